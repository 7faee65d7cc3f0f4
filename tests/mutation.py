"""What replaces a part of specjax, for the mutants of tests/specjax/mutants."""

import functools
import types
from unittest import mock

import compiling
import jax

from specjax import decode
from specjax import warp as warp_lib

# Each mutant is a program of its own: compiling it is most of the work.
compiled = functools.partial(jax.jit, compiler_options=compiling.OPTIONS)


def copy_of(module, **replaced):
  """What a module's name may stand for instead: it, with other functions."""
  return types.SimpleNamespace(**vars(module) | replaced)


def verifier_warps(warp):
  """The verifier alone makes its laws by another function."""
  return mock.patch.object(decode, "warp_lib", copy_of(warp_lib, warp=warp))
