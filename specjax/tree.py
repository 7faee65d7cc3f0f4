"""Token trees: the drafted tokens that one target pass scores.

Node 0 is the last committed token; nodes 1..N are drafted. A `Tree` is static
and hashable, and everything about it is NumPy, computed once when a decoder is
built. Nodes are numbered level by level, so the nodes of one depth are
contiguous and a parent has a smaller index than its children.

A tree's `Form` says how much of a draft's shape is static. A `Topology` is the
shape of a round's drafts: constants if it is fixed, else arrays computed from
`Draft.parents`.
"""

import dataclasses
import enum
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from specjax.structs import struct


class Form(enum.Enum):
  """The static part of a draft's shape."""

  FIXED = "fixed"
  """Every node exists, under its static parent."""
  MASKED = "masked"
  """Nodes may be masked; parents are static."""
  FREE = "free"
  """Parents are data. The tree bounds N, the depth G and the children C."""


@dataclasses.dataclass(frozen=True)
class Tree:
  """A token tree given by its parents.

  Attributes:
    parents: N + 1 entries; `parents[0] == -1`, and `parents[n] < n` is the
      index of node n's parent. Depths must not decrease with the index.
    form: how much of this is the same in every draft.
    lanes: the parents of E tokens that are fed after the nodes and scored with
      them, but never verified: entry e is the index, below N + 1 + e, of the
      root or of another lane.

  Raises:
    ValueError: if nodes are not numbered level by level, or a lane's parent is
      a drafted node.
  """

  parents: tuple[int, ...] = (-1,)
  form: Form = Form.FIXED
  lanes: tuple[int, ...] = ()

  def __post_init__(self):
    parents = self.parents
    if not parents or parents[0] != -1:
      raise ValueError(f"parents[0] must be -1 (the root), got {parents}")
    if any(not 0 <= p < n for n, p in enumerate(parents) if n):
      raise ValueError(
        f"every parent must be an earlier node, got parents {parents}"
      )
    if np.any(np.diff(self.depth) < 0):
      raise ValueError(
        f"nodes must be numbered level by level, got depths {self.depth}"
      )
    for lane, parent in enumerate(self.lanes, start=len(parents)):
      if parent and not len(parents) <= parent < lane:
        raise ValueError(
          "a lane's parent must be the root or an earlier lane, got lanes "
          f"{self.lanes} after {len(parents)} nodes"
        )

  @property
  def num_nodes(self) -> int:
    """N + 1: the root and the drafted nodes."""
    return len(self.parents)

  @property
  def num_drafted(self) -> int:
    """N, the number of drafted tokens per step."""
    return len(self.parents) - 1

  @property
  def num_fed(self) -> int:
    """N + 1 + E, tokens fed in one target pass."""
    return len(self.parents) + len(self.lanes)

  @functools.cached_property
  def depth(self) -> np.ndarray:
    """`int[N + 1]`: 0 at the root."""
    return _depths(self.parents)

  @property
  def max_depth(self) -> int:
    """G, the depth of the deepest node."""
    return int(self.depth[-1])

  @functools.cached_property
  def levels(self) -> tuple[range, ...]:
    """The nodes of depth 0, 1, .., G."""
    bounds = np.searchsorted(self.depth, np.arange(self.max_depth + 2))
    return tuple(
      range(int(lo), int(hi)) for lo, hi in itertools.pairwise(bounds)
    )

  @functools.cached_property
  def children(self) -> tuple[tuple[int, ...], ...]:
    """The children of each node, in sampling order."""
    children: list[list[int]] = [[] for _ in self.parents]
    for node, parent in enumerate(self.parents[1:], start=1):
      children[parent].append(node)
    return tuple(tuple(c) for c in children)

  @functools.cached_property
  def rank(self) -> np.ndarray:
    """`int[N + 1]`: how many siblings were drawn before each node."""
    rank = np.zeros(len(self.parents), np.int32)
    for children in self.children:
      rank[list(children)] = np.arange(len(children))
    return rank

  @property
  def max_children(self) -> int:
    """C, the largest number of children of a node."""
    return max(map(len, self.children))

  @functools.cached_property
  def ancestors(self) -> np.ndarray:
    """`bool[N + 1, N + 1]`: entry (n, m) is true if m is n or an ancestor."""
    return _ancestors(self.parents)

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """`int[N + 1, G + 1]`: nodes from the root to n; the tail repeats n."""
    paths = np.zeros((len(self.parents), self.max_depth + 1), np.int32)
    for node, parent in enumerate(self.parents[1:], start=1):
      paths[node] = paths[parent]
      paths[node, self.depth[node] :] = node
    return paths

  @property
  def is_chain(self) -> bool:
    """True if every node has at most one child (node index == depth).

    False for trees of form `FREE`.
    """
    return self.form is not Form.FREE and self.parents == tuple(
      range(-1, len(self.parents) - 1)
    )

  @property
  def is_paths(self) -> bool:
    """True for `paths(G, K)`: chains of equal length under the root."""
    return self.form is not Form.FREE and (
      self.max_depth == 0
      or self.parents == paths(self.max_depth, len(self.children[0])).parents
    )


