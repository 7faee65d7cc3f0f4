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
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.tree import (
  Form,
  Topology,
  Tree,
  child_table,
  representative,
  take_node,
)
from specjax.types import Draft, Verification, VerifyFn


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["accept", "next_log_probs", "total_variation"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """A rule's decision at one node; C candidates, V tokens.

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
    target_log_probs: Array,
    draft_log_probs: Array,
    tokens: Array,
    valid: Array,
  ) -> Decision:
    """Decides among the candidates after one node.

    It is called with C = 1 and with larger C, and what it returns must depend
    on the valid candidates alone.

    Args:
      target_log_probs: `f32[V]`, the target's law q after the node.
      draft_log_probs: `f32[C, V]`, the law that each candidate was drawn from,
        given its elders; or `f32[1, V]` if siblings are independent, and the
        draft's law p is that of all.
      tokens: `i32[C]`, the candidates, in the order they were drawn.
      valid: `bool[C]`, False for masked ones, which come last unless siblings
        are independent. If none is, anything but NaN may be returned.

    Returns:
      The `Decision`.
    """


def decide_single(
  target_log_probs: Array, draft_log_probs: Array, tokens: Array, valid: Array
) -> Decision:
  """Ordinary verification of the only candidate; see `DecideFn`."""
  law = draft_log_probs[0]
  test = laws.acceptance(target_log_probs[tokens], law[tokens])
  return Decision(
    accept=jnp.where(valid, test, 0),
    next_log_probs=laws.residual(target_log_probs, law),
  )


def verify_nodes(
  decide: DecideFn, *, merge: bool = True, with_laws: bool = True
) -> VerifyFn:
  """The tree rule that decides with `decide` at every node.

  Args:
    decide: the decision at one node.
    merge: whether equal paths of independent siblings are one hypothesis. If
      not, the walk stays on the subtree of the very sibling it accepted. So it
      does where the tree's form is `FREE`.
    with_laws: whether `decide` looks at the draft's laws; if not, it is given
      laws without any mass, `f32[1, V]`.

  Returns:
    A `specjax.types.VerifyFn`.
  """

  def verify(
    draft: Draft, topology: Topology, target_log_probs: Array
  ) -> Verification:
    tree, independent = draft.tree, draft.siblings.independent
    if not tree.num_drafted:
      return Verification(
        node_probs=jnp.ones_like(target_log_probs[:, :, 0]),
        next_log_probs=lambda node: take_node(target_log_probs, node),
      )
    walk = _Walk(
      decide=decide,
      tree=tree,
      topology=topology,
      tokens=draft.tokens[:, : tree.num_nodes],
      target=target_log_probs,
      laws=draft.laws(target_log_probs) if with_laws else None,
      shared=independent,
    )
    if tree.form is Form.FREE:
      return _verify_free(walk)
    if merge and independent and not tree.is_chain:
      return _verify_merged(walk)
    return _verify_apart(walk)

  return verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Walk:
  """The laws and the form of a draft, for every way of walking its tree.

  Attributes:
    decide: the decision at one node.
    tree: the tree.
    topology: the tree's parents and children.
    tokens: `i32[B, N + 1]`.
    target: `f32[B, N + 1, V]`, the target's laws.
    laws: `f32[B, N + 1, V]`, the law each token was drawn from; None if it is
      not looked at.
    shared: whether all candidates of a node are given one law.
  """

  decide: DecideFn
  tree: Tree
  topology: Topology
  tokens: Array
  target: Array
  laws: Array | None
  shared: bool

  def at_nodes(
    self, nodes: np.ndarray, slots: np.ndarray, valid: Array
  ) -> Decision:
    """Decides at several nodes.

    Args:
      nodes: `int[I]`.
      slots: `int[I, C]`, the candidates of each.
      valid: `bool[B, I, C]`.

    Returns:
      Decisions `[B, I, ...]`.
    """
    if self.laws is None:
      drafted = jnp.full_like(self.target[:, : len(nodes), None], -jnp.inf)
    elif self.shared:
      drafted = node_rows(self.laws, slots[:, 0])[:, :, None]
    else:
      drafted = node_rows(self.laws, slots.reshape(-1)).reshape(
        *valid.shape, self.laws.shape[-1]
      )
    return jax.vmap(jax.vmap(self.decide))(
      node_rows(self.target, nodes), drafted, self.tokens[:, slots], valid
    )

  def at_node(self, node: Array, slots: Array, valid: Array) -> Decision:
    """Decides at one node of every row.

    Args:
      node: `i32[B]`.
      slots: `i32[B, C]`, its candidates.
      valid: `bool[B, C]`.

    Returns:
      Decisions `[B, ...]`.
    """
    target = take_node(self.target, node)
    if self.laws is None:
      drafted = jnp.full_like(target[:, None], -jnp.inf)
    elif self.shared:
      first = jnp.argmax(valid, axis=1, keepdims=True)
      first = jnp.take_along_axis(slots, first, axis=1)
      drafted = take_node(self.laws, first[:, 0])[:, None]
    else:
      drafted = jax.vmap(lambda rows, at: rows[at])(self.laws, slots)
    tokens = jnp.take_along_axis(self.tokens, slots, axis=1)
    return jax.vmap(self.decide)(target, drafted, tokens, valid)

  def verification(
    self,
    reach: Array,
    onward: Array,
    distance: Array | None,
    candidates: Callable[[Array], tuple[Array, Array]],
    after: Callable[[Array, Array, Array], Array] | None = None,
  ) -> Verification:
    """The `Verification` from the probabilities of the walk.

    Args:
      reach: `f32[B, N + 1]`, the probability that the walk comes to a node.
      onward: `f32[B, N + 1]`, that it goes on from there.
      distance: `f32[B, N + 1]`, or None; 0 where no candidates are.
      candidates: a node's slots and their validity, `i32[B] -> [B, C]` twice.
      after: `(node, slots, valid) -> f32[B, V]`, the law if none is accepted;
        by default that of the decision there.
    """
    if after is None:
      after = lambda *where: self.at_node(*where).next_log_probs

    def next_log_probs(node):
      slots, valid = candidates(node)
      return jnp.where(
        valid.any(axis=1, keepdims=True),
        after(node, slots, valid),
        take_node(self.target, node),
      )

    return Verification(
      node_probs=reach * jnp.maximum(1 - onward, 0),
      next_log_probs=next_log_probs,
      total_variation=distance,
    )


# ------------------------------------------------- every sibling for itself


def _verify_apart(walk: _Walk) -> Verification:
  """Each node's candidates are its children, as many as it has."""
  tree, present = walk.tree, walk.topology.present
  batch = walk.tokens.shape[0]
  counts = np.array([len(c) for c in tree.children])
  by_node = []  # of each width: the nodes, and what was decided there
  for width in np.unique(counts[counts > 0]):
    nodes = np.flatnonzero(counts == width).astype(np.int32)
    slots = np.array([tree.children[n] for n in nodes], np.int32)
    valid = jnp.broadcast_to(present[:, slots], (batch, *slots.shape))
    by_node.append((slots, nodes, valid, walk.at_nodes(nodes, slots, valid)))
  # Children of all inner nodes, in the order they were decided, then by node.
  below = np.concatenate([slots.reshape(-1) for slots, *_ in by_node])
  inner = np.concatenate([nodes for _, nodes, *_ in by_node])
  flat = [decision.accept.reshape(batch, -1) for *_, decision in by_node]
  accept = jnp.concatenate(flat, axis=1)[:, _inverse(below)]  # [B, N]
  reach = jnp.ones_like(accept[:, :1])
  for level in tree.levels[1:]:
    above = np.array([tree.parents[n] for n in level], np.int32)
    came = node_rows(reach, above) * node_rows(accept, np.array(level) - 1)
    reach = jnp.concatenate([reach, came], axis=1)

  def spread(values: list[Array]) -> Array:  # [B, I] of inner nodes -> all
    zeros = jnp.zeros((batch, tree.num_nodes), accept.dtype)
    return zeros.at[:, inner].set(jnp.concatenate(values, axis=1))

  apart = [
    jnp.where(valid.any(axis=-1), decision.total_variation, 0)
    for *_, valid, decision in by_node
    if decision.total_variation is not None
  ]
  distance = spread(apart) if apart else None
  table, is_child = child_table(tree, walk.topology)
  is_child = jnp.broadcast_to(is_child, (batch, *is_child.shape[1:]))

  def candidates(node):
    return jnp.asarray(table[0])[node], take_node(is_child, node)

  onward = spread([decision.accept.sum(axis=-1) for *_, decision in by_node])
  return walk.verification(reach, onward, distance, candidates)


def _inverse(order: np.ndarray) -> np.ndarray:
  """The place of each of the nodes 1..N in an order of them."""
  return np.argsort(order).astype(np.int32)


# --------------------------------------------------------- parents are data


def _verify_free(walk: _Walk) -> Verification:
  """As `_verify_apart`; nodes are decided one after the other."""
  tree, topology = walk.tree, walk.topology
  count, nodes = tree.max_children, tree.num_nodes
  parents, rank = topology.parents[:, :nodes], topology.rank
  present = topology.present[:, :nodes]
  slots, valid = child_table(tree, topology)

  def candidates(node):
    return take_node(slots, node), take_node(valid, node)

  def decide(node):
    where = jnp.full_like(walk.tokens[:, 0], node)
    here, some = candidates(where)
    decision = walk.at_node(where, here, some)
    distance = decision.total_variation
    if distance is not None:
      distance = jnp.where(some.any(axis=1), distance, 0)
    return jnp.where(some, decision.accept, 0), distance

  accept, distance = jax.lax.map(decide, jnp.arange(nodes))  # [N + 1, B, C]
  accept = jnp.moveaxis(accept, 0, 1)
  onward = accept.sum(axis=-1)
  if distance is not None:
    distance = jnp.moveaxis(distance, 0, 1)
  batch = jnp.arange(len(present))[:, None]
  step = accept[batch, parents, jnp.minimum(rank, count - 1)]  # [B, N + 1]
  step = jnp.where(present & (rank < count), step, 0).at[:, 0].set(1)
  along = step[batch[..., None], topology.paths]  # [B, N + 1, G + 1]
  is_path = np.arange(tree.max_depth + 1) <= topology.depth[:, :nodes, None]
  reach = jnp.prod(jnp.where(is_path, along, 1), axis=-1)
  # What is deeper than the bounds has no path of its own.
  reach = jnp.where(present, reach, 0)
  return walk.verification(reach, onward, distance, candidates)


# ----------------------------------------------- equal paths are one hypothesis


def _verify_merged(walk: _Walk) -> Verification:
  """Each node's candidates are the children of all nodes equal to it."""
  tree, tokens, present = walk.tree, walk.tokens, walk.topology.present
  present = present[:, : tree.num_nodes]
  places = _merged_places(tree)
  group = representative(tree, tokens, present)  # [B, N + 1]
  parent = group[:, np.maximum(tree.parents, 0).astype(np.int32)]
  valid = jnp.asarray(
    places.filled
    & (parent[:, places.slots] == places.inner[:, None])
    & present[:, places.slots]
  )  # [B, I, C]
  accept, distance = _decide_merged(walk, places, valid)
  batch = jnp.arange(tokens.shape[0])[:, None]
  # P(n is accepted | the walk is at its parent), for n as it was drawn.
  step = accept[batch, jnp.asarray(places.row)[parent], places.slot]
  reach = jnp.ones_like(step[:, :1])
  for level in tree.levels[1:]:
    here = slice(level.start, level.stop)
    came = step[:, here] * jnp.take_along_axis(reach, parent[:, here], axis=1)
    came = jnp.where(present[:, here], came, 0)
    same = group[:, here, None] == np.array(level)  # [B, drawn, stands for]
    reach = jnp.concatenate(
      [reach, jnp.sum(jnp.where(same, came[:, :, None], 0), axis=1)], axis=1
    )
  onward = jnp.where(
    places.is_inner, jnp.sum(accept, axis=-1)[:, places.row], 0
  )
  if distance is not None:
    distance = jnp.where(valid.any(axis=-1), distance, 0)
    distance = jnp.where(places.is_inner, distance[:, places.row], 0)
    # A path may go through a node that another stands for.
    distance = jnp.take_along_axis(distance, group, axis=1)

  def candidates(node):
    row = jnp.asarray(places.row)[node]
    some = take_node(valid, row) & jnp.asarray(places.is_inner)[node, None]
    return jnp.asarray(places.slots)[row], some

  def after(node, slots, valid):
    first = jnp.argmax(valid, axis=1, keepdims=True)
    one = walk.at_node(
      node,
      jnp.take_along_axis(slots, first, axis=1),
      jnp.take_along_axis(valid, first, axis=1),
    ).next_log_probs
    several = jnp.sum(valid, axis=1, keepdims=True) > 1
    wide = lambda: walk.at_node(node, slots, valid).next_log_probs
    return jax.lax.cond(
      several.any(), lambda: jnp.where(several, wide(), one), lambda: one
    )

  return walk.verification(reach, onward, distance, candidates, after)


def _decide_merged(
  walk: _Walk, places: "_Places", valid: Array
) -> tuple[Array, Array | None]:
  """Decides at nodes with one candidate at once, at others one by one.

  Returns acceptances `f32[B, I, C]`, and a lossy rule's distances `f32[B, I]`.
  """
  batch, inner = jnp.arange(len(valid)), jnp.asarray(places.inner)
  first = jnp.argmax(valid, axis=-1, keepdims=True)  # [B, I, 1]
  slot = jnp.asarray(places.slots)[np.arange(len(places.inner)), first[..., 0]]
  one = _at_single(walk, places, slot, valid.any(axis=-1))
  at_first = first == np.arange(valid.shape[-1])
  accept = jnp.where(at_first & valid, one.accept, 0)  # [B, I, C]
  several = jnp.sum(valid, axis=-1) > 1  # [B, I]
  order = jnp.argsort(~several, axis=1).astype(jnp.int32)
  count = jnp.max(jnp.sum(several, axis=1))

  def decide_one(index, decided):
    row = jax.lax.dynamic_index_in_dim(order, index, 1, keepdims=False)
    decision = walk.at_node(
      inner[row], jnp.asarray(places.slots)[row], take_node(valid, row)
    )
    use = several[batch, row]

    def put(all_nodes, new):
      keep = use.reshape(-1, *[1] * (all_nodes.ndim - 2))
      old = all_nodes[batch, row]
      return all_nodes.at[batch, row].set(jnp.where(keep, new, old))

    return jax.tree.map(
      put, decided, (decision.accept, decision.total_variation)
    )

  return jax.lax.fori_loop(
    0,
    len(places.inner),
    lambda i, decided: jax.lax.cond(
      i < count, decide_one, lambda _, same: same, i, decided
    ),
    (accept, one.total_variation),
  )


def _at_single(
  walk: _Walk, places: "_Places", slot: Array, valid: Array
) -> Decision:
  """Decides at all inner nodes with one candidate each, `slot i32[B, I]`.

  Siblings are independent, and so the law is that of any child.
  """
  target = node_rows(walk.target, places.inner)
  if walk.laws is None:
    drafted = jnp.full_like(target, -jnp.inf)
  elif walk.tree.form is Form.FIXED:
    drafted = node_rows(walk.laws, places.child)
  else:  # of a child that is there
    drafted = jax.vmap(lambda rows, at: rows[at])(walk.laws, slot)
  return jax.vmap(jax.vmap(walk.decide))(
    target,
    drafted[:, :, None],
    jnp.take_along_axis(walk.tokens, slot, axis=1)[..., None],
    valid[..., None],
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Places:
  """The candidates of each node with children; all static.

  A merged node's candidates may be anywhere in the next level.

  Attributes:
    inner: `int[I]`, the nodes with children.
    child: `int[I]`, the first child of each.
    slots: `int[I, C]`, the nodes that may be candidates after each of them.
    filled: `bool[I, C]`, False where a slot is padding.
    row: `int[N + 1]`, each inner node's index in `inner` (0 for leaves).
    slot: `int[N + 1]`, each node's place among its candidates.
    is_inner: `bool[N + 1]`.
  """

  inner: np.ndarray
  child: np.ndarray
  slots: np.ndarray
  filled: np.ndarray
  row: np.ndarray
  slot: np.ndarray
  is_inner: np.ndarray


@functools.cache
def _merged_places(tree: Tree) -> _Places:
  is_inner = np.array([bool(c) for c in tree.children])
  inner = np.flatnonzero(is_inner).astype(np.int32)
  lists = [list(tree.levels[tree.depth[n] + 1]) for n in inner]
  first = np.array([level.start for level in tree.levels])
  width = max(map(len, lists))
  row = np.zeros(tree.num_nodes, np.int32)
  row[inner] = np.arange(len(inner))
  return _Places(
    inner=inner,
    child=np.array([tree.children[n][0] for n in inner], np.int32),
    slots=np.array([x + [0] * (width - len(x)) for x in lists], np.int32),
    filled=np.array([[i < len(x) for i in range(width)] for x in lists]),
    row=row,
    slot=(np.arange(tree.num_nodes) - first[tree.depth]).astype(np.int32),
    is_inner=is_inner,
  )


def node_rows(per_node: Array, nodes: np.ndarray) -> Array:
  """`per_node[:, nodes]`, as a slice (no copy in a fusion) if it is one."""
  start = int(nodes[0])
  if (nodes == np.arange(start, start + len(nodes))).all():
    return per_node[:, start : start + len(nodes)]
  return per_node[:, nodes]
