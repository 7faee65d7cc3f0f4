"""Replaces parts of specjax, for the mutants of tests/specjax/mutants."""

import types
from unittest import mock

from specjax import decode
from specjax import warp as warp_lib


def copy_of(module, **replaced):
  """A copy of a module with some functions replaced."""
  return types.SimpleNamespace(**vars(module) | replaced)


def verifier_warps(warp):
  """Replaces the warp of the verifier alone."""
  return mock.patch.object(decode, "warp_lib", copy_of(warp_lib, warp=warp))
