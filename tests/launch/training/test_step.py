"""Placement of trained parameters on a mesh."""

import jax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from launch.training import step
from models import sharding
from models.networks.description import llama_config
from models.networks.transformer import Transformer

CONFIG = llama_config(
  vocab_size=7, embed_dim=4, num_layers=1, num_heads=1, num_kv_heads=1,
  head_dim=3, mlp_dim=6, max_positions=8,
)  # fmt: skip


def test_only_divisible_outputs_and_channels_are_sharded():
  """Where two devices divide them."""
  module = nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))
  actual = step.shardings(
    nnx.state(module), AbstractMesh((1, 2), ("data", "model"))
  )
  specs = {
    ".".join(sharding.names(path)): leaf.spec
    for path, leaf in jax.tree_util.tree_leaves_with_path(actual)
  }
  assert specs["embed.embedding"] == P(None, "model")
  for name in ("attention.out", "mlp.up"):
    assert specs[f"layers.0.{name}.weight"] == P("model")
  assert specs["layers.0.attention.q.weight"] == P()  # of three channels
  assert specs["lm_head.weight"] == P()  # of seven tokens
