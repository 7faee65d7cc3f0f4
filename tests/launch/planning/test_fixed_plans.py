"""Plans that stay as they are: compiled for TPUs, none of them here.

A change of these numbers is not a mistake by itself; it must be meant.
"""

import pytest

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")

from configs import shapes
from launch import hardware
from launch.planning import program
from models.formats.huggingface_config import config_from_json
from models.meshes import Layout
from specjax import tree as tree_lib

pytestmark = pytest.mark.slow


def model(name):
  return config_from_json(shapes.SHAPES[name])


def compiled(topology, target, draft, **changes):
  fields = dict(
    target=model(target), draft=draft and model(draft), siblings="iid",
    batch_size=8, max_length=2048, prompt_length=32,
  )  # fmt: skip
  return program.compile_for(
    program.Question(**fields | changes),
    hardware.devices(hardware.topology(topology)),
  )


def counts(actual, phase):
  return {kind: x["count"] for kind, x in actual.collectives[phase].items()}


def check(actual):
  assert actual.buffers_reused
  assert actual.cache_copies == 0
  assert actual.collectives["commit"] == {}


def test_a_tree_over_rows_and_devices():
  """Two groups of four devices: what they tell each other is one flag.

  It is asked before the loop, and once a round.
  """
  actual = compiled(
    "v6e:2x4", "llama-3.1-8b", "llama-3.2-1b",
    tree=tree_lib.Tree((-1, 0, 0, 1, 1, 2)), siblings="without_replacement",
    rule="recursive", layout=Layout(data=2, model=4, draft=4),
  )  # fmt: skip
  check(actual)
  assert actual.peak == pytest.approx(5_316_696_064, rel=0.02)
  assert counts(actual, "other") == {"all-reduce": 2}
  assert counts(actual, "verify") == {"all-reduce": 2 * 32 + 1, "all-gather": 1}
  assert counts(actual, "draft pass") == {
    "all-reduce": 2 * (2 * 16 + 1), "all-gather": 2,
  }  # fmt: skip
