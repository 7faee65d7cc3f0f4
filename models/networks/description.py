"""Descriptions of a decoder-only transformer: of the whole, and of its layers.

A layer is attention and a feed-forward block, each described by a few fields of
its own (`LayerSpec`); a model is a tuple of layers in a frame
(`TransformerConfig`). `llama_config` describes the usual model by its sizes.

Letters in shapes: B rows, T tokens, D model width, H query heads, K key/value
heads, C channels per head.
"""

import dataclasses
from collections.abc import Callable, Sequence

from models.networks.mixture import Mixture
from models.networks.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Latents in the place of keys and values (`models.networks.latent`).

  Attributes:
    rank: R, channels of a token's latent.
    rope_dim: P, channels of the key beside it, and of queries, that rotate.
    nope_dim: N, channels of a head's query that do not.
    value_dim: V, channels of a head's values.
    query_rank: channels of what queries are projected from; None for D.
    interleaved: neighboring channels turn together, not those of two halves.
  """

  rank: int
  rope_dim: int
  nope_dim: int
  value_dim: int
  query_rank: int | None = None
  interleaved: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
  """Self-attention of one layer.

  Attributes:
    num_heads: H.
    num_kv_heads: K; must divide H.
    head_dim: C.
    window: tokens that a token sees, itself included; None for all.
    rope: its rotary embeddings, or None.
    scale: of the scores; None for `1 / sqrt(C)`.
    softcap: `c tanh(scores / c)` instead of the scaled scores, before the mask.
    qk_norm: a norm of queries and keys before they rotate: "head", of each
      head's; "width", over all heads; or None.
    clip: queries, keys and values are kept within it, after that norm (OLMoE).
    sinks: a learned score for every head, beside those of the keys, that takes
      a share of the softmax and gives nothing (gpt-oss).
    output_gate: what heads give is weighted by a sigmoid of the token, channel
      by channel, before the last projection (Qwen3-Next).
    v_norm: values are divided by the root of their heads' mean square.
    keys_as_values: values are what keys are made of, before norm and rotation.
    source: the layer whose keys and values are attended to; None for its own.
    latent: latents in their place. K is 1 then and C what is cached of a token,
      R + P; `scale` must be given.
    qkv_bias, out_bias: biases of the projections.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  window: int | None = None
  rope: Rope | None = None
  scale: float | None = None
  softcap: float | None = None
  qk_norm: str | None = None
  clip: float | None = None
  sinks: bool = False
  output_gate: bool = False
  v_norm: bool = False
  keys_as_values: bool = False
  source: int | None = None
  latent: Latent | None = None
  qkv_bias: bool = False
  out_bias: bool = False

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and "
        f"{self.num_heads}"
      )

  @property
  def value_dim(self) -> int:
    """Channels of a head's values in the cache; of latents there are none."""
    return self.head_dim if self.latent is None else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaSpec:
  """A layer of the gated delta rule (`models.networks.gated_delta`).

  Attributes:
    num_key_heads: K; must divide H.
    num_value_heads: H: every key head serves H / K consecutive ones.
    key_dim: channels of a key.
    value_dim: channels of a value.
    kernel: tokens that its convolution reads, the newest included.
    activation: of what the convolution gives, as of `DenseSpec`.
  """

  num_key_heads: int
  num_value_heads: int
  key_dim: int
  value_dim: int
  kernel: int = 4
  activation: str = "silu"

  @property
  def channels(self) -> int:
    """W, what is convolved of each key head: a query, a key and its values."""
    served = self.num_value_heads // self.num_key_heads
    return 2 * self.key_dim + served * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseSpec:
  """A feed-forward block of one hidden layer.

  Attributes:
    width: of the hidden layer.
    activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".
    gated: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    bias: biases of the projections.
  """

  width: int
  activation: str = "silu"
  gated: bool = True
  bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
  """A layer: attention, or its replacement, and a feed-forward block.

  Attributes:
    attention: its attention, or what stands in its place.
    feed_forward: its feed-forward block: one hidden layer, or a mixture of
      experts (`models.networks.mixture`).
    norms: where they stand: "pre", before both blocks; "post", after both,
      before the residual is added; or "both".
    parallel: both blocks read the layer's input (NeoX).
    beside: a mixture that reads what the feed-forward block does, each between
      norms of its own, and whose output is added to that (Gemma 4); `norms` is
      "both" then.
    scaled: what the layer gives is multiplied by a learned number (Gemma 4).
  """

  attention: AttentionSpec | DeltaSpec
  feed_forward: DenseSpec | Mixture
  norms: str = "pre"
  parallel: bool = False
  beside: Mixture | None = None
  scaled: bool = False

  @property
  def blocks(self) -> tuple[DenseSpec | Mixture, ...]:
    """The feed-forward block, and the mixture beside it if there is one."""
    return (self.feed_forward, *([self.beside] if self.beside else []))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """A model: its layers, and what is around them.

  Attributes:
    vocab_size: rows of the embedding, padding included.
    embed_dim: D.
    layers: a description of each layer, one of which is attention.
    max_positions: longest sequence the model is meant for (and the number of
      rows of a learned position table); None if that is not known.
    norm: "rms"; "rms_plus_one", whose weights are one less than what they
      multiply by; or "layer".
    norm_eps: added to the variance.
    learned_positions: a table added to the embeddings instead of rotary.
    tied_embeddings: the output projection is the embedding's transpose.
    embed_scale: what embeddings are multiplied by, rounded to their type.
    logit_softcap: `c tanh(logits / c)` instead of the logits.
    per_layer_dim: P, channels of an embedding that each layer has of every
      token, beside a projection of the first embedding (Gemma 4); 0 for none.
    per_layer_vocab: tokens that have one.
  """

  vocab_size: int
  embed_dim: int
  layers: tuple[LayerSpec, ...]
  max_positions: int | None
  norm: str = "rms"
  norm_eps: float = 1e-5
  learned_positions: bool = False
  tied_embeddings: bool = False
  embed_scale: float | None = None
  logit_softcap: float | None = None
  per_layer_dim: int = 0
  per_layer_vocab: int = 0

  @property
  def num_layers(self) -> int:
    """Number of layers."""
    return len(self.layers)

  @property
  def attention(self) -> AttentionSpec:
    """The attention of the first layer that has one."""
    return next(iter(self.attentions.values()))

  @property
  def attentions(self) -> dict[int, AttentionSpec]:
    """The attention of every layer that has one, by its index, in order."""
    layers = ((i, layer.attention) for i, layer in enumerate(self.layers))
    return {i: a for i, a in layers if isinstance(a, AttentionSpec)}

  @property
  def deltas(self) -> dict[int, DeltaSpec]:
    """The other layers, by index, in order."""
    layers = ((i, layer.attention) for i, layer in enumerate(self.layers))
    return {i: a for i, a in layers if isinstance(a, DeltaSpec)}

  def source(self, layer: int) -> int | None:
    """The layer whose keys and values another attends to, or None."""
    return getattr(self.layers[layer].attention, "source", None)

  @property
  def cached(self) -> tuple[int, ...]:
    """Layers that have keys and values of their own, in order."""
    return tuple(i for i, a in self.attentions.items() if a.source is None)

  @property
  def windows(self) -> tuple[int | None, ...]:
    """Of every layer, the size of its sliding window, or None."""
    return tuple(getattr(x.attention, "window", None) for x in self.layers)

  @property
  def has_windows(self) -> bool:
    """True if some layer has a sliding window."""
    return any(self.windows)

  def with_attention(
    self, change: Callable[[AttentionSpec], AttentionSpec]
  ) -> "TransformerConfig":
    """The same model with the attention of its layers changed."""
    layers = tuple(
      dataclasses.replace(layer, attention=change(layer.attention))
      if isinstance(layer.attention, AttentionSpec)
      else layer
      for layer in self.layers
    )
    return dataclasses.replace(self, layers=layers)


