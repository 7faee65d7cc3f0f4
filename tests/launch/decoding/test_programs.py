"""Prefill and loop fit each other: compiled for TPUs, none of them here."""

import pytest

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")

from launch.decoding.mesh import Layout
from launch.planning import chips, program
from models.transformer import TransformerConfig
from specjax import tree as tree_lib


def test_caches_of_narrow_heads_are_not_held_twice():
  """Left alone, XLA:TPU turns arrays of 80 channels over, to pad them less.

  The caches are larger than what is beside the memory (128 MiB), where copies
  would not be counted.
  """
  config = TransformerConfig(
    vocab_size=512, embed_dim=640, num_layers=24, num_heads=8, num_kv_heads=8,
    head_dim=80, mlp_dim=512, max_positions=4096,
  )  # fmt: skip
  found = program.compile_for(
    program.Question(
      target=config, draft=None, tree=tree_lib.chain(2), siblings="iid",
      rule="token", batch_size=8, max_length=2048, prompt_length=8,
      layout=Layout(data=1, model=4, draft=1),
    ),
    chips.devices(chips.topology("v5e-4")),
  )  # fmt: skip
  caches = 24 * 2 * 2 * 8 * 2048 * 80 * 2  # bytes on a device, without padding
  assert found.donation_honoured
  assert found.temporaries < caches / 10
