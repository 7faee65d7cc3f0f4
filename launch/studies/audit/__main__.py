r"""Audit of methods published as lossless, by exact enumeration.

  python -m launch.studies.audit --output=docs/measurements/audit/audit.json

Every method on four pairs of laws, the smallest pair on which it is lossy, and
the power of tests that sample. Takes half a minute.

  A  p = (2/3, 1/3), q = (1/3, 2/3) after any text
  B  p = (1/2, 1/2); q = (1/2, 1/2) for the first token, then (1, 0)
  C  p = (.5, .3, .2), q = (.2, .3, .5) after any text
  R  random laws of three tokens, other ones after every text

Power is exact, of samplers whose law is a total variation `bias` away from the
target, spread evenly over all tokens, half of them too likely and half too
rare. Pearson's statistic of n samples then follows, for large n, the noncentral
chi-squared law of V - 1 degrees of freedom and noncentrality `n sum (d^2 / q) =
4 n bias^2` over a uniform target.
"""

import time

import numpy as np
from scipy import optimize, stats

from launch import cli, provenance, results
from launch.studies.audit import shape
from launch.studies.audit.methods import METHODS

cli.reads(cli.OUTPUT)
EXACT = 1e-9  # what floats may be off by
LEVEL = 0.05


def row(method: shape.Method) -> dict:
  """A method's outcomes."""
  outcomes = {i.name: shape.outcome(method, i) for i in shape.INSTANCES}
  exact = max(one.distance for one in outcomes.values()) < EXACT
  return {
    "name": method.name,
    "source": method.source,
    "claim": method.claim,
    "finding": method.finding,
    "depth": method.depth,
    "exact": exact,
    "distance": {name: one.distance for name, one in outcomes.items()},
    "block_efficiency": {n: one.tokens for n, one in outcomes.items()},
    "smallest": None if exact else shape.smallest(method),
  }


def chi_squared(samples: float, vocab: int, bias: float) -> float:
  """Power of Pearson's test at the 5% level, in [0.05, 1)."""
  free = vocab - 1
  limit = stats.chi2.isf(LEVEL, free)
  return float(stats.ncx2.sf(limit, free, 4 * samples * bias**2))


def samples_for(power: float, vocab: int, bias: float) -> int:
  """Samples from which Pearson's test has this power."""
  miss = lambda log_n: chi_squared(np.exp(log_n), vocab, bias) - power
  return int(np.ceil(np.exp(optimize.brentq(miss, 1.0, 40.0))))


def vllm(bias: float, *, runs: int = 2_000) -> float:
  """Power of vLLM's test of its rejection sampler against a biased one.

  The test takes 10 and then 100,000 drafts of two tokens, over ten tokens with
  softmaxes of uniform logits, and asserts that the distance of the emitted
  tokens' histogram to the target falls 20 times as much as that to 100 other
  laws (tests/v1/sample/test_rejection_sampler.py).

  Args:
    bias: total variation, spread over all tokens.
    runs: how many times the test is run.

  Returns:
    The share of runs that fail.
  """
  rng = np.random.default_rng(0)
  softmax = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)
  shift = np.tile([1.0, -1.0], 5) * bias / 5
  failures = 0
  for _ in range(runs):
    draft, target = softmax(rng.random(10)), softmax(rng.random(10))
    others = softmax(rng.random((100, 10)))
    accept = np.minimum(draft, target).sum()
    away = []
    for count in (10, 100_000):
      tokens = count + rng.binomial(count, accept)
      frequencies = rng.multinomial(tokens, target + shift) / tokens
      away.append(
        (
          np.linalg.norm(target - frequencies),
          np.linalg.norm(others - frequencies),
        )
      )
    (few, few_others), (many, many_others) = away
    failures += not few / many > 20 * few_others / many_others
  return failures / runs


def measure() -> dict:
  """Every number of the page about power."""
  biases = (1e-3, 3e-3, 1e-2, 3e-2)
  return {
    "samples": 100_000,
    "level": LEVEL,
    "chi_squared": [
      {
        "vocab_size": vocab,
        "power": {f"{b:g}": chi_squared(100_000, vocab, b) for b in biases},
        "samples_for_0.9": samples_for(0.9, vocab, 1e-3),
      }
      for vocab in (4, 10, 100)
    ],
    "vllm": {f"{b:g}": vllm(b) for b in (0.0, *biases)},
  }


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  start = time.perf_counter()
  result = {"methods": [row(method) for method in METHODS], "power": measure()}
  seconds = time.perf_counter() - start
  result |= {"seconds": seconds, **provenance.record()}
  results.write_json(cli.OUTPUT.value or "-", result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
