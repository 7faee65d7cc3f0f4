"""Shared by all tests: `toys` and `files` are importable by name."""

import gc
import itertools
import os
import pathlib
import sys

import pytest

from launch import without_tpu

TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(TESTS))

import compiling  # noqa: E402

_NUMBER = itertools.count()


def pytest_configure(config):
  """Lets all runs share compiled programs, and workers a GPU."""
  gc.set_threshold(20_000)  # traces are many objects, and hardly any a cycle
  without_tpu.set_environment()
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
  # XLA may follow call stacks forever: see specjax/runtime/compilation.py.
  os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers are given it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiling.cache())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  compiling.write_whole()


@pytest.fixture(scope="session", autouse=True)
def _whole_float32_products():
  """A GPU else multiplies float32 matrices in TF32, of 10 bits of mantissa."""
  import jax

  if jax.default_backend() == "gpu":
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module")
def quick_to_compile():
  """For modules of many programs that run once: see compiling.py."""
  compiling.switch(True)


@pytest.fixture
def x64():
  """Arrays of 64 bits, for laws that are compared to 1e-10 and less."""
  import jax

  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_as_for_users(request):
  """The others, though the module before was compiled quickly."""
  compiling.begin(request.node.iter_markers("usefixtures"))


@pytest.fixture(autouse=True)
def _few_memory_maps():
  yield
  if next(_NUMBER) % 16:  # counting takes time
    return
  import jax

  from specjax.runtime import compilation

  if compilation.has_many_maps():
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _the_cache_stays():
  """Commands that time things turn the cache of compiled programs off."""
  import jax

  names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
  before = {name: jax.config.values[name] for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
