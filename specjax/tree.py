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
    index
      of node n's parent. Depths must not decrease with the index.

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


def drafted_paths(length: int, num_paths: int = 1) -> Tree:
  """`paths`, for drafters, which propose at least one token.

  Raises:
    ValueError: if `length` or `num_paths` is less than 1.
  """
  if length < 1:
    raise ValueError(
      f"a drafter needs num_speculative_tokens >= 1, got {length} (0 is the "
      "plain drafter)"
    )
  return paths(length, num_paths)


def first_equal_node(tree: Tree, tokens: Array) -> Array:
  """The first node whose root-to-node tokens equal those of each node.

  Independent paths may draw the same tokens; they are then one hypothesis.
  Equal paths have equal depth, so it is enough to compare with nodes of the
  same level, given the representatives of the parents.

  Args:
    tree: the static tree.
    tokens: `i32[B, N + 1]`.

  Returns:
    `i32[B, N + 1]`, each entry at most its own index; a node that is its own
    entry is the representative of its hypothesis.
  """
  first = jnp.zeros((tokens.shape[0], 1), jnp.int32)  # [B, nodes so far]
  for level in tree.levels[1:]:
    token = tokens[:, level.start : level.stop]  # [B, W]
    parent = first[:, np.array([tree.parents[n] for n in level])]  # [B, W]
    equal = (token[:, :, None] == token[:, None, :]) & (
      parent[:, :, None] == parent[:, None, :]
    )
    index = jnp.argmax(equal, axis=-1).astype(jnp.int32)  # first True
    first = jnp.concatenate([first, level.start + index], axis=1)
  return first


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
