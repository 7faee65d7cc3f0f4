"""Losslessness in float32, through rules compiled as they are for users."""

import forms
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from exact_cases import ONE_TREE, distance, round_error

from specjax.siblings import GREEDY, HUB, WITHOUT_REPLACEMENT
from specjax.tree import Tree

LOW_TREE = Tree((-1, 0, 0))


def each_rule_once():
  """Other siblings of the same rule are slow."""
  seen, cases = set(), []
  for case in ONE_TREE:
    name = case.values[0].name
    again = pytest.mark.slow if name in seen else ()
    seen.add(name)
    cases.append(pytest.param(*case.values, id=case.id, marks=again))
  return cases


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "tree", "siblings"), each_rule_once())
def test_float32_output_matches_target_distribution(rule, tree, siblings):
  actual = distance(
    rule, tree, siblings=siblings, seed=5, warp_settings={}, zeros=True,
    dtype=jnp.float32,
  )  # fmt: skip
  assert actual < 1e-5


@pytest.mark.parametrize(
  ("rule", "siblings"),
  [
    ("recursive", WITHOUT_REPLACEMENT),
    ("traversal", WITHOUT_REPLACEMENT),
    ("score_block", WITHOUT_REPLACEMENT),
    ("greedy_draft", GREEDY),
    ("hub", HUB),
  ],
)
def test_second_sibling_is_lossless_at_low_temperatures(rule, siblings):
  """Beside a first one of nearly all mass, what is left is 1e-7 of nothing."""
  for temperature in (1e-6, 1e-5, 1e-3):
    draft = np.array([10, 0, -0.25 * temperature, -2], np.float32)
    target = np.array([-5, 0, -0.6 * temperature, -5], np.float32)
    error = round_error(
      forms.table_drafter(4, LOW_TREE, siblings), rule,
      model=toys.table_model(4), temperature=temperature,
      target=np.tile(target, (97, 1)), draft=np.tile(draft, (97, 1)),
    )  # fmt: skip
    assert error < 1e-6
