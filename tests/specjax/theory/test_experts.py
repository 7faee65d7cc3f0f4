"""Experts touched by a pass: enumeration, published sizes, draft lengths."""

import itertools

import numpy as np
import pytest

from specjax.theory import experts, throughput
from specjax.theory.experts import Reads, expected_distinct


@pytest.mark.parametrize(("count", "chosen"), [(4, 2), (5, 1), (4, 3), (3, 3)])
def test_expected_distinct_matches_enumerated_routings(count, chosen):
  ways = list(itertools.combinations(range(count), chosen))
  for tokens in (0, 1, 2, 3):
    sizes = [
      len(set().union(*routed))
      for routed in itertools.product(ways, repeat=tokens)
    ]
    actual = expected_distinct(tokens, count, chosen)
    assert actual == pytest.approx(np.mean(sizes), rel=1e-12)


def qwen3_30b_a3b() -> Reads:
  """In bfloat16, of its configuration."""
  width, layers, heads, kv_heads, channels = 2048, 48, 32, 4, 128
  attention = 2 * width * channels * (heads + kv_heads)
  router = 128 * width
  return Reads(
    others=2 * (layers * (attention + router) + 151936 * width),
    expert=2 * 3 * width * 768,
    num_layers=layers,
    num_experts=128,
    num_chosen=8,
  )


def test_qwen3_30b_a3b_bytes_per_pass():
  """One token is given 8 experts a layer, eight tokens nearly 52."""
  model = qwen3_30b_a3b()
  distinct = expected_distinct(np.array([1, 4, 8, 16, 64]), 128, 8)
  np.testing.assert_allclose(distinct, [8, 29.1, 51.6, 82.4, 125.9], atol=0.05)
  gigabytes = model.bytes_of(np.array([1, 4, 8, 16])) / 1e9
  np.testing.assert_allclose(gigabytes, [6.1, 15.7, 25.8, 39.8], atol=0.05)
  verify = model.verify()
  assert verify(1) == 1
  assert verify(8) == pytest.approx(25.8 / 6.1, rel=0.005)
  assert model.verify(rows=256)(8) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
  ("count", "chosen", "devices"), [(128, 8, 8), (32, 4, 4), (8, 2, 4)]
)
def test_busiest_device_load_is_within_4_percent_of_simulation(
  count, chosen, devices
):
  rng = np.random.default_rng(0)
  for tokens in (1, 4, 16):
    scores = rng.random((1500, tokens, count))
    routed = np.argsort(scores, axis=-1)[..., :chosen]
    met = np.zeros((1500, count), bool)
    np.put_along_axis(met, routed.reshape(1500, -1), True, axis=1)
    simulated = met.reshape(1500, devices, -1).sum(-1).max(-1).mean()
    distinct = expected_distinct(tokens, count, chosen)
    actual = experts.busiest(distinct, count, devices)
    assert actual == pytest.approx(simulated, rel=0.04)
    assert actual >= distinct / devices
  assert experts.busiest(distinct, count, 1) == pytest.approx(distinct)


def test_moe_speedup_is_small_alone_and_dense_like_in_big_batches():
  model = qwen3_30b_a3b()
  gains = {}
  for rows in (1, 4, 64):
    verify = model.verify(rows)
    best = throughput.best_num_tokens(0.7, 0.02, verify)
    rate = throughput.throughput(best, 0.7, 0.02, verify(best + 1))
    gains[rows] = best, round(float(rate), 2)
  assert gains == {1: (1, 1.08), 4: (1, 1.02), 64: (8, 2.72)}
  assert throughput.best_num_tokens(0.7, 0.02, 1.0) == 8


def test_out_of_range_inputs_are_rejected():
  for tokens, chosen in ((1, 5), (np.inf, 2)):
    with pytest.raises(ValueError, match="must be"):
      expected_distinct(tokens, 4, chosen)
