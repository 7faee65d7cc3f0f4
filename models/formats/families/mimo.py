"""MiMo-7B: Qwen2's layers and an MTP head."""

import dataclasses

from models.formats.families import qwen2

FAMILY = dataclasses.replace(
  qwen2.FAMILY,
  name="mimo",
  fixed=dict(qwen2.FAMILY.fixed, attention_bias=True),
  harmless=frozenset({"num_nextn_predict_layers"}),
  # The MTP head, which the model itself does not use.
  ignores=lambda name, config: name.startswith("mtp_layers."),
  gguf=None,
)
