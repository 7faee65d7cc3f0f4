"""No drafting: the empty tree, and so plain autoregressive decoding."""

import jax.numpy as jnp

from specjax.siblings import IID
from specjax.tree import chain
from specjax.types import Draft, Drafter


def drafter(*, vocab_size: int) -> Drafter:
  """A drafter whose tree is the root alone.

  Args:
    vocab_size: V, the number of real tokens.

  Returns:
    A `Drafter` without state, to be used with any rule.
  """

  def propose(params, state, target_cache, context):
    del params
    root = jnp.take_along_axis(
      context.tokens, context.length[:, None] - 1, axis=1
    )
    nothing = jnp.full((root.shape[0], 1, vocab_size), -jnp.inf)
    return Draft(tokens=root, log_probs=nothing), state, target_cache

  return Drafter(
    name="plain",
    tree=chain(0),
    siblings=IID,
    init=lambda params, batch, slots: (),
    prefill=lambda params, state, tokens, lengths: state,
    propose=propose,
    commit=lambda params, state, commit: state,
  )
