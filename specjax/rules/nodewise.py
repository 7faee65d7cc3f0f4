"""Rules that decide node by node, from the distributions at a node alone.

Most multi-draft rules do. Such a rule is a function of one node, without a
batch axis: from the two distributions and the drafted candidates it computes
the probability of accepting each candidate, and the next token's distribution
if none is accepted. `verify_nodes` walks the tree with it:

  P(the walk reaches child x of n) = P(it reaches n) P(x is accepted at n).

Independent siblings may carry equal tokens. Their paths are one hypothesis,
whose children are all i.i.d. draws from one distribution: the walk merges them,
as SpecTr's loop over surviving paths does (Sun et al., NeurIPS 2023). Nodes
with one candidate are decided together, as arrays, and the others one by one.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.structs import struct
from specjax.tree import (
  Form,
  Topology,
  Tree,
  child_table,
  representative,
  take_node,
)
from specjax.types import Draft, Verification, VerifyFn


@struct
class Decision:
  """A rule's decision at one node; C candidates, V tokens.

  Attributes:
    accept: `f32[C]`, the probability that the walk continues to each candidate;
      0 where it is not valid. Their sum is at most 1.
    next_log_probs: `f32[V]`, the next token's distribution if none is accepted.
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

    Called with C = 1 and with larger C. The result must depend only on valid
    candidates.

    Args:
      target_log_probs: `f32[V]`, the target's distribution q after the node.
      draft_log_probs: `f32[C, V]`, the distribution that each candidate was
        drawn from, given its previous siblings; or `f32[1, V]` if all are drawn
        from the draft's distribution p independently.
      tokens: `i32[C]`, the candidates, in the order they were drawn.
      valid: `bool[C]`, False for masked ones, which come last unless siblings
        are independent. If none is valid, anything but NaN may be returned.
    """


def decide_single(
  target_log_probs: Array, draft_log_probs: Array, tokens: Array, valid: Array
) -> Decision:
  """Ordinary verification of the only candidate; see `DecideFn`."""
  draft = draft_log_probs[0]
  test = distributions.acceptance(target_log_probs[tokens], draft[tokens])
  return Decision(
    accept=jnp.where(valid, test, 0),
    next_log_probs=distributions.residual(target_log_probs, draft),
  )


def verify_nodes(
  decide: DecideFn, *, merge: bool = True, needs_draft: bool = True
) -> VerifyFn:
  """The tree rule that decides with `decide` at every node.

  Args:
    decide: the decision at one node.
    merge: whether to merge equal paths of independent siblings; if not, and in
      `FREE` trees, the walk stays below the very sibling it accepted.
    needs_draft: whether `decide` uses the draft's distributions; if not, it
      gets distributions without any mass, `f32[1, V]`.

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
      distributions=draft.distributions(target_log_probs)
      if needs_draft
      else None,
      shared=independent,
    )
    merge_here = merge and independent and tree.form is not Form.FREE
    if merge_here and not tree.is_chain:
      return _verify_merged(walk)
    return _verify_per_node(walk)

  return verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Walk:
  """A draft, and the rule that decides at its nodes.

  Arrays are `i32[B, N + 1]` and `f32[B, N + 1, V]`. `distributions`, which
  tokens were drawn from, are None if `decide` ignores them; they are `shared`
  if a node's candidates have the same one.
  """

  decide: DecideFn
  tree: Tree
  topology: Topology
  tokens: Array
  target: Array
  distributions: Array | None
  shared: bool

  def at(
    self,
    nodes: np.ndarray | Array,
    slots: np.ndarray | Array,
    valid: Array,
    source: np.ndarray | Array | None = None,
  ) -> Decision:
    """Decisions `[B, I, ...]` at nodes `int[I]`, static, or `i32[B, I]`.

    Candidates are `slots`, `int[I, C]` or `i32[B, I, C]`, where `valid`,
    `bool[B, I, C]`. A shared distribution is taken from node `source`, by
    default the first valid candidate.
    """
    target = node_rows(self.target, nodes)
    if self.distributions is None:
      drafted = jnp.full_like(target[:, :, None], -jnp.inf)
    elif self.shared:
      source = _first(slots, valid) if source is None else source
      drafted = node_rows(self.distributions, source)[:, :, None]
    else:
      drafted = node_rows(self.distributions, slots)
    return jax.vmap(jax.vmap(self.decide))(
      target, drafted, node_rows(self.tokens, slots), valid
    )

  def after(self, node: Array, slots: Array, valid: Array) -> Array:
    """The distribution `f32[B, V]` after nodes with candidates `[B, C]`."""
    rest = self.at(node[:, None], slots[:, None], valid[:, None])
    return jnp.where(
      valid.any(axis=1, keepdims=True),
      rest.next_log_probs[:, 0],
      take_node(self.target, node),
    )


