"""OLMo 3: OLMo 2 of which three layers of four slide.

Frequencies are rescaled in full layers only.
"""

from models.formats.families import olmo2, reading
from models.formats.families.family import Family, Settings
from models.formats.families.reading import FULL, SLIDES, get
from models.networks.description import TransformerConfig

_THETA = 5e5


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  window = get(settings, "sliding_window", int, None)
  usual = [SLIDES if (i + 1) % 4 else FULL for i in range(sizes["num_layers"])]
  allowed = [FULL] if window is None else [FULL, SLIDES]
  older = {
    FULL: {key: settings.get(key) for key in ("rope_theta", "rope_scaling")},
    SLIDES: {},  # transformers takes rope_theta of full layers alone
  }
  ropes = reading.rope_by_type(
    settings,
    sizes["head_dim"],
    older=older,
    theta={FULL: _THETA, SLIDES: _THETA},
  )
  types = reading.layer_types(settings, usual, allowed, window)
  return olmo2.described(settings, types, ropes, {FULL: None, SLIDES: window})


FAMILY = Family(
  name="olmo3",
  read=_read,
  tensors=olmo2.TENSORS,
  defaults=dict(olmo2.DEFAULTS, sliding_window=4096, layer_types=None),
)
