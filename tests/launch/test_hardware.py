"""Slices by their names."""

import pytest

from launch import hardware


@pytest.mark.parametrize(
  ("name", "chips_", "devices", "cloud"),
  [
    ("v5e:2x2", 4, 4, "v5litepod-4"),
    ("v5e-16", 16, 16, "v5litepod-16"),
    ("v5p-8", 4, 4, "v5p-8"),
    ("v5p-64", 32, 32, "v5p-64"),
    ("v6e-64", 64, 64, "v6e-64"),
    ("v4:4x4x4", 64, 64, "v4-128"),
    ("tpu7x:2x2x1", 4, 8, "tpu7x-8"),
    ("v5litepod-256", 256, 256, "v5litepod-256"),
  ],
)
def test_slices_go_by_both_names(name, chips_, devices, cloud):
  one = hardware.topology(name)
  assert (one.num_chips, one.num_devices) == (chips_, devices)
  assert one.accelerator_type == cloud
  assert hardware.topology(one.name) == hardware.topology(cloud) == one


def test_an_unknown_slice_lists_the_known_ones():
  with pytest.raises(ValueError, match=r"unknown topology 'v9:1x1'.*v5e:4x4"):
    hardware.topology("v9:1x1")


def test_every_generation_goes_from_one_host_to_256_chips():
  for generation in hardware.CHIPS:
    sizes = [
      t.num_chips for t in hardware.topologies() if t.chip.name == generation
    ]
    assert min(sizes) <= 4
    assert max(sizes) == 256
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("name", "pod"), [("v5e", 51.2e12), ("v6e", 102.4e12)])
def test_a_device_sends_its_share_of_a_pods_all_reduce(name, pod):
  """Google gives the all-reduce bandwidth of these pods, of 256 chips."""
  assert hardware.CHIPS[name].ici_bandwidth == pytest.approx(pod / 256)


def test_every_slice_has_the_devices_that_are_said():
  """A v4 chip is one device, a tpu7x chip two; needs the compiler's tables."""
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  for one in hardware.topologies():
    assert len(hardware.devices(one)) == one.num_devices, one.name


@pytest.mark.parametrize(
  ("kind", "giga"),
  [
    ("Tesla T4", 320),
    ("NVIDIA A100-SXM4-40GB", 1555),
    ("A100-PCIE-40GB", 1555),
    ("NVIDIA H100 PCIe", 2000),
    ("NVIDIA H200", 4800),
    ("TPU v5 lite", 819),
  ],
)
def test_a_known_device_has_its_makers_bandwidth(kind, giga):
  assert hardware.bandwidth_of(kind) == giga * 1e9


@pytest.mark.parametrize(
  "kind", ["cpu", "TPU v9", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", ""]
)
def test_other_devices_have_none(kind):
  assert hardware.bandwidth_of(kind) is None