def node_rows(per_node: Array, nodes: np.ndarray | Array) -> Array:
  """`per_node[b, nodes]`, or if `nodes` is traced `per_node[b, nodes[b]]`.

  Contiguous static nodes become a slice, which fuses without a copy.
  """
  if not isinstance(nodes, np.ndarray):
    return jax.vmap(lambda rows, at: rows[at])(per_node, nodes)
  start, size = int(nodes.flat[0]), nodes.size
  if (nodes.reshape(-1) == np.arange(start, start + size)).all():
    some = per_node[:, start : start + size]
  else:
    some = per_node[:, nodes.reshape(-1)]
  return some.reshape(len(some), *nodes.shape, *per_node.shape[2:])


def _first(slots: np.ndarray | Array, valid: Array) -> Array:
  """The first valid of slots `int[.., C]`, for each of `bool[B, .., C]`."""
  first = jnp.argmax(valid, axis=-1, keepdims=True)
  slots = jnp.broadcast_to(slots, valid.shape)
  return jnp.take_along_axis(slots, first, axis=-1)[..., 0]


# -------------------------------------------------------- siblings not merged


def _verify_per_node(walk: _Walk) -> Verification:
  """Verifies a tree in which each node's candidates are its own children."""
  tree, topology = walk.tree, walk.topology
  nodes, batch = tree.num_nodes, len(walk.tokens)
  table, filled = child_table(tree, topology)
  most = filled.shape[-1]
  valid = jnp.broadcast_to(filled, (batch, nodes, most))
  slots = jnp.broadcast_to(table, valid.shape)
  if tree.form is Form.FREE:  # parents are data: one node at a time

    def one(node):
      where = jnp.full((batch, 1), node)
      here, mask = node_rows(slots, where), node_rows(valid, where)
      decision = walk.at(where, here, mask)
      return jax.tree.map(
        lambda x: x[:, 0], (decision.accept, decision.total_variation)
      )

    accept, distance = jax.tree.map(
      lambda x: jnp.moveaxis(x, 0, 1), jax.lax.map(one, jnp.arange(nodes))
    )
  else:  # all nodes with the same number of children together
    zeros = jnp.zeros(valid.shape, walk.target.dtype)
    accept, distance = zeros, None
    counts = np.array([len(children) for children in tree.children])
    for width in np.unique(counts[counts > 0]):
      here = np.flatnonzero(counts == width).astype(np.int32)
      below, mask = table[0, here, :width], valid[:, here, :width]
      eldest = below[:, 0] if width == 1 or tree.form is Form.FIXED else None
      decision = walk.at(here, below, mask, eldest)
      accept = accept.at[:, here, :width].set(decision.accept)
      if decision.total_variation is not None:
        distance = zeros[..., 0] if distance is None else distance
        distance = distance.at[:, here].set(decision.total_variation)
  if distance is not None:
    distance = jnp.where(valid.any(axis=-1), distance, 0)
  accept = jnp.where(valid, accept, 0)
  parents, rank = topology.parents[:, :nodes], topology.rank
  present = topology.present[:, :nodes]
  rows = np.arange(batch)[:, None]
  step = accept[rows, parents, jnp.minimum(rank, most - 1)]
  step = jnp.where(present & (rank < most), step, 0).at[:, 0].set(1)
  along = step[rows[..., None], topology.paths]  # [B, N + 1, G + 1]
  is_path = np.arange(tree.max_depth + 1) <= topology.depth[:, :nodes, None]
  reach = jnp.prod(jnp.where(is_path, along, 1), axis=-1)
  # Nodes deeper than the bounds have no path of their own.
  reach = jnp.where(present, reach, 0)

  def next_log_probs(node):
    return walk.after(node, take_node(slots, node), take_node(valid, node))

  return Verification(
    node_probs=reach * jnp.maximum(1 - jnp.sum(accept, axis=-1), 0),
    next_log_probs=next_log_probs,
    total_variation=distance,
  )


# ---------------------------------------------------------- equal paths merged


