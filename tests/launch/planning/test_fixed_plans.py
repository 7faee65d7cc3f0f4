"""Plans that stay as they are: compiled for TPUs, none of them here.

A change of these numbers is not a mistake by itself; it must be meant.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")

from configs import shapes
from launch import hardware
from launch.planning import program
from models.formats import head_checkpoints
from models.formats.huggingface_config import config_from_json
from models.meshes import Layout
from models.networks import linear
from models.networks.quantized_tensor import QuantizedTensor
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


def test_a_chain_over_four_devices():
  """Parallel residuals: one sum a layer, and one of the embedding."""
  actual = compiled(
    "v5e:2x2", "pythia-2.8b", "pythia-70m", tree=tree_lib.chain(2),
    rule="token", layout=Layout(data=1, model=4, draft=4),
  )  # fmt: skip
  check(actual)
  assert actual.peak == pytest.approx(3_712_362_496, rel=0.02)
  assert counts(actual, "other") == {}
  assert counts(actual, "verify") == {"all-reduce": 32 + 1, "all-gather": 1}
  assert counts(actual, "draft pass") == {
    "all-reduce": 2 * (6 + 1), "all-gather": 2,
  }  # fmt: skip


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


def test_a_head_is_cut_as_its_target_and_its_cache_is_never_gathered():
  """A pass sums what it looked up, its attention and its MLP; logits are whole.

  The first also gathers the features that it has fused.
  """
  target = model("llama-3.2-1b")
  settings = shapes.HEADS["eagle3-llama-3.1-8b"] | dict(
    hidden_size=2048, intermediate_size=8192, head_dim=64
  )
  about = head_checkpoints.Target(
    num_layers=target.num_layers, embed_dim=2048, vocab_size=target.vocab_size
  )
  actual = compiled(
    "v5e:2x2", "llama-3.2-1b", None, tree=tree_lib.chain(2), rule="token",
    head=head_checkpoints.shape(settings, about, kind="eagle3"),
    layout=Layout(data=1, model=4, draft=4),
  )  # fmt: skip
  check(actual)
  assert counts(actual, "other") == {}
  assert counts(actual, "verify") == {"all-reduce": 2 * 16 + 1, "all-gather": 1}
  assert counts(actual, "draft pass") == {"all-reduce": 2 * 3, "all-gather": 3}


def test_quantized_weights_are_read_as_they_are_and_not_converted():
  """Products with one layer's weights of a stack, in a loop over layers."""
  layers, outputs, inputs, rows = 4, 1792, 4096, 8

  def run(x, *stacks):
    def layer(i, x):
      values, scales = (
        lax.dynamic_index_in_dim(a, i, keepdims=False) for a in stacks
      )
      y = linear.project(x, QuantizedTensor(values=values, scales=scales))
      return jnp.tanh(jnp.concatenate([y, y, y], axis=1)[:, :inputs])

    return lax.fori_loop(0, layers, layer, x)

  device = hardware.devices(hardware.topology("v5e:2x4"))[0]
  place = jax.sharding.SingleDeviceSharding(device)
  shaped = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, dtype, sharding=place
  )
  compiled = (
    jax.jit(run)
    .lower(
      shaped(jnp.bfloat16, rows, inputs),
      shaped(jnp.int8, layers, outputs, inputs),
      shaped(jnp.float32, layers, outputs, 1),
    )
    .compile()
  )
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  assert temporaries < outputs * inputs  # no layer's weights among them
