"""Layers of several kinds, for tests of small models."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  Latent,
  LayerSpec,
  with_windows,
)
from models.networks.mixture import Mixture
from models.networks.rope import Rope
from models.networks.transformer import Transformer


def alter(config, *, num_layers=None, windows=None, **changes):
  """A model with other fields: of its frame, or of all its layers and blocks.

  The first layer is repeated for another number of layers.
  """
  config = dataclasses.replace(
    config, layers=changes.pop("layers", config.layers)
  )
  unknown = {*changes}

  def put(spec):
    names = {field.name for field in dataclasses.fields(spec)} & {*changes}
    unknown.difference_update(names)
    return dataclasses.replace(spec, **{name: changes[name] for name in names})

  layers = [
    put(
      dataclasses.replace(
        layer,
        attention=put(layer.attention),
        feed_forward=put(layer.feed_forward),
      )
    )
    for layer in config.layers
  ]
  if num_layers is not None:
    layers = layers[:1] * num_layers
  if windows is not None:
    layers = with_windows(layers, windows)
  config = dataclasses.replace(put(config), layers=tuple(layers))
  assert not unknown, unknown
  return config


def random_module(config):
  """A module all of whose parameters are random and matter."""
  module = Transformer(config, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(1)
  noise = lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(x.dtype)
  nnx.update(module, jax.tree.map(noise, nnx.state(module)))
  return module


def layers(
  windows, *, norms="both", qk_norm="head", softcap=1.5, scale=0.2, mlp_dim=48
):
  """Layers of 4 heads of 8 channels, which rotate as their window says."""
  ropes = {
    True: Rope(theta=50.0, dim=8),
    False: Rope(theta=900.0, dim=8, factors=(1.0, 2.0, 3.0, 4.0), scale=1.1),
  }
  return tuple(
    LayerSpec(
      attention=AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        window=window,
        rope=ropes[window is None],
        scale=scale,
        softcap=softcap,
        qk_norm=qk_norm,
      ),
      feed_forward=DenseSpec(width=mlp_dim, activation="gelu_tanh"),
      norms=norms,
    )
    for window in windows
  )


GEMMA = dict(
  layers=layers((3, None, 4)),
  norm="rms_plus_one",
  embed_scale=5.5,
  logit_softcap=2.0,
  tied_embeddings=True,
)
OLMO = dict(
  layers=layers((None, 5, 5), norms="post", qk_norm="width", softcap=None)
)


def _mixed():
  """A dense layer between two of experts, one of whom is every token's."""
  experts = Mixture(
    num_experts=4, num_chosen=2, embed_dim=32, expert_dim=12, shared_dim=8,
    router="sigmoid",
  )  # fmt: skip
  first, second, third = layers((3, None, 4), norms="pre")
  put = lambda layer: dataclasses.replace(layer, feed_forward=experts)
  return put(first), second, put(third)


MIXED = dict(layers=_mixed())


def _latents():
  """Layers that cache latents, one of which has a window."""
  latent = Latent(rank=12, rope_dim=6, nope_dim=4, value_dim=10, query_rank=14)
  changed = []
  for layer in layers((None, 4, None), norms="pre"):
    attention = dataclasses.replace(
      layer.attention, num_kv_heads=1, head_dim=18, latent=latent, scale=0.3,
      rope=Rope(theta=90.0, dim=6), qk_norm=None, softcap=None,
    )  # fmt: skip
    changed.append(dataclasses.replace(layer, attention=attention))
  return tuple(changed)


LATENTS = dict(layers=_latents())


def _gemma4():
  """A sliding layer, a full one of wider heads, and one that reads the first's.

  The second has a mixture beside its MLP, and values that are its keys.
  """
  first, second, third = layers((3, None, 3), softcap=None, scale=1.0)
  put = dataclasses.replace
  first = put(first, scaled=True, attention=put(first.attention, v_norm=True))
  wide = put(
    second.attention, num_kv_heads=1, head_dim=12, keys_as_values=True,
    rope=Rope(theta=900.0, dim=12, factors=(1.0,) * 3 + (float("inf"),) * 3),
  )  # fmt: skip
  extra = Mixture(
    num_experts=4, num_chosen=2, embed_dim=32, expert_dim=12,
    router_norm_eps=1e-3, activation="gelu_tanh",
  )  # fmt: skip
  second = put(second, attention=wide, extra=extra)
  third = put(third, scaled=True, attention=put(third.attention, source=0))
  return first, second, third


GEMMA4 = dict(
  layers=_gemma4(),
  embed_scale=5.5,
  logit_softcap=2.0,
  tied_embeddings=True,
  per_layer_dim=6,
  per_layer_vocab=61,
)
