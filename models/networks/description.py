"""Descriptions of a decoder-only transformer: of the whole, and of its layers.

A layer is attention and a feed-forward block, each described by a few fields of
its own: `LayerSpec`. Where all layers of a model are alike but for their
windows, the switches of `TransformerConfig` describe them; where they are not,
its `layers` has a description of each. The network reads descriptions only
(`TransformerConfig.layer`).

Letters in shapes: B rows, T tokens, D model width, H query heads, K key/value
heads, C channels per head.
"""

import dataclasses
import math
from collections.abc import Sequence

from models.networks.mixture import ACTIVATIONS, Mixture
from models.networks.rope import Rope, RopeScaling

NORMS = ("rms", "rms_plus_one", "layer")
QK_NORMS = (None, "head", "width")
PLACES = ("pre", "post", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Latents in the place of keys and values (`models.networks.latent`).

  Attributes:
    rank: R, channels of a token's latent.
    rope_dim: P, channels of the key beside it, and of queries, that rotate.
    still_dim: N, channels of a head's query that do not.
    value_dim: V, channels of a head's values.
    query_rank: channels of what queries are projected from; None for D.
    interleaved: neighbouring channels turn together, not those of two halves.
  """

  rank: int
  rope_dim: int
  still_dim: int
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
    qk_norm: a norm of queries and keys before they rotate: of each head's, over
      the whole width of all heads, or None.
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
    _one_of("qk_norm", self.qk_norm, QK_NORMS)

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

  def __post_init__(self):
    _one_of("activation", self.activation, sorted(ACTIVATIONS))
    if self.num_value_heads % self.num_key_heads:
      raise ValueError(
        f"num_key_heads must divide num_value_heads, got {self.num_key_heads} "
        f"and {self.num_value_heads}"
      )
    if self.kernel < 2:
      raise ValueError(f"kernel must be at least 2, got {self.kernel}")

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
    activation: "silu", "gelu" (exact), "gelu_tanh", "quick_gelu" or "relu".
    gated: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    bias: biases of the projections.
  """

  width: int
  activation: str = "silu"
  gated: bool = True
  bias: bool = False

  def __post_init__(self):
    _one_of("activation", self.activation, sorted(ACTIVATIONS))


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
      norms of its own, and whose output is added to that (Gemma 4).
    scaled: what the layer gives is multiplied by a learned number (Gemma 4).
  """

  attention: AttentionSpec | DeltaSpec
  feed_forward: DenseSpec | Mixture
  norms: str = "pre"
  parallel: bool = False
  beside: Mixture | None = None
  scaled: bool = False

  def __post_init__(self):
    _one_of("norms", self.norms, PLACES)
    if self.beside is not None and self.norms != "both":
      raise ValueError(f"beside needs norms 'both', got {self.norms!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Shapes and switches of one model.

  Attributes:
    vocab_size: rows of the embedding, padding included.
    embed_dim: D.
    num_layers: number of layers.
    num_heads, num_kv_heads, head_dim: of every layer; of the first, where
      `layers` differ in them.
    mlp_dim: width of the MLP's hidden layer, or of an expert's; the first
      layer's, if there are `layers`.
    max_positions: longest sequence the model is meant for (and the number of
      rows of a learned position table); None if that is not known.
    norm: "rms"; "rms_plus_one", whose weights are one less than what they
      multiply by; or "layer".
    norm_eps: added to the variance.
    activation, gated_mlp, mlp_bias: as of `DenseSpec`.
    learned_positions: a table added to the embeddings instead of rotary.
    rope_theta, rotary_dim, rope_scaling, rope_factors, rope_scale: as of
      `Rope`; all channels rotate if `rotary_dim` is None.
    parallel_residual: as of `LayerSpec`.
    qkv_bias, out_bias: as of `AttentionSpec`.
    qk_norm: a norm of each head's queries and keys (Qwen3).
    tied_embeddings: the output projection is the embedding's transpose.
    windows: per layer, the sliding-window size, or None for full attention.
    embed_scale: what embeddings are multiplied by, rounded to their type.
    logit_softcap: `c tanh(logits / c)` instead of the logits.
    per_layer_dim: P, channels of an embedding that each layer has of every
      token, beside a projection of the first embedding (Gemma 4); 0 for none.
    per_layer_vocab: tokens that have one.
    layers: a description of each layer. Of the fields above those that are of
      layers are then not looked at, but for numbers and sizes of heads, which
      must be those of the first.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  max_positions: int | None
  norm: str = "rms"
  norm_eps: float = 1e-5
  activation: str = "silu"
  gated_mlp: bool = True
  learned_positions: bool = False
  rope_theta: float = 10_000.0
  rotary_dim: int | None = None
  rope_scaling: RopeScaling | None = None
  rope_factors: tuple[float, ...] | None = None
  rope_scale: float = 1.0
  parallel_residual: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  tied_embeddings: bool = False
  windows: tuple[int | None, ...] | None = None
  embed_scale: float | None = None
  logit_softcap: float | None = None
  per_layer_dim: int = 0
  per_layer_vocab: int = 0
  layers: tuple[LayerSpec, ...] | None = None

  def __post_init__(self):
    _one_of("norm", self.norm, NORMS)
    for name, given in (("windows", self.windows), ("layers", self.layers)):
      if given is not None and len(given) != self.num_layers:
        raise ValueError(
          f"{name} must have one entry per layer ({self.num_layers}), got "
          f"{len(given)}"
        )
    if self.learned_positions and self.max_positions is None:
      raise ValueError("learned positions need max_positions")
    heads = self.num_heads, self.num_kv_heads, self.head_dim
    attending = [*filter(None, map(_heads, self.layers or ()))]
    if self.layers and not attending:
      raise ValueError("at least one layer must be attention, got none")
    if attending and attending[0] != heads:
      raise ValueError(
        f"heads and channels must be those of the first layer, "
        f"{attending[0]}, got {heads}"
      )
    if self.layers is None:
      self._alike(None)  # which refuses what it cannot be
    self._check_sources()

  def _check_sources(self):
    """Raises ValueError for sources that no layer could read."""
    for i, layer in enumerate(self.layers or ()):
      spec, source = layer.attention, self.source(i)
      if source is None or not isinstance(spec, AttentionSpec):
        continue
      known = self.attentions.get(source) if source < i else None
      if (
        not known
        or known.source is not None
        or (
          (known.num_kv_heads, known.head_dim, known.window)
          != (spec.num_kv_heads, spec.head_dim, spec.window)
        )
      ):
        raise ValueError(
          f"the source of layer {i} must be an earlier layer of the same heads "
          f"and window with keys and values of its own, got {source}"
        )

  @classmethod
  def of_layers(
    cls, layers: Sequence[LayerSpec], **frame
  ) -> "TransformerConfig":
    """The model of some layers, at least one.

    Args:
      layers: described each, one of which is attention.
      **frame: what is not of layers: `vocab_size`, `embed_dim`,
        `max_positions`, `norm`, `norm_eps`, `tied_embeddings`, `embed_scale`,
        `logit_softcap`, `per_layer_dim`, `per_layer_vocab`.
    """
    heads, kv_heads, channels = next(
      filter(None, map(_heads, layers)), (1, 1, 1)
    )
    return cls(
      **frame,
      num_layers=len(layers),
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=channels,
      mlp_dim=mlp_width(layers[0]),
      layers=tuple(layers),
    )

  def layer(self, index: int) -> LayerSpec:
    """The description of a layer."""
    if self.layers is not None:
      return self.layers[index]
    return self._alike(self.windows[index] if self.windows else None)

  def _alike(self, window: int | None) -> LayerSpec:
    """A layer as the switches describe it."""
    return LayerSpec(
      attention=AttentionSpec(
        num_heads=self.num_heads,
        num_kv_heads=self.num_kv_heads,
        head_dim=self.head_dim,
        window=window,
        rope=self.rope,
        qk_norm="head" if self.qk_norm else None,
        qkv_bias=self.qkv_bias,
        out_bias=self.out_bias,
      ),
      feed_forward=DenseSpec(
        width=self.mlp_dim,
        activation=self.activation,
        gated=self.gated_mlp,
        bias=self.mlp_bias,
      ),
      parallel=self.parallel_residual,
    )

  @property
  def rope(self) -> Rope | None:
    """Rotary embeddings of the switches, or None."""
    if self.learned_positions:
      return None
    return Rope(
      theta=self.rope_theta,
      dim=self.head_dim if self.rotary_dim is None else self.rotary_dim,
      scaling=self.rope_scaling,
      factors=self.rope_factors,
      scale=self.rope_scale,
    )

  def window(self, layer: int) -> int | None:
    """Sliding-window size of a layer, or None."""
    return getattr(self.layer(layer).attention, "window", None)

  @property
  def attentions(self) -> dict[int, AttentionSpec]:
    """The attention of every layer that has one, by its index, in order."""
    layers = ((i, self.layer(i).attention) for i in range(self.num_layers))
    return {i: a for i, a in layers if isinstance(a, AttentionSpec)}

  @property
  def deltas(self) -> dict[int, DeltaSpec]:
    """The other layers, by index, in order."""
    layers = ((i, self.layer(i).attention) for i in range(self.num_layers))
    return {i: a for i, a in layers if isinstance(a, DeltaSpec)}

  def source(self, layer: int) -> int | None:
    """The layer whose keys and values another attends to, or None."""
    return getattr(self.layer(layer).attention, "source", None)

  @property
  def value_dim(self) -> int:
    """Channels of a head's values in the cache, of the first attention."""
    every = (self.layer(i).attention for i in range(self.num_layers))
    specs = (each for each in every if isinstance(each, AttentionSpec))
    return next(specs).value_dim

  @property
  def cached(self) -> tuple[int, ...]:
    """Layers that have keys and values of their own, in order."""
    return tuple(i for i, a in self.attentions.items() if a.source is None)

  @property
  def has_windows(self) -> bool:
    """True if some layer has a sliding window."""
    return any(self.window(i) for i in range(self.num_layers))

  def with_kv_heads(self, size: int) -> "TransformerConfig":
    """The same with key/value heads that can be cut in so many parts.

    Where they cannot each is there several times, for its own queries.
    """
    more = lambda a: dataclasses.replace(
      a, num_kv_heads=math.lcm(a.num_kv_heads, size)
    )
    layers = self.layers and tuple(
      dataclasses.replace(layer, attention=more(layer.attention))
      if isinstance(layer.attention, AttentionSpec)
      else layer
      for layer in self.layers
    )
    count = math.lcm(self.num_kv_heads, size)
    return dataclasses.replace(self, num_kv_heads=count, layers=layers)


def mlp_width(layer: LayerSpec) -> int:
  """Width of the hidden layer, or of an expert's."""
  block = layer.feed_forward
  return block.width if isinstance(block, DenseSpec) else block.expert_dim


def attention_weights(layer: LayerSpec, embed_dim: int) -> int:
  """Weights that a token meets in the attention, biases and norms apart."""
  a = layer.attention
  if isinstance(a, DeltaSpec):
    values = a.num_value_heads * a.value_dim
    mixed = a.num_key_heads * a.channels
    return embed_dim * (mixed + 2 * values + 2 * a.num_value_heads)
  if (m := a.latent) is not None:
    queries = a.num_heads * (m.still_dim + m.rope_dim)
    asked = (
      embed_dim * queries
      if m.query_rank is None
      else (embed_dim + queries) * m.query_rank
    )
    made = m.rank * a.num_heads * (m.still_dim + m.value_dim)
    out = a.num_heads * m.value_dim * embed_dim
    return asked + embed_dim * (m.rank + m.rope_dim) + made + out
  queries = (3 if a.output_gate else 2) * a.num_heads  # and the output
  own = 0 if a.source is not None else 1 if a.keys_as_values else 2
  return embed_dim * a.head_dim * (queries + own * a.num_kv_heads)


def mlp_weights(layer: LayerSpec, embed_dim: int) -> int:
  """Weights that a token meets in the feed-forward block, biases apart."""
  met = 0
  for block in (layer.feed_forward, layer.beside):
    if isinstance(block, DenseSpec):
      met += (3 if block.gated else 2) * block.width
    elif block is not None:
      met += 3 * (block.num_chosen * block.expert_dim + block.shared_dim)
      met += block.num_experts
  return embed_dim * met


def _heads(layer: LayerSpec) -> tuple[int, int, int] | None:
  a = layer.attention
  if isinstance(a, DeltaSpec):
    return None
  return a.num_heads, a.num_kv_heads, a.head_dim


def _one_of(name: str, value: str | None, known: Sequence[str | None]) -> None:
  if value not in known:
    raise ValueError(f"{name} must be one of {[*known]}, got {value!r}")
