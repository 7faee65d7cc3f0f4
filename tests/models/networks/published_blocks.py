"""Heads that draft blocks, of random numbers, by their published names.

The reference attends over a whole context and a block at once, without a cache.
"""

import json

import numpy as np
import safetensors.numpy
from published_heads import (
  MLP,
  TARGET,
  D,
  H,
  Published,
  V,
  layer_shapes,
)


def numbers(seed):
  """`random(*shape)` of a generator of its own."""
  rng = np.random.default_rng(seed)
  return lambda *shape: rng.standard_normal(shape).astype(np.float32)


random = numbers(0)
HEADS, KV, LAYERS, BLOCK, MASK = 4, 2, 2, 4, 11
LAYERS_JSON = dict(
  model_type="qwen3", hidden_size=H, intermediate_size=MLP,
  num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=LAYERS,
  vocab_size=V, rms_norm_eps=1e-3, hidden_act="silu", head_dim=D,
  max_position_embeddings=64, rope_theta=5_000.0, tie_word_embeddings=False,
  layer_types=["full_attention"] * LAYERS,
)  # fmt: skip
TENSORS = {
  "fc.weight": random(H, 3 * H), "hidden_norm.weight": 1 + random(H),
  "norm.weight": 1 + random(H),
}  # fmt: skip
for name in (f"layers.{i}" for i in range(LAYERS)):
  shapes = layer_shapes(
    name, read=H, heads=HEADS, kv_heads=KV, qk_norm=True
  ) | {f"{name}.input_layernorm.weight": (H,)}
  TENSORS |= {k: random(*shape) for k, shape in shapes.items()}


def write(path, config, tensors):
  """A directory of a head."""
  path.mkdir()
  (path / "config.json").write_text(json.dumps(config))
  safetensors.numpy.save_file(tensors, path / "model.safetensors")
  return str(path)


class Block(Published):
  """A slow head, for one row.

  Attributes:
    w: its tensors.
  """

  eps, theta = LAYERS_JSON["rms_norm_eps"], LAYERS_JSON["rope_theta"]

  def __init__(self, tensors):
    self.w = tensors

  def around(self, name, x, part):
    """What a part of a layer adds; DFlash 2 has convolutions around each."""
    del name
    return part(x)

  def states(self, features, newest, visible=lambda i, t, s: True):
    """What the output projection reads, the newest token's row among it.

    Token t of the block sees position s if `visible(layer, t, s)`.
    """
    context = self.norm("hidden_norm", self.linear("fc", features))
    x = TARGET.embedding[[newest] + [MASK] * (BLOCK - 1)]
    for i in range(LAYERS):
      here = f"layers.{i}."
      attend = lambda y, here=here, i=i: self.attention(
        here, y, context, lambda t, s: visible(i, t, s)
      )
      feed = lambda y, here=here: self.feed_forward(here, y)
      normed = self.norm(f"{here}input_layernorm", x)
      x = x + self.around(f"{here}attention_conv", normed, attend)
      normed = self.norm(f"{here}post_attention_layernorm", x)
      x = x + self.around(f"{here}mlp_conv", normed, feed)
    return self.norm("norm", x)