def _depths(parents: tuple[int, ...]) -> np.ndarray:
  depth = np.zeros(len(parents), np.int32)
  for node, parent in enumerate(parents[1:], start=1):
    depth[node] = depth[parent] + 1
  return depth


def _ancestors(parents: tuple[int, ...]) -> np.ndarray:
  mask = np.eye(len(parents), dtype=bool)
  for node, parent in enumerate(parents[1:], start=1):
    mask[node] |= mask[parent]
  return mask


def chain(length: int) -> Tree:
  """A single path of `length` drafted tokens; 0 gives the root alone."""
  return paths(length, 1)


def paths(length: int, num_paths: int) -> Tree:
  """`num_paths` separate paths of `length` drafted tokens under one root."""
  if length < 0:
    raise ValueError(f"length must be >= 0, got {length}")
  if num_paths < 1:
    raise ValueError(f"num_paths must be >= 1, got {num_paths}")
  first = [0] * num_paths if length else []
  rest = range(1, 1 + num_paths * (length - 1)) if length else []
  return Tree((-1, *first, *rest))


def delayed(length: int, num_paths: int, below: int) -> Tree:
  """A path of `length` tokens, then `num_paths` paths of `below` from its end.

  Delayed expansion (Thomas et al., 2026, arXiv 2602.16994).
  """
  first, rest = chain(length).parents, paths(below, num_paths).parents
  return Tree((*first, *(length + parent for parent in rest[1:])))


def k_ary(*branching: int) -> Tree:
  """Every node of depth d has `branching[d]` children, one or more."""
  if min(branching, default=1) < 1:
    raise ValueError(f"branching must be >= 1 at every depth, got {branching}")
  parents, level = [-1], [0]
  for count in branching:
    first = len(parents)
    parents += [node for node in level for _ in range(count)]
    level = list(range(first, len(parents)))
  return Tree(tuple(parents))


