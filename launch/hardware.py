"""TPUs: Google's figures for each generation, and slices to compile for.

Figures are from https://docs.cloud.google.com/tpu/docs (system architecture),
read in November 2026; v4's six links of 50 GB/s are from its paper (Jouppi et
al., 2023). Usable memory is what libtpu's compiler reports, less than what is
installed.
"""

import dataclasses
import importlib.util
import math
from typing import Any

from jax.experimental import topologies

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device of a generation, as the roofline sees it.

  Attributes:
    name: the generation.
    hbm_bytes: memory that a program may use on one device.
    hbm_bandwidth: bytes a second.
    peak_flops: bfloat16 operations a second.
    ici_bandwidth: bytes a second out of a device, over all its links: half of
      what Google's tables call bidirectional.
    dimensions: of its torus, 2 or 3.
    accelerator: how Cloud names a slice of it: with the number of chips if the
      torus has two dimensions, else of cores, two a chip.
    devices_per_chip: devices that jax sees; the figures above are of a device.
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
    # Half a chip: jax sees two devices on each.
    Chip("tpu7x", int(94.75 * GIB), 7380e9 / 2, 2307e12 / 2,
         1200e9 / 2 / 2, 3, "tpu7x", devices_per_chip=2),
  )
}  # fmt: skip

# Shapes of slices, from one host (or a part of one) to 256 chips.
_SHAPES = {
  2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
  3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice: a generation, and chips along each dimension, as in "4x4"."""

  chip: Chip
  shape: str

  @property
  def name(self) -> str:
    """As in `v5e:4x4`."""
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
    """Cloud's name of the slice, as in `v5litepod-16`."""
    count = self.num_chips * (2 if self.chip.dimensions == 3 else 1)
    return f"{self.chip.accelerator}-{count}"


TOPOLOGIES = [
  Topology(chip, shape)
  for chip in CHIPS.values()
  for shape in _SHAPES[chip.dimensions]
]


def topology(name: str) -> Topology:
  """A slice as in `v5e:4x4`, or as Cloud names it, `v5litepod-16`."""
  for one in TOPOLOGIES:
    if name in (one.name, one.accelerator_type):
      return one
  raise ValueError(
    f"unknown topology {name!r}; known are "
    + ", ".join(f"{t.name} ({t.accelerator_type})" for t in TOPOLOGIES)
  )


def devices(one: Topology) -> list:
  """The slice's devices, to compile for."""
  if not importlib.util.find_spec("libtpu"):
    raise OSError("libtpu is needed (x86-64 Linux): pip install -e '.[tpu]'")
  options: dict[str, Any] = {}
  if one.num_chips == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  if one.chip.name == "v4":
    options["chip_config_name"] = "megacore"
  return topologies.get_topology_desc(one.name, "tpu", **options).devices
