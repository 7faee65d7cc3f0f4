"""`jax.jit` for programs that run once: compiling them is most of the work."""

import functools

import jax

quick_jit = functools.partial(
  jax.jit,
  compiler_options={
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
  },
)
