"""Roofline of a forward pass on a slice: a model, not a measurement.

  time = max(bytes read and written / memory bandwidth,
             operations / peak) + bytes sent / interconnect bandwidth

per device. Bytes are the weights once, the blocks of the cache that hold text
once, and the activations; scores of attention are taken to stay on the chip.
Collectives are rings that use all links of a device at once, as if every slice
were a torus and every group of devices a ring in it. Latencies, kernel launches
and overlap are left out, so small models on many chips look better here than
they are.
"""

import dataclasses
import functools
from collections.abc import Sequence

from launch.hardware import Chip
from launch.planning import networks
from launch.planning.networks import Work
from models.networks.lowbits import Format
from models.networks.transformer import SkippedLayers

_ITEM = 2  # bytes of a bfloat16
_NOTHING = SkippedLayers()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """A model on its devices.

  Attributes:
    config: the model; repeated key/value heads count as heads.
    num_params: of the whole model.
    size: devices that the model is cut over.
    rows: rows of the batch that each such group decodes.
    slots: cache slots of each row.
    text: tokens of the longest row's text; None if it fills the cache.
    skipped: sub-layers that the pass leaves out.
    input_length: tokens that an encoder read.
    distinct: experts of a layer that a pass touches, as measured; None for
      uniform routing.
    weights: how they are stored; None for bfloat16.
    cache: what keys and values are stored as, likewise.
  """

  config: networks.Config
  num_params: int
  size: int
  rows: int
  slots: int
  text: int | None = None
  skipped: SkippedLayers = _NOTHING
  input_length: int = 0
  distinct: networks.Distinct | None = None
  weights: Format | None = None
  cache: str | None = None

  def read(self, work: Work, idle: float) -> float:
    """Bytes of weights and cache that a pass reads, on all devices.

    Args:
      work: of the pass.
      idle: weights of experts that it leaves out.
    """
    c, channels = self.config, self.rows * work.channels
    num_bytes = networks.bytes_per_weight(c, self.weights) * work.weights
    num_bytes += networks.bytes_per_channel(c, self.cache) * channels
    if idle:
      num_bytes -= networks.bytes_per_expert_weight(c, self.weights) * idle
    return num_bytes + _ITEM * (self.size - 1) * networks.replicated(c)

  @property
  def work(self) -> Work:
    """The work of a pass."""
    return networks.work(
      self.config, num_params=self.num_params, skipped=self.skipped,
      slots=self.slots, text=self.slots if self.text is None else self.text,
      input_length=self.input_length,
    )  # fmt: skip


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

  def beside(self, other: "Pass") -> "Pass":
    """Both passes as one."""
    return Pass(
      hbm_bytes=self.hbm_bytes + other.hbm_bytes,
      flops=self.flops + other.flops,
      ici_bytes=self.ici_bytes + other.ici_bytes,
    )

  def seconds(self, chip: Chip) -> float:
    """Seconds by the roofline of this module."""
    alone = self.causes(chip)
    return max(alone["memory"], alone["arithmetic"]) + alone["collectives"]

  def bound(self, chip: Chip) -> str:
    """The cause that takes longest."""
    alone = self.causes(chip)
    return max(alone, key=lambda cause: alone[cause])


def mean(passes: Sequence[Pass]) -> Pass:
  """The mean pass of at least one."""
  each = zip(*map(dataclasses.astuple, passes), strict=True)
  return Pass(*(sum(x) / len(passes) for x in each))


def forward(placement: Placement, num_tokens: int) -> Pass:
  """A pass over `num_tokens` tokens of every row.

  Args:
    placement: the model on its devices.
    num_tokens: T, at least 1.
  """
  p, c, work = placement, placement.config, placement.work
  tokens = p.rows * num_tokens
  # Written once and read once: what a block takes and hands on, whole on every
  # device; what is inside it, cut; and the logits.
  whole = 2 * tokens * (work.attentions + work.mlps) * 2 * c.embed_dim
  cut = 2 * tokens * work.inside
  logits = 2 * 4 * tokens * c.vocab_size  # float32, whole on every device
  idle = functools.partial(networks.idle, c, p.skipped, distinct=p.distinct)
  untouched = idle(tokens, size=p.size)
  copies = networks.expert_copies(c, p.skipped, p.weights, untouched)
  states, pending = networks.state_bytes(c)
  states = 2 * p.rows * (states + num_tokens * pending)
  flops = 2 * tokens * (work.weights - idle(1))
  flops += 4 * tokens * work.products
  return Pass(
    hbm_bytes=(p.read(work, untouched) + copies) / p.size
    + _ITEM * (cut / p.size + whole)
    + states / p.size
    + logits,
    flops=flops / p.size,
    ici_bytes=_sent(p, tokens),
  )


def least_bytes(placement: Placement) -> float:
  """Bytes that a device must read for a pass: weights and cache, once.

  Of mixtures the weights of a plain pass, one token a row, evenly shared.
  """
  p, c = placement, placement.config
  exact = dataclasses.replace(p, slots=p.slots if p.text is None else p.text)
  idle = networks.idle(c, p.skipped, p.rows, distinct=p.distinct)
  return p.read(exact.work, idle) / p.size


def _sent(p: Placement, tokens: int) -> float:
  """Bytes that leave a device: rings, (n - 1) / n of an array a trip."""
  if p.size == 1:
    return 0.0
  c, share = p.config, (p.size - 1) / p.size
  # Partial sums. Tables are cut over the vocabulary: what was looked up is one
  # more, and so is what layers have of their own.
  reduced = (p.work.sums + 1) * c.embed_dim
  reduced += c.num_layers * getattr(c, "per_layer_dim", 0)
  reductions = 2 * share * _ITEM * tokens * reduced
  return reductions + share * 4 * tokens * c.vocab_size
