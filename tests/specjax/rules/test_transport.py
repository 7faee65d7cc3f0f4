"""The flagship: its value against a linear program and set formulas."""

import dataclasses
import itertools

import acceptances
import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.rules import transport
from specjax.rules.nodewise import verify_nodes
from specjax.theory import optimum as theory

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(("vocab", "count"), [(3, 2), (4, 3), (5, 2)])
def test_linear_program_set_formula_and_sort_agree(vocab, count):
  for p, q in zip(*instances.random_laws(6, vocab, seed=vocab), strict=True):
    drafts = np.array([*itertools.product(range(vocab), repeat=count)])
    value, shipped = acceptances.plan(drafts, p[drafts].prod(1), q)
    assert value == pytest.approx(theory.iid_optimum(p, q, count), abs=1e-9)
    assert value == pytest.approx(
      acceptances.set_optimum(q, lambda s: p[list(s)].sum() ** count),  # noqa: B023
      abs=1e-9,
    )
    assert (shipped.sum(0) <= q + 1e-9).all()
    assert (shipped.sum(1) <= p[drafts].prod(1) + 1e-9).all()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_single_token_classes_are_optimal_at_1k_vocab(count):
  for seed in range(2):
    p, q = (x[0] for x in instances.random_laws(1, 1000, seed=seed))
    accepted, law = value(p, q, count)
    assert law == pytest.approx(1, abs=1e-9)
    assert accepted == pytest.approx(theory.iid_optimum(p, q, count), abs=1e-9)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_classes_reach_99_9_percent_of_optimum_at_128k_vocab(count):
  with jax.enable_x64(False):
    for seed, concentration in ((0, 1.0), (1, 0.05)):
      rng = np.random.default_rng(seed)
      p = rng.dirichlet(np.full(128_000, concentration))
      q = p ** rng.uniform(0.5, 1.2) * np.exp(0.7 * rng.normal(size=p.shape))
      q /= q.sum()
      accepted, law = value(p, q, count)
      assert law == pytest.approx(1, abs=2e-5)
      assert accepted > 0.999 * theory.iid_optimum(p, q, count)


def value(p, q, count):
  """Acceptance of the rule, `sum min(a, q)`, and the sum of a."""
  log_p, log_q = instances.log(p), instances.log(q)

  @jax.jit
  def run(log_p, log_q):
    classes = transport.classes_of(log_q, log_p, count)
    _, slopes = transport.selection(
      classes.draft, classes.target, jnp.int32(count), most=count
    )
    selected = jnp.exp(log_p) * slopes[classes.ids]
    return jnp.minimum(selected, jnp.exp(log_q)).sum(), selected.sum()

  return tuple(map(float, run(log_p, log_q)))


@pytest.mark.parametrize("count", [2, 3])
def test_classes_stay_lossless(monkeypatch, count):
  """The way of large vocabularies, in few classes: less accepted, no bias."""
  monkeypatch.setattr(transport, "_MOST_TOKENS", 0)
  monkeypatch.setattr(transport, "_NUM_FINE", 4)
  rule = dataclasses.replace(
    transport.RULE, verify=verify_nodes(transport.decide)
  )
  p, q = instances.random_laws(50, 4, seed=5, zeros=True)
  accepted, output = instances.at_one_position(rule, p, q, count)
  assert np.abs(output - q).max() < 1e-12
  best = np.array(
    [theory.iid_optimum(*x, count) for x in zip(p, q, strict=True)]
  )
  assert (accepted <= best + 1e-12).all()
  assert (accepted < best - 1e-3).any()
