"""Order of rules by acceptance, on a thousand random instances.

Asserted where a theorem says so. Where none does, the observed order is in
docs/optimum.md.
"""

import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules, tree
from specjax.siblings import IID
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
def test_no_rule_beats_transport_and_transport_is_the_optimum(count, vocab):
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
def test_more_drafts_are_never_worse(name):
  one, two, three = (many(name, count) for count in (1, 2, 3))
  assert (one <= two + 1e-9).all()
  assert (two <= three + 1e-9).all()
  if name != "match":
    p, q = laws(3)
    np.testing.assert_allclose(one, np.minimum(p, q).sum(1), atol=1e-9)


def test_block_never_accepts_less_than_token():
  """On paths of two tokens whose laws depend on the first."""
  rng = np.random.default_rng(2)
  count, vocab = 1000, 3
  laws = rng.dirichlet(np.ones(vocab), (2, count, 1 + vocab))  # p, q
  tokens = np.array([(0, x, y) for x in range(vocab) for y in range(vocab)])
  rows = lambda table: np.stack(
    [table[:, [0] * 9], table[:, 1 + tokens[:, 1]], table[:, [0] * 9]], axis=2
  ).reshape(-1, 3, vocab)
  p, q = rows(laws[0]), rows(laws[1])
  tiled = np.tile(tokens, (count, 1))
  at = np.arange(len(tiled))
  weight = p[at, 0, tiled[:, 1]] * p[at, 1, tiled[:, 2]]
  log_p = np.log(p)
  log_p[:, 2] = -np.inf
  draft = instances.make_draft(
    tree.chain(2), IID, jnp.asarray(tiled, jnp.int32), jnp.asarray(log_p)
  )

  def expected(name):
    verify = rules.get(name).verify
    ask = jax.jit(lambda d, q: verify(d, d.topology(), q).node_probs)
    mean = np.asarray(ask(draft, np.log(q))) @ np.arange(3)
    return (weight * mean).reshape(count, 9).sum(1)

  token, block = expected("token"), expected("block")
  assert (block >= token - 1e-12).all()
  assert (block > token + 1e-3).mean() > 0.3
