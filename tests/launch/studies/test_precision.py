"""`launch.studies.precision`: distances by definition, and its page."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from launch.studies import precision

pytestmark = pytest.mark.usefixtures("quick_to_compile")
ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_distances_are_means_over_the_tokens_of_a_text():
  rng = np.random.default_rng(0)
  p, q = (special.log_softmax(x, -1) for x in rng.normal(size=(2, 2, 3, 5)))
  tokens = rng.integers(0, 5, (2, 4))
  found = precision.compare(p + 3, q - 1, tokens)
  mean = lambda x: x.reshape(2, 3).mean(1)
  kl = (np.exp(p) * (p - q)).sum(-1)
  said = [q[b, t, tokens[b, t + 1]] for b in range(2) for t in range(3)]
  expected = {
    "kl": mean(kl),
    "total_variation": mean(np.abs(np.exp(p) - np.exp(q)).sum(-1) / 2),
    "greedy_agreement": mean(p.argmax(-1) == q.argmax(-1)),
    "log_perplexity": mean(-np.array(said)),
  }
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_the_target_is_at_no_distance_and_floats_are_further(pair):
  texts = np.random.default_rng(0).integers(0, 256, (3, 9))
  written = ["stored(int8)", "stored(fp8, cache=int8)"]
  rows = precision.measure(pair[0], jnp.float32, written, texts)
  names = [row["precision"] for row in rows]
  assert names == ["target", "stored(int8)", 'stored(fp8, cache="int8")']
  assert abs(rows[0]["kl"]) < 1e-6
  assert rows[0]["total_variation"] < 1e-6
  assert rows[0]["greedy_agreement"] == 1
  kl = [row["kl"] for row in rows]
  assert kl[0] < kl[1] < kl[2]
  num_bytes = [row["weight_bytes"] for row in rows]
  assert num_bytes[0] > num_bytes[1] == num_bytes[2]
  shown = precision.table({"x/tiny.json": {"rows": rows}}).splitlines()
  assert len(shown) == 5
  assert shown[3].startswith("| tiny | `stored(int8)` |")


def test_intervals_are_over_five_texts_or_there_are_none():
  of = lambda n: precision.summarize(
    {name: np.arange(1.0, n + 1) for name in precision._PER_TEXT}
  )
  assert of(4)["kl_ci"] is None
  low, high = of(6)["kl_ci"]
  assert low < of(6)["kl"] == 3.5 < high


def test_unknown_precisions_are_refused():
  with pytest.raises(ValueError, match="a cache is stored as one of"):
    precision.PRECISIONS.make("stored(cache=int2)")
  with pytest.raises(ValueError, match="unknown weights 'int3'"):
    precision.PRECISIONS.make("stored(int3)")
