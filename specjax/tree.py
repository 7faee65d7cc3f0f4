"""Static token trees: what a draft proposes and one target pass scores.

Node 0 is the last committed token; nodes 1..N are drafted. Nodes are numbered
level by level, so the nodes of one depth are neighbours and a parent always has
a smaller index than its children. Everything here is NumPy, computed once when
a decoder is built: a tree is static and hashable.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Tree:
  """A token tree given by its parents.

  Attributes:
    parents: N + 1 entries; `parents[0] == -1`, and `parents[n] < n` is the
      index of node n's parent. Depths must not decrease with the index.

  Raises:
    ValueError: if the parents are not those of a tree numbered level by level.
  """

  parents: tuple[int, ...] = (-1,)

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

  @property
  def num_nodes(self) -> int:
    """N + 1: the root and the drafted nodes."""
    return len(self.parents)

  @property
  def num_drafted(self) -> int:
    """N, the number of drafted tokens per step."""
    return len(self.parents) - 1

  @functools.cached_property
  def depth(self) -> np.ndarray:
    """`int[N + 1]`: 0 at the root."""
    depth = np.zeros(len(self.parents), np.int32)
    for node, parent in enumerate(self.parents[1:], start=1):
      depth[node] = depth[parent] + 1
    return depth

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
    children = [[] for _ in self.parents]
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
    """`bool[N + 1, N + 1]`: entry (n, m) says that m is n or above n."""
    mask = np.eye(len(self.parents), dtype=bool)
    for node, parent in enumerate(self.parents[1:], start=1):
      mask[node] |= mask[parent]
    return mask

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
    """Whether every node has at most one child (node index == depth)."""
    return self.parents == tuple(range(-1, len(self.parents) - 1))

  @property
  def is_paths(self) -> bool:
    """Whether it is `paths(G, K)`: chains of equal length under the root."""
    return self.max_depth == 0 or self == paths(
      self.max_depth, len(self.children[0])
    )


def chain(length: int) -> Tree:
  """A single path of `length` drafted tokens; 0 gives the root alone."""
  return paths(length, 1)


def paths(length: int, num_paths: int) -> Tree:
  """`num_paths` separate paths of `length` drafted tokens under one root.

  Raises:
    ValueError: if `length` is negative or `num_paths` is not positive.
  """
  if length < 0:
    raise ValueError(f"num_speculative_tokens must be >= 0, got {length}")
  if num_paths < 1:
    raise ValueError(f"num_drafts must be >= 1, got {num_paths}")
  first = [0] * num_paths if length else []
  rest = range(1, 1 + num_paths * (length - 1)) if length else []
  return Tree((-1, *first, *rest))


def k_ary(*branching: int) -> Tree:
  """Every node of depth d has `branching[d]` children.

  Raises:
    ValueError: if a number is not positive.
  """
  if min(branching, default=1) < 1:
    raise ValueError(f"branching must be >= 1 at every depth, got {branching}")
  parents, level = [-1], [0]
  for count in branching:
    first = len(parents)
    parents += [node for node in level for _ in range(count)]
    level = list(range(first, len(parents)))
  return Tree(tuple(parents))


def representative(tree: Tree, tokens: Array) -> Array:
  """For each node, the node that stands for its hypothesis.

  Independent paths may draw the same tokens; they are then one hypothesis. It
  is represented by the first of its nodes that has children, or by the first
  of them if none has. Equal paths have equal depth, so it is enough to compare
  with nodes of the same level, given the representatives of the parents.

  Args:
    tree: the static tree.
    tokens: `i32[B, N + 1]`.

  Returns:
    `i32[B, N + 1]`; a node that is its own entry is a representative.
  """
  found = jnp.zeros((tokens.shape[0], 1), jnp.int32)  # [B, nodes so far]
  for level in tree.levels[1:]:
    token = tokens[:, level.start : level.stop]  # [B, W]
    above = np.array([tree.parents[n] for n in level], np.int32)
    parent = found[:, above]  # [B, W]
    equal = (token[:, :, None] == token[:, None, :]) & (
      parent[:, :, None] == parent[:, None, :]
    )
    inner = np.array([bool(tree.children[n]) for n in level])
    index = jnp.argmax(equal * (1 + inner), axis=-1)  # the first largest
    found = jnp.concatenate(
      [found, (level.start + index).astype(jnp.int32)], axis=1
    )
  return found


def take_node(per_node: Array, node: Array) -> Array:
  """`per_node[b, node[b]]` for every row b.

  Args:
    per_node: `[B, N + 1, ...]`.
    node: `i32[B]`.

  Returns:
    `[B, ...]`.
  """
  return jax.vmap(
    lambda x, n: jax.lax.dynamic_index_in_dim(x, n, 0, keepdims=False)
  )(per_node, node)
