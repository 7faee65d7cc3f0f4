"""`check_rule`: every rule here is what it says, and liars are not."""

import dataclasses

import jax.numpy as jnp
import pytest

from specjax import exact, rules

NOISY = {name for name in rules.RULES if rules.get(name).with_noise}
_FAST = ("token", "match", "typical", "decoding_uno")


@pytest.mark.parametrize(
  "name",
  [
    n if n in _FAST else pytest.param(n, marks=pytest.mark.slow)
    for n in sorted(set(rules.RULES) - NOISY)
  ],
)
def test_rules_match_their_declared_losslessness(name):
  rule = rules.get(name)
  actual = exact.check_rule(rule)
  assert actual.num_cases >= 7
  assert actual.error < 1e-9
  assert actual.reports == (not rule.lossless)
  assert (actual.total_variation < 1e-9) == rule.lossless


def broken(name, **changes):
  """A rule whose verification is changed: `Verification -> changes`."""
  rule = rules.get(name)

  def verify(draft, topology, target):
    said = rule.verify(draft, topology, target)
    new = {key: change(said, target) for key, change in changes.items()}
    return dataclasses.replace(said, **new)

  return dataclasses.replace(rule, verify=verify)


@pytest.mark.parametrize(
  ("rule", "words"),
  [
    (dataclasses.replace(rules.get("typical"), lossless=True),
     "is not lossless: the law of its output is off by"),
    (broken("token", next_log_probs=lambda v, q: lambda node: q[:, 0]),
     "lossless: the law"),
    (broken("token", node_probs=lambda v, q: v.node_probs * 0.9),
     "outcomes sum to 0.9"),
    (broken("token", node_probs=lambda v, q: v.node_probs * jnp.nan),
     "are not finite"),
    (broken("typical", total_variation=lambda v, q: v.total_variation / 2),
     "from the target, off by"),
    (broken("typical", total_variation=lambda v, q: v.total_variation
            * jnp.where(q.shape[1] == 3, 0.5, 1)),
     r"parents \(-1, 0, 1\).* from the target, off by"),
    (broken("token", total_variation=lambda v, q: 0.3 + 0 * v.node_probs),
     "reports a distance of 0.3 from the target, off by 0.3"),
  ],
  ids=[
    "claims", "residual", "lost mass", "nan", "reports", "reports of a chain",
    "lossless and reports",
  ],
)  # fmt: skip
def test_incorrect_rules_are_caught(rule, words):
  with pytest.raises(ValueError, match=words):
    exact.check_rule(rule)


def test_rule_reporting_no_distance_is_recognized():
  silent = broken("typical", total_variation=lambda said, target: None)
  actual = exact.check_rule(silent)
  assert not actual.reports
  assert actual.total_variation > 0.01


def test_rule_rejecting_every_tree_raises():
  def refuse(tree, siblings):
    raise ValueError("none")

  with pytest.raises(ValueError, match="nothing was checked"):
    exact.check_rule(dataclasses.replace(rules.get("token"), check=refuse))
