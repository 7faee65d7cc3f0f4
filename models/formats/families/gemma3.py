"""Gemma 3, the text model: Gemma 2 with normed queries and keys.

Every sixth layer has full attention and its own rotary frequencies.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.formats.families import gemma2, reading
from models.formats.families.family import Family, Gguf, Settings
from models.formats.families.reading import FULL, SLIDING, get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  period = get(settings, "sliding_window_pattern", int, 6)
  older = {
    FULL: {key: settings.get(key) for key in ("rope_theta", "rope_scaling")},
    SLIDING: {"rope_theta": settings.get("rope_local_base_freq")},
  }
  return gemma2.config_of(
    settings,
    slides=lambda layer: (layer + 1) % period != 0,
    ropes=lambda size: reading.rope_by_type(
      settings, size, older=older, theta={FULL: 1e6, SLIDING: 1e4}
    ),
    qk_norm="head",
  )


def _gguf_settings(
  metadata: Mapping[str, Any], has: Callable[..., bool]
) -> dict[str, Any]:
  del has
  settings = {"query_pre_attn_scalar": gemma2.scalar(metadata, 62)}
  kind = metadata.get("rope.scaling.type", "none")
  if kind != "none":
    factor = metadata.get("rope.scaling.factor", 1.0)
    settings["rope_scaling"] = {"rope_type": kind, "factor": factor}
  return settings


FAMILY = Family(
  name="gemma3_text",
  read=_read,
  tensors=gemma2.TENSORS,
  defaults=dict(
    gemma2.DEFAULTS, vocab_size=262_208, max_position_embeddings=131_072
  ),
  fixed=gemma2.FIXED,
  # Attention scores have no soft cap, whatever a file says, as in transformers.
  harmless=gemma2.HARMLESS | {"attn_logit_softcapping"},
  # The multimodal model ties its embeddings by default and has no logit cap.
  multimodal={
    "gemma3": dict(tie_word_embeddings=True, final_logit_softcapping=None)
  },
  gguf=Gguf(
    architecture="gemma3",
    keys={**gemma2.GGUF_KEYS, "rope.freq_base_swa": "rope_local_base_freq"},
    settings=_gguf_settings,
    layouts=gemma2.GGUF_LAYOUTS,
  ),
)
