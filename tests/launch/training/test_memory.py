"""Memory that is freed and asked for again costs no page faults."""

import platform
import subprocess
import sys

import pytest

_TWICE = """
import ctypes, resource, sys
from launch.training import memory
if sys.argv[1] == "keep":
  assert memory.keep_freed()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = libc.memset.argtypes = None
size = 1 << 26
for _ in range(2):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
  ctypes.memset(block, 1, size)
  libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc only")
@pytest.mark.parametrize("keep", [True, False])
def test_kept_memory_costs_no_page_faults(keep):
  actual = subprocess.run(
    [sys.executable, "-c", _TWICE, "keep" if keep else "leave"],
    check=True, capture_output=True, text=True,
  )  # fmt: skip
  assert (int(actual.stdout) < 100) == keep
