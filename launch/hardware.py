"""Figures of accelerators, and the slices of TPUs with their devices.

TPUs' figures are Google's, from the pages of each generation under
https://docs.cloud.google.com/tpu/docs (system architecture), read in November
2026; v4's six links of 50 GB/s are from its paper (Jouppi et al., 2023). The
memory that a program may use is what libtpu's compiler reports, less than what
is soldered on. GPUs' peaks are those of NVIDIA's data sheets.
"""

import dataclasses
import math

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """A device of a generation, as the roofline sees it.

  Attributes:
    name: the generation.
    hbm_bytes: memory that a program may use on one device.
    hbm_bandwidth: bytes a second.
    peak_flops: bfloat16 operations a second.
    ici_bandwidth: bytes a second out of a device, over all its links, while as
      many come in: half of what Google's tables call bidirectional.
    dimensions: of its torus, 2 or 3.
    devices_per_chip: devices that jax sees; the figures above are of a device.
    accelerator: how Cloud names a slice of it; the number counts `counted`.
    counted: "chips" or "cores", of which there are two a chip.
    kinds: what `device_kind` says of it.
  """

  name: str
  hbm_bytes: int
  hbm_bandwidth: float
  peak_flops: float
  ici_bandwidth: float
  dimensions: int
  devices_per_chip: int = 1
  accelerator: str
  counted: str = "chips"
  kinds: tuple[str, ...]


CHIPS = {
  chip.name: chip
  for chip in (
    Chip(
      name="v4", hbm_bytes=int(30.75 * GIB), hbm_bandwidth=1200e9,
      peak_flops=275e12, ici_bandwidth=600e9 / 2, dimensions=3,
      accelerator="v4", counted="cores", kinds=("TPU v4",),
    ),
    Chip(
      name="v5e", hbm_bytes=int(15.75 * GIB), hbm_bandwidth=819e9,
      peak_flops=197e12, ici_bandwidth=400e9 / 2, dimensions=2,
      accelerator="v5litepod", kinds=("TPU v5 lite", "TPU v5e"),
    ),
    Chip(
      name="v5p", hbm_bytes=int(95.74 * GIB), hbm_bandwidth=2765e9,
      peak_flops=459e12, ici_bandwidth=1200e9 / 2, dimensions=3,
      accelerator="v5p", counted="cores", kinds=("TPU v5p", "TPU v5"),
    ),
    Chip(
      name="v6e", hbm_bytes=int(31.25 * GIB), hbm_bandwidth=1638e9,
      peak_flops=918e12, ici_bandwidth=800e9 / 2, dimensions=2,
      accelerator="v6e", kinds=("TPU v6 lite", "TPU v6e"),
    ),
    Chip(  # half a chip: jax sees two devices on each
      name="tpu7x", hbm_bytes=int(94.75 * GIB), hbm_bandwidth=7380e9 / 2,
      peak_flops=2307e12 / 2, ici_bandwidth=1200e9 / 2 / 2, dimensions=3,
      devices_per_chip=2, accelerator="tpu7x", counted="cores",
      kinds=("TPU7x", "TPU v7x"),
    ),
  )
}  # fmt: skip

# Dense bfloat16 operations a second by `device_kind` without a leading
# "NVIDIA ". A slice of a GPU (MIG) has another name.
_GPUS = {
  "A100-PCIE-40GB": 312e12,
  "A100-SXM4-40GB": 312e12,
  "A100 80GB PCIe": 312e12,
  "A100-SXM4-80GB": 312e12,
  "H100 PCIe": 756e12,
  "H100 80GB HBM3": 989e12,  # SXM
  "H200": 989e12,
}


def peak_flops_of(device_kind: str) -> float | None:
  """A device's dense bfloat16 operations a second, or None if unknown."""
  for chip in CHIPS.values():
    if device_kind in chip.kinds:
      return chip.peak_flops
  return _GPUS.get(device_kind.removeprefix("NVIDIA "))


# Shapes of slices, from one host (or a part of one) to 256 chips.
_SHAPES = {
  2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
  3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice: a generation and the shape of its torus.

  Attributes:
    chip: the generation.
    shape: chips along each dimension, as in "4x4".
  """

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
    count = self.num_chips * (2 if self.chip.counted == "cores" else 1)
    return f"{self.chip.accelerator}-{count}"


def topologies() -> list[Topology]:
  """All slices that are known here."""
  return [
    Topology(chip, shape)
    for chip in CHIPS.values()
    for shape in _SHAPES[chip.dimensions]
  ]


def topology(name: str) -> Topology:
  """A slice by its shape, `v5e:4x4`, or as Cloud names it, `v5litepod-16`.

  Raises:
    ValueError: for an unknown one; it lists those that are known.
  """
  for one in topologies():
    if name in (one.name, one.accelerator_type):
      return one
  raise ValueError(
    f"unknown topology {name!r}; known are "
    + ", ".join(f"{t.name} ({t.accelerator_type})" for t in topologies())
  )


def devices(one: Topology) -> list:
  """The slice's devices, to compile for.

  Raises:
    OSError: if libtpu is not installed.
  """
  from jax.experimental import topologies as jax_topologies

  try:
    import libtpu  # noqa: F401
  except ImportError as error:
    raise OSError(
      "libtpu is needed to compile for TPUs (x86-64 Linux): "
      "pip install -e '.[tpu]'"
    ) from error
  options = {}
  if one.num_chips == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  if one.chip.name == "v4":
    options["chip_config_name"] = "megacore"
  return list(
    jax_topologies.get_topology_desc(
      platform="tpu", topology_name=one.name, **options
    ).devices
  )
