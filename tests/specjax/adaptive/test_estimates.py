"""Estimates of acceptance, of finished rounds."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.adaptive import chains, estimates
from specjax.types import Commit, ModelOutput


def commit_of(tokens, laws, count):
  rows = len(tokens)
  return Commit(
    tokens=jnp.asarray(tokens), start=jnp.full(rows, 9),
    path=jnp.zeros((rows, tokens.shape[1]), int),
    length=jnp.asarray(10 + np.asarray(count)),
    target_output=ModelOutput(logits=jnp.zeros(())),
    num_refed=jnp.zeros(rows, int), newest=jnp.zeros(rows, int),
    target_log_probs=jnp.asarray(laws),
  )  # fmt: skip


def test_estimates_match_plain_python_accumulation():
  """Against a loop over rows and tokens in plain Python."""
  rng = np.random.default_rng(0)
  rows, levels, vocab = 3, 4, 5
  tokens = rng.integers(0, vocab, (rows, levels + 1))
  law = np.log(rng.dirichlet(np.ones(vocab), (rows, levels + 1)))
  now = dataclasses.replace(
    chains.Drawn.zeros(rows, levels),
    top=jnp.asarray(rng.random((rows, levels)), jnp.float32),
    log_p=jnp.asarray(np.log(rng.random((rows, levels))), jnp.float32),
    drafted=jnp.array([4, 2, 3]),
  )
  finished = chains._finished(now, commit_of(tokens, law, [2, 1, 0]))
  later = estimates.learn(estimates.Estimates.zeros(rows), finished, 0.5)
  accepted = np.zeros((rows, 2, estimates.BINS + 1))
  seen, gained = np.zeros_like(accepted), np.zeros(rows)
  for row in (0, 1):  # the last has emitted nothing
    alive, before = 1.0, estimates.ROOT
    gained[row] = 1
    for i in range(int(now.drafted[row])):
      q = np.exp(law[row, i, tokens[row, i + 1]])
      a = min(1.0, q / np.exp(float(now.log_p[row, i])))
      bin_of = sum(float(now.top[row, i]) >= edge for edge in estimates.EDGES)
      for which, here in ((0, bin_of), (1, before)):
        accepted[row, which, here] += alive * a
        seen[row, which, here] += alive
      alive, before = alive * a, bin_of
      gained[row] += alive
  np.testing.assert_allclose(later.accepted, accepted, atol=1e-6)
  np.testing.assert_allclose(later.seen, seen, atol=1e-6)
  np.testing.assert_allclose(later.tokens, gained, atol=1e-6)
  np.testing.assert_allclose(later.seconds, [3, 2, 0], atol=1e-6)
