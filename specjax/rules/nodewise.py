"""Rules that decide at one node at a time, from the laws at that node alone.

Most multi-draft rules do. Such a rule is one function for one node, without a
batch: from the two laws and the drafted candidates it says with what
probability each candidate is accepted, and what law the next token has if none
is. `verify_nodes` walks the tree with it:

  P(the walk reaches child x of n) = P(it reaches n) P(x is accepted at n).

Independent siblings may carry equal tokens. Their paths are one hypothesis, and
below it the children of all of them are i.i.d. draws from one law: the walk
merges them, so that a node has as many candidates as paths survive. This is
SpecTr's loop over surviving paths (Sun et al., NeurIPS 2023).

Most nodes have one candidate, and are decided at once with arrays of one; the
others one after the other, as many as there are (under `jax.vmap`, as many as
there could be: the results are the same, the saving is lost).
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.siblings import Siblings
from specjax.tree import Tree, representative, take_node
from specjax.types import Draft, Verification, VerifyFn


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["accept", "next_log_probs", "total_variation"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """What a rule decides at one node; C candidates, V tokens.

  Attributes:
    accept: `f32[C]`, the probability that the walk goes on to each candidate; 0
      where it is not valid. Their sum is at most 1.
    next_log_probs: `f32[V]`, the next token's law if none is accepted.
    total_variation: `f32[]`, for lossy rules, see `Verification`.
  """

  accept: Array
  next_log_probs: Array
  total_variation: Array | None = None


class DecideFn(Protocol):
  """The decision at one node."""

  def __call__(
    self,
    siblings: Siblings,
    target_log_probs: Array,
    draft_log_probs: Array,
    tokens: Array,
    valid: Array,
  ) -> Decision:
    """Decides among the candidates after one node.

    It is called with C = 1 and with larger C, and what it returns must depend
    on the valid candidates alone.

    Args:
      siblings: how the candidates were drawn.
      target_log_probs: `f32[V]`, the target's law q after the node.
      draft_log_probs: `f32[V]`, the draft's law p.
      tokens: `i32[C]`, the candidates, in the order they were drawn.
      valid: `bool[C]`, which of them are there. If none is, anything but NaN
        may be returned.

    Returns:
      The `Decision`.
    """


def decide_single(
  siblings: Siblings,
  target_log_probs: Array,
  draft_log_probs: Array,
  tokens: Array,
  valid: Array,
) -> Decision:
  """Ordinary verification of the only candidate; see `DecideFn`."""
  law = siblings.child(draft_log_probs, tokens[:0], 1)
  test = laws.acceptance(target_log_probs[tokens], law[tokens])
  return Decision(
    accept=jnp.where(valid, test, 0),
    next_log_probs=laws.residual(target_log_probs, law),
  )


def verify_nodes(decide: DecideFn, *, merge: bool = True) -> VerifyFn:
  """The tree rule that decides with `decide` at every node.

  Args:
    decide: the decision at one node.
    merge: whether equal paths of independent siblings are one hypothesis. If
      not, the walk stays on the subtree of the very sibling it accepted.

  Returns:
    A `specjax.types.VerifyFn`.
  """

  def verify(
    tree: Tree, siblings: Siblings, draft: Draft, target_log_probs: Array
  ) -> Verification:
    if not tree.num_drafted:
      return Verification(
        node_probs=jnp.ones_like(target_log_probs[:, :, 0]),
        next_log_probs=lambda node: take_node(target_log_probs, node),
      )
    merged = merge and siblings.independent and not tree.is_chain
    places = _places(tree, merged)
    tokens = draft.tokens
    parents = np.maximum(tree.parents, 0).astype(np.int32)
    if merged:
      group = representative(tree, tokens)  # [B, N + 1]
      parent = group[:, parents]  # [B, N + 1]
    else:
      group = jnp.broadcast_to(np.arange(tree.num_nodes), tokens.shape)
      parent = jnp.broadcast_to(parents, tokens.shape)
    candidates = tokens[:, places.slots]  # [B, I, C]
    valid = places.filled & (
      parent[:, places.slots] == places.inner[:, None]
    )  # [B, I, C]
    at_nodes = jax.vmap(jax.vmap(functools.partial(decide, siblings)))
    decide_all = _decide_merged if merged else _decide_by_width
    accept, distance = decide_all(
      at_nodes, places, draft, target_log_probs, candidates, valid
    )
    # P(n is accepted | the walk is at its parent), for n as it was drawn.
    step = accept[
      jnp.arange(tokens.shape[0])[:, None],
      jnp.asarray(places.row)[parent],
      places.slot,
    ]  # [B, N + 1]
    reach = jnp.ones_like(step[:, :1])
    for level in tree.levels[1:]:
      here = slice(level.start, level.stop)
      came = step[:, here] * jnp.take_along_axis(reach, parent[:, here], axis=1)
      same = group[:, here, None] == np.array(level)  # [B, drawn, stands for]
      reach = jnp.concatenate(
        [reach, jnp.sum(jnp.where(same, came[:, :, None], 0), axis=1)], axis=1
      )
    onward = jnp.sum(accept, axis=-1)  # [B, I]
    stay = jnp.where(
      places.is_inner, jnp.maximum(1 - onward, 0)[:, places.row], 1
    )
    if distance is not None:
      distance = jnp.where(places.is_inner, distance[:, places.row], 0)

    def next_log_probs(node):
      row = jnp.asarray(places.row)[node]
      there = take_node(valid, row) & jnp.asarray(places.is_inner)[node, None]
      law = take_node(target_log_probs, node)
      drafted = take_node(draft.log_probs, node)
      near = take_node(candidates, row)
      over_batch = jax.vmap(functools.partial(decide, siblings))
      wide = lambda: over_batch(law, drafted, near, there).next_log_probs
      if merged:
        first = jnp.argmax(there, axis=1, keepdims=True)
        one = over_batch(
          law,
          drafted,
          jnp.take_along_axis(near, first, axis=1),
          jnp.take_along_axis(there, first, axis=1),
        ).next_log_probs
        several = jnp.sum(there, axis=1, keepdims=True) > 1
        found = jax.lax.cond(
          several.any(), lambda: jnp.where(several, wide(), one), lambda: one
        )
      else:
        found = wide()
      return jnp.where(there.any(axis=1, keepdims=True), found, law)

    return Verification(
      node_probs=reach * stay,
      next_log_probs=next_log_probs,
      total_variation=distance,
    )

  return verify


def _decide_by_width(
  at_nodes, places, draft, target_log_probs, candidates, valid
) -> tuple[Array, Array | None]:
  """Decides at every node, with no more candidates than it has children.

  Returns:
    `f32[B, I, C]`, each candidate's acceptance, and `f32[B, I]`, the distances
    of a lossy rule.
  """
  widths = places.filled.sum(axis=1)
  parts, order = [], []
  for width in np.unique(widths):
    rows = np.flatnonzero(widths == width).astype(np.int32)
    found = at_nodes(
      node_rows(target_log_probs, places.inner[rows]),
      node_rows(draft.log_probs, places.inner[rows]),
      node_rows(candidates, rows)[:, :, :width],
      node_rows(valid, rows)[:, :, :width],
    )
    pad = candidates.shape[-1] - width
    accept = jnp.pad(found.accept, [(0, 0), (0, 0), (0, pad)])
    parts.append((accept, found.total_variation))
    order.append(rows)
  back = np.argsort(np.concatenate(order)).astype(np.int32)
  return jax.tree.map(
    lambda *x: node_rows(jnp.concatenate(x, axis=1), back), *parts
  )


def _decide_merged(
  at_nodes, places, draft, target_log_probs, candidates, valid
) -> tuple[Array, Array | None]:
  """Decides at nodes with one candidate at once, at others one by one.

  Returns:
    As `_decide_by_width`.
  """
  first = jnp.argmax(valid, axis=-1, keepdims=True)  # [B, I, 1]
  one = at_nodes(
    node_rows(target_log_probs, places.inner),
    node_rows(draft.log_probs, places.inner),
    jnp.take_along_axis(candidates, first, axis=-1),
    jnp.take_along_axis(valid, first, axis=-1),
  )
  at_first = first == np.arange(valid.shape[-1])
  accept = jnp.where(at_first & valid, one.accept, 0)  # [B, I, C]
  several = jnp.sum(valid, axis=-1) > 1  # [B, I]
  order = jnp.argsort(~several, axis=1).astype(jnp.int32)
  count = jnp.max(jnp.sum(several, axis=1))
  batch = jnp.arange(len(valid))
  inner = jnp.asarray(places.inner)

  def decide_one(index, decided):
    row = jax.lax.dynamic_index_in_dim(order, index, 1, keepdims=False)
    found = at_nodes(
      take_node(target_log_probs, inner[row])[:, None],
      take_node(draft.log_probs, inner[row])[:, None],
      take_node(candidates, row)[:, None],
      take_node(valid, row)[:, None],
    )
    use = several[batch, row]

    def put(all_nodes, new):
      keep = use.reshape(-1, *[1] * (all_nodes.ndim - 2))
      old = all_nodes[batch, row]
      return all_nodes.at[batch, row].set(jnp.where(keep, new[:, 0], old))

    return jax.tree.map(put, decided, (found.accept, found.total_variation))

  return jax.lax.fori_loop(
    0,
    len(places.inner),
    lambda i, decided: jax.lax.cond(
      i < count, decide_one, lambda _, same: same, i, decided
    ),
    (accept, one.total_variation),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Places:
  """Where the candidates of each node with children stand; all static.

  Attributes:
    inner: `int[I]`, the nodes with children.
    slots: `int[I, C]`, the nodes that may be candidates after each of them.
    filled: `bool[I, C]`, False where a slot is padding.
    row: `int[N + 1]`, each inner node's index in `inner` (0 for leaves).
    slot: `int[N + 1]`, each node's place among its candidates.
    is_inner: `bool[N + 1]`.
  """

  inner: np.ndarray
  slots: np.ndarray
  filled: np.ndarray
  row: np.ndarray
  slot: np.ndarray
  is_inner: np.ndarray


@functools.cache
def _places(tree: Tree, merged: bool) -> _Places:
  """A merged node's candidates may be anywhere in the next level."""
  is_inner = np.array([bool(c) for c in tree.children])
  inner = np.flatnonzero(is_inner).astype(np.int32)
  if merged:
    lists = [list(tree.levels[tree.depth[n] + 1]) for n in inner]
    first = np.array([level.start for level in tree.levels])
    slot = (np.arange(tree.num_nodes) - first[tree.depth]).astype(np.int32)
  else:
    lists = [list(tree.children[n]) for n in inner]
    slot = tree.rank
  width = max(map(len, lists))
  slots = np.array([x + [0] * (width - len(x)) for x in lists], np.int32)
  filled = np.array(
    [[True] * len(x) + [False] * (width - len(x)) for x in lists]
  )
  row = np.zeros(tree.num_nodes, np.int32)
  row[inner] = np.arange(len(inner))
  return _Places(
    inner=inner,
    slots=slots,
    filled=filled,
    row=row,
    slot=slot,
    is_inner=is_inner,
  )


def node_rows(per_node: Array, nodes: np.ndarray) -> Array:
  """`per_node[:, nodes]`, as a slice (no copy in a fusion) if it is one."""
  start = int(nodes[0])
  if (nodes == np.arange(start, start + len(nodes))).all():
    return per_node[:, start : start + len(nodes)]
  return per_node[:, nodes]
