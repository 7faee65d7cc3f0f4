"""Multi-token prediction (MTP) heads: an additional layer that drafts.

A token's embedding and the target's hidden state of the token before it, each
normed, are concatenated in this order, projected to the target's width, and go
through one decoder layer and a norm; the target's output projection reads the
result, which also replaces the hidden state for the next token (DeepSeek-V3's
technical report, 2024, section 2.2). One layer is applied repeatedly, or each
drafted token has its own. DeepSeek-V3, GLM-4.5, Qwen3-Next and others come with
such a head (`models.formats.mtp_format`).

It is a `specjax.types.FeatureModel` like EAGLE's heads
(`specjax.drafters.mtp`). Letters in shapes as in `models.networks.eagle`.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array

from models import sharding as sharding_lib
from models.networks.description import AttentionSpec, TransformerConfig
from models.networks.eagle import anywhere, at
from models.networks.heads import HeadConfig, embedding
from models.networks.layers import Layer, Linear, make_norm
from models.networks.mixture import Mixture
from models.sharding import Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig(HeadConfig):
  """Shapes of a head.

  Attributes:
    layers: a model of one layer, which describes each of its layers.
    num_depths: D, number of layers, each for one drafted token.
    normed: whether it reads normed hidden states, both the target's (after the
      final norm) and its own. Servers differ in this.
    expert_axes: mesh axes that its experts are distributed over, if any.
  """

  layers: TransformerConfig
  num_depths: int = 1
  normed: bool = True
  expert_axes: tuple[str, ...] = ()

  kind = "mtp"
  shared = frozenset({"embed", "lm_head"})

  def even_sizes(self) -> tuple[int, ...]:
    """Sizes that must be multiples of the number of devices."""
    # Experts split by number or width (`models.networks.mixture.cut_by`), and a
    # latent is replicated.
    layer = self.layers.layers[0]
    attention, block = layer.attention, layer.feed_forward
    assert isinstance(attention, AttentionSpec)
    one = attention.latent is not None
    return (
      attention.num_heads,
      *(() if one else (attention.num_kv_heads,)),
      block.shared_dim if isinstance(block, Mixture) else block.width,
      self.layers.embed_dim,
      self.layers.vocab_size,
    )

  def cut(self, sharding: Sharding, parts: int) -> tuple["MtpConfig", Sharding]:
    """Like `HeadConfig.cut`, with experts."""
    layers = self.layers
    if any(a.latent is not None for a in layers.attentions.values()):
      layers = sharding_lib.kv_heads_for(layers, parts)
    sharding = sharding_lib.for_experts(layers, sharding, parts)
    axes = sharding.axes if sharding.experts == "expert" else ()
    return dataclasses.replace(self, layers=layers, expert_axes=axes), sharding


def config_of(target: TransformerConfig, *, num_depths: int = 1) -> MtpConfig:
  """The head of a target, with layers like its last one with attention.

  If some of these have a mixture of experts, it is like the last of those.

  Args:
    target: the target.
    num_depths: D.
  """
  mixes = lambda i: isinstance(target.layers[i].feed_forward, Mixture)
  last = max(target.attentions, key=lambda i: (mixes(i), i))
  layers = TransformerConfig(
    layers=(target.layers[last],),
    vocab_size=target.vocab_size,
    embed_dim=target.embed_dim,
    max_positions=target.max_positions,
    norm=target.norm,
    norm_eps=target.norm_eps,
  )
  return MtpConfig(layers=layers, num_depths=num_depths)


class Depth(nnx.Module):
  """A layer of a head, with projection and norms."""

  def __init__(self, config: MtpConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    c = config.layers
    norm = lambda: make_norm(c, c.embed_dim, dtype, rngs)
    self.embed_norm, self.hidden_norm = norm(), norm()
    self.fc = Linear(2 * c.embed_dim, c.embed_dim, False, dtype, rngs)
    self.layer = Layer(c, dtype, expert_axes=config.expert_axes, rngs=rngs)
    self.final_norm = norm()

  def states(
    self, embedded, hidden, rotary, visible, kv, start, *, number, put
  ):
    """States `[B, T, H]` before and after the final norm, and keys and values.

    `embedded` and `hidden`, `[B, T, H]`, are of tokens and of those before
    them; `number` is the stacked layer's index, the rest as for attention.
    """
    both = [self.embed_norm(embedded), self.hidden_norm(hidden)]
    x = put(self.fc(jnp.concatenate(both, axis=-1)), "act_btd")
    out, kv = self.layer.attend(x, rotary, visible, kv, start, layer=number)
    x = x + out
    x = put(x + self.layer.mlp_output(x), "act_btd")
    return x, self.final_norm(x), kv


class Mtp(Depth):
  """The network; arguments as for `models.networks.eagle.Eagle`.

  It is itself the first layer; `later` has the others.
  """

  def __init__(self, config: MtpConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
    c = config.layers
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.embed = embedding(c.vocab_size, c.embed_dim, dtype, rngs)
    super().__init__(config, dtype=dtype, rngs=rngs)
    self.lm_head = Linear(c.embed_dim, c.vocab_size, False, dtype, rngs)
    more = range(config.num_depths - 1)
    self.later = nnx.List([Depth(config, dtype=dtype, rngs=rngs) for _ in more])

  def fuse(self, features: Array) -> Array:
    """`[B, T, F] -> [B, T, H]`, unchanged features."""
    return features.astype(self.dtype)

  def __call__(
    self, tokens, hidden, rotary, visible, kvs, start, *, stacked=False,
    put=anywhere, logits_at=None, depth=0,
  ):  # fmt: skip
    """Like `models.networks.eagle.Eagle.__call__`, for the layer at `depth`."""
    (kv,), number = kvs, jnp.int32(0) if stacked else None
    layer = self.later[depth - 1] if depth else self
    x, read, kv = layer.states(
      self.embed(tokens), hidden.astype(self.dtype), rotary,
      visible[self.config.layers.windows[0]], kv, start, number=number, put=put,
    )  # fmt: skip
    wide = jnp.promote_types(self.dtype, jnp.float32)
    logits = self.lm_head(at(read, logits_at)).astype(wide)
    logits = put(logits, "logits_btv")
    return logits, read if self.config.normed else x, (kv,)
