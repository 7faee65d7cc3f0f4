"""Command lines: shared flags, help, compilation cache and exit codes.

A user's mistake is one line on stderr and exit code 2: a `UserError`, what the
operating system says of a file, or a `ValueError` that this project raises.
Every other error is a bug, and keeps its traceback: those of libraries, and
whatever is raised while jax traces a program, as in a rule or a drafter under
development.

A command reads the flags that its module defines, and those that it names with
`reads`: it takes no others, and `--help` lists no others.
"""

import logging
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence

import jax
import ml_collections
from absl import app, flags
from ml_collections import config_flags

from launch import processes, terminal, without_tpu

# Flags that several commands have; a name can be defined only once.
CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Experiment file, as in configs/.", lock_config=True
)
PROMPTS = flags.DEFINE_string(
  "prompts", None, 'Prompts: a line {"id": ..., "prompt": "..."} each.'
)
OUTPUT = flags.DEFINE_string("output", None, "Where to write the results.")
OVERWRITE = flags.DEFINE_bool(
  "overwrite", False, "Replace what is there, whatever it is of."
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "The folder of a run: a training, a report, figures."
)

TARGET = flags.DEFINE_string(
  "target", None,
  "The target: its law (0.2,0.3,0.5), the shape of a plan, or a checkpoint.",
)  # fmt: skip
DRAFT = flags.DEFINE_string("draft", None, "The draft, as --target.")
RULE = flags.DEFINE_string(
  "rule", None, 'A rule, as in "token" or "typical(epsilon=0.2)".'
)
NUM_SPECULATIVE_TOKENS = flags.DEFINE_list(
  "num_speculative_tokens", None, "G, tokens of a drafted path."
)
NUM_DRAFTS = flags.DEFINE_list(
  "num_drafts", None, "Paths that are drafted: K, or each M of the theory."
)
TEMPERATURES = flags.DEFINE_list(
  "temperatures", None, "Temperatures to decode at, one after the other."
)
TURNS = flags.DEFINE_integer(
  "turns", None, "Repetitions of what is timed, or a user's turns.",
  lower_bound=1,
)  # fmt: skip
BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Rows of a batch.")
TEXT_TOKENS = flags.DEFINE_integer(
  "text_tokens", 100, "Tokens that each row begins with.", lower_bound=1
)
ITERATIONS = flags.DEFINE_integer(
  "iterations", 15, "Times that each case is measured.", lower_bound=1
)
BATCH_SIZES = flags.DEFINE_list(
  "batch_sizes", None, "Rows that are decoded together, each number in turn."
)
TIMINGS = flags.DEFINE_list(
  "timings", None, "Results of launch.evaluate --timing=passes."
)
COUNT = flags.DEFINE_integer("count", None, "How many to make.", lower_bound=1)
SEED = flags.DEFINE_integer(
  "seed", None, "Of what is sampled or searched.", lower_bound=0,
  upper_bound=2**32 - 1,
)  # fmt: skip

flags.disclaim_key_flags()  # what is declared from here on is the caller's

# Settings that are arguments of what drafts, as an example has them.
_SAID_BY_DRAFTER = {
  "num_speculative_tokens": "model(tokens=4)",
  "draft": 'model("DIR")',
  "heads": 'eagle3("DIR")',
  "depth": "model(policy=survival)",
  "ladder": "ladder(model, lengths=(0, 1, 2, 4))",
  "num_drafts": "model(tree=paths(4))",
  "tree": "model(tree=(-1, 0, 0))",
  "num_nodes": "eagle3(tree=dynamic(60))",
  "num_children": "eagle3(tree=dynamic(60, top_k=10))",
  "siblings": "model(siblings=without_replacement)",
  "widths": "with_widths(suffix, 2, 4)",
  "max_ngram": "ngram(max_ngram=3)",
  "repeats": "repeats(eagle3, min_match=3)",
  "elsewhere": "repeats(eagle3(tokens=1), tokens=7)",
  "corpus": 'rest("INDEX")',
  "window": "lookahead(window=7)",
  "skip_layers": 'layer_skip("SET.json")',
  "skip_attention": 'layer_skip("SET.json")',
  "skip_mlp": 'layer_skip("SET.json")',
  "online": "online(model)",
}

# A command takes the arguments left over by the flags and returns an exit code.
Command = Callable[[Sequence[str]], int]
# The exit code of a run that saved its state and stopped because it was asked
# to: the same command goes on (EX_TEMPFAIL of sysexits.h).
UNFINISHED = 75

