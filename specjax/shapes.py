"""Tree shapes as users write them, some for any depth.

A drafter's `tree=` is a `specjax.tree.Tree`, or a `Shape`, which becomes one
for the depth `tokens=`.
"""

import dataclasses
from collections.abc import Callable

from specjax import tree as tree_lib
from specjax.calls import Grammar
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """A tree for any depth.

  Attributes:
    make: the tree of a given depth.
    depth: the depth, if fixed.
    dynamic: whether the drafter chooses the nodes, as EAGLE-2 does.
    families: whether it chooses all children of a node together.
  """

  make: Callable[[int], Tree]
  depth: int | None = None
  dynamic: bool = False
  families: bool = False


def fixed(tree: Tree) -> Shape:
  """A tree of fixed depth."""
  return Shape(make=lambda tokens: tree, depth=tree.max_depth)


def paths(num_drafts: int) -> Shape:
  """`num_drafts` separate paths, each `tokens` deep."""
  return Shape(make=lambda tokens: tree_lib.paths(tokens, num_drafts))


def delayed(*, chain: int, paths: int, tokens: int) -> Shape:
  """A chain of `chain` tokens, then `paths` paths of `tokens` from its end."""
  return fixed(tree_lib.delayed(chain, paths, tokens))


def k_ary(*branching: int) -> Shape:
  """The number of children of each node, level by level."""
  return fixed(tree_lib.k_ary(*branching))


def parents(*nodes: int) -> Shape:
  """Any tree, by each node's parent, root first: (-1, 0, 0, 1, 1)."""
  return fixed(Tree(nodes))


def dynamic(nodes: int, *, top_k: int = 10, families: bool = False) -> Shape:
  """The likeliest nodes (EAGLE-2) or families (JetSpec), `tokens` deep.

  A node has at most `top_k` children, fewer if the depth takes more nodes.
  """

  def make(tokens: int) -> Tree:
    children = max(1, min(top_k, nodes - tokens + 1))
    return tree_lib.bound(nodes, tokens, children)

  return Shape(make=make, dynamic=True, families=families)


def tree_of_ranks(paths: tuple[tuple[int, ...], ...]) -> Tree:
  """The tree of Medusa's choices: a path of ranks for each node.

  Args:
    paths: for each node but the root, in any order, the ranks (from 0) on its
      path, as in `((0,), (1,), (0, 0))`. Every node's parent and previous
      siblings must be among them.

  Raises:
    ValueError: if one of those is missing, or a path is listed twice.
  """
  known = set(paths)
  if len(known) != len(paths) or () in known:
    raise ValueError("list every node once, and not the root")
  for path in paths:
    *above, rank = path
    for need in (tuple(above), (*above, rank - 1)):
      if need and need[-1] >= 0 and need not in known:
        raise ValueError(f"{path} needs {need}, which is missing")
  ordered = [(), *sorted(known, key=lambda p: (len(p), p))]
  index = {path: n for n, path in enumerate(ordered)}
  return Tree((-1, *(index[path[:-1]] for path in ordered[1:])))


def _ranks(*levels: str) -> tuple[tuple[int, ...], ...]:
  """Paths as published: digits, "0-3" for a range of the last one."""
  ranks = []
  for word in " ".join(levels).split():
    first, _, last = word.partition("-")
    head = tuple(map(int, first[:-1]))
    ranks += [
      (*head, r) for r in range(int(first[-1]), int((last or first)[-1]) + 1)
    ]
  return tuple(ranks)


# Static trees that were published, by name: of 63 nodes and the root for
# Vicuna-7B (Medusa), and of 25 (EAGLE-1, under the same name there).
PUBLISHED = {
  "mc_sim_7b_63": tree_of_ranks(
    _ranks(
      "0-9",
      "00-09 10-16 20-22 30 31 40 50 60 70 80 90",
      "000-009 010 011 012 020 021 030 040 050 060 070 100 101 200",
      "0000 0001",
    )
  ),
  "eagle_25": tree_of_ranks(
    _ranks(
      "0-3",
      "00 01 02 10 11 20 21 30",
      "000 001 002 010 011 020 021 100",
      "0000 0001 0002",
      "00000 00001",
    )
  ),
}


def _published(tree: Tree) -> Callable[[], Shape]:
  def published() -> Shape:
    return fixed(tree)

  published.__doc__ = f"The published tree of {tree.num_nodes} nodes."
  return published


GRAMMAR = Grammar(
  kind="tree",
  entries={
    "paths": paths,
    "delayed": delayed,
    "k_ary": k_ary,
    "parents": parents,
    "dynamic": dynamic,
    **{name: _published(tree) for name, tree in PUBLISHED.items()},
  },
  literal="parents",
)
