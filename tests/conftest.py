"""Shared by all tests."""

import gc
import hashlib
import itertools
import os
import pathlib
import platform
import sys

import pytest

from launch import without_tpu

TESTS = pathlib.Path(__file__).parent
# Helpers are imported by their names, whatever folder they are in.
sys.path[:0] = sorted({str(path.parent) for path in TESTS.rglob("*.py")})

# Most programs of the tests run once: compiling them is most of the work. What
# a user's XLA makes of them is tested by `make test-slow`, whose XLA_FLAGS are
# empty, and by `make test XLA_FLAGS=`.
QUICK = (
  "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
  " --xla_cpu_parallel_codegen_split_count=1"
)
_NUMBER = itertools.count()
_MOST_BYTES = 3 * 2**30  # that a worker holds


def _cache() -> pathlib.Path:
  """A folder of compiled programs that all runs on this processor share.

  The instructions that a program was made for are not in JAX's key of it.
  """
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  about = pathlib.Path("/proc/cpuinfo")
  lines = about.read_text().splitlines() if about.is_file() else []
  flags = sorted({x for x in lines if x.startswith(("flags", "Features"))})
  processor = platform.machine() + platform.processor() + "".join(flags)
  name = hashlib.sha256(processor.encode()).hexdigest()[:12]
  return pathlib.Path(home) / "specjax" / "tests" / name


def pytest_configure(config):
  """Lets all runs share compiled programs, and workers a GPU."""
  gc.set_threshold(20_000)  # traces are many objects, and hardly any a cycle
  without_tpu.set_environment()
  os.environ.setdefault("XLA_FLAGS", QUICK)
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
  # XLA may follow call stacks forever: see specjax/runtime/compilation.py.
  os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers are given it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_cache())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


@pytest.fixture(scope="session", autouse=True)
def _whole_float32_products():
  """A GPU else multiplies float32 matrices in TF32, of 10 bits of mantissa."""
  import jax

  if jax.default_backend() == "gpu":
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def x64():
  """Arrays of 64 bits, for laws that are compared to 1e-10 and less."""
  import jax

  with jax.enable_x64(True):
    yield


@pytest.fixture(autouse=True)
def _little_memory():
  """Frees compiled programs before memory, or memory maps, run out."""
  yield
  if next(_NUMBER) % 16:  # counting takes time
    return
  import jax

  from specjax.runtime import compilation

  pages = pathlib.Path("/proc/self/statm")
  used = int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0
  if used > _MOST_BYTES or compilation.has_many_maps():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _the_cache_stays():
  """Commands that time things turn the cache of compiled programs off."""
  import jax

  names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
  before = {name: jax.config.values[name] for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
