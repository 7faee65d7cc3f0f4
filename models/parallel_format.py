"""DFlash's heads as they are published.

`config.json` is Qwen3's of the head's own layers, with `block_size` and
`dflash_config` beside it; the tensors are those layers', `fc`, `hidden_norm`
and `norm`. Embedding and output projection are the target's. Layers whose
features are read are numbered by their outputs: id i is what layer i + 1 is
given.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from flax import nnx

from models import head_files
from models.head_files import Place
from models.head_shapes import HeadModule, HeadShape, Target
from models.huggingface_config import config_from_json
from models.parallel import ParallelConfig
from models.weights import Tensor

_LAYER = {
  "attention.q": "self_attn.q_proj",
  "attention.k": "self_attn.k_proj",
  "attention.v": "self_attn.v_proj",
  "attention.out": "self_attn.o_proj",
  "mlp.gate": "mlp.gate_proj",
  "mlp.up": "mlp.up_proj",
  "mlp.down": "mlp.down_proj",
}
_NORMS = {
  "attention.q_norm": "self_attn.q_norm",
  "attention.k_norm": "self_attn.k_norm",
  "attention_norm": "input_layernorm",
  "mlp_norm": "post_attention_layernorm",
}
# Of the layers, of the head, and what changes nothing. Anything else might
# change what it says, and is refused.
_KNOWN = frozenset(
  """
  vocab_size hidden_size intermediate_size num_hidden_layers head_dim
  num_attention_heads num_key_value_heads hidden_act rms_norm_eps
  max_position_embeddings rope_theta rope_scaling rope_parameters
  attention_bias tie_word_embeddings sliding_window use_sliding_window
  max_window_layers layer_types model_type

  block_size dflash_config num_target_layers

  architectures auto_map transformers_version torch_dtype dtype use_cache
  initializer_range attention_dropout bos_token_id eos_token_id pad_token_id
  _name_or_path
  """.split()
)
_OF_DFLASH = frozenset({"mask_token_id", "target_layer_ids", "block_size"})


def is_one(config: Mapping[str, Any]) -> bool:
  """Whether a configuration is of this format."""
  return "dflash_config" in config


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """What a configuration says of a head.

  Args:
    config: what `config.json` holds.
    target: the model that it drafts for.

  Raises:
    ValueError: for switches that are not known, or another target.
  """
  own = config["dflash_config"]
  if not isinstance(own, Mapping):
    raise ValueError("dflash_config must be an object")
  unknown = {*set(config) - _KNOWN, *set(own) - _OF_DFLASH}
  if unknown:
    raise ValueError(
      f"settings that are not known: {', '.join(sorted(unknown))}"
    )
  number = lambda name: _integer(name, own.get(name, config.get(name)))
  if config.get("num_target_layers", target.num_layers) != target.num_layers:
    raise ValueError(
      f"it was made for {config['num_target_layers']} layers, and the target "
      f"has {target.num_layers}"
    )
  kinds = config.get("layer_types") or []
  if not isinstance(kinds, list) or {*kinds} - {"full_attention"}:
    raise ValueError(f"layer_types must be full_attention, got {kinds!r:.80}")
  settings = {
    "model_type": "qwen3",
    "max_position_embeddings": 2048,
    **{k: v for k, v in config.items() if k != "layer_types"},
  }
  layers = config_from_json({**settings, "use_sliding_window": False})
  layers = dataclasses.replace(layers, tied_embeddings=False)
  for name, mine, theirs in (
    ("vocabulary", layers.vocab_size, target.vocab_size),
    ("width", layers.embed_dim, target.embed_dim),
  ):
    if mine != theirs:  # it reads the target's embedding
      raise ValueError(f"its {name} is {mine}, and the target's {theirs}")
  ids = own.get("target_layer_ids")
  if ids is None:
    ids = _usual_layers(layers.num_layers, target.num_layers)
  if (
    not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids)
  ):
    raise ValueError(f"target_layer_ids must be layers, got {ids!r:.80}")
  # What comes after the last layer may be meant with its norm or without.
  if min(ids) < 0 or max(ids) >= target.num_layers - 1:
    raise ValueError(
      f"target_layer_ids {ids} are not layers of a target of "
      f"{target.num_layers}, the last one apart"
    )
  made = ParallelConfig(
    layers=layers,
    num_features=len(ids) * target.embed_dim,
    block_size=number("block_size"),
    mask_token=number("mask_token_id"),
  )
  return HeadShape(
    kind="parallel", config=made, features=tuple(i + 1 for i in ids)
  )


def _integer(name: str, value: Any) -> int:
  if type(value) is not int:
    raise ValueError(f"{name} must be an integer, got {value!r}")
  return value


def _usual_layers(count: int, num_layers: int) -> list[int]:
  """The layers that are read where no file says: evenly from 1 to N - 3."""
  if count == 1:
    return [num_layers // 2]
  step = (num_layers - 4) / (count - 1)
  return [round(1 + i * step) for i in range(count)]


def fill(
  found: HeadShape,
  tensors: Mapping[str, Tensor],
  target: Target,
  *,
  path: pathlib.Path,
  dtype,
  place: Place | None,
) -> HeadModule:
  """The network of a head's tensors; raises as `eagle_format.fill`."""
  table = {
    "embed.embedding": ("embed_tokens.weight", False),
    "lm_head.kernel": ("lm_head.weight", True),
    "fc.kernel": ("fc.weight", True),
    "hidden_norm.scale": ("hidden_norm.weight", False),
    "final_norm.scale": ("norm.weight", False),
  }
  for i in range(found.config.layers.num_layers):
    for mine, theirs in _LAYER.items():
      for kind, name, turned in (
        ("kernel", "weight", True), ("bias", "bias", False)
      ):  # fmt: skip
        table[f"layers.{i}.{mine}.{kind}"] = (
          f"layers.{i}.{theirs}.{name}", turned
        )  # fmt: skip
    for mine, theirs in _NORMS.items():
      table[f"layers.{i}.{mine}.scale"] = (f"layers.{i}.{theirs}.weight", False)
  module, used = head_files.filled(
    path,
    lambda: found.make(dtype=dtype, rngs=nnx.Rngs(0)),
    table,
    tensors,
    target.shared(),
    dtype,
    place=place,
  )
  head_files.refuse_rest(path, tensors, used)
  return module
