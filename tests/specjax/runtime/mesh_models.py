"""Models of `mesh_decoding`: one of each kind of layers, for a mesh.

All have sixteen channels and eight heads, one a device where there are eight.
"""

import dataclasses

import jax

from models import sharding
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  Latent,
  LayerSpec,
  TransformerConfig,
  llama_config,
)
from models.networks.mixture import Mixture
from models.networks.params import names
from models.networks.rope import Rope

VOCAB = 32
FRAME = dict(vocab_size=VOCAB, embed_dim=16, max_positions=64)

# Two key/value heads of eight: repeated where they are cut over more devices.
CONFIG = llama_config(
  **FRAME, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=4, mlp_dim=24
)
_ATTENTION = CONFIG.layers[0].attention
_MIXTURE = Mixture(num_experts=8, num_chosen=2, embed_dim=16, expert_dim=12)
_DENSE = DenseSpec(width=24, activation="gelu_tanh")


def _layer(feed_forward, *, norms="pre", **attention):
  """A layer whose attention is `_ATTENTION` but for these fields."""
  own = dataclasses.replace(_ATTENTION, **attention)
  return LayerSpec(attention=own, feed_forward=feed_forward, norms=norms)


# One expert a device where there are eight.
MIXED = TransformerConfig(layers=(_layer(_MIXTURE),) * 2, **FRAME)


def _gemma4() -> TransformerConfig:
  """Wider heads in a full layer, and a layer that reads what the first has."""
  slides = _layer(
    _DENSE, norms="both", num_kv_heads=8, window=3, scale=1.0, qk_norm="head",
    v_norm=True,
  )  # fmt: skip
  full = dataclasses.replace(
    slides.attention, head_dim=6, window=None, keys_as_values=True,
    rope=Rope(theta=900.0, dim=6, factors=(1.0, 1.0, float("inf"))),
  )  # fmt: skip
  extra = dataclasses.replace(_MIXTURE, router_norm_eps=1e-3)
  reads = dataclasses.replace(slides.attention, source=0)
  change = dataclasses.replace
  return TransformerConfig(
    layers=(
      change(slides, scaled=True),
      change(slides, scaled=True, attention=full, extra=extra),
      change(slides, scaled=True, attention=reads),
    ),
    **FRAME, embed_scale=4.0, logit_softcap=4.0, tied_embeddings=True,
    per_layer_dim=4, per_layer_vocab=VOCAB,
  )  # fmt: skip


GEMMA4 = _gemma4()
# Layers with states, cut by heads of keys with the values of each.
HYBRID = TransformerConfig(
  layers=tuple(
    LayerSpec(attention=one, feed_forward=DenseSpec(width=24))
    for one in 2
    * (
      DeltaSpec(num_key_heads=8, num_value_heads=16, key_dim=3, value_dim=2),
      dataclasses.replace(_ATTENTION, num_kv_heads=8),
    )
  ),
  **FRAME,
)
# Of latents and of experts that are dealt out, as a head has it.
LATENTS = TransformerConfig(
  layers=(
    LayerSpec(
      attention=AttentionSpec(
        num_heads=8, num_kv_heads=1, head_dim=10, scale=0.4,
        rope=Rope(theta=500.0, dim=4),
        latent=Latent(rank=6, rope_dim=4, nope_dim=4, value_dim=6),
      ),
      feed_forward=dataclasses.replace(
        _MIXTURE, router="sigmoid", shared_dim=16
      ),
    ),
  ),
  **FRAME,
)  # fmt: skip


def with_kv_heads(params, old, new):
  """Stacked parameters of `old` for `new`, of `sharding.kv_heads_for`."""
  times = new.attention.num_kv_heads // old.attention.num_kv_heads

  def repeat(path, x):
    if times == 1 or names(path)[-2] not in sharding.of_kv_heads(old):
      return x
    return sharding.repeat_heads(x, old.attention.head_dim, times, axis=1)

  return jax.tree_util.tree_map_with_path(repeat, params)
