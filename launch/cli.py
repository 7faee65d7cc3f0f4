"""Command lines: shared flags, help, compilation cache and exit codes.

A user's mistake (`UserError`, or any ValueError or OSError) prints one line on
stderr and exits with code 2; --debug shows its traceback. Other errors are bugs
and keep their tracebacks.

A command takes the flags that its module defines and the shared ones that it
declares with `reads`; other shared flags are rejected.
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

# Flags that several commands share; a name can be defined only once.
CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Experiment file, see configs/.", lock_config=True
)
PROMPTS = flags.DEFINE_string("prompts", None, "File of prompts, JSONL.")
OUTPUT = flags.DEFINE_string("output", None, "Where to write the results.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace existing outputs.")
WORKDIR = flags.DEFINE_string(
  "workdir", None, "Folder for a training run or for figures."
)
TARGET = flags.DEFINE_string(
  "target",
  None,
  "A distribution (0.2,0.3,0.5), a plan's shape, or a directory.",
)
RULE = flags.DEFINE_string(
  "rule", None, 'A rule, such as "token" or "typical(epsilon=0.2)".'
)
TEMPERATURES = flags.DEFINE_list(
  "temperatures", None, "Temperatures to decode at, in turn."
)
BATCH_SIZES = flags.DEFINE_list(
  "batch_sizes", None, "Batch sizes to decode with, in turn."
)
COUNT = flags.DEFINE_integer("count", None, "How many to make.", lower_bound=1)
SEED = flags.DEFINE_integer(
  "seed", None, "Seed for sampling or for the search.", lower_bound=0,
  upper_bound=2**32 - 1,
)  # fmt: skip
_DEBUG = flags.DEFINE_bool("debug", False, "Show tracebacks of all errors.")

flags.disclaim_key_flags()  # later declarations belong to the caller

# A command takes the arguments left over by the flags and returns an exit code.
Command = Callable[[Sequence[str]], int]
# Exit code of a run that saved its state and stopped on request: the same
# command resumes it (EX_TEMPFAIL of sysexits.h).
UNFINISHED = 75

_MORE_HELP = """
--helpfull lists all flags and the given config's settings;
--help=drafters lists drafters; --debug shows tracebacks."""
_HELP = {"--help", "-help", "-h", "-?", "--helpshort"}


class UserError(Exception):
  """A user's mistake; its text is the whole message."""


def reads(*shared: flags.FlagHolder) -> None:
  """Declares which shared flags the calling command reads.

  Commands with --output or --workdir also read --overwrite.
  """
  writes = any(flag.name in (OUTPUT.name, WORKDIR.name) for flag in shared)
  for flag in (*shared, *([OVERWRITE] if writes else [])):
    flags.declare_key_flag(flag.name)


def integers(flag: flags.FlagHolder, *, default: Sequence[int]) -> list[int]:
  """The positive integers of a list flag; UserError for anything else."""
  if flag.value is None:
    return list(default)
  if not flag.value or not all(x.isdecimal() and int(x) for x in flag.value):
    raise UserError(
      f"--{flag.name} must be positive integers, as in 1,2,4, got "
      f"{','.join(flag.value)!r}"
    )
  return [int(x) for x in flag.value]


def run(
  command: Command,
  *,
  required: Sequence[str] = ("config",),
  several_processes: bool = False,
  preemption_notice: bool = False,
) -> None:
  """Runs a command as the program and exits with its code."""
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  sys.stdout.reconfigure(errors="backslashreplace")
  without_tpu.set_environment()
  jax.config.config_with_absl()
  # Do not warn about missing accelerators.
  for name in ("xla_bridge", "distributed"):
    logging.getLogger(f"jax._src.{name}").setLevel(logging.WARNING)
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  cache = pathlib.Path(home) / "specjax" / "xla"
  _default_flag("jax_compilation_cache_dir", str(cache))
  _default_flag("jax_persistent_cache_min_compile_time_secs", 0.0)

  def parse(argv):
    try:
      return _parse(command, argv, required)
    except UserError as error:
      sys.exit(fail(str(error)))

  def joined(argv):
    if several_processes:
      processes.start(preemption_notice=preemption_notice)
    return command(argv)

  def body(argv):
    try:
      code = _guarded(joined, argv)
    except KeyboardInterrupt:
      print("interrupted", file=sys.stderr)
      code = 130  # as a shell reports SIGINT
    except Exception:
      if not processes.several():
        raise
      traceback.print_exc()
      code = fail("this process failed, or another one it waited for", 1)
    if code and processes.several():
      processes.leave(code)
    return code

  app.run(body, flags_parser=parse)


def fail(message: str, code: int = 2) -> int:
  """Prints one message on stderr; returns the exit code."""
  label = f"process {jax.process_index()}: " if processes.several() else ""
  print(f"error: {label}{' '.join(message.split())}", file=sys.stderr)
  return code


def _guarded(command: Command, argv: Sequence[str]) -> int:
  """Runs a command; prints one line for a user's mistake."""
  try:
    code = command(argv)
    sys.stdout.flush()
    return code
  except BrokenPipeError:  # for example, from `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # as a shell reports SIGPIPE
  except (UserError, ValueError, OSError, processes.UnjoinedError) as error:
    if _DEBUG.value:
      traceback.print_exc()
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
      text = f"{error.filename}: {error.strerror}"
    return fail(text, 1 if isinstance(error, processes.UnjoinedError) else 2)


def _parse(
  command: Command, argv: Sequence[str], required: Sequence[str] = ()
) -> list[str]:
  """Parses flags and the config file; UserError if they are invalid."""
  module = sys.modules[command.__module__]
  if "--help=drafters" in argv:
    from launch.assembly import registry

    for call, text in registry.help_table():
      print(f"{call}\n    {text}")
    raise SystemExit(0)
  if not _HELP.isdisjoint(argv):
    print(module.__doc__, flags.FLAGS.module_help(module), _MORE_HELP, sep="\n")
    raise SystemExit(0)
  try:
    rest = flags.FLAGS([x for x in argv if x != "--helpfull"])
    _ = CONFIG.value and CONFIG.value.keys()  # forces it to be read
  except Exception as error:  # a config file may raise anything
    text = str(error).replace("\\n", ": ").replace("\\'", "").strip()
    text = text or type(error).__name__
    text = text[1:-1] if text[0] == "'" else text  # a KeyError has quotes
    raise UserError(text.splitlines()[-1]) from None
  if "--helpfull" in argv:
    print(module.__doc__, flags.FLAGS.get_help(), CONFIG.value or "", sep="\n")
    raise SystemExit(0)
  read = {f.name for f in flags.FLAGS.get_key_flags_for_module(module)}
  shared = {f.name for f in flags.FLAGS.flags_by_module_dict()[__name__]}
  for name in sorted(shared - read - {_DEBUG.name}):
    if flags.FLAGS[name].present:
      raise UserError(f"this command does not read --{name}: see --help")
  for name in required:
    if flags.FLAGS[name].value is None:
      raise UserError(f"--{name} is required; see --help for an example")
  if rest[1:]:
    raise UserError(f"unexpected {rest[1:]}: settings are --name=value")
  return rest


def _default_flag(name: str, value) -> None:
  """Sets a jax option unless the environment does; flags still override it."""
  if name.upper() not in os.environ:
    jax.config.update(name, value)
    flags.FLAGS.set_default(name, value)
