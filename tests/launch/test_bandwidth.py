"""What a plain step reads, against figures worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from launch import bandwidth
from models.networks.layers import TransformerConfig
from models.networks.transformer import Transformer, as_language_model

SHAPES = dict(
  vocab_size=100, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=4, mlp_dim=24, max_positions=50,
)  # fmt: skip
# A layer: q and out (16 x 16), k and v (16 x 8), three MLP matrices (16 x 24),
# two norms; then the final norm.
LAYERS = 2 * (2 * 256 + 2 * 128 + 3 * 384 + 2 * 16) + 16
HEAD = 100 * 16


def model(dtype=jnp.float32, **changes):
  config = TransformerConfig(**SHAPES | changes)
  return as_language_model(Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  ("changes", "weights"),
  [
    ({}, LAYERS + HEAD),  # the embedding is looked up, the head multiplied
    (dict(tied_embeddings=True), LAYERS + HEAD),  # one table does both
    (dict(learned_positions=True), LAYERS + HEAD),
    (dict(qkv_bias=True), LAYERS + HEAD + 2 * (16 + 8 + 8)),
  ],
)
def test_weights_count_if_they_are_multiplied(changes, weights):
  for dtype, size in ((jnp.float32, 4), (jnp.bfloat16, 2)):
    _, params = model(dtype, **changes)
    assert bandwidth.weight_bytes(params) == size * weights


def test_the_slots_of_the_text_count():
  plain, _ = model(jnp.bfloat16)
  cache = plain.init_cache(3, 20)
  # Keys and values, 2 layers, 3 rows, 2 heads, 5 tokens, 4 channels.
  expected = 2 * 2 * 3 * 2 * 5 * 4 * 2
  assert bandwidth.cache_bytes(cache, 5) == expected
  shapes = jax.eval_shape(lambda: plain.init_cache(3, 40))
  assert bandwidth.cache_bytes(shapes, 5) == expected  # room beyond is unread
  assert bandwidth.cache_bytes(cache, 50) == 4 * expected


def test_the_share_is_bytes_a_pass_times_passes_over_bandwidth():
  found = bandwidth.share(
    weight_bytes=14_000_000_000,  # of 7e9 weights in bfloat16
    cache_bytes=1_000_000_000,
    rows=4,
    step_seconds=0.01,
    bandwidth=bandwidth.from_spec_sheet("NVIDIA A100-SXM4-80GB"),
  )
  assert found["bytes_per_second"] == pytest.approx(1.5e12)
  assert found["share"] == pytest.approx(1500 / 2039)
  assert found["tokens_per_second"] == pytest.approx(400)
  assert found["bytes_per_token"] * found["tokens_per_second"] == pytest.approx(
    found["bytes_per_second"]
  )
  assert bandwidth.row(found) == (
    "plain decoding: 14000.0 MB of weights and 1000.0 MB of cache a "
    "pass, 100 passes/s of 4 rows: 1500.0 of 2039.0 GB/s (spec sheet), 74%"
  )


@pytest.mark.parametrize(
  ("kind", "giga"),
  [
    ("Tesla T4", 320),
    ("NVIDIA L4", 300),
    ("NVIDIA A100-SXM4-40GB", 1555),
    ("A100-PCIE-40GB", 1555),
    ("NVIDIA H100 80GB HBM3", 3350),
    ("NVIDIA H100 PCIe", 2000),
    ("TPU v5 lite", 819),
    ("NVIDIA H200", 4800),
  ],
)
def test_a_known_gpu_has_its_makers_figure(kind, giga):
  found = bandwidth.from_spec_sheet(kind)
  assert found.bytes_per_second == giga * 1e9
  assert found.source == "spec sheet"


@pytest.mark.parametrize(
  "kind", ["cpu", "TPU v9", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", ""]
)
def test_other_devices_have_none(kind):
  assert bandwidth.from_spec_sheet(kind) is None


@pytest.mark.gpu
def test_measuring_gives_about_the_same_twice():
  device = jax.devices()[0]
  first, second = (
    bandwidth.measure(device, num_bytes=2**26).bytes_per_second
    for _ in range(2)
  )
  assert 0 < first < 3 * second < 9 * first


def test_an_unknown_device_is_measured(monkeypatch):
  asked = []

  def measure(device):
    asked.append(device)
    return bandwidth.Bandwidth(bytes_per_second=1.0, source=bandwidth.MEASURED)

  class Device:
    device_kind = "unheard of"

  monkeypatch.setattr(bandwidth, "measure", measure)
  device = Device()
  assert bandwidth.of_device(device).source == "measured"
  assert asked == [device]
  device.device_kind = "NVIDIA B200"
  assert bandwidth.of_device(device).source == "spec sheet"
  assert asked == [device]
