"""`launch.studies.precision`: distances by definition, and its page."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from launch.studies import precision

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def test_distances_are_means_over_the_tokens_of_a_text():
  rng = np.random.default_rng(0)
  p, q = (special.log_softmax(x, -1) for x in rng.normal(size=(2, 2, 6, 5)))
  tokens = rng.integers(0, 5, (2, 7))
  actual = precision.compare(p + 3, q - 1, tokens)
  mean = lambda x: x.reshape(2, -1).mean(1)
  kl = (np.exp(p) * (p - q)).sum(-1)
  said = [q[b, t, tokens[b, t + 1]] for b in range(2) for t in range(6)]
  variation = np.abs(np.exp(p) - np.exp(q)).sum(-1) / 2
  agree = p.argmax(-1) == q.argmax(-1)

  def of_chains(chance):
    """Tokens of four drafted ones, the call's own besides, begun at each."""
    begun = np.stack([chance[:, t : t + 4].cumprod(1).sum(1) for t in range(3)])
    return 1 + begun.mean(0)

  expected = {
    "kl": mean(kl),
    "total_variation": mean(variation),
    "greedy_agreement": mean(agree),
    "log_perplexity": mean(-np.array(said)),
    "block_efficiency": of_chains(1 - variation),
    "greedy_block_efficiency": of_chains(agree),
  }
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-5)


def test_a_token_is_accepted_as_often_as_two_laws_overlap():
  p, q = np.log([[[0.5, 0.3, 0.2]]]), np.log([[[0.1, 0.6, 0.2, 0.1]]])
  actual = precision.acceptance(p, q)  # of the three that both models know
  np.testing.assert_allclose(actual, [1 / 9 + 0.3 + 0.2], rtol=1e-6)


def test_the_target_is_at_no_distance_and_floats_are_further(pair):
  texts = np.random.default_rng(0).integers(0, 256, (3, 9))
  written = ["stored(int8)", "stored(fp8, cache=int8)"]
  rows = precision.measure(pair[0], jnp.float32, written, texts, draft=pair[1])
  names = [row["precision"] for row in rows]
  assert names == ["target", "stored(int8)", 'stored(fp8, cache="int8")']
  assert abs(rows[0]["kl"]) < 1e-6
  assert rows[0]["total_variation"] < 1e-6
  assert rows[0]["greedy_agreement"] == 1
  kl = [row["kl"] for row in rows]
  assert kl[0] < kl[1] < kl[2]
  assert rows[0]["block_efficiency"] == pytest.approx(5)
  assert 0 < rows[0]["draft_acceptance"] < 1
  speeds = [row["v5e-8"] for row in rows]
  assert speeds[0]["plain"] < speeds[1]["plain"] < speeds[2]["plain"]
  assert [len(x) for x in speeds] == [1, 3, 1]  # a draft has the target's cache
  num_bytes = [row["weight_bytes"] for row in rows]
  assert num_bytes[0] > num_bytes[1] == num_bytes[2]
  drawn = precision.table({"x/tiny.json": {"rows": rows}}).splitlines()
  assert len(drawn) == 5
  assert drawn[3].startswith("| tiny | `stored(int8)` |")


def test_intervals_are_over_five_texts_or_there_are_none():
  of = lambda n: precision.summarize(
    {name: np.arange(1.0, n + 1) for name in precision._PER_TEXT}
  )
  assert of(4)["kl_ci"] is None
  low, high = of(6)["kl_ci"]
  assert low < of(6)["kl"] == 3.5 < high
  near = {name: np.full(6, 5.0) for name in precision._PER_TEXT}
  near["greedy_agreement"] = np.array([0.4, 1, 1, 1, 1, 1])
  near["block_efficiency"] = 5 * near["greedy_agreement"]
  row = precision.summarize(near)
  assert row["greedy_agreement_ci"][1] == 1  # and not beyond
  assert row["block_efficiency_ci"][1] == 5


def test_unknown_precisions_are_refused():
  with pytest.raises(ValueError, match="a cache is stored as one of"):
    precision.PRECISIONS.make("stored(cache=int2)")
  with pytest.raises(ValueError, match="unknown weights 'int3'"):
    precision.PRECISIONS.make("stored(int3)")