_JAX = pathlib.Path(jax.__file__).parent
_ROOT = pathlib.Path(__file__).parents[1]
_OURS = [_ROOT / name for name in ("configs", "launch", "models", "specjax")]
_HELP = {"--help", "-help", "-?"}


class UserError(Exception):
  """Something the user can mend; its text is the whole message."""


def reads(*shared: flags.FlagHolder) -> None:
  """Declares the flags of other modules that the calling command reads.

  Those of every command are among them, and --overwrite of all that write.
  """
  writes = any(flag.name in (OUTPUT.name, WORKDIR.name) for flag in shared)
  every = [processes.DISTRIBUTED, *([OVERWRITE] if writes else [])]
  for flag in (*every, *shared):
    flags.declare_key_flag(flag.name)


def refuse_with(what: str, *unread: flags.FlagHolder) -> None:
  """Raises UserError if flags are given that are not read beside `what`."""
  if names := [f"--{flag.name}" for flag in unread if flag.present]:
    raise UserError(f"{', '.join(names)}: not read with {what}")


_given: list[str] = []
_spread: set[str] = set()
_kept: dict[str, None] = {}


def takes_the_rest(flag: flags.FlagHolder) -> None:
  """Lets a list flag's values stand apart, as in `--flag A B`, if it is given.

  The caller takes the arguments that are left over as more values of it.
  """
  _spread.add(flag.name)


def arguments() -> list[str]:
  """The command line as it was parsed, without the program, files read in."""
  return list(_given)


def config_file() -> str:
  """The path in --config, without what stands after its colon."""
  return config_flags.get_config_filename(flags.FLAGS["config"]).split(":")[0]


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
  terminal.guard()
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  without_tpu.set_environment()
  jax.config.config_with_absl()
  # Which accelerators are not there is no news.
  for name in ("xla_bridge", "distributed"):
    logging.getLogger(f"jax._src.{name}").setLevel(logging.WARNING)
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  cache = pathlib.Path(home) / "specjax" / "xla"
  _default_flag("jax_compilation_cache_dir", str(cache))
  _default_flag("jax_persistent_cache_min_compile_time_secs", 0.0)

  def parse(argv):
    try:
      rest = _parse(command, argv)
      for name in required:
        if flags.FLAGS[name].value is None:
          raise UserError(f"--{name} is required; see --help for an example")
      return rest
    except UserError as error:
      sys.exit(fail(str(error)))
    except BrokenPipeError:
      sys.exit(terminal.reader_left())

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
      print(interruption(), file=sys.stderr)
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
  with terminal.guarded():
    try:
      rest = _parse(command, argv)
    except UserError as error:
      return fail(str(error))
    finally:
      sys.argv = outer
    return _guarded(command, rest)


def keeps(place: str) -> None:
  """Notes that the same command, interrupted, goes on from a file or folder."""
  _kept[place] = None


def interruption() -> str:
  """The message of a command that Ctrl-C ended."""
  if not _kept:
    return "interrupted"
  return (
    f"interrupted; what {' and '.join(_kept)} holds so far is kept, and the "
    "same command goes on from there"
  )


def fail(message: str, code: int = 2) -> int:
  """Prints one message on stderr; returns the exit code."""
  label = f"process {jax.process_index()}: " if processes.several() else ""
  print(f"error: {label}{message}", file=sys.stderr)
  return code


def _guarded(
  command: Command, argv: Sequence[str], failed: list | None = None
) -> int:
  """Runs; a user's mistake becomes one line, and is appended to `failed`."""
  try:
    code = command(argv)
    sys.stdout.flush()
    return code
  except BrokenPipeError:
    return terminal.reader_left()
  except processes.UnjoinedError as error:
    return fail(str(error), 1)
  except (UserError, ValueError, OSError) as error:
    if not _is_mistake(error):
      raise
    if failed is not None:
      failed.append(error)
    return fail(" ".join(_in_words(error).split()))


