"""Heads of multi-token prediction (MTP): a further layer that drafts.

A token's embedding and the target's hidden state of the token before it, each
normed and next to each other in this order, are projected to the target's width
and go through one decoder layer and a norm; the target's output projection
reads that, and with the next token it is fed back in the hidden state's place
(DeepSeek-V3's technical report, 2024, section 2.2; here one layer is applied
again and again, and hidden states are read after the final norm). Qwen3-Next
and Qwen3.5 come with one, whose layer is one of attention.

It is a `specjax.types.FeatureModel` as EAGLE's heads are, and drafts as they
do. Letters in shapes as in `models.networks.eagle`.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.networks.description import AttentionSpec, TransformerConfig
from models.networks.eagle import EagleConfig, anywhere
from models.networks.layers import Layer, Linear, make_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig(EagleConfig):
  """Shapes of a head; of `EagleConfig` it has `layer` and `num_features`."""

  generation: int = 1


def config_of(target: TransformerConfig) -> MtpConfig:
  """The head of a target: a layer as its last one of attention.

  Args:
    target: whose embedding and output projection the head shares.
  """
  last = next(
    target.layer(i)
    for i in reversed(range(target.num_layers))
    if isinstance(target.layer(i).attention, AttentionSpec)
  )
  layer = TransformerConfig.of_layers(
    [last],
    vocab_size=target.vocab_size,
    embed_dim=target.embed_dim,
    max_positions=target.max_positions,
    norm=target.norm,
    norm_eps=target.norm_eps,
  )
  return MtpConfig(layer=layer, num_features=target.embed_dim)


class Mtp(nnx.Module):
  """The network; arguments as of `models.networks.eagle.Eagle`."""

  def __init__(self, config: MtpConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    c = config.layer
    self.config = config
    self.dtype = jnp.dtype(dtype)
    norm = lambda: make_norm(c, c.embed_dim, dtype, rngs)
    self.embed = nnx.Embed(
      c.vocab_size, c.embed_dim, dtype=dtype, param_dtype=dtype, rngs=rngs
    )
    self.embed_norm, self.hidden_norm = norm(), norm()
    self.fc = Linear(2 * c.embed_dim, c.embed_dim, False, dtype, rngs)
    self.layer = Layer(c, dtype, rngs=rngs)
    self.final_norm = norm()
    self.lm_head = Linear(c.embed_dim, c.vocab_size, False, dtype, rngs)

  def fuse(self, features: Array) -> Array:
    """`[B, T, F] -> [B, T, H]`: features are read as they are."""
    return features.astype(self.dtype)

  def __call__(
    self, tokens, hidden, rotary, sees, kvs, start, *, stacked=False,
    put=anywhere,
  ):  # fmt: skip
    """As `models.networks.eagle.Eagle.__call__`; states are normed."""
    (kv,), number = kvs, jnp.int32(0) if stacked else None
    both = [
      self.embed_norm(self.embed(tokens)),
      self.hidden_norm(hidden.astype(self.dtype)),
    ]
    x = put(self.fc(jnp.concatenate(both, axis=-1)), "act_btd")
    window = self.config.layer.window(0)
    out, kv = self.layer.attended(
      x, rotary, sees[window], kv, start, layer=number
    )
    x = x + out
    x = put(x + self.layer.fed_forward(x), "act_btd")
    read = self.final_norm(x)
    wide = jnp.promote_types(self.dtype, jnp.float32)
    logits = put(self.lm_head(read).astype(wide), "logits_btv")
    return logits, read, (kv,)
