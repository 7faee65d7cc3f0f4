"""Order of rules by acceptance on a thousand random instances.

Only the orders that a theorem states are asserted.
"""

import instances
import numpy as np
import pytest

from specjax import rules
from specjax.theory import optimum as theory

pytestmark = pytest.mark.usefixtures("x64")


def many(name, count, vocab=3):
  """Acceptance on 1,000 instances, a quarter with zero probabilities."""
  p, q = laws(vocab)
  accepted, output = instances.at_one_position(rules.get(name), p, q, count)
  assert np.abs(output - q).max() < 1e-10
  return accepted


def laws(vocab):
  plain = instances.random_laws(750, vocab, seed=0)
  holes = instances.random_laws(250, vocab, seed=1, zeros=True)
  return tuple(np.concatenate(x) for x in zip(plain, holes, strict=True))


@pytest.mark.parametrize(("count", "vocab"), [(2, 4), (3, 3)])
def test_transport_attains_the_optimum_and_bounds_other_rules(count, vocab):
  optimum = np.array(
    [theory.iid_optimum(p, q, count) for p, q in zip(*laws(vocab), strict=True)]
  )
  actual = {
    name: many(name, count, vocab)
    for name in ("transport", "kseq", "recursive", "match")
  }
  np.testing.assert_allclose(actual["transport"], optimum, atol=1e-9)
  for name, value in actual.items():
    assert (value <= optimum + 1e-9).all(), name
  # Sun et al., NeurIPS 2023, Theorem 2.
  bound = 1 - (1 - 1 / count) ** count
  assert (actual["kseq"] >= bound * optimum - 1e-9).all()
  assert (actual["recursive"] < optimum - 1e-3).any()


@pytest.mark.parametrize("name", ["transport", "recursive", "kseq", "match"])
def test_more_drafts_never_reduce_acceptance(name):
  one, two, three = (many(name, count) for count in (1, 2, 3))
  assert (one <= two + 1e-9).all()
  assert (two <= three + 1e-9).all()
  if name != "match":
    p, q = laws(3)
    np.testing.assert_allclose(one, np.minimum(p, q).sum(1), atol=1e-9)