def bound(num_drafted: int, max_depth: int, max_children: int) -> Tree:
  """A tree for drafts whose parents are data, within these bounds.

  Args:
    num_drafted: N, the most drafted nodes.
    max_depth: G.
    max_children: C, the most children of a node.

  Raises:
    ValueError: if no tree of N nodes has this depth and this many children.
  """
  if not (
    1 <= max_depth
    and 1 <= max_children
    and max_depth + max_children - 1 <= num_drafted
    and num_drafted <= sum(max_children**d for d in range(1, max_depth + 1))
  ):
    raise ValueError(
      f"no tree of {num_drafted} drafted nodes has depth {max_depth} and "
      f"{max_children} children of one node"
    )
  # As many nodes per level as possible, leaving one for each level below.
  parents, level, left = [-1], [0], num_drafted
  for below in range(max_depth - 1, -1, -1):
    count = min(len(level) * max_children, left - below)
    first = len(parents)
    parents += [level[i // max_children] for i in range(count)]
    level, left = list(range(first, len(parents))), left - count
  return Tree(tuple(parents), form=Form.FREE)


@struct
class Topology:
  """Shape of a round's drafts as arrays; F = N + 1 + E fed tokens.

  B is the number of rows, or 1 for arrays that all rows share, which are NumPy
  constants.

  Attributes:
    present: `bool[B, F]`; False for masked nodes.
    parents: `int[B, F]`, 0 for the root and masked nodes.
    depth: `int[B, F]`.
    ancestors: `bool[B, F, F]`: entry (n, m) is true if m is n or an ancestor.
    paths: `int[B, N + 1, G + 1]`: nodes from the root to n; the tail repeats n.
    rank: `int[B, N + 1]`: unmasked siblings before each node.
    num_children: `int[B, N + 1]`: unmasked children.
  """

  present: np.ndarray | Array
  parents: np.ndarray | Array
  depth: np.ndarray | Array
  ancestors: np.ndarray | Array
  paths: np.ndarray | Array
  rank: np.ndarray | Array
  num_children: np.ndarray | Array


@functools.cache
def fixed_topology(tree: Tree) -> Topology:
  """The topology of a draft without masked nodes."""
  parents = (*tree.parents, *tree.lanes)
  return Topology(
    present=np.ones((1, tree.num_fed), bool),
    parents=np.maximum([parents], 0).astype(np.int32),
    depth=_depths(parents)[None],
    ancestors=_ancestors(parents)[None],
    paths=tree.paths[None],
    rank=tree.rank[None],
    num_children=np.array([[len(c) for c in tree.children]], np.int32),
  )


def data_topology(
  tree: Tree, parents: Array, max_depth: Array | None = None
) -> Topology:
  """The topology of drafts whose parents are data.

  Args:
    tree: the bounds if its form is `FREE`; everything but the mask if `MASKED`.
    parents: `i32[B, F]`; -1 masks a node and all nodes below it. Nodes deeper
      than the bounds are masked too.
    max_depth: `i32[B]`, a bound on each row's depth; None for the tree's only.

  Returns:
    The `Topology`; depths, ancestors and paths of a `MASKED` tree are constant.
  """
  nodes, fed = tree.num_nodes, tree.num_fed
  index = np.arange(fed, dtype=np.int32)
  present = (parents >= 0) | (index == 0)
  fixed = fixed_topology(tree)
  ancestors: np.ndarray | Array
  depth: np.ndarray | Array
  paths: np.ndarray | Array
  if tree.form is Form.FREE:
    linked = present & (index > 0)
    above = (parents[..., None] == index) & linked[..., None]
    ancestors = jnp.eye(fed, dtype=bool) | above
    for _ in range(math.ceil(math.log2(fed))):  # the transitive closure
      reached = ancestors.astype(jnp.float32)
      ancestors = jnp.matmul(reached, reached) > 0
    depth = jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1
    below = ancestors[:, :nodes, None, :nodes] & (
      depth[:, None, None, :nodes]
      <= np.arange(tree.max_depth + 1, dtype=np.int32)[:, None]
    )  # [B, N + 1, G + 1, N + 1]
    paths = jnp.max(jnp.where(below, index[:nodes], 0), axis=-1)
  else:
    ancestors, depth, paths = fixed.ancestors, fixed.depth, fixed.paths
    parents = jnp.broadcast_to(fixed.parents, parents.shape)
  deepest = tree.max_depth if max_depth is None else max_depth[:, None]
  present &= (depth <= jnp.minimum(deepest, tree.max_depth)) | (index >= nodes)
  present &= ~jnp.any(ancestors & ~present[:, None, :], axis=-1)
  parents = jnp.where(present, parents, 0)
  parents = parents.at[:, 0].set(0)
  mine = present[:, :nodes] & (index[:nodes] > 0)
  together = (
    (parents[:, :nodes, None] == parents[:, None, :nodes])
    & mine[:, :, None]
    & mine[:, None, :]
  )
  earlier = np.tri(nodes, k=-1, dtype=bool)
  child = (parents[:, None, :nodes] == index[:nodes, None]) & mine[:, None, :]
  return Topology(
    present=present,
    parents=parents,
    depth=depth,
    ancestors=ancestors,
    paths=paths,
    rank=jnp.sum(together & earlier, axis=-1, dtype=jnp.int32),
    num_children=jnp.sum(child, axis=-1, dtype=jnp.int32),
  )


def child_table(
  tree: Tree, topology: Topology
) -> tuple[np.ndarray | Array, np.ndarray | Array]:
  """The children of every node, in sampling order.

  Indices `int[B or 1, N + 1, C]`, and which entries are real. Children beyond
  the tree's bound are left out.
  """
  nodes, most = tree.num_nodes, max(tree.max_children, 1)
  present = topology.present[:, :nodes]
  if tree.form is Form.FREE:
    mine = present & (np.arange(nodes) > 0)
    is_child = topology.parents[:, None, :nodes] == np.arange(nodes)[:, None]
    ranked = (is_child & mine[:, None])[:, :, None] & (
      topology.rank[:, None] == np.arange(most)[:, None]
    )[:, None]  # [B, N + 1, C, N + 1]
    return jnp.argmax(ranked, axis=-1).astype(jnp.int32), ranked.any(axis=-1)
  pad = lambda children: [*children, *[0] * (most - len(children))]
  slots = np.array([pad(children) for children in tree.children], np.int32)
  filled = np.arange(most) < fixed_topology(tree).num_children[0][:, None]
  return slots[None], filled & present[:, slots]


def representative(
  tree: Tree, tokens: Array, present: np.ndarray | Array
) -> Array:
  """Maps each node to the representative of its hypothesis.

  Independent paths with the same tokens are one hypothesis. Its representative
  is the first of its nodes that may have children, or else the first.

  Args:
    tree: the tree, not `FREE`.
    tokens: `i32[B, N + 1]`.
    present: `bool[B or 1, N + 1]`; a masked node represents itself.

  Returns:
    `i32[B, N + 1]`; a node that is its own entry is a representative.
  """
  # [B, nodes so far]
  representatives = jnp.zeros((tokens.shape[0], 1), jnp.int32)
  for level in tree.levels[1:]:
    here = slice(level.start, level.stop)
    token = tokens[:, here]  # [B, W]
    above = np.array([tree.parents[n] for n in level], np.int32)
    parent = representatives[:, above]  # [B, W]
    equal = (token[:, :, None] == token[:, None, :]) & (
      parent[:, :, None] == parent[:, None, :]
    )
    equal &= present[:, here, None] & present[:, None, here]
    equal |= np.eye(len(level), dtype=bool)
    inner = np.array([bool(tree.children[n]) for n in level])
    index = jnp.argmax(equal * (1 + inner), axis=-1)  # the first largest
    representatives = jnp.concatenate(
      [representatives, (level.start + index).astype(jnp.int32)], axis=1
    )
  return representatives


def take_node(per_node: ArrayLike, node: Array) -> Array:
  """`per_node[b, node[b]]` for every row b: `[B, N + 1, ...] -> [B, ...]`."""
  return jax.vmap(
    lambda x, n: jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False)
  )(per_node, node)
