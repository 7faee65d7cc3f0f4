"""The configuration of a T5, and its `config.json` in both directions.

T5 1.0 and 1.1 (Flan-T5 and ByT5 are 1.1) differ in the feed-forward block and
the output projection. All share 32 buckets of distances up to 128 and the
norms' epsilon, which are not configurable.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from models.networks.description import AttentionSpec, DenseSpec, LayerSpec

NUM_BUCKETS, MAX_DISTANCE = 32, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """Shapes and switches of one T5.

  Attributes:
    vocab_size: rows of the embedding, including padding.
    embed_dim: D.
    num_layers: layers of the decoder.
    num_encoder_layers: layers of the encoder.
    num_heads: H, for queries, keys and values alike.
    head_dim: C; H times C may differ from D.
    mlp_dim: width of the feed-forward block's hidden layer.
    activation: "relu", "gelu_tanh" or "silu".
    gated_mlp: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    tied_embeddings: whether the output projection is the embedding transposed.
    scale_outputs: whether the output projection's input is divided by
      `sqrt(D)`.
    start_token: first token of every decoder text.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_encoder_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  activation: str = "relu"
  gated_mlp: bool = False
  tied_embeddings: bool = True
  scale_outputs: bool = True
  start_token: int = 0
  norm_eps: ClassVar[float] = 1e-6
  max_positions: ClassVar[None] = None  # positions are relative

  @property
  def layers(self) -> tuple[LayerSpec, ...]:
    """The decoder's layers without cross-attention, like the encoder's."""
    layer = LayerSpec(
      attention=AttentionSpec(
        num_heads=self.num_heads, num_kv_heads=self.num_heads,
        head_dim=self.head_dim, scale=1.0,
      ),
      feed_forward=DenseSpec(
        width=self.mlp_dim, activation=self.activation, gated=self.gated_mlp
      ),
    )  # fmt: skip
    return (layer,) * self.num_layers


def bucket_table(*, bidirectional: bool) -> np.ndarray:
  """Bucket of each distance, `i32[MAX_DISTANCE + 1]`; the last is for the rest.

  Half of the buckets are for one distance each, the others grow with distance.
  Those for keys to the right (`bidirectional`) follow in the same order.
  Computed in float32, as in training of the checkpoints.
  """
  count = NUM_BUCKETS // 2 if bidirectional else NUM_BUCKETS
  exact = count // 2
  distance = np.arange(MAX_DISTANCE + 1)
  ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
  grown = np.log(ratio) / np.float32(np.log(MAX_DISTANCE / exact))
  far = exact + (grown * np.float32(count - exact)).astype(np.int32)
  far = np.minimum(far, count - 1)
  return np.where(distance < exact, distance, far).astype(np.int32)


# `feed_forward_proj` to activation and gating.
_BLOCKS = {
  "relu": ("relu", False),
  "gated-gelu": ("gelu_tanh", True),  # as intended by its authors
  "gated-silu": ("silu", True),
}
_FIXED = dict(
  is_encoder_decoder=True, is_decoder=False, quantization_config=None,
  relative_attention_num_buckets=NUM_BUCKETS,
  relative_attention_max_distance=MAX_DISTANCE,
  layer_norm_epsilon=T5Config.norm_eps,
)  # fmt: skip


def config_from_json(config: Mapping[str, Any]) -> T5Config:
  """Translates the contents of a T5's `config.json`.

  Assumes a tied output projection, as transformers does; the tensors decide.

  Args:
    config: as written by transformers 4 or 5. Missing keys get transformers'
      defaults, but the model's sizes are required.

  Raises:
    ValueError: for a setting that is missing, malformed or not supported.
  """
  for key, value in _FIXED.items():
    if config.get(key, value) != value:
      raise ValueError(
        f"{key} must be {value!r} in a t5 model, got {config[key]!r}"
      )
  kind = config.get("feed_forward_proj", "relu")
  if kind not in list(_BLOCKS):
    raise ValueError(
      f"feed_forward_proj must be one of {sorted(_BLOCKS)}, got {kind!r}"
    )
  activation, gated = _BLOCKS[kind]
  tied = config.get("tie_word_embeddings", True) is not False
  scaled = config.get("scale_decoder_outputs")
  layers = _whole(config, "num_layers")
  return T5Config(
    vocab_size=_whole(config, "vocab_size"),
    embed_dim=_whole(config, "d_model"),
    num_layers=_whole(config, "num_decoder_layers", layers),
    num_encoder_layers=layers,
    num_heads=_whole(config, "num_heads"),
    head_dim=_whole(config, "d_kv"),
    mlp_dim=_whole(config, "d_ff"),
    activation=activation,
    gated_mlp=gated,
    scale_outputs=bool(tied if scaled is None else scaled),
    start_token=_whole(config, "decoder_start_token_id", 0, least=0),
  )


def to_json(
  c: T5Config, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
  """The `config.json` of a T5 checkpoint.

  Args:
    c: the module's configuration.
    dtype: dtype of the weights in the file.
    eos_token_id: end-of-text token, if known.
  """
  (kind,) = (k for k, x in _BLOCKS.items() if x == (c.activation, c.gated_mlp))
  fixed = {key: value for key, value in _FIXED.items() if value is not None}
  return fixed | {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": c.vocab_size,
    "d_model": c.embed_dim,
    "d_kv": c.head_dim,
    "d_ff": c.mlp_dim,
    "num_layers": c.num_encoder_layers,
    "num_decoder_layers": c.num_layers,
    "num_heads": c.num_heads,
    "feed_forward_proj": kind,
    "tie_word_embeddings": c.tied_embeddings,
    "scale_decoder_outputs": c.scale_outputs,
    "decoder_start_token_id": c.start_token,
    "pad_token_id": c.start_token,
    "eos_token_id": eos_token_id,
    "dtype": dtype,
    "torch_dtype": dtype,  # for transformers 4
  }


def _whole(config, key: str, default: int | None = None, *, least=1) -> int:
  value = config.get(key)
  value = default if value is None else value
  if type(value) is not int or value < least:
    raise ValueError(f"{key} must be an integer >= {least}, got {value!r}")
  return value
