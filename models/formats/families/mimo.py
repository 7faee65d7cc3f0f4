"""MiMo-7B: Qwen2's layers, beside one that drafts for them."""

import dataclasses

from models.formats.families import qwen2
from models.networks.description import TransformerConfig


def _drafts(name: str, config: TransformerConfig) -> bool:
  """Tensors of the layer that drafts, which the model does not read."""
  del config
  return name.startswith("mtp_layers.")


FAMILY = dataclasses.replace(
  qwen2.FAMILY,
  name="mimo",
  fixed=dict(qwen2.FAMILY.fixed, attention_bias=True),
  harmless=qwen2.FAMILY.harmless | {"num_nextn_predict_layers"},
  left_out=_drafts,
  gguf=None,
)
