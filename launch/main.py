"""What every command line shares: flags, caches, and honest exit codes.

A user's mistake (a `ValueError`, an `OSError` or a `UserError`) is one line on
stderr and exit code 2. What jax itself raises, and everything else, is a bug
and keeps its traceback.
"""

import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence

import jax
from absl import app, flags
from ml_collections import config_flags

from launch import processes, without_tpu

flags.adopt_module_key_flags(processes)

# Flags that several commands have; a name can be defined only once.
CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Experiment file, as in configs/.", lock_config=True
)
PROMPTS = flags.DEFINE_string(
  "prompts", None, 'Prompts: a line {"id": ..., "prompt": "..."} each.'
)
OUTPUT = flags.DEFINE_string("output", None, "Where to write the results.")
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Checkpoints and metrics of a run."
)

TARGET = flags.DEFINE_string(
  "target", None, "The target: its law (0.2,0.3,0.5), or its shape (a name)."
)
DRAFT = flags.DEFINE_string("draft", None, "The draft, as --target.")
RULE = flags.DEFINE_string(
  "rule", None, 'A rule, as in "token" or "typical(epsilon=0.2)".'
)
NUM_SPECULATIVE_TOKENS = flags.DEFINE_list(
  "num_speculative_tokens", None, "G, tokens of a drafted path."
)
NUM_DRAFTS = flags.DEFINE_list(
  "num_drafts", None, "Numbers of drafts: K of rules, each M of the theory."
)
SEED = flags.DEFINE_integer(
  "seed", None, "Of what is sampled, where no config says.", lower_bound=0
)

# A command takes the arguments left over by the flags and returns an exit code.
Command = Callable[[Sequence[str]], int]


class UserError(Exception):
  """Something the user can mend; its text is the whole message."""


def integers(flag: flags.FlagHolder, *, default: Sequence[int]) -> list[int]:
  """The positive integers of a list flag; UserError if they are none."""
  if flag.value is None:
    return list(default)
  try:
    counts = [int(text) for text in flag.value]
  except ValueError:
    counts = []
  if not counts or min(counts) < 1:
    raise UserError(
      f"--{flag.name} must be positive integers, as in 1,2,4, got "
      f"{','.join(flag.value)!r}"
    )
  return counts


def run(
  command: Command,
  *,
  required: Sequence[str] = ("config",),
  several_processes: bool = False,
  preemption_notice: bool = False,
) -> None:
  """Runs a command as the program and exits with its code.

  Args:
    command: what to run.
    required: flags that must be given.
    several_processes: whether it may be one of several processes.
    preemption_notice: see `processes.start`.
  """
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  without_tpu.set_environment()
  jax.config.config_with_absl()
  # Which accelerators are not there is no news.
  for name in ("xla_bridge", "distributed"):
    logging.getLogger(f"jax._src.{name}").setLevel(logging.WARNING)
  _default_flag("jax_compilation_cache_dir", str(_cache_dir()))
  _default_flag("jax_persistent_cache_min_compile_time_secs", 0.0)

  def parse(argv):
    try:
      rest = _parse(argv)
      for name in required:
        if flags.FLAGS[name].value is None:
          raise UserError(f"--{name} is required; see --help for an example")
      return rest
    except UserError as error:
      sys.exit(fail(str(error)))

  def whole(argv):
    if several_processes:
      processes.start(preemption_notice=preemption_notice)
    else:
      processes.refuse()
    return command(argv)

  def body(argv):
    failed: list[BaseException] = []
    try:
      code = _guarded(whole, argv, failed)
    except KeyboardInterrupt as error:
      failed.append(error)
      print(
        "interrupted; what --output or --workdir holds so far is kept, and the "
        "same command goes on from there",
        file=sys.stderr,
      )
      code = 130  # as a shell reports SIGINT
    except Exception as error:
      if not processes.several():
        raise
      failed.append(error)
      traceback.print_exc()
      code = fail("this process failed, or one that it waited for", 1)
    if failed and processes.several():
      processes.leave(code)
    return code

  app.run(body, flags_parser=parse)


def execute(command: Command, argv: Sequence[str]) -> int:
  """Parses `argv` (program name first) and runs; returns the exit code."""
  # Settings of a config file (`--config.x=1`) are looked for in sys.argv.
  outer, sys.argv = sys.argv, list(argv)
  try:
    rest = _parse(argv)
  except UserError as error:
    return fail(str(error))
  finally:
    sys.argv = outer
  return _guarded(command, rest)


def fail(message: str, code: int = 2) -> int:
  """Prints one message on stderr; returns the exit code."""
  who = f"process {jax.process_index()}: " if processes.several() else ""
  print(f"error: {who}{message}", file=sys.stderr)
  return code


def _guarded(
  command: Command, argv: Sequence[str], failed: list | None = None
) -> int:
  """Runs; a user's mistake becomes one line, and is appended to `failed`."""
  try:
    return command(argv)
  except (UserError, ValueError, OSError) as error:
    if _raised_by_jax(error):
      raise
    if failed is not None:
      failed.append(error)
    return fail(" ".join(str(error).split()))


def _parse(argv: Sequence[str]) -> list[str]:
  """Parses flags; a config file may raise anything, and its text is shown."""
  try:
    rest = flags.FLAGS(list(argv))
  except Exception as error:
    text = str(error.args[0] if error.args else error)
    text = text.replace("\\n", "\n").replace("\\'", "'")  # a repr, at times
    if "Traceback" in text:  # of the config's file: its last line says what
      text = text.strip().splitlines()[-1]
    raise UserError(" ".join(text.split())) from None
  if rest[1:]:
    raise UserError(
      f"unexpected arguments {rest[1:]}: settings are written --name=value"
    )
  return rest


def _raised_by_jax(error: BaseException) -> bool:
  """Whether the innermost frame is jax's own: then it is not a user's error."""
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  file = pathlib.Path(trace.tb_frame.f_code.co_filename)
  return pathlib.Path(jax.__file__).parent in file.parents


def _default_flag(name: str, value) -> None:
  """Sets a jax option unless the environment has; a flag still overrides."""
  if name.upper() not in os.environ:
    jax.config.update(name, value)
    flags.FLAGS.set_default(name, value)


def _cache_dir() -> pathlib.Path:
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "specjax" / "xla"
