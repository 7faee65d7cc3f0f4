"""The roofline against sums done by hand."""

import dataclasses

import described
import pytest

from configs import shapes
from launch import plan
from launch.hardware import CHIPS
from launch.planning import networks
from models.formats.huggingface import translate
from models.formats.huggingface_config import config_from_json
from models.networks.description import llama_config
from models.networks.quantized import Quantization
from models.networks.transformer import SkippedLayers

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
def test_a_pass_by_hand(size):
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


def test_memory_and_arithmetic_overlap_and_collectives_come_after():
  chip = CHIPS["v5e"]
  for one in (forward(n, size=8) for n in (1, 4096)):
    memory, arithmetic, collectives = one.causes(chip).values()
    assert memory == one.hbm_bytes / 819e9
    assert arithmetic == one.flops / 197e12
    assert collectives == one.ici_bytes / 200e9
    assert one.seconds(chip) == max(memory, arithmetic) + collectives


def test_a_windows_blocks_alone_are_read():
  config = described.alter(CONFIG, windows=3 * (1000,))
  actual = networks.work(config, slots=8196)
  assert actual.cache_bytes == 2 * 3 * 2 * (3 * 512) * 2 * 16
  assert actual.products == 3 * (3 * 512) * 4 * 16


def test_skipped_layers_are_neither_read_nor_summed():
  sums = lambda **skipped: networks.work(
    described.alter(CONFIG, parallel=True),
    slots=100, skipped=SkippedLayers(**skipped),
  ).summed / 64 - 1  # fmt: skip
  assert sums() == sums(attention=(0,), mlp=(1,)) == 3  # once a layer
  assert sums(attention=(0,), mlp=(0,)) == 2
  less = networks.work(
    CONFIG, slots=100, skipped=SkippedLayers(attention=(0, 1), mlp=(2,))
  )
  assert less.weights == WEIGHTS - 2 * ATTENTION - MLP
  assert less.cache_bytes == 2 * 2 * 100 * 2 * 16


def test_int8_is_half_of_the_bytes_with_its_scales():
  plain, low = (
    networks.work(CONFIG, slots=100, weights=weights, cache=cache)
    for weights, cache in ((None, None), (Quantization(dtype="int8"), "int8"))
  )
  outputs = 3 * (16 * (2 * 4) + 64 + 2 * 128 + 64) + 1000  # a scale each
  norms = 3 * 2 * 64 + 64
  assert low.weight_bytes == pytest.approx(
    WEIGHTS + norms + 4 * outputs, rel=0.01
  )
  assert plain.weight_bytes == 2 * WEIGHTS
  # Keys and values of two heads have a scale of four bytes each.
  assert low.cache_bytes == plain.cache_bytes * (16 + 4) / (2 * 16)


def test_a_mixture_is_read_as_far_as_its_tokens_choose():
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
  skipped = forward(1, config, rows=1, slots=8, skipped=SkippedLayers(mlp=(3,)))
  less = one.hbm_bytes - skipped.hbm_bytes
  met = 2 * (2048 * 128 + 8 * 3 * 2048 * 768)
  assert less == pytest.approx(met, rel=0.01)


def test_states_are_read_and_written_and_keys_are_of_attention_alone():
  config = translate(shapes.SHAPES["qwen3.5-9b"])
  work = networks.work(config, slots=1024)
  # In 24 of 32 layers 32 states of 128 x 128 in float32, and three tokens of
  # what is convolved.
  convolved = (2 * 16 + 32) * 128
  assert work.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * convolved * 2)
  assert work.cache_bytes == 2 * 8 * 1024 * 2 * 4 * 256
  bare = dataclasses.replace(work, state_bytes=0, pending_bytes=0)
  bytes_of = lambda w, n: networks.forward(w, n, size=4, rows=2).hbm_bytes
  more = [bytes_of(work, n) - bytes_of(bare, n) for n in (1, 9)]
  assert more[0] == 2 * 2 * (work.state_bytes + work.pending_bytes) / 4
  assert more[1] - more[0] == 2 * 2 * 8 * work.pending_bytes / 4


def test_a_t5_reads_its_decoder_without_what_the_input_made():
  config = plan.shape("t5-1.1-small")
  actual = networks.work(config, slots=100, input_length=30)
  own, cross, mlp = 4 * 512 * 384, 2 * 512 * 384, 3 * 512 * 1024
  assert actual.weights == 8 * (own + cross + mlp) + 32128 * 512
  assert actual.cache_bytes == 2 * 8 * (100 + 30) * 2 * 6 * 64
  assert (actual.blocks, actual.summed) == (24, 25 * 512)
