"""Fast compilation for the CPU, without optimisations.

For programs that run once and test no compiler: what a rule sums to, what a
command writes. The loop (`test_decode.py`), caches, the warp and models are
compiled as for users,
and so is every rule once (`test_output_law_holds_in_float32`).
"""

import contextlib
import os
from unittest import mock

OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_use_fusion_emitters": False,
  "xla_cpu_parallel_codegen_split_count": 1,  # else LLVM begins many times
}


def jit(function, **options):
  """`jax.jit` of a program that runs once; quick to compile on a CPU."""
  import jax

  quick = OPTIONS if jax.default_backend() == "cpu" else None
  return jax.jit(function, compiler_options=quick, **options)


@contextlib.contextmanager
def quickly():
  """Compiles quickly inside, also in processes begun there; for CPUs only.

  A process keeps its programs in memory and does not ask how they were made,
  and the two ways round differently: none may pass from one into the other.
  """
  import jax
  from jax._src import compiler

  if jax.default_backend() != "cpu":
    yield
    return
  real = compiler.get_compile_options

  def options(*args, env_options_overrides=None, **others):
    asked = OPTIONS | (env_options_overrides or {})
    return real(*args, env_options_overrides=asked, **others)

  real(1, 1)  # a process reads XLA_FLAGS once: this one has now
  flags = [f"--{name}={value}".lower() for name, value in OPTIONS.items()]
  flags = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
  with (
    mock.patch.dict(os.environ, XLA_FLAGS=flags),
    mock.patch.object(compiler, "get_compile_options", options),
  ):
    jax.clear_caches()
    try:
      yield
    finally:
      jax.clear_caches()
