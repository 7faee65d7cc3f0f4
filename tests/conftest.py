"""Shared by all tests: `toys` and `files` are importable by name."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

_MAPS = pathlib.Path("/proc/self/maps")
# Linux allows a process 65,530 memory maps, and every compiled program takes a
# few: XLA aborts where no more are to be had.
_MOST_MAPS = 25_000


@pytest.fixture(autouse=True)
def _few_memory_maps():
  yield
  if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
    jax.clear_caches()
