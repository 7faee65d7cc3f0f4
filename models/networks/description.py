"""Descriptions of decoder-only transformers and their layers.

A layer is attention and a feed-forward block, each with its own specification
(`LayerSpec`); a model is a tuple of layers with embedding and output
(`TransformerConfig`). `llama_config` describes a Llama by its sizes.

Letters in shapes: B rows, T tokens, D model width, H query heads, K key/value
heads, C channels per head.
"""

import dataclasses
from collections.abc import Callable, Sequence

from models.networks.mixture import Mixture
from models.networks.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Multi-head latent attention (`models.networks.latent`).

  Attributes:
    rank: R, channels of a token's latent.
    rope_dim: P, rotated channels of queries and of the shared key.
    nope_dim: N, channels of a head's query that do not rotate.
    value_dim: V, channels of a head's values.
    query_rank: channels of the query latent; None to project from D.
    interleaved: whether adjacent channels rotate together, not two halves.
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
    window: tokens that a token sees, including itself; None for all.
    rope: its rotary embeddings, or None.
    scale: factor of the scores; None for `1 / sqrt(C)`.
    softcap: `c tanh(scores / c)` instead of the scaled scores, before the mask.
    qk_norm: norm of queries and keys before rotation: "head", per head;
      "width", over all heads; or None.
    clip: bound on queries, keys and values, after that norm (OLMoE).
    sinks: whether heads have a learned score that takes part in the softmax
      without a value (gpt-oss).
    output_gate: whether heads' outputs are multiplied by a sigmoid gate, by
      channel, before the output projection (Qwen3-Next).
    v_norm: whether values are RMS-normalized by head.
    keys_as_values: whether values are the keys before norm and rotation.
    source: the layer whose KV cache it shares; None for its own.
    latent: latent attention instead. K is then 1 and C is R + P, the cached
      channels of a token; `scale` must be given.
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
    """Channels of a head's values in the cache; 0 with latents."""
    return self.head_dim if self.latent is None else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaSpec:
  """A layer of the gated delta rule (`models.networks.gated_delta`).

  Attributes:
    num_key_heads: K; must divide H.
    num_value_heads: H; every key head serves H / K consecutive ones.
    key_dim: channels of a key.
    value_dim: channels of a value.
    kernel: tokens that its convolution reads, including the newest.
    activation: applied to the convolution's output, as in `DenseSpec`.
  """

  num_key_heads: int
  num_value_heads: int
  key_dim: int
  value_dim: int
  kernel: int = 4
  activation: str = "silu"

  @property
  def channels(self) -> int:
    """W, convolved channels of a key head: a query, a key and its values."""
    served = self.num_value_heads // self.num_key_heads
    return 2 * self.key_dim + served * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseSpec:
  """A feed-forward block with one hidden layer.

  Attributes:
    width: width of the hidden layer.
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
  """A layer: attention, or the gated delta rule, and a feed-forward block.

  Attributes:
    attention: its attention or its replacement.
    feed_forward: its feed-forward block: one hidden layer, or a mixture of
      experts (`models.networks.mixture`).
    norms: "pre", before both blocks; "post", after both, before the residual is
      added; or "both".
    parallel: whether both blocks read the layer's input (NeoX).
    extra: a mixture in parallel with the feed-forward block, each between its
      own norms, whose outputs are added (Gemma 4); `norms` is then "both".
    scaled: whether the output is multiplied by a learned scalar (Gemma 4).
  """

  attention: AttentionSpec | DeltaSpec
  feed_forward: DenseSpec | Mixture
  norms: str = "pre"
  parallel: bool = False
  extra: Mixture | None = None
  scaled: bool = False

  @property
  def blocks(self) -> tuple[DenseSpec | Mixture, ...]:
    """The feed-forward block, and the parallel mixture if there is one."""
    return (self.feed_forward, *([self.extra] if self.extra else []))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """A model: its layers, embedding and output.

  Attributes:
    vocab_size: rows of the embedding, including padding.
    embed_dim: D.
    layers: a description of each layer, at least one with attention.
    max_positions: longest supported sequence (and number of rows of a learned
      position table); None if unknown.
    norm: "rms"; "rms_plus_one", which scales by 1 + w; or "layer".
    norm_eps: added to the variance.
    learned_positions: whether a position table is added to the embeddings.
    tied_embeddings: whether the output projection is the embedding transposed.
    embed_scale: factor of embeddings, rounded to their dtype.
    logit_softcap: c of `c tanh(logits / c)`, or None.
    per_layer_dim: P, channels of each layer's own token embedding, which is
      added to a projection of the first embedding (Gemma 4); 0 for none.
    per_layer_vocab: rows of these embeddings.
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
    """The attention of every layer that has it, by index, in order."""
    layers = ((i, layer.attention) for i, layer in enumerate(self.layers))
    return {i: a for i, a in layers if isinstance(a, AttentionSpec)}

  @property
  def deltas(self) -> dict[int, DeltaSpec]:
    """The other layers, by index, in order."""
    layers = ((i, layer.attention) for i, layer in enumerate(self.layers))
    return {i: a for i, a in layers if isinstance(a, DeltaSpec)}

  def source(self, layer: int) -> int | None:
    """The layer whose KV cache `layer` shares, or None."""
    return getattr(self.layers[layer].attention, "source", None)

  @property
  def cached(self) -> tuple[int, ...]:
    """Layers that have keys and values of their own, in order."""
    return tuple(i for i, a in self.attentions.items() if a.source is None)

  @property
  def windows(self) -> tuple[int | None, ...]:
    """The sliding window of every layer, or None."""
    return tuple(getattr(x.attention, "window", None) for x in self.layers)

  @property
  def has_windows(self) -> bool:
    """True if some layer has a sliding window."""
    return any(self.windows)

  def with_attention(
    self, change: Callable[[AttentionSpec], AttentionSpec]
  ) -> "TransformerConfig":
    """A copy with changed attention in its layers."""
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
  """Copies of attention layers with other windows, a size or None each."""
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
  """A model with Llama's layers, by its sizes.

  Args:
    num_layers: number of layers.
    num_heads, num_kv_heads, head_dim, qk_norm, qkv_bias: as for
      `AttentionSpec`.
    mlp_dim: width of the MLP's hidden layer.
    rope_theta: base of the rotary frequencies; all channels of a head rotate.
    windows: the sliding window of every layer; None for full attention.
    **frame: the fields of `TransformerConfig` except `layers`.
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
  """Width of the hidden layer, or of one expert's."""
  block = layer.feed_forward
  return block.width if isinstance(block, DenseSpec) else block.expert_dim
