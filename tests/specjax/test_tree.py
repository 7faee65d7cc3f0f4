"""Token trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import shapes
from specjax import tree as tree_lib
from specjax.tree import Tree


def test_chain_numbers_nodes_by_depth():
  tree = tree_lib.chain(3)
  assert tree.parents == (-1, 0, 1, 2)
  assert tree.is_chain
  assert tree.max_depth == tree.num_drafted == 3
  np.testing.assert_array_equal(tree.ancestors, np.tril(np.ones((4, 4), bool)))
  assert tree_lib.chain(0).parents == (-1,)
  assert tree_lib.chain(0).levels == (range(1),)


def test_paths_share_only_the_root():
  tree = tree_lib.paths(3, 2)
  assert tree.parents == (-1, 0, 0, 1, 2, 3, 4)
  assert not tree.is_chain
  assert tree.levels == (range(1), range(1, 3), range(3, 5), range(5, 7))
  np.testing.assert_array_equal(tree.depth, [0, 1, 1, 2, 2, 3, 3])
  np.testing.assert_array_equal(tree.paths[5], [0, 1, 3, 5])
  np.testing.assert_array_equal(tree.paths[4], [0, 2, 4, 4])
  both = tree.ancestors[5] & tree.ancestors[6]
  assert np.flatnonzero(both).tolist() == [0]


def test_delayed_paths_begin_where_a_chain_ends():
  tree = tree_lib.delayed(2, 3, 2)
  assert tree.parents == (-1, 0, 1, 2, 2, 2, 3, 4, 5)
  assert tree_lib.delayed(0, 3, 2) == tree_lib.paths(2, 3)
  assert tree_lib.delayed(2, 1, 3) == tree_lib.chain(5)
  assert tree_lib.delayed(2, 3, 0) == tree_lib.chain(2)


def test_children_are_listed_in_sampling_order():
  assert Tree((-1, 0, 0, 1, 1, 2)).children == (
    (1, 2), (3, 4), (5,), (), (), (),
  )  # fmt: skip


@pytest.mark.parametrize(
  "parents", [(), (0,), (-1, 1), (-1, 0, 1, 0), (-1, -1)]
)
def test_malformed_parents_are_rejected(parents):
  with pytest.raises(ValueError, match=r"parent|level by level"):
    Tree(parents)


def test_equal_paths_share_one_representative_node():
  tree = Tree((-1, 0, 0, 0, 1, 2, 3))
  tokens = jnp.array(
    [
      [9, 5, 5, 6, 1, 1, 1],  # paths 1 and 2 agree throughout
      [9, 5, 5, 6, 1, 2, 1],  # they part at depth 2
      [9, 5, 6, 7, 1, 1, 1],  # equal tokens under different parents
    ]
  )
  np.testing.assert_array_equal(
    tree_lib.representative(tree, tokens, np.ones((1, 7), bool)),
    [[0, 1, 1, 3, 4, 4, 6], [0, 1, 1, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]],
  )


def test_dynamic_tree_of_few_nodes_has_fewer_children():
  assert shapes.dynamic(8).make(5) == tree_lib.bound(8, 5, 4)
  with pytest.raises(ValueError, match="no tree of 4 drafted nodes"):
    shapes.dynamic(4).make(5)
