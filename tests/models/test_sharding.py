"""Sharding of models, and loading of checkpoints onto meshes."""

import json

import described
import jax
import jax.numpy as jnp
import pytest
import several
from flax import nnx
from jax.sharding import PartitionSpec as P

from models import sharding
from models.formats import huggingface
from models.networks import stacked
from models.networks.description import llama_config
from models.networks.transformer import Transformer

CONFIG = llama_config(
  vocab_size=40, embed_dim=16, num_layers=3, num_heads=8, num_kv_heads=2,
  head_dim=4, mlp_dim=24, max_positions=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  """A Llama directory, in float32."""
  folder = tmp_path_factory.mktemp("llama")
  module = Transformer(CONFIG, rngs=nnx.Rngs(0))
  huggingface.save_llama(module, str(folder), dtype=jnp.float32)
  return str(folder)


def spec_of(name, config=CONFIG):
  params = stacked.abstract_params(config, dtype=jnp.float32)
  specs = sharding.param_specs(params, sharding.Sharding())
  actual = [
    spec
    for path, spec in jax.tree_util.tree_leaves_with_path(
      specs, is_leaf=lambda x: isinstance(x, P)
    )
    if ".".join(sharding.names(path)).endswith(name)
  ]
  assert len(actual) == 1, name
  return actual[0]


@pytest.mark.parametrize(
  ("name", "spec"),
  [
    ("attention.q.weight", P(None, ("model",), None)),
    ("attention.v.bias", P(None, ("model",))),
    ("attention.out.weight", P(None, None, ("model",))),
    ("attention.out.bias", P(None)),
    ("mlp.down.weight", P(None, None, ("model",))),
    ("embed.embedding", P(("model",), None)),
    ("lm_head.weight", P(("model",), None)),
    ("final_norm.scale", P()),
  ],
)
def test_projections_are_sharded_like_megatron(name, spec):
  config = described.alter(CONFIG, qkv_bias=True, out_bias=True)
  assert spec_of(name, config) == spec


@pytest.mark.parametrize(
  "name", ["markov_head.gate_proj", "markov_head.joint_proj", "confidence_head"]
)
def test_dspark_rank_dependent_weights_are_replicated(name):
  """Of DSpark's head, whose rank no number of devices need divide."""
  parts = [*name.split("."), "weight"]
  assert sharding.param_spec(parts, sharding.Sharding()) == P()


@pytest.mark.parametrize(
  ("changes", "size", "message"),
  [
    ({}, 3, r"num_heads \(8\) cannot be cut over 3"),
    (dict(width=25), 2, r"mlp_dim \(25\) cannot be cut over 2"),
    (dict(vocab_size=41), 2, r"vocab_size \(41\) cannot be cut over 2"),
  ],
)
def test_indivisible_sizes_are_rejected(changes, size, message):
  config = described.alter(CONFIG, **changes)
  with pytest.raises(ValueError, match=message):
    sharding.kv_heads_for(config, size)


_EIGHT_DEVICES = """
  import json, sys
  import jax, jax.numpy as jnp, numpy as np
  sys.path.insert(0, "tests/specjax/runtime")
  import mesh_models
  from models import checkpoints, sharding
  from models.formats import huggingface, loading, weights
  from models.networks import stacked
  from models.networks.quantized import Quantization

  jax.config.update("jax_num_cpu_devices", 8)
  real, read = weights.part, []

  def part(*args):
    found = real(*args)
    read.append(found.size)
    return found

  weights.part = part
  mesh = jax.make_mesh((2, 4), ("data", "model"),
                       axis_types=(jax.sharding.AxisType.Auto,) * 2)
  network = checkpoints.load(
    sys.argv[1], mesh=mesh, sharding=sharding.Sharding())
  weights.part = real
  config, params = network.config, network.params
  module = loading.load(huggingface.source(sys.argv[1]))
  expected = mesh_models.with_kv_heads(stacked.stack(module), module.config,
                                       config)
  equal = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()),
                       params, expected)
  form = Quantization(dtype="int8")
  cut, alone = (stacked.quantize(p, config, form) for p in (params, expected))
  low = jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), cut, alone)
  tokens = np.arange(8).reshape(2, 4)

  def logits(params, how):
    model = stacked.as_language_model(
      config, dtype=jnp.float32, sharding=how, weights=form)
    run = lambda p: model.apply(p, tokens, model.init_cache(2, 8))[0].logits
    return np.asarray(jax.jit(run)(params))

  with jax.set_mesh(mesh):
    found = logits(cut, sharding.Sharding())
  far = np.abs(found - logits(alone, None)).max() / np.abs(found).max()
  held = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(params))
  print(json.dumps({
    "equal": all(jax.tree.leaves(equal)), "far": float(far),
    "low": all(jax.tree.leaves(low)), "heads": config.attention.num_kv_heads,
    "held": held, "read": sum(read),
    "whole": sum(x.size for x in jax.tree.leaves(params))}))
"""


def test_eight_devices_load_only_their_checkpoint_shards(checkpoint):
  record = json.loads(several.printed(_EIGHT_DEVICES, checkpoint))
  assert record["equal"]
  assert record["low"]  # in eight bits they are the same too
  assert record["far"] < 1e-5
  assert record["heads"] == 4  # two, each on two devices
  assert record["held"] < record["whole"] / 2
  # Eight devices, each its own part: the rows of 'data' hold the same.
  assert record["read"] <= 8 * record["held"]
