"""Reads on where the text repeats itself, and drafts with another elsewhere.

Where the last tokens of a text have occurred before, what followed them is
often a good draft, the more so at low temperatures, and needs no pass. SAM
decoding (Hu et al., ACL 2025) chooses so between its suffix automaton and
EAGLE, by the length of the match.

Of either kind a row's tokens have the laws that they are of: what was looked up
is certain, a point mass in `Draft.log_probs`, and what was drawn has its own.
Which of the two a row gets is a function of its text, known before anything is
drawn, so every lossless rule for a chain stays lossless.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.ngram import look_up
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Draft, Drafter


def drafter(inner: Drafter, *, least: int = 3, max_ngram: int = 8) -> Drafter:
  """Drafts the continuation of a long match, and what `inner` drafts elsewhere.

  Args:
    inner: of a chain of 'iid' tokens, whose state does not rest on its own
      draft being the one that is verified (`Drafter.reads_anew`):
      `drafters.eagle`, `medusa`, `dflash`, `layer_skip`. It drafts for all
      rows, those that read on too; but with a depth policy, it is allowed
      nothing there, and where all rows at work read on it makes no pass that
      drafts.
    least: tokens that must have occurred in a row, at least.
    max_ngram: the longest match that is looked for; longer ones win.

  Returns:
    The `Drafter`, of `inner`'s tree and state.

  Raises:
    ValueError: if `inner` has another form, or would remember a draft that was
      not verified, or no match is as long as `least`.
  """
  check(inner.tree, inner.siblings)
  if not inner.reads_anew:
    raise ValueError(
      f"the state of {inner.name!r} rests on what it drafted, and another "
      "draft may be verified in its place"
    )
  if not 1 <= least <= max_ngram:
    raise ValueError(
      f"least must be in 1..max_ngram, got {least} and {max_ngram}"
    )
  depth = inner.tree.max_depth

  def propose(params, state, target_cache, context):
    found, matched = jax.vmap(
      lambda tokens, length: look_up(
        tokens, length, count=depth, max_ngram=max_ngram
      )
    )(context.tokens, context.length)
    repeats = matched >= least  # [B]
    allowed = jnp.where(repeats, 0, context.max_depth)
    drafted, state, target_cache = inner.propose(
      params,
      state,
      target_cache,
      dataclasses.replace(context, max_depth=allowed),
    )
    return _chosen(repeats, found, drafted), state, target_cache

  return dataclasses.replace(
    inner, name=f"{inner.name}, repeats", propose=propose
  )


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless what was looked up can fill that tree."""
  if not tree.is_chain or siblings is not IID or tree.lanes:
    raise ValueError(
      "what reads on where a text repeats itself drafts one path, whose tokens "
      f"are drawn 'iid', got parents {tree.parents} and siblings "
      f"{siblings.name!r}"
    )


def _chosen(repeats: Array, found: Array, drafted: Draft) -> Draft:
  """In some rows what was found, in the others what was drafted.

  Args:
    repeats: `bool[B]`.
    found: `i32[B, G]`.
    drafted: of a chain of G tokens.
  """
  whole = jnp.concatenate([drafted.tokens[:, :1], found], axis=1)
  log_probs, parents = drafted.log_probs, drafted.parents
  if log_probs is not None:
    certain = whole[..., None] == np.arange(log_probs.shape[-1])
    point = jnp.where(certain, 0, -jnp.inf).astype(log_probs.dtype)
    log_probs = jnp.where(repeats[:, None, None], point, log_probs)
  if parents is not None:
    chain = np.arange(-1, drafted.tree.max_depth, dtype=np.int32)
    parents = jnp.where(repeats[:, None], chain, parents)
  return dataclasses.replace(
    drafted,
    tokens=jnp.where(repeats[:, None], whole, drafted.tokens),
    log_probs=log_probs,
    parents=parents,
  )
