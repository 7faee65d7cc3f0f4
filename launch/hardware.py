"""Figures for TPU generations, and the slices that plans compile for.

Figures are from https://docs.cloud.google.com/tpu/docs (system architecture),
read in November 2026; v4's six links of 50 GB/s are from its paper (Jouppi et
al., 2023). Usable memory is what libtpu's compiler reports, which is less than
what is installed.
"""

import dataclasses
import importlib.util
import math
from typing import Any

from jax.experimental import topologies

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """The roofline figures of one device of a generation.

  Attributes:
    name: the generation.
    hbm_bytes: memory that a program can use on a device.
    hbm_bandwidth: bytes per second.
    peak_flops: bfloat16 operations per second.
    ici_bandwidth: bytes per second that a device can send over all its links:
      half of Google's "bidirectional" figure.
    dimensions: dimensions of its torus, 2 or 3.
    accelerator: Cloud's prefix for slices, followed by the number of chips for
      two dimensions, or of cores (two per chip) for three.
    devices_per_chip: devices that jax sees; the figures above are per device.
  """

  name: str
  hbm_bytes: int
  hbm_bandwidth: float
  peak_flops: float
  ici_bandwidth: float
  dimensions: int
  accelerator: str
  devices_per_chip: int = 1


CHIPS = {
  chip.name: chip
  for chip in (
    Chip("v4", int(30.75 * GIB), 1200e9, 275e12, 600e9 / 2, 3, "v4"),
    Chip("v5e", int(15.75 * GIB), 819e9, 197e12, 400e9 / 2, 2,
         "v5litepod"),
    Chip("v5p", int(95.74 * GIB), 2765e9, 459e12, 1200e9 / 2, 3, "v5p"),
    Chip("v6e", int(31.25 * GIB), 1638e9, 918e12, 800e9 / 2, 2, "v6e"),
    # Half a chip: jax sees two devices per chip.
    Chip("tpu7x", int(94.75 * GIB), 7380e9 / 2, 2307e12 / 2,
         1200e9 / 2 / 2, 3, "tpu7x", devices_per_chip=2),
  )
}  # fmt: skip

# Slice shapes, from one host (or part of one) to 256 chips.
_SHAPES = {
  2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
  3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice: a generation, and its chips per dimension, such as "4x4"."""

  chip: Chip
  shape: str

  @property
  def name(self) -> str:
    """Its name, such as `v5e:4x4`."""
    return f"{self.chip.name}:{self.shape}"

  @property
  def num_chips(self) -> int:
    """Chips in the slice."""
    return math.prod(map(int, self.shape.split("x")))

  @property
  def num_devices(self) -> int:
    """Devices that jax sees."""
    return self.num_chips * self.chip.devices_per_chip

  @property
  def accelerator_type(self) -> str:
    """Cloud's name for the slice, such as `v5litepod-16`."""
    count = self.num_chips * (2 if self.chip.dimensions == 3 else 1)
    return f"{self.chip.accelerator}-{count}"


TOPOLOGIES = [
  Topology(chip, shape)
  for chip in CHIPS.values()
  for shape in _SHAPES[chip.dimensions]
]


def topology(name: str) -> Topology:
  """Looks up a slice by name, `v5e:4x4`, or Cloud's name, `v5litepod-16`."""
  for one in TOPOLOGIES:
    if name in (one.name, one.accelerator_type):
      return one
  raise ValueError(
    f"unknown topology {name!r}; known are "
    + ", ".join(f"{t.name} ({t.accelerator_type})" for t in TOPOLOGIES)
  )


def devices(one: Topology) -> list:
  """The slice's devices, for ahead-of-time compilation."""
  if not importlib.util.find_spec("libtpu"):
    raise OSError("libtpu is needed (x86-64 Linux): pip install -e '.[tpu]'")
  options: dict[str, Any] = {}
  if one.num_chips == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  if one.chip.name == "v4":
    options["chip_config_name"] = "megacore"
  return topologies.get_topology_desc(one.name, "tpu", **options).devices
