"""Acceptance of blockwise parallel decoding (Stern et al., 2018): lossy.

The paper's exact variant accepts a token if it is the one that the target says
itself: that is `match`. Two others accept more (its section 5):

- top-k: a token that is among the k likeliest of the target;
- a minimum block: the first tokens of a block, whatever they are.

A token that is not accepted is replaced by one of the target's own law, and so
is the one after the last. The distance reported is exact: with p the law that
the token was drawn from (a point mass if it is certain) and b(x) whether x
would be accepted, TV(b p + Z q, q), Z = sum (1 - b) p.

The likeliest tokens are those of the *warped* target. At temperature 0 that
knows one token alone, and top-k accepts no other: the paper's greedy decoding
with top-k is a temperature that is small but not 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.rules import requirements
from specjax.siblings import Siblings
from specjax.tree import Form, Tree, take_node
from specjax.types import Draft, Rule, Verification


@functools.cache
def rule(top_k: int = 2, min_accepted: int = 0) -> Rule:
  """Accepts what is likely enough by rank, and the first tokens in any case.

  Args:
    top_k: tokens of the target that are accepted, at least 1; of equally likely
      ones all.
    min_accepted: drafted tokens of a block that always are (the paper's
      minimum block is one more: it counts the target's own token).

  Raises:
    ValueError: if either is out of range.
  """
  if top_k < 1 or min_accepted < 0:
    raise ValueError(
      "top_k must be at least 1 and min_accepted at least 0, got "
      f"{top_k} and {min_accepted}"
    )

  def verify(draft: Draft, target_log_probs: jax.Array) -> Verification:
    nodes = draft.tree.num_nodes
    above = target_log_probs[:, :-1]  # [B, N, V]
    least, _ = jax.lax.top_k(above, min(top_k, above.shape[-1]))
    enough = (above >= least[..., -1:]) & (above > -jnp.inf)
    enough |= (np.arange(nodes - 1) < min_accepted)[:, None]
    there = draft.topology().there[:, 1:nodes]
    tokens = draft.tokens[:, 1:nodes, None]
    passes = jnp.take_along_axis(enough, tokens, axis=-1)[..., 0] & there
    accept = passes.astype(target_log_probs.dtype)
    one = jnp.ones_like(target_log_probs[:, :1, 0])
    reach = jnp.cumprod(jnp.concatenate([one, accept], axis=1), axis=1)
    drafted = jnp.exp(draft.laws(target_log_probs)[:, 1:])
    target = jnp.exp(above)
    refused = jnp.sum(jnp.where(enough, 0, drafted), axis=-1, keepdims=True)
    got = jnp.where(enough, drafted, 0) + refused * target
    distance = jnp.sum(jnp.maximum(got - target, 0), axis=-1)
    return Verification(
      node_probs=reach * jnp.concatenate([1 - accept, one], axis=1),
      next_log_probs=lambda node: take_node(target_log_probs, node),
      total_variation=jnp.concatenate(
        [jnp.where(there, distance, 0), 0 * one], axis=1
      ),
    )

  def check(tree: Tree, siblings: Siblings) -> None:
    del siblings
    requirements.single_path(name, tree)
    requirements.form(name, tree, Form.FIXED, Form.MASKED)

  name = f"blockwise(top_k={top_k}, min_accepted={min_accepted})"
  return Rule(name=name, verify=verify, lossless=False, check=check)