def _verify_merged(walk: _Walk) -> Verification:
  """Verifies a tree, merging the children of nodes with equal paths."""
  tree, tokens = walk.tree, walk.tokens
  present = walk.topology.present[:, : tree.num_nodes]
  slots = _next_levels(tree)
  group = representative(tree, tokens, present)  # [B, N + 1]
  parent = group[:, np.maximum(tree.parents, 0).astype(np.int32)]
  parent = parent.at[:, 0].set(-1)
  index = np.arange(tree.num_nodes)
  valid = (parent[:, slots] == index[:, None]) & present[
    :, slots
  ]  # [B, N + 1, C]
  accept, distance = _decide_merged(walk, slots, valid)
  rows = np.arange(len(tokens))[:, None]
  # P(n is accepted | the walk is at its parent), for n as it was drawn.
  first = np.array([level.start for level in tree.levels])
  step = accept[rows, parent, index - first[tree.depth]]
  reach = jnp.ones_like(step[:, :1])
  for level in tree.levels[1:]:
    here = slice(level.start, level.stop)
    came = step[:, here] * jnp.take_along_axis(reach, parent[:, here], axis=1)
    came = jnp.where(present[:, here], came, 0)
    same = group[:, here, None] == np.array(level)  # [B, drawn, stands for]
    reach = jnp.concatenate(
      [reach, jnp.sum(jnp.where(same, came[:, :, None], 0), axis=1)], axis=1
    )
  if distance is not None:
    distance = jnp.where(valid.any(axis=-1), distance, 0)
    # A path may go through a node that another one represents.
    distance = jnp.take_along_axis(distance, group, axis=1)

  def next_log_probs(node):
    here, mask = jnp.asarray(slots)[node], take_node(valid, node)
    several = jnp.sum(mask, axis=1, keepdims=True) > 1
    some = mask.any(axis=1, keepdims=True)
    one = walk.after(node, _first(here, mask)[:, None], some)
    wide = lambda: walk.after(node, here, mask)
    return jax.lax.cond(
      several.any(), lambda: jnp.where(several, wide(), one), lambda: one
    )

  return Verification(
    node_probs=reach * jnp.maximum(1 - jnp.sum(accept, axis=-1), 0),
    next_log_probs=next_log_probs,
    total_variation=distance,
  )


def _decide_merged(
  walk: _Walk, slots: np.ndarray, valid: Array
) -> tuple[Array, Array | None]:
  """Acceptances `f32[B, N + 1, C]`, and a lossy rule's distances."""
  children = walk.tree.children
  inner = np.flatnonzero([bool(c) for c in children]).astype(np.int32)
  child = np.array([children[n][0] for n in inner], np.int32)
  fixed, first = walk.tree.form is Form.FIXED, _first(slots, valid)[:, inner]
  some = valid[:, inner].any(axis=-1, keepdims=True)
  one = walk.at(inner, first[..., None], some, child if fixed else first)
  everywhere = jnp.zeros(valid.shape[:2], walk.target.dtype)
  at_first = valid & (jnp.cumsum(valid, axis=-1) == 1)
  alone = everywhere.at[:, inner].set(one.accept[..., 0])
  accept = jnp.where(at_first, alone[..., None], 0)
  distance = one.total_variation
  if distance is not None:
    distance = everywhere.at[:, inner].set(distance)
  several = jnp.sum(valid, axis=-1) > 1  # [B, N + 1]
  order = jnp.argsort(~several, axis=1).astype(jnp.int32)
  count = jnp.max(jnp.sum(several, axis=1))

  def decide_next(index, decided):
    node = jax.lax.dynamic_slice_in_dim(order, index, 1, axis=1)  # [B, 1]
    decision = walk.at(node, jnp.asarray(slots)[node], node_rows(valid, node))
    here = (node == np.arange(len(children))) & several  # [B, N + 1]
    put = lambda all_nodes, new: jnp.where(
      here.reshape(*here.shape, *[1] * (new.ndim - 2)), new, all_nodes
    )
    return jax.tree.map(
      put, decided, (decision.accept, decision.total_variation)
    )

  return jax.lax.fori_loop(
    0,
    len(inner),
    lambda i, decided: jax.lax.cond(
      i < count, decide_next, lambda _, same: same, i, decided
    ),
    (accept, distance),
  )


@functools.cache
def _next_levels(tree: Tree) -> np.ndarray:
  """`int[N + 1, C]`: the next level of each inner node, padded with 0."""
  levels = [*tree.levels, ()]
  rows = [
    [*levels[depth + 1]] if children else []
    for depth, children in zip(tree.depth, tree.children, strict=True)
  ]
  width = max(map(len, rows))
  return np.array([row + [0] * (width - len(row)) for row in rows], np.int32)
