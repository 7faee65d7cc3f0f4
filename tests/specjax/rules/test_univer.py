"""`univer`: its limits are known rules, and a value computed by hand."""

import instances
import numpy as np
import pytest

from specjax import exact, rules
from specjax import tree as tree_lib
from specjax.siblings import GREEDY, HUB, IID, TOP_K, WITHOUT_REPLACEMENT

pytestmark = pytest.mark.usefixtures("quick_to_compile", "x64")
UNIVER = rules.get("univer")


@pytest.mark.parametrize(
  ("name", "siblings"), [("transport", IID), ("greedy_draft", GREEDY)]
)
def test_of_one_token_it_is_the_optimum_of_its_siblings(name, siblings):
  p, q = instances.random_laws(20, 4, seed=2)
  actual, _ = instances.at_one_position(UNIVER, p, q, 3, siblings)
  best, _ = instances.at_one_position(rules.get(name), p, q, 3, siblings)
  np.testing.assert_allclose(actual, best, atol=1e-12)


def test_it_reaches_the_joint_optimum_of_an_example():
  """7/4: nothing is cut at the root, and below the target is certain.

  Each path owes a half after the root. Its second token is right with
  probability 1/2, and owes all; so one of both paths is accepted whole with
  3/4, and else the first token of one of them.
  """
  even, sure = np.array([0.5, 0.5]), np.array([1.0, 0.0])
  law = exact.block_law(
    UNIVER,
    tree_lib.paths(2, 2),
    lambda c: even,
    lambda c: even if len(c) == 1 else sure,
  )
  np.testing.assert_allclose(law.accepted_at_least, [1, 1, 0.75], atol=1e-12)


def test_of_greedy_drafts_it_accepts_more_than_the_walk_from_the_root():
  rng = np.random.default_rng(1)
  p, q = rng.dirichlet(np.ones(3), (2, 6, 3))
  laws = [lambda c, x=x: x[len(c) % 6, c[-1]] for x in (p, q)]
  for tree in (tree_lib.paths(2, 2), tree_lib.k_ary(2, 2)):
    actual, other = (
      exact.block_law(rule, tree, *laws, siblings=GREEDY).expected_accepted
      for rule in (UNIVER, rules.get("greedy_draft"))
    )
    assert actual > other + 1e-3


@pytest.mark.parametrize("siblings", [WITHOUT_REPLACEMENT, TOP_K, HUB])
def test_other_siblings_are_refused(siblings):
  with pytest.raises(ValueError, match="siblings='iid' or siblings='greedy'"):
    UNIVER.check(tree_lib.k_ary(2), siblings)


@pytest.mark.parametrize(
  ("form", "siblings"),
  [(tree_lib.Form.FREE, IID), (tree_lib.Form.MASKED, GREEDY)],
)
def test_forms_that_may_depend_on_what_was_drafted_are_refused(form, siblings):
  tree = tree_lib.Tree((-1, 0, 0), form=form)
  with pytest.raises(ValueError, match="verifies trees whose form is"):
    UNIVER.check(tree, siblings)
