"""Prefill and loop fit each other: compiled for TPUs, none of them here."""

import jax
import pytest

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")

import described

from configs import shapes
from launch import hardware
from launch.planning import program
from models.formats.huggingface_config import config_from_json
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


def compiled(topology="v5e:2x2", **changes):
  fields = dict(
    target=CONFIG, draft=None, tree=tree_lib.chain(2), siblings="iid",
    rule="token", batch_size=8, max_length=2048, prompt_length=8,
    layout=Layout(data=1, model=4, draft=1),
  )  # fmt: skip
  return program.compile_for(
    program.Question(**fields | changes),
    hardware.devices(hardware.topology(topology)),
  )


def counts(actual):
  """How often a round sends what, by its phase."""
  return {
    phase: {kind: x["count"] for kind, x in sent.items()}
    for phase, sent in actual.collectives.items()
  }


def test_model_pair_has_no_cache_copies_and_expected_collectives():
  """Left alone, XLA:TPU turns arrays of 80 channels over, to pad them less.

  A layer has two sums over devices, the embedding one.
  """
  actual = compiled(
    draft=described.alter(CONFIG, num_layers=2, embed_dim=128),
    layout=Layout(data=1, model=4, draft=4),
  )
  assert actual.buffers_reused
  assert actual.cache_copies == 0
  assert actual.temporaries < CACHES / 10
  assert counts(actual) == {
    "verify": {"all-reduce": 2 * 24 + 1, "all-gather": 1},
    "draft pass": {"all-reduce": 2 * (2 * 2 + 1), "all-gather": 2},
    "commit": {}, "other": {},
  }  # fmt: skip


@pytest.mark.slow
def test_sharded_tree_has_expected_memory_and_collectives():
  """Llama 3.1 8B in two groups of four devices, which share one flag alone.

  It is asked before the loop, and once a round. Another peak is no mistake by
  itself; it must be meant.
  """
  shape = lambda name: config_from_json(shapes.SHAPES[name])
  actual = compiled(
    "v6e:2x4", target=shape("llama-3.1-8b"), draft=shape("llama-3.2-1b"),
    tree=tree_lib.Tree((-1, 0, 0, 1, 1, 2)), siblings="without_replacement",
    rule="recursive", layout=Layout(data=2, model=4, draft=4), prompt_length=32,
  )  # fmt: skip
  assert actual.buffers_reused
  assert actual.cache_copies == 0
  assert actual.peak == pytest.approx(5_316_696_064, rel=0.02)
  assert counts(actual) == {
    "verify": {"all-reduce": 2 * 32 + 1, "all-gather": 1},
    "draft pass": {"all-reduce": 2 * (2 * 16 + 1), "all-gather": 2},
    "commit": {}, "other": {"all-reduce": 2},
  }  # fmt: skip


def test_skipping_sublayers_copies_no_cache():
  actual = compiled(
    tree=tree_lib.chain(1),
    skipped=SkippedLayers(attention=(1, 3, 8), mlp=(2, 3, 4)),
  )
  assert actual.buffers_reused
  assert actual.cache_copies == 0
  assert actual.temporaries < CACHES / 10


def test_lowered_programs_contain_no_call_stacks(monkeypatch):
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