def with_windows(
  layers: Sequence[LayerSpec], windows: Sequence[int | None]
) -> tuple[LayerSpec, ...]:
  """Layers of attention with other windows: a size, or None, for each."""
  return tuple(
    dataclasses.replace(
      layer, attention=dataclasses.replace(layer.attention, window=window)
    )
    for layer, window in zip(layers, windows, strict=True)
  )


def llama_config(
  *,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  mlp_dim: int,
  rope_theta: float = 10_000.0,
  qk_norm: str | None = None,
  qkv_bias: bool = False,
  windows: Sequence[int | None] | None = None,
  **frame,
) -> TransformerConfig:
  """A model of Llama's layers, by its sizes.

  Args:
    num_layers: how many.
    num_heads, num_kv_heads, head_dim, qk_norm, qkv_bias: as of `AttentionSpec`.
    mlp_dim: width of the MLP's hidden layer.
    rope_theta: base of the rotary frequencies; all channels of a head rotate.
    windows: of every layer its sliding window, or None for full attention.
    **frame: the fields of `TransformerConfig` but `layers`.
  """
  layer = LayerSpec(
    attention=AttentionSpec(
      num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
      rope=Rope(theta=rope_theta, dim=head_dim), qk_norm=qk_norm,
      qkv_bias=qkv_bias,
    ),
    feed_forward=DenseSpec(width=mlp_dim),
  )  # fmt: skip
  windows = (None,) * num_layers if windows is None else windows
  layers = with_windows((layer,) * num_layers, windows)
  return TransformerConfig(layers=layers, **frame)


def mlp_width(layer: LayerSpec) -> int:
  """Width of the hidden layer, or of an expert's."""
  block = layer.feed_forward
  return block.width if isinstance(block, DenseSpec) else block.expert_dim
