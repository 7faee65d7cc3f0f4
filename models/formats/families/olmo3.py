"""OLMo 3: OLMo 2 with sliding windows in three of four layers.

Rotary frequencies are rescaled in full-attention layers only.
"""

from models.formats.families import olmo2, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import FULL, SLIDING, get
from models.networks.description import TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  window = get(settings, "sliding_window", int, None)
  # As in transformers, the older keys apply to full-attention layers only.
  older = {key: settings.get(key) for key in ("rope_theta", "rope_scaling")}
  ropes = reading.rope_by_type(
    settings,
    sizes["head_dim"],
    older={FULL: older},
    theta={FULL: 5e5, SLIDING: 5e5},
  )
  usual = [(i + 1) % 4 > 0 for i in range(sizes["num_layers"])]
  types = reading.windowed(settings, usual, window)
  return olmo2.config_of(settings, sizes, types, ropes, window)


FAMILY = Family(
  name="olmo3",
  read=_read,
  tensors=olmo2.TENSORS,
  defaults=dict(olmo2.DEFAULTS, sliding_window=4096),
)
