"""Medusa's heads as they are published, and blockwise heads in our own form.

Medusa's are read as its authors (`medusa_lm_head.pt`) and as vLLM name their
tensors. Of blockwise parallel decoding (Stern et al., 2018) nothing was
published; this is the form that is read here:

    config.json  {"model_type": "blockwise", "num_heads": K, "hidden_dim": N,
                  "hidden_size": D, "vocab_size": V}
    hidden.weight  [K * N, D]      hidden.bias  [K * N]
    out.weight     [K * D, K * N]  out.bias     [K * D]
    lm_head.weight [V, D], if it is not the target's
"""

import re
from collections.abc import Mapping
from typing import Any

from models.formats import json_files
from models.formats.families import FAMILIES
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadShape, Target
from models.networks.medusa import BlockwiseConfig, MedusaConfig
from models.networks.transformer import FINAL

_NAMES = re.compile(r"heads\.(\d{1,3})\.(blocks\.(\d{1,3})|lm_head)\.")
_MOST = 1000  # heads, and blocks of one
_OF_BLOCKWISE = ("num_heads", "hidden_dim", "hidden_size", "vocab_size")
_ALSO = ("model_type", "architectures", "torch_dtype", "dtype")
# What a configuration of Medusa's heads may say: its authors', vLLM's, and what
# changes nothing. `max_paths` and `topk` are of vLLM's trees.
_OF_MEDUSA = frozenset(
  """
  medusa_num_heads medusa_num_layers base_model_name_or_path

  num_heads num_hidden_layers hidden_size vocab_size truncated_vocab_size
  original_lm_head medusa_fc_bias max_paths topk max_seq_len

  model_type architectures auto_map transformers_version torch_dtype dtype
  version use_cache bos_token_id eos_token_id pad_token_id
  """.split()
)


def shape(
  config: Mapping[str, Any],
  target: Target,
  tensors: Mapping[str, Tensor] | None,
) -> HeadShape:
  """Shapes of Medusa's heads, from configuration and tensors.

  Args:
    config: what `config.json` holds.
    target: the model that they draft for.
    tensors: by the names of the normal form; None if there are none to look at,
      and the configuration is believed.

  Raises:
    ValueError: for switches that are not known, or heads that are none.
  """
  merged = config.get("model_type") in [*FAMILIES]  # then it is the target's
  if not merged:
    json_files.refuse_unknown(config, _OF_MEDUSA)
  for name, expected in (
    ("hidden_size", target.embed_dim), ("vocab_size", target.vocab_size)
  ):  # fmt: skip
    if config.get(name, expected) != expected:
      raise ValueError(
        f"{name} is {config[name]!r}, and the target's {expected}"
      )
  if config.get("original_lm_head"):
    raise ValueError("original_lm_head is not supported, got true")
  either = lambda mine, theirs: json_files.agreed(
    {mine: config.get(mine), theirs: None if merged else config.get(theirs)}
  )
  count = either("medusa_num_heads", "num_heads")
  layers = either("medusa_num_layers", "num_hidden_layers")
  words = config.get("truncated_vocab_size") or target.vocab_size
  if type(words) is not int or not 0 < words <= target.vocab_size:
    raise ValueError(
      f"truncated_vocab_size must be in 1..{target.vocab_size}, got {words!r}"
    )
  if tensors is None:
    layers = 1 if layers is None else layers
    for name, value in (("heads", count), ("layers", layers)):
      if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"the number of {name} must be said, got {value!r}")
    bias = "medusa_num_heads" in config or bool(config.get("medusa_fc_bias"))
  else:
    matches = [_NAMES.match(name) for name in tensors]
    numbers = [int(m[1]) for m in matches if m]
    blocks = [int(m[3]) for m in matches if m and m[3] is not None]
    if not numbers:
      raise CheckpointError("there are no heads among the tensors")
    for what, some in (("heads", numbers), ("blocks", blocks)):
      if set(some) != set(range(len(set(some)))):
        raise CheckpointError(f"{what} are not numbered from 0 on")
    # Published files hold more heads than their configuration says.
    count, in_files = 1 + max(numbers), 1 + max(blocks, default=-1)
    if layers not in (None, in_files):
      raise ValueError(f"it says {layers!r} layers, and there are {in_files}")
    layers = in_files
    bias = "heads.0.blocks.0.bias" in tensors or not blocks
  made = MedusaConfig(
    num_heads=count,
    num_layers=layers,
    embed_dim=target.embed_dim,
    vocab_size=target.vocab_size,
    bias=bias,
    draft_vocab_size=None if words == target.vocab_size else words,
  )
  return HeadShape(config=made, features=(FINAL,))


def blockwise_shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """Shapes of blockwise heads; raises as `shape`."""
  json_files.refuse_unknown(config, {*_OF_BLOCKWISE, *_ALSO})
  for name in _OF_BLOCKWISE:
    value = config.get(name)
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a positive integer, got {value!r}")
  for name, expected in (
    ("hidden_size", target.embed_dim), ("vocab_size", target.vocab_size)
  ):  # fmt: skip
    if config[name] != expected:
      raise ValueError(f"{name} is {config[name]}, and the target's {expected}")
  made = BlockwiseConfig(
    num_heads=config["num_heads"],
    hidden_dim=config["hidden_dim"],
    embed_dim=config["hidden_size"],
    vocab_size=config["vocab_size"],
  )
  return HeadShape(config=made, features=(FINAL,))
