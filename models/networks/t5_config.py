"""Translates the `config.json` of a T5 to a `T5Config`, and back.

T5 1.0 and 1.1 (Flan-T5 is 1.1) differ in the feed-forward block and in the
output projection. Whatever would change the logits and is not understood is an
error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """Shapes and switches of one T5.

  Attributes:
    vocab_size: rows of the embedding, padding included.
    embed_dim: D.
    num_layers: layers of the decoder.
    num_encoder_layers: layers of the encoder.
    num_heads: H, for queries, keys and values alike.
    head_dim: C; H times C may differ from D.
    mlp_dim: width of the feed-forward block's hidden layer.
    num_buckets: relative distances that attention tells apart.
    max_distance: distance from which on all are one bucket.
    norm_eps: added to the variance.
    activation: "relu", "gelu" (exact), "gelu_tanh" or "silu".
    gated_mlp: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    tied_embeddings: the output projection is the embedding's transpose.
    scale_outputs: what the output projection reads is divided by `sqrt(D)`.
    start_token: what every text of the decoder begins with.

  Raises:
    ValueError: for buckets that cannot be told apart.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_encoder_layers: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  num_buckets: int = 32
  max_distance: int = 128
  norm_eps: float = 1e-6
  activation: str = "relu"
  gated_mlp: bool = False
  tied_embeddings: bool = True
  scale_outputs: bool = True
  start_token: int = 0

  def __post_init__(self):
    if self.num_buckets < 4 or self.max_distance <= self.num_buckets // 2:
      raise ValueError(
        "need relative_attention_num_buckets >= 4 and a "
        "relative_attention_max_distance above half of them, got "
        f"{self.num_buckets} and {self.max_distance}"
      )
    if not 0 <= self.start_token < self.vocab_size:
      raise ValueError(
        f"decoder_start_token_id must be in 0..{self.vocab_size - 1}, got "
        f"{self.start_token}"
      )

  @property
  def num_kv_heads(self) -> int:
    """K, which is H."""
    return self.num_heads

  @property
  def max_positions(self) -> None:
    """No length is too long for relative positions."""
    return None


def bucket_table(
  num_buckets: int, max_distance: int, *, bidirectional: bool
) -> np.ndarray:
  """Bucket of each distance, `i32[max_distance + 1]`.

  Half of the buckets are one distance each, the others grow with it. Those of
  keys to the right of their query (`bidirectional`) come after these, in the
  same order. Computed in float32, as checkpoints were trained with.

  Args:
    num_buckets: of both directions together.
    max_distance: all beyond are as this one.
    bidirectional: whether half of them are of the other direction.
  """
  if bidirectional:
    num_buckets //= 2
  exact = num_buckets // 2
  distance = np.arange(max_distance + 1)
  ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
  grown = np.log(ratio) / np.float32(np.log(max_distance / exact))
  far = exact + (grown * np.float32(num_buckets - exact)).astype(np.int32)
  far = np.minimum(far, num_buckets - 1)
  return np.where(distance < exact, distance, far).astype(np.int32)


_ACTIVATIONS = {
  "relu": "relu",
  **dict.fromkeys(("silu", "swish"), "silu"),
  **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
  **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
  **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"),
}
_FIXED = dict(
  is_encoder_decoder=True, is_decoder=False, quantization_config=None
)
_MOST_LAYERS = 2**20


def config_from_json(config: Mapping[str, Any]) -> T5Config:
  """Translates the contents of a T5's `config.json`.

  Whether the output projection is the embedding's, its tensors say: here it is
  taken to be, as transformers does.

  Args:
    config: as transformers 4 or 5 write it. A key that is left out has the
      value that transformers gives it; the model's sizes must be there.

  Raises:
    ValueError: for a setting that is missing, malformed or not supported.
  """
  for key, value in _FIXED.items():
    if config.get(key, value) != value:
      raise ValueError(
        f"{key} must be {value!r} in a t5 model, got {config[key]!r}"
      )
  kind = config.get("feed_forward_proj", "relu")
  gate, _, name = kind.rpartition("-") if isinstance(kind, str) else ("", "", 0)
  if gate not in ("", "gated") or name not in list(_ACTIVATIONS):
    raise ValueError(
      f"feed_forward_proj must be one of {sorted(_ACTIVATIONS)}, or gated- and "
      f"one of them, got {kind!r}"
    )
  if kind == "gated-gelu":  # as those that wrote it meant it
    name = "gelu_new"
  tied = config.get("tie_word_embeddings", True) is not False
  scaled = config.get("scale_decoder_outputs")
  layers = _whole(config, "num_layers", most=_MOST_LAYERS)
  return T5Config(
    vocab_size=_whole(config, "vocab_size"),
    embed_dim=_whole(config, "d_model"),
    num_layers=_whole(
      config, "num_decoder_layers", default=layers, most=_MOST_LAYERS
    ),
    num_encoder_layers=layers,
    num_heads=_whole(config, "num_heads"),
    head_dim=_whole(config, "d_kv"),
    mlp_dim=_whole(config, "d_ff"),
    num_buckets=_whole(config, "relative_attention_num_buckets", default=32),
    max_distance=_whole(config, "relative_attention_max_distance", default=128),
    norm_eps=float(config.get("layer_norm_epsilon", 1e-6)),
    activation=_ACTIVATIONS[name],
    gated_mlp=gate == "gated",
    scale_outputs=bool(tied if scaled is None else scaled),
    start_token=start_token(config),
  )


def start_token(config: Mapping[str, Any], default: int | None = None) -> int:
  """Id of the token that begins the decoder's texts, by default padding.

  Args:
    config: of a `config.json` or a `generation_config.json`.
    default: what it is if nothing says; by default the padding token.
  """
  if default is None:
    default = _whole(config, "pad_token_id", default=0, least=0)
  return _whole(config, "decoder_start_token_id", default=default, least=0)


_NAMES = {
  "relu": "relu", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new",
}  # fmt: skip


def to_json(
  c: T5Config, dtype: str, eos_token_id: int | None
) -> dict[str, Any]:
  """The `config.json` of a T5 checkpoint.

  Args:
    c: the module's configuration.
    dtype: of the weights in the file.
    eos_token_id: end-of-text token, if known.

  Raises:
    ValueError: if the format cannot express it.
  """
  name = _NAMES[c.activation]
  if c.gated_mlp and c.activation == "gelu":
    raise ValueError("T5's format has no gated block with an exact GELU")
  return {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": c.vocab_size,
    "d_model": c.embed_dim,
    "d_kv": c.head_dim,
    "d_ff": c.mlp_dim,
    "num_layers": c.num_encoder_layers,
    "num_decoder_layers": c.num_layers,
    "num_heads": c.num_heads,
    "relative_attention_num_buckets": c.num_buckets,
    "relative_attention_max_distance": c.max_distance,
    "layer_norm_epsilon": c.norm_eps,
    "feed_forward_proj": f"gated-{name}" if c.gated_mlp else name,
    "tie_word_embeddings": c.tied_embeddings,
    "scale_decoder_outputs": c.scale_outputs,
    "decoder_start_token_id": c.start_token,
    "pad_token_id": c.start_token,
    "eos_token_id": eos_token_id,
    "dtype": dtype,
    "torch_dtype": dtype,  # the same for transformers 4
  }


def _whole(
  config, key: str, *, default: int | None = None, least=1, most=2**31 - 1
) -> int:
  value = config.get(key)
  if value is None and default is not None:
    return default
  if type(value) is not int or not least <= value <= most:
    raise ValueError(
      f"{key} must be an integer in {least}..{most}, got {value!r}"
    )
  return value
