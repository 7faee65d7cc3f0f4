"""What replaces a part of specjax, for the mutants of tests/specjax/mutants."""

import types
from unittest import mock

import compiling

from specjax import decode
from specjax import warp as warp_lib

# Each mutant is a program of its own: compiling it is most of the work.
compiled = compiling.jit


def copy_of(module, **replaced):
  """What a module's name may stand for instead: it, with other functions."""
  return types.SimpleNamespace(**vars(module) | replaced)


def verifier_warps(warp):
  """The verifier alone makes its laws by another function."""
  return mock.patch.object(decode, "warp_lib", copy_of(warp_lib, warp=warp))
