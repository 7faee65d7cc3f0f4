"""Layers of several kinds, for tests of small models."""

from models.networks.description import (
  AttentionSpec,
  DenseSpec,
  LayerSpec,
  Rope,
)


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
