"""Fast compilation for the CPU, without optimizations.

For programs that run once and test no compiler: what a rule sums to, what a
command writes. The loop (`test_decode.py`), caches, the warp and models are
compiled as for users,
and so is every rule once (`test_output_law_holds_in_float32`).
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import tempfile
import time
from unittest import mock

OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_use_fusion_emitters": False,
  "xla_cpu_parallel_codegen_split_count": 1,  # else LLVM begins many times
}


_DAYS = 30  # that a compiled program is held


def cache() -> pathlib.Path:
  """A folder of compiled programs for this processor, shared by all runs.

  A program is the same for the same StableHLO, options and version of JAX; that
  it is made for the instructions of one processor is not in its key.
  """
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  about = pathlib.Path("/proc/cpuinfo")
  lines = about.read_text().splitlines() if about.is_file() else []
  named = sorted({x for x in lines if x.startswith(("flags", "Features"))})
  processor = platform.machine() + platform.processor() + "".join(named)
  name = hashlib.sha256(processor.encode()).hexdigest()[:12]
  folder = pathlib.Path(home) / "specjax" / "tests" / name
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:  # no home to write to
    return pathlib.Path(tempfile.mkdtemp(prefix="specjax-tests-"))
  old = time.time() - _DAYS * 86400
  for file in folder.iterdir():
    with contextlib.suppress(OSError):  # another run was quicker, or may not
      if file.is_file() and file.stat().st_mtime < old:
        file.unlink()
  return folder


def write_whole() -> None:
  """Lets JAX write a compiled program whole or not at all, if a run is killed.

  One that is half there would never be replaced.
  """
  from jax._src import lru_cache

  put = lru_cache.LRUCache.put

  def whole(self, key, value):
    path = self.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    if self.eviction_enabled or path.exists():
      return put(self, key, value)
    part = self.path / f"{key}.{os.getpid()}.part"
    part.write_bytes(value)
    part.replace(path)

  lru_cache.LRUCache.put = whole


def jit(function, **options):
  """`jax.jit` of a program that runs once; quick to compile on a CPU."""
  import jax

  quick = OPTIONS if jax.default_backend() == "cpu" else None
  return jax.jit(function, compiler_options=quick, **options)


_undo = contextlib.ExitStack()
_is_quick = False


def switch(quick: bool) -> None:
  """Compiles quickly from here on, also in processes begun here, or does not.

  For CPUs only. A process keeps its programs in memory and does not ask how
  they were made, and the two ways round differently: none may pass from one
  into the other. So they are dropped, but not between two modules that are
  compiled alike.
  """
  global _is_quick
  if quick == _is_quick:
    return
  import jax
  from jax._src import compiler

  if jax.default_backend() != "cpu":
    return
  jax.clear_caches()
  _is_quick = quick
  _undo.close()
  if not quick:
    return
  real = compiler.get_compile_options

  def options(*args, env_options_overrides=None, **others):
    asked = OPTIONS | (env_options_overrides or {})
    return real(*args, env_options_overrides=asked, **others)

  real(1, 1)  # a process reads XLA_FLAGS once: this one has now
  flags = [f"--{name}={value}".lower() for name, value in OPTIONS.items()]
  before = os.environ.get("XLA_FLAGS")
  os.environ["XLA_FLAGS"] = " ".join([*(before or "").split(), *flags])
  if before is None:
    _undo.callback(os.environ.pop, "XLA_FLAGS", None)
  else:
    _undo.callback(os.environ.update, XLA_FLAGS=before)
  _undo.enter_context(
    mock.patch.object(compiler, "get_compile_options", options)
  )


def is_quick() -> bool:
  return _is_quick


def begin(marks) -> None:
  """A module of these `usefixtures` marks: as for users unless it asks."""
  if not any("quick_to_compile" in mark.args for mark in marks):
    switch(False)


@contextlib.contextmanager
def quickly():
  """Compiles quickly inside."""
  before = _is_quick
  switch(True)
  try:
    yield
  finally:
    switch(before)
