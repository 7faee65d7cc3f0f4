"""Slices by their names."""

import pytest

from launch import hardware


@pytest.mark.parametrize(
  ("name", "chips", "devices", "cloud"),
  [
    ("v5e:2x2", 4, 4, "v5litepod-4"),
    ("v4:4x4x4", 64, 64, "v4-128"),
    ("v5p:2x2x1", 4, 4, "v5p-8"),
    ("v6e:8x8", 64, 64, "v6e-64"),
    ("tpu7x:2x2x1", 4, 8, "tpu7x-8"),
  ],
)
def test_slices_are_found_by_topology_or_accelerator_type(
  name, chips, devices, cloud
):
  one = hardware.topology(name)
  assert (one.num_chips, one.num_devices) == (chips, devices)
  assert hardware.topology(cloud) == one
  assert one.accelerator_type == cloud


def test_device_counts_match_libtpu():
  """A v4 chip is one device, a tpu7x chip two; needs the compiler's tables."""
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  for one in hardware.TOPOLOGIES:
    assert len(hardware.devices(one)) == one.num_devices, one.name
