"""Published Medusa heads: the authors' (`medusa_lm_head.pt`) and vLLM's."""

from collections.abc import Mapping
from typing import Any

from models.formats import json_files
from models.formats.families import FAMILIES
from models.formats.families.reading import get
from models.formats.weights import Tensor
from models.head_shapes import HeadShape, Target
from models.networks.medusa import MedusaConfig
from models.networks.transformer import FINAL, Features

# Known settings: the authors', vLLM's (`max_paths` and `topk` are for its
# trees), and those that change nothing.
_OF_MEDUSA = frozenset(
  """
  medusa_num_heads medusa_num_layers base_model_name_or_path

  num_heads num_hidden_layers hidden_size vocab_size truncated_vocab_size
  original_lm_head medusa_fc_bias max_paths topk max_seq_len

  model_type architectures auto_map transformers_version torch_dtype dtype
  version use_cache bos_token_id eos_token_id pad_token_id
  """.split()
)


def matches(config: Mapping[str, Any]) -> bool:
  """True if a configuration describes Medusa heads."""
  return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def shape(
  config: Mapping[str, Any],
  target: Target,
  tensors: Mapping[str, Tensor] | None = None,
) -> HeadShape:
  """The shape of the heads, from configuration and tensors.

  Args:
    config: the contents of `config.json`.
    target: the model that they draft for.
    tensors: by normalized name; None to count heads from the configuration.
      Published files hold more heads than it says.

  Raises:
    ValueError: for unknown switches, or heads for another target.
  """
  if config.get("model_type") in [*FAMILIES]:  # a target's with heads beside it
    config = {k: v for k, v in config.items() if k.startswith("medusa")}
  json_files.refuse_unknown(config, _OF_MEDUSA)
  for name, expected in (
    ("hidden_size", target.embed_dim), ("vocab_size", target.vocab_size),
    ("truncated_vocab_size", target.vocab_size),
  ):  # fmt: skip
    if config.get(name, expected) != expected:
      raise ValueError(
        f"{name} is {config[name]!r}, but the target's is {expected}"
      )
  if config.get("original_lm_head"):
    raise ValueError("original_lm_head is not supported, got true")
  if tensors is None:
    both = lambda mine, theirs, *least: get(
      config, mine if mine in config else theirs, int, *least
    )
    count = both("medusa_num_heads", "num_heads")
    layers = both("medusa_num_layers", "num_hidden_layers", 1)
    bias = "medusa_num_heads" in config or bool(config.get("medusa_fc_bias"))
  else:
    count = sum(name.startswith("lm_heads.") for name in tensors)
    blocks = [name for name in tensors if name.startswith("blocks.0.")]
    layers = sum(name.endswith(".weight") for name in blocks)
    bias = len(blocks) > layers or not blocks
  made = MedusaConfig(
    num_heads=count,
    num_layers=layers,
    embed_dim=target.embed_dim,
    vocab_size=target.vocab_size,
    bias=bias,
  )
  return HeadShape(config=made, features=(FINAL,))


def names(config: Any) -> dict[str, str]:
  """Tensor names of the parameters, as in vLLM."""
  named = {}
  for h in range(config.num_heads):
    named[f"heads.{h}.lm_head.weight"] = f"lm_heads.{h}.weight"
    for i in range(config.num_layers):
      for leaf in ("weight", "bias"):
        ours = f"heads.{h}.blocks.{i}.{leaf}"
        named[ours] = f"blocks.{h}.layers.{i}.{leaf}"
  return named


def settings(config: Any, features: Features, dtype: str) -> dict[str, Any]:
  """The `config.json` of heads in vLLM's format."""
  del features
  return {
    "hidden_size": config.embed_dim,
    "vocab_size": config.vocab_size,
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "num_heads": config.num_heads,
    "num_hidden_layers": config.num_layers,
    "truncated_vocab_size": config.vocab_size,
    "medusa_fc_bias": config.bias,
    "dtype": dtype,
    "torch_dtype": dtype,
  }
