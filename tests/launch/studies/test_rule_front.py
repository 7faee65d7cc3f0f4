"""`launch.studies.rules.front`: exact, and what is committed of it."""

import dataclasses
import json
import pathlib

import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instances import P, Q

from launch.studies.rules import front, plots
from specjax import rules, siblings, tree
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_to_compile")
ABOVE = ("decoding_uno", "cascade_token", "contrastive", "typical", "blockwise")


@pytest.fixture(scope="module")
def committed():
  path = pathlib.Path("docs/measurements/rules/front.json")
  return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize(
  "name", ["token", "lenient", "decoding_uno", "typical(epsilon=0.3)"]
)
def test_the_next_token_is_that_of_the_enumerated_law(name):
  rule = rules.get(name)
  with jax.enable_x64(True):
    accepted, law, said = map(
      np.asarray,
      jax.jit(lambda p, q: front.next_token(rule, p, q))(
        jnp.log(P), jnp.log(Q)
      ),
    )
    expected, output = instances.at_one_position(rule, P[None], Q[None], 1)
  np.testing.assert_allclose(accepted, expected[0], atol=1e-12)
  np.testing.assert_allclose(law, output[0], atol=1e-12)
  assert said == pytest.approx(np.abs(law - Q).sum() / 2, abs=1e-12)


def test_what_is_asked_of_a_step_is_in_its_order():
  """Rejections .2 and distance .2 of a TV of .3, by the hand example."""
  shape, laws = tree.chain(2), jnp.log(jnp.asarray([[P, P, P]], jnp.float32))
  draft = Draft(
    tree=shape, siblings=siblings.IID, tokens=jnp.array([[0, 2, 2]]),
    log_probs=laws,
  )  # fmt: skip
  target = jnp.log(jnp.asarray([[Q, Q, Q]], jnp.float32))
  rule = rules.get("decoding_uno(epsilon=0.1)")
  actual = jax.jit(lambda *x: front.ask(rule, *x))(draft, target)
  law = np.array([0.3, 0.3, 0.2]) + 0.2 * Q
  np.testing.assert_allclose(
    actual[:, 0],
    [0.8, 0.2, 0.1, -(law * np.log(Q)).sum(), 3, 0],
    atol=1e-5,
  )


def test_a_report_that_is_wrong_shows_in_the_last_column():
  rule = rules.get("fuzzy(threshold=0.7)")
  wrong = dataclasses.replace(
    rule,
    verify=lambda *x: dataclasses.replace(
      rule.verify(*x), total_variation=jnp.zeros((1, 2))
    ),
  )
  draft = Draft(
    tree=tree.chain(1), siblings=siblings.IID, tokens=jnp.array([[0, 1]]),
    log_probs=jnp.log(jnp.asarray([[P, P]], jnp.float32)),
  )  # fmt: skip
  target = jnp.log(jnp.asarray([[Q, Q]], jnp.float32))
  off = lambda rule: jax.jit(lambda *x: front.ask(rule, *x)[-1, 0])(
    draft, target
  )
  assert off(rule) < 1e-5
  assert off(wrong) == pytest.approx(0.3, abs=1e-5)


def test_who_is_on_the_front_in_what_is_committed(committed):
  assert set(committed["families"]) == set(front.FAMILIES)
  for family, points in committed["families"].items():
    above = [point["above_front"] for point in points]
    assert min(above) > -1e-5, family
    for point in points:
      low, high = point["cross_entropy_ratio_ci"]
      assert low <= point["cross_entropy_ratio"] <= high
    assert (max(above) > 1e-3) == (family in ABOVE), family


def test_the_table_has_a_row_a_rule(committed):
  lines = plots.front_table({"": committed}).split("\n")
  count = sum(len(points) for points in committed["families"].values())
  assert len(lines) == count + 2
  assert "| `token` |" in lines[2]
