"""Models of `tests/mesh_decoding.py`: one of each kind of layers, for a mesh.

All have sixteen channels and eight heads, one a device where there are eight.
"""

import dataclasses

from models.networks.description import (
  AttentionSpec,
  Latent,
  LayerSpec,
  TransformerConfig,
)
from models.networks.mixture import Mixture
from models.networks.rope import Rope

VOCAB = 32
FRAME = dict(vocab_size=VOCAB, embed_dim=16, max_positions=64)

# Two key/value heads of eight: repeated where they are cut over more devices.
CONFIG = TransformerConfig(
  **FRAME, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=4, mlp_dim=24
)
_MIXTURE = Mixture(num_experts=8, num_chosen=2, embed_dim=16, expert_dim=12)

# One expert a device where there are eight.
MIXED = TransformerConfig.of_layers(
  [LayerSpec(attention=CONFIG.layer(0).attention, feed_forward=_MIXTURE)] * 2,
  **FRAME,
)
# Of latents and of experts that are dealt out, as DeepSeek-V3's.
LATENTS = TransformerConfig.of_layers(
  [
    LayerSpec(
      attention=AttentionSpec(
        num_heads=8, num_kv_heads=1, head_dim=10, scale=0.4,
        rope=Rope(theta=500.0, dim=4),
        latent=Latent(rank=6, rope_dim=4, still_dim=4, value_dim=6),
      ),
      feed_forward=dataclasses.replace(
        _MIXTURE, router="sigmoid", shared_dim=16
      ),
    )
  ],
  **FRAME,
)  # fmt: skip
