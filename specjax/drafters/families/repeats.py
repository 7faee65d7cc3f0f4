"""Look-ups where the text repeats itself; another drafter elsewhere.

If the last tokens of a text have occurred before, what followed them is often a
good draft, especially at low temperatures, and needs no pass. SAM decoding (Hu
et al., ACL 2025) chooses between its suffix automaton and EAGLE in this way, by
the length of the match.

Looked-up tokens are deterministic, point masses in `Draft.log_probs`; drawn
ones have the distributions they were drawn from. The choice between the two
depends on a row's text alone and is made before anything is drawn, so every
lossless rule for a chain stays lossless.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.families.ngram import look_up
from specjax.siblings import GIVEN, IID
from specjax.tree import Form, Tree, bound, chain
from specjax.types import Draft, Drafter


def repeats(
  drafter: Drafter,
  *,
  tokens: int | None = None,
  min_match: int = 3,
  max_ngram: int = 8,
) -> Drafter:
  """Looked-up tokens after a long match, else another drafter's.

  Args:
    drafter: drafts a chain of 'iid' tokens or a dynamic tree, and supports
      `Drafter.accepts_foreign_drafts`: a head, `layer_skip`. It drafts for all
      rows; with a policy (`policies.fixed` will do), only for those that do not
      look up, and if all do, it makes no draft pass.
    tokens: how many to look up; by default as deep as the other drafts.
    min_match: the shortest match to use.
    max_ngram: the longest match to look for; longer ones win.

  Returns:
    The `Drafter`; its state is the inner drafter's.

  Raises:
    ValueError: if the inner drafter does not qualify, or for lengths that
      cannot match.
  """
  tree, usual = drafter.tree, drafter.tree.max_depth
  drawn = tree.is_chain and not tree.lanes and drafter.siblings is IID
  drawn |= tree.form is Form.FREE and drafter.siblings is GIVEN
  if not drawn or not drafter.accepts_foreign_drafts:
    raise ValueError(
      "repeats needs a drafter of a chain or dynamic tree whose state depends "
      "on committed tokens alone (a head, layer_skip), without a policy that "
      f"learns from its drafts, got {drafter.name!r}"
    )
  if not 1 <= min_match <= max_ngram:
    raise ValueError(
      f"min_match must be in 1..max_ngram ({max_ngram}), got {min_match}"
    )
  tokens = usual if tokens is None else tokens
  if tokens < usual:
    raise ValueError(f"tokens must be >= the inner drafter's {usual}")
  if tokens > usual:
    tree = _deeper(tree, tokens)

  def propose(params, state, target_cache, context):
    followers, matched = look_up(
      context.tokens, context.length, count=tokens, max_ngram=max_ngram
    )
    is_match = matched >= min_match  # [B]
    allowed = jnp.where(is_match, 0, context.max_depth)

    drafted, state, target_cache = drafter.propose(
      params,
      state,
      target_cache,
      dataclasses.replace(context, max_depth=allowed),
    )
    drafted = _within(drafted, tree)
    return _chosen(is_match, followers, drafted), state, target_cache

  return dataclasses.replace(
    drafter, name=f"{drafter.name}, repeats", tree=tree, propose=propose
  )


def _deeper(tree: Tree, tokens: int) -> Tree:
  """A form that holds the tree, or a chain of that many tokens."""
  if tree.is_chain:
    return dataclasses.replace(chain(tokens), form=Form.MASKED)
  nodes = max(tree.num_drafted, tokens + tree.max_children - 1)
  return bound(nodes, tokens, tree.max_children)


def _within(draft: Draft, tree: Tree) -> Draft:
  """The same draft in a larger form, whose further nodes are masked."""
  more = tree.num_drafted - draft.tree.num_drafted
  if not more:
    return dataclasses.replace(draft, tree=tree)
  parents, log_probs = draft.parents, draft.log_probs
  if parents is None:
    parents = jnp.broadcast_to(
      np.array(draft.tree.parents, np.int32), draft.tokens.shape
    )
  if log_probs is not None:
    log_probs = jnp.pad(log_probs, ((0, 0), (0, more), (0, 0)))
  return dataclasses.replace(
    draft,
    tree=tree,
    tokens=jnp.pad(draft.tokens, ((0, 0), (0, more))),
    log_probs=log_probs,
    parents=jnp.pad(parents, ((0, 0), (0, more)), constant_values=-1),
  )


def _chosen(is_match: Array, followers: Array, drafted: Draft) -> Draft:
  """The looked-up tokens, `i32[B, G]`, in rows that match, else the draft."""
  depth, nodes = drafted.tree.max_depth, drafted.tree.num_drafted
  followers = jnp.pad(followers, ((0, 0), (0, nodes - depth)))
  whole = jnp.concatenate([drafted.tokens[:, :1], followers], axis=1)
  log_probs, parents = drafted.log_probs, drafted.parents
  if log_probs is not None:
    certain = whole[..., None] == np.arange(log_probs.shape[-1])
    point = jnp.where(certain, 0, -jnp.inf).astype(log_probs.dtype)
    log_probs = jnp.where(is_match[:, None, None], point, log_probs)
  if parents is not None:
    chain = np.full(nodes + 1, -1, np.int32)
    chain[: depth + 1] = np.arange(-1, depth)
    parents = jnp.where(is_match[:, None], chain, parents)
  return dataclasses.replace(
    drafted,
    tokens=jnp.where(is_match[:, None], whole, drafted.tokens),
    log_probs=log_probs,
    parents=parents,
  )
