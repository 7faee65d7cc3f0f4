"""The roofline against sums done by hand."""

import dataclasses

import numpy as np
import pytest

from configs import shapes
from launch.hardware import CHIPS
from launch.planning import networks, roofline
from models.formats.huggingface_config import config_from_json
from models.networks.layers import TransformerConfig
from models.networks.transformer import SkippedLayers

CONFIG = TransformerConfig(
  vocab_size=1000, embed_dim=64, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=16, mlp_dim=128, max_positions=512,
)  # fmt: skip
ONE = roofline.Placement(
  config=CONFIG, num_params=10**9, size=1, rows=2, slots=100
)


def test_a_pass_of_one_device_by_hand():
  actual = roofline.forward(ONE, 5)
  tokens = 2 * 5
  weights = 10**9 - 1000 * 64  # the embedding is only looked up
  cache = 2 * 3 * 2 * 100 * 2 * 16
  activations = 2 * tokens * 3 * (4 * 64 + 2 * (4 * 16 + 128))
  assert actual.hbm_bytes == pytest.approx(
    2 * (weights + cache + activations) + 2 * 4 * tokens * 1000
  )
  assert actual.flops == pytest.approx(
    2 * tokens * weights + 4 * 3 * tokens * 100 * 4 * 16
  )
  assert actual.ici_bytes == 0


@pytest.mark.parametrize(
  "text, window, read",
  [(1, None, 512), (1000, None, 1024), (1024, None, 1024),
   (8000, None, 8192), (8195, None, 8196),
   (1025, None, 1536), (6000, 1024, 1536), (6143, 1000, 1024)],
)  # fmt: skip
def test_a_cache_is_read_in_blocks_from_a_window_to_the_text(
  text, window, read
):
  config = dataclasses.replace(CONFIG, windows=3 * (window,))
  place = dataclasses.replace(ONE, slots=8196, text=text, config=config)
  full = dataclasses.replace(place, slots=read, text=None)
  full = dataclasses.replace(full, config=CONFIG)
  assert roofline.forward(place, 1) == roofline.forward(full, 1)


def test_the_least_that_is_read_are_weights_and_the_text():
  place = dataclasses.replace(ONE, slots=8196, text=1000)
  weights = 10**9 - 1000 * 64
  cache = 2 * 3 * 2 * 1000 * 2 * 16
  assert roofline.least_bytes(place) == 2 * (weights + cache)


def test_eight_devices_cut_all_but_what_lies_between_blocks():
  actual = roofline.forward(dataclasses.replace(ONE, size=8), 5)
  tokens = 2 * 5
  cut = 10**9 - 1000 * 64  # weights
  cut += 2 * 3 * 2 * 100 * 2 * 16  # cache
  cut += 2 * tokens * 3 * 2 * (4 * 16 + 128)  # inside blocks
  whole = 2 * tokens * 3 * 4 * 64
  assert actual.hbm_bytes == pytest.approx(
    2 * (cut / 8 + whole) + 2 * 4 * tokens * 1000
  )


def test_what_eight_devices_send_by_hand():
  actual = roofline.forward(dataclasses.replace(ONE, size=8), 5)
  tokens = 2 * 5
  reductions = (2 * 3 + 1) * 2 * 7 / 8 * 2 * tokens * 64
  assert actual.ici_bytes == pytest.approx(
    reductions + 7 / 8 * 4 * tokens * 1000
  )


def test_parallel_blocks_are_summed_once_a_layer_that_has_any():
  sums = lambda attention, mlp: (
    roofline.forward(
      dataclasses.replace(
        ONE,
        size=8,
        config=dataclasses.replace(CONFIG, parallel_residual=True),
        skipped=SkippedLayers(attention=attention, mlp=mlp),
      ),
      1,
    ).ici_bytes
  )
  one = 2 * 7 / 8 * 2 * 2 * 64  # two rows' partial sums there and back
  assert sums((), ()) - sums((0,), (0,)) == pytest.approx(one)
  assert sums((0,), (1,)) == sums((), ())


def test_one_token_is_bound_by_memory_and_many_by_operations():
  chip = CHIPS["v5e"]
  times = np.array(
    [roofline.forward(ONE, n).seconds(chip) for n in (1, 2, 4096)]
  )
  weights = 2e9 / chip.hbm_bandwidth
  assert times[0] == pytest.approx(weights, rel=0.01)
  assert times[1] == pytest.approx(times[0], rel=0.01)
  assert times[2] > 10 * times[0]
  assert times[2] == pytest.approx(
    roofline.forward(ONE, 4096).flops / chip.peak_flops
  )


def test_tied_embeddings_are_read():
  tied = dataclasses.replace(
    ONE, config=dataclasses.replace(CONFIG, tied_embeddings=True)
  )
  more = (
    roofline.forward(tied, 1).hbm_bytes - roofline.forward(ONE, 1).hbm_bytes
  )
  assert more == pytest.approx(2 * 1000 * 64)


def test_a_mixture_is_read_as_far_as_its_tokens_choose():
  """Qwen3-30B-A3B: 6.1 GB for one token, 25.8 for eight; the cache apart."""
  config = config_from_json(shapes.SHAPES["qwen3-30b-a3b"])
  place = roofline.Placement(
    config=config, num_params=networks.num_params(config), size=1, rows=1,
    slots=8,
  )  # fmt: skip
  cache = 2 * 2 * 48 * 8 * 4 * 128
  assert roofline.least_bytes(place) - cache == pytest.approx(6.1e9, rel=0.01)
  eight = dataclasses.replace(place, rows=8)
  read = roofline.least_bytes(eight) - 8 * cache
  assert read == pytest.approx(25.8e9, rel=0.01)
  one, more = (roofline.forward(place, tokens) for tokens in (1, 8))
  assert 4.1 < more.hbm_bytes / one.hbm_bytes < 4.3
  assert more.flops == pytest.approx(8 * one.flops)
  # Without one layer's experts: what its tokens would choose is not read.
  skipped = dataclasses.replace(place, skipped=SkippedLayers(mlp=(3,)))
  less = one.hbm_bytes - roofline.forward(skipped, 1).hbm_bytes
  met = 2 * (2048 * 128 + 8 * 3 * 2048 * 768)
  assert less == pytest.approx(met, rel=0.01)
