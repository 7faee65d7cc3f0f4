"""Roofline of a forward pass on a slice: a model, not a measurement.

  time = max(bytes read and written / memory bandwidth,
             operations / peak) + bytes sent / interconnect bandwidth

per device. Bytes are the weights once, the blocks of the cache that hold text
once, and the activations; scores of attention are taken to stay on the chip.
Tables of which a pass looks up rows are left out, and what every device reads
whole counts as if it were cut: routers, down-projections of latents, and what
goes with the replicated embeddings of Gemma E4B's layers. Collectives are rings
that use all links of a device at once, as if every slice were a torus and every
group of devices a ring in it.
Latencies, kernel launches and overlap are left out, so small models on many
chips look better here than they are; so are copies of experts whose groups are
dequantized.
"""

import dataclasses
from collections.abc import Sequence

from launch.hardware import Chip
from launch.planning import networks
from launch.planning.networks import Work

_ITEM = 2  # bytes of a bfloat16


@dataclasses.dataclass(frozen=True)
class Pass:
  """A forward pass on one device.

  Attributes:
    hbm_bytes: read from and written to memory.
    flops: bfloat16 operations.
    ici_bytes: sent to other devices.
  """

  hbm_bytes: float
  flops: float
  ici_bytes: float

  def causes(self, chip: Chip) -> dict[str, float]:
    """Seconds that each of memory, arithmetic and collectives takes alone."""
    return {
      "memory": self.hbm_bytes / chip.hbm_bandwidth,
      "arithmetic": self.flops / chip.peak_flops,
      "collectives": self.ici_bytes / chip.ici_bandwidth,
    }

  def seconds(self, chip: Chip) -> float:
    """Seconds by the roofline of this module."""
    alone = self.causes(chip)
    return max(alone["memory"], alone["arithmetic"]) + alone["collectives"]


def mean(passes: Sequence[Pass]) -> Pass:
  """The mean pass of at least one."""
  each = zip(*map(dataclasses.astuple, passes), strict=True)
  return Pass(*(sum(x) / len(passes) for x in each))


def forward(work: Work, num_tokens: int, *, size: int, rows: int) -> Pass:
  """A pass over `num_tokens` tokens of every row."""
  tokens = rows * num_tokens

  def idle(tokens: int, size: int) -> float:
    """Weights of experts that no token of a pass is given."""
    return sum(
      layers
      * (block.num_experts - networks.touched(block, tokens, size))
      * block.num_expert_params
      for block, layers in work.mixtures
    )

  # Written once and read once: what a block takes and hands on, whole on every
  # device; what is inside it, cut; and the logits.
  whole = 2 * tokens * work.blocks * 2 * work.embed_dim
  cut = _ITEM * 2 * tokens * work.inside
  logits = 4 * tokens * work.vocab_size  # float32, whole on every device
  cut += work.weight_bytes * (1 - idle(tokens, size) / work.weights)
  cut += rows * work.cache_bytes
  cut += 2 * rows * (work.state_bytes + num_tokens * work.pending_bytes)
  flops = 2 * tokens * (work.weights - idle(1, 1)) + 4 * tokens * work.products
  # Rings: (n - 1) / n of an array a trip, and two trips of partial sums.
  sent = 2 * _ITEM * tokens * work.summed + logits
  return Pass(
    hbm_bytes=cut / size + _ITEM * whole + 2 * logits,
    flops=flops / size,
    ici_bytes=(size - 1) / size * sent,
  )
