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

from models.formats import head_files, json_files
from models.formats.families import FAMILIES
from models.formats.families.reading import get
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadShape, Target
from models.networks.medusa import BlockwiseConfig, MedusaConfig
from models.networks.transformer import FINAL

_NAMES = re.compile(r"heads\.(\d{1,3})\.(blocks\.(\d{1,3})|lm_head)\.")
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
  _refuse_other_target(config, target)
  if config.get("original_lm_head"):
    raise ValueError("original_lm_head is not supported, got true")
  either = lambda mine, theirs: json_files.agreed(
    {mine: config.get(mine), theirs: None if merged else config.get(theirs)}
  )
  count = either("medusa_num_heads", "num_heads")
  layers = either("medusa_num_layers", "num_hidden_layers")
  if tensors is None:
    if count is None:
      raise ValueError("the number of heads must be said")
    layers = 1 if layers is None else layers
    bias = "medusa_num_heads" in config or bool(config.get("medusa_fc_bias"))
  else:
    matches = [_NAMES.match(name) for name in tensors]
    heads = {int(m[1]) for m in matches if m}
    blocks = {int(m[3]) for m in matches if m and m[3] is not None}
    for what, some in (("heads", heads), ("blocks", blocks)):
      if some != {*range(len(some))}:
        raise CheckpointError(f"{what} are not numbered from 0 on")
    # Published files hold more heads than their configuration says.
    count = len(heads)
    if layers not in (None, len(blocks)):
      raise ValueError(
        f"it says {layers!r} layers, and there are {len(blocks)}"
      )
    layers = len(blocks)
    bias = "heads.0.blocks.0.bias" in tensors or not blocks
  words = get(config, "truncated_vocab_size", int, target.vocab_size)
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
  _refuse_other_target(config, target)
  heads, hidden, width, words = (
    get(config, name, int) for name in _OF_BLOCKWISE
  )
  made = BlockwiseConfig(
    num_heads=heads, hidden_dim=hidden, embed_dim=width, vocab_size=words
  )
  return HeadShape(config=made, features=(FINAL,))


def _refuse_other_target(config: Mapping[str, Any], target: Target) -> None:
  """Raises ValueError for the sizes of another target."""
  for name, expected in (
    ("hidden_size", target.embed_dim), ("vocab_size", target.vocab_size)
  ):  # fmt: skip
    if config.get(name, expected) != expected:
      raise ValueError(
        f"{name} is {config[name]!r}, and the target's {expected}"
      )


def opened(
  tensors: Mapping[str, Tensor], described: HeadShape
) -> head_files.Opened:
  """Heads of a shape, opened, whose tensors have the normal form's names."""
  return head_files.Opened(
    shape=described,
    tensors=tensors,
    locate=head_files.by_table({}),
    also=frozenset({"d2t", "t2d", "token_map"}),
  )
