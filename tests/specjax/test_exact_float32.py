"""Losslessness in float32, through rules compiled as they are for users."""

import jax.numpy as jnp
import pytest
from exact_cases import ONE_TREE, distance


def each_rule_once():
  """Other siblings of the same rule are heavy."""
  seen = set()
  for case in ONE_TREE:
    name = case.values[0].name
    again = pytest.mark.heavy if name in seen else ()
    seen.add(name)
    yield pytest.param(*case.values, id=case.id, marks=again)


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "tree", "siblings"), each_rule_once())
def test_output_law_holds_in_float32(rule, tree, siblings):
  found = distance(
    rule, tree, siblings=siblings, seed=5, warp_settings={}, zeros=True,
    dtype=jnp.float32,
  )  # fmt: skip
  assert found < 1e-5
