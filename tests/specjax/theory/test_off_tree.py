"""Laws off the draft: the programme over priors, between rules and optimum."""

import itertools

import numpy as np
import pytest

from specjax import tree as tree_lib
from specjax.theory import joint, off_tree

PAIR = np.array([[2 / 3, 1 / 3], [1 / 3, 2 / 3]])  # draft and target


def dirichlet(count, seed, vocab=2):
  """So many pairs after each context but the root, which has one."""

  def prior(context):
    rng = np.random.default_rng([seed, *context])
    size = count if len(context) > 1 else 1
    return rng.dirichlet(np.ones(vocab), (size, 2))

  return prior


@pytest.mark.parametrize("length, count", [(2, 2), (2, 3), (3, 2)])
def test_with_nothing_to_know_it_is_the_joint_optimum(length, count):
  actual = off_tree.optimum(
    tree_lib.paths(length, count), lambda context: PAIR[None]
  )
  best = joint.iid_paths(
    lambda context: PAIR[0], lambda context: PAIR[1], length=length, count=count
  ).expected_accepted
  assert actual.on_draft == pytest.approx(best, abs=1e-10)
  assert actual.everywhere == pytest.approx(best, abs=1e-10)


@pytest.mark.parametrize(
  "pairs, seed", list(itertools.product((2, 3), range(3)))
)
def test_laws_off_two_paths_of_two_tokens_are_worth_next_to_nothing(
  pairs, seed
):
  actual = off_tree.optimum(tree_lib.paths(2, 2), dirichlet(pairs, seed))
  assert actual.on_draft <= actual.everywhere + 1e-9
  assert actual.on_draft > 0.998 * actual.everywhere


def test_of_one_path_nothing_off_it_is_worth_anything():
  """Block verification is optimal, and reads its own path."""
  actual = off_tree.optimum(tree_lib.chain(2), dirichlet(3, 0))
  assert actual.on_draft == pytest.approx(actual.everywhere, abs=1e-9)


def test_laws_off_the_draft_can_be_worth_something():
  actual = off_tree.optimum(tree_lib.paths(2, 2), dirichlet(3, 1, vocab=3))
  lost = actual.everywhere - actual.on_draft
  assert 1e-5 < lost < 1e-4
