"""How long a forward pass should take on a slice: a model, not a measurement.

  time = max(bytes read and written / memory bandwidth,
             operations / peak) + bytes sent / interconnect bandwidth

per device. Bytes are the weights once, the whole cache of the rows once, and
the activations; latencies, kernel launches and overlap are left out, so small
models on many chips look better here than they are.
"""

import dataclasses

import numpy as np

from launch.planning.chips import Chip
from models.transformer import TransformerConfig

_ITEM = 2  # bytes of a bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """A model on its devices.

  Attributes:
    config: the model; repeated key/value heads count as heads.
    num_params: of the whole model.
    size: devices that the model is cut over.
    rows: rows of the batch that each such group decodes.
    slots: cache slots of each row.
  """

  config: TransformerConfig
  num_params: int
  size: int
  rows: int
  slots: int


@dataclasses.dataclass(frozen=True)
class Pass:
  """One forward pass on one device.

  Attributes:
    hbm_bytes: read from and written to memory.
    flops: bfloat16 operations.
    ici_bytes: sent to other devices.
  """

  hbm_bytes: float
  flops: float
  ici_bytes: float

  def seconds(self, chip: Chip) -> float:
    """By the roofline of this module."""
    return (
      max(self.hbm_bytes / chip.hbm_bandwidth, self.flops / chip.peak_flops)
      + self.ici_bytes / chip.ici_bandwidth
    )


def forward(placement: Placement, num_tokens: int) -> Pass:
  """A pass over `num_tokens` tokens of every row, caches full.

  Args:
    placement: the model on its devices.
    num_tokens: T, at least 1.
  """
  p, c = placement, placement.config
  tokens = p.rows * num_tokens
  embedding = c.vocab_size * c.embed_dim
  # An embedding that is only looked up is neither read whole nor multiplied.
  weights = p.num_params - (0 if c.tied_embeddings else embedding)
  cache = 2 * c.num_layers * p.rows * p.slots * c.num_kv_heads * c.head_dim
  # Written once and read once: what a layer hands on, and the logits.
  per_layer = 4 * c.embed_dim + 2 * (c.num_heads * c.head_dim + c.mlp_dim)
  activations = 2 * tokens * (c.num_layers * per_layer)
  logits = 2 * 4 * tokens * c.vocab_size  # float32, whole on every device
  flops = 2 * tokens * weights
  flops += 4 * c.num_layers * tokens * p.slots * c.num_heads * c.head_dim
  return Pass(
    hbm_bytes=_ITEM * (weights + cache + activations) / p.size + logits,
    flops=flops / p.size,
    ici_bytes=_sent(p, tokens),
  )


def _sent(p: Placement, tokens: int) -> float:
  """Bytes that leave a device: rings, (n - 1) / n of an array a trip."""
  if p.size == 1:
    return 0.0
  c, share = p.config, (p.size - 1) / p.size
  reduced = _ITEM * tokens * c.embed_dim  # a partial sum
  sums = 1 if c.parallel_residual else 2
  # The table is cut over the vocabulary: one more sum, of what was looked up.
  reductions = 2 * share * reduced * (sums * c.num_layers + 1)
  return reductions + share * 4 * tokens * c.vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """What a round is made of, in seconds.

  Attributes:
    draft: one draft pass.
    verify: `verify[n - 1]`, a target pass over n tokens, n = 1...
  """

  draft: float
  verify: np.ndarray

  @property
  def ratio(self) -> float:
    """c, a draft pass over a target pass of one token."""
    return self.draft / float(self.verify[0])


def costs(
  target: Placement, draft: Placement | None, chip: Chip, *, most: int = 32
) -> Costs:
  """The roofline's costs.

  Args:
    target: the target on its devices.
    draft: the draft on its own, or None where drafting is free.
    chip: what both run on.
    most: verify passes of 1..most tokens.
  """
  return Costs(
    draft=forward(draft, 1).seconds(chip) if draft else 0.0,
    verify=np.array(
      [forward(target, n).seconds(chip) for n in range(1, most + 1)]
    ),
  )
