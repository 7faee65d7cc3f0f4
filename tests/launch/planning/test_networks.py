"""The roofline against sums done by hand."""

import pytest

from configs import shapes
from launch.planning import networks
from models.formats.huggingface_config import config_from_json
from models.networks.description import llama_config

CONFIG = llama_config(
  vocab_size=1000, embed_dim=64, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=16, mlp_dim=128, max_positions=512,
)  # fmt: skip
ATTENTION, MLP = 64 * 16 * (2 * 4 + 2 * 2), 3 * 64 * 128
# Layers and their norms, the last norm, the output projection; the embedding is
# only looked up.
WEIGHTS = 3 * (ATTENTION + MLP + 2 * 64) + 64 + 1000 * 64


def forward(num_tokens, config=CONFIG, *, size=1, rows=2, **how):
  work = networks.work(config, **dict(slots=100) | how)
  return networks.forward(work, num_tokens, size=size, rows=rows)


@pytest.mark.parametrize("size", [1, 8])
def test_forward_pass_costs_match_hand_computed_values(size):
  actual = forward(5, size=size)
  tokens = 2 * 5
  cache = 2 * 3 * 2 * 100 * 2 * 16
  inside = 2 * tokens * 3 * 2 * (4 * 16 + 128)
  whole = 2 * tokens * 3 * 4 * 64  # what blocks take and hand on
  logits = 4 * tokens * 1000
  assert actual.hbm_bytes == pytest.approx(
    2 * ((WEIGHTS + cache + inside) / size + whole) + 2 * logits
  )
  assert actual.flops == pytest.approx(
    (2 * tokens * WEIGHTS + 4 * 3 * tokens * 100 * 4 * 16) / size
  )
  # Two sums a layer, and one of what was looked up, there and back.
  sums = (2 * 3 + 1) * 2 * 2 * tokens * 64
  assert actual.ici_bytes == pytest.approx((size - 1) / size * (sums + logits))


def test_moe_reads_only_the_experts_its_tokens_activate():
  """Qwen3-30B-A3B: 6.1 GB for one token, 25.8 for eight; the cache apart."""
  config = config_from_json(shapes.SHAPES["qwen3-30b-a3b"])
  one, eight = (forward(n, config, rows=1, slots=8) for n in (1, 8))
  assert one.hbm_bytes == pytest.approx(6.1e9, rel=0.01)
  assert eight.hbm_bytes == pytest.approx(25.8e9, rel=0.01)
  assert eight.flops == pytest.approx(8 * one.flops)
  ((block, layers),) = networks.work(config, slots=8).mixtures
  assert layers == 48
  assert networks.touched(block, 1) == 8
  assert networks.touched(block, 8) == pytest.approx(128 * (1 - (15 / 16) ** 8))
