"""Prefill and loop fit each other: compiled for TPUs, none of them here."""

import jax
import pytest

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")

import described

from launch import hardware
from launch.planning import program
from models.meshes import Layout
from models.networks.description import llama_config
from models.networks.transformer import SkippedLayers
from specjax import tree as tree_lib

# Caches are larger than what is beside the memory (128 MiB), where copies are
# not counted.
CONFIG = llama_config(
  vocab_size=512, embed_dim=640, num_layers=24, num_heads=8, num_kv_heads=8,
  head_dim=80, mlp_dim=512, max_positions=4096,
)  # fmt: skip
CACHES = 24 * 2 * 2 * 8 * 2048 * 80 * 2  # bytes on a device, without padding


def compiled(**changes):
  fields = dict(
    target=CONFIG, draft=None, tree=tree_lib.chain(2), siblings="iid",
    rule="token", batch_size=8, max_length=2048, prompt_length=8,
    layout=Layout(data=1, model=4, draft=1),
  )  # fmt: skip
  return program.compile_for(
    program.Question(**fields | changes),
    hardware.devices(hardware.topology("v5e:2x2")),
  )


def test_a_pair_copies_no_cache_and_sends_what_it_must():
  """Left alone, XLA:TPU turns arrays of 80 channels over, to pad them less.

  A layer has two sums over devices, the embedding one. Plans of real pairs are
  in planning/test_fixed_plans.py.
  """
  actual = compiled(
    draft=described.alter(CONFIG, num_layers=2, embed_dim=128),
    layout=Layout(data=1, model=4, draft=4),
  )
  assert actual.buffers_reused
  assert actual.cache_copies == 0
  assert actual.temporaries < CACHES / 10
  counts = lambda phase: {
    kind: x["count"] for kind, x in actual.collectives[phase].items()
  }
  assert counts("verify") == {"all-reduce": 2 * 24 + 1, "all-gather": 1}
  assert counts("draft pass") == {
    "all-reduce": 2 * (2 * 2 + 1),
    "all-gather": 2,
  }
  assert counts("commit") == counts("other") == {}


def test_drafting_with_some_sublayers_left_out_copies_no_cache():
  actual = compiled(
    tree=tree_lib.chain(1),
    skipped=SkippedLayers(attention=(1, 3, 8), mlp=(2, 3, 4)),
  )
  assert actual.buffers_reused
  assert actual.cache_copies == 0
  assert actual.temporaries < CACHES / 10


def test_programs_carry_no_call_stacks(monkeypatch):
  """XLA:TPU may follow them forever."""
  texts = []

  def read(lowered):
    texts.append(lowered.as_text(debug_info=True))
    assert "callsite" not in texts[-1]  # or compiling might not end
    return lowered.compile()

  monkeypatch.setattr(program, "_compile", read)
  name = "jax_traceback_in_locations_limit"
  outside = getattr(jax.config, name)
  jax.config.update(name, 100)  # jax's own default; conftest.py has another
  try:
    compiled(target=described.alter(CONFIG, num_layers=1))
    assert getattr(jax.config, name) == 100
  finally:
    jax.config.update(name, outside)
  assert len(texts) == 2
  assert "while/body/verify" in texts[0]
