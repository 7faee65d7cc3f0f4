"""What every command line does first: flags, caches, and honest exit codes.

A user's mistake (a `ValueError` or a missing file while the command is being
set up, or a `UserError` at any time) is one line on stderr and exit code 2.
Anything else is a bug and keeps its traceback.
"""

import os
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
from absl import app, flags


class UserError(Exception):
  """Something the user can mend; its text is the whole message."""


def run(main: Callable[[Sequence[str]], int | None]) -> None:
  """Parses flags and runs `main(argv)`; see the module's docstring."""
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  jax.config.config_with_absl()
  _default_flag("jax_compilation_cache_dir", str(_cache_dir()))
  _default_flag("jax_persistent_cache_min_compile_time_secs", 0.0)

  def guarded(argv):
    try:
      return main(argv)
    except (UserError, ValueError, FileNotFoundError) as error:
      if isinstance(error, ValueError) and _raised_by_jax(error):
        raise
      return fail(str(error))

  app.run(guarded, flags_parser=_parse)


def fail(message: str) -> int:
  """Prints one message on stderr; returns the exit code 2."""
  print(f"error: {message}", file=sys.stderr)
  return 2


def _parse(argv):
  try:
    return flags.FLAGS(argv)
  except (
    flags.Error,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OSError,
    ImportError,
    SyntaxError,
  ) as error:
    text = error.args[0] if error.args else error
    sys.exit(fail(" ".join(str(text).split())))


def _raised_by_jax(error: BaseException) -> bool:
  """Whether the innermost frame is jax's own: then it is not a user's error."""
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  return "/jax/" in trace.tb_frame.f_code.co_filename.replace(os.sep, "/")


def _default_flag(name: str, value) -> None:
  """Sets a jax option unless the environment has; a flag still overrides."""
  if name.upper() not in os.environ:
    jax.config.update(name, value)
    flags.FLAGS.set_default(name, value)


def _cache_dir() -> pathlib.Path:
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "specjax" / "xla"