def _parse(command: Command, argv: Sequence[str]) -> list[str]:
  """Parses flags; a config file may raise anything, and its text is shown.

  Raises:
    UserError: for flags that are none, or that the command does not read.
    SystemExit: once help that was asked for is shown.
  """
  try:
    argv = [
      argv[0],
      *flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False),
    ]
    _given[:] = argv[1:]
    if "--help=drafters" in argv:
      from launch.assembly import registry

      for written, about in registry.help_table():
        print(f"{written}\n    {about}")
      raise SystemExit(0)
    wants_help = not _HELP.isdisjoint(argv)
    if wants_help:
      module = sys.modules[command.__module__]
      print(f"{(module.__doc__ or '').strip()}\n\nflags:")
      print(flags.FLAGS.module_help(module).partition(":\n")[2])
      print("\n--helpfull lists the flags of jax and absl too.\n")
      argv = [arg for arg in argv if arg not in _HELP]
    elif unread := _unread(command, argv):
      raise UserError(
        f"this command does not read {', '.join(unread)}; --help lists the "
        "flags that it reads (settings of a config are --config.NAME=VALUE)"
      )
    rest = flags.FLAGS(list(argv))
    if wants_help:
      print(_settings(command))
      raise SystemExit(0)
  except (UserError, BrokenPipeError):
    raise
  except Exception as error:
    raise UserError(_why_not(error)) from None
  if any(flags.FLAGS[name].present for name in _spread):
    return rest
  if rest[1:]:
    raise UserError(
      f"unexpected arguments {rest[1:]}: settings are written --name=value"
    )
  return rest


def _why_not(error: Exception) -> str:
  """The reason why flags could not be parsed, from absl or a config file."""
  text = str(error.args[0] if error.args else error)
  text = text.replace("\\n", "\n").replace("\\'", "'")  # a repr, at times
  if isinstance(error, KeyError | AttributeError):  # a setting that is none
    name = text.strip("'\" ").split("'")[0]
    meant = re.search(r'Did you mean "([^"]+)"', text)
    guess = f" (did you mean {meant[1]!r}?)" if meant else ""
    if name in _SAID_BY_DRAFTER:
      guess = f": write --config.drafter='{_SAID_BY_DRAFTER[name]}'"
    return f"the config has no setting {name!r}{guess}"
  if "Traceback" in text:  # of the config's file: its last line says what
    text = re.sub(r"^ValueError: ", "", text.strip().splitlines()[-1])
  return " ".join(text.split())


def _in_words(error: Exception) -> str:
  """An error's text, of files without the number of the error."""
  if isinstance(error, OSError) and error.strerror and error.filename:
    return f"{error.filename}: {error.strerror}"
  # A config's file that is not there is told when the config is read.
  missing = re.search(
    r"^Configuration is not .*No such file or directory: '([^']+)'",
    str(error), re.DOTALL,
  )  # fmt: skip
  return f"there is no {missing[1]}" if missing else str(error)


def _is_mistake(error: Exception) -> bool:
  """True if an error is a user's mistake, whose text suffices."""
  if isinstance(error, UserError):
    return True
  files = [
    pathlib.Path(frame.f_code.co_filename).parents
    for frame, _ in traceback.walk_tb(error.__traceback__)
  ]
  notes = " ".join(getattr(error, "__notes__", ()))
  if any(_JAX in file for file in files) or "JAX has removed" in notes:
    return False
  return isinstance(error, OSError) or any(o in files[-1] for o in _OURS)


def _key_flags(command: Command) -> set[str]:
  module = sys.modules[command.__module__]
  return {flag.name for flag in flags.FLAGS.get_key_flags_for_module(module)}


def _unread(command: Command, argv: Sequence[str]) -> list[str]:
  """The flags of other commands in `argv`, as they are written there.

  What jax, absl and other libraries define is not ours to refuse.
  """
  read, unread = _key_flags(command), []
  for arg in argv[1:]:
    written = arg.partition("=")[0]
    name = written.lstrip("-")
    if name not in flags.FLAGS:
      name = name.removeprefix("no")
    if not arg.startswith("-") or name not in flags.FLAGS or name in read:
      continue
    if flags.FLAGS.find_module_defining_flag(name).startswith("launch."):
      unread.append(written)
  return unread


def _settings(command: Command) -> str:
  """The settings of the config that is named, by their dotted names."""
  if CONFIG.name not in _key_flags(command):
    return ""
  if CONFIG.value is None:
    return (
      "settings: name a config, as in --config=FILE --help, to see its own."
    )

  def leaves(config: ml_collections.ConfigDict, prefix: str):
    for name, value in config.items():
      if isinstance(value, ml_collections.ConfigDict) and len(value):
        yield from leaves(value, f"{prefix}{name}.")
      else:
        yield f"  {prefix}{name}={value!r}"

  return "\n".join(
    [
      f"settings of {config_file()}, changed as in --config.NAME=VALUE (it and "
      "what it imports, as configs/common.py, say what they are):",
      *leaves(CONFIG.value, ""),
    ]
  )


def _default_flag(name: str, value) -> None:
  """Sets a jax option unless the environment has; a flag still overrides."""
  if name.upper() not in os.environ:
    jax.config.update(name, value)
    flags.FLAGS.set_default(name, value)
