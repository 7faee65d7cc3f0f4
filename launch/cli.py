"""What every command line shares: flags, caches, and honest exit codes.

A user's mistake is one line on stderr and exit code 2: a `UserError`, what the
operating system says of a file, or a `ValueError` that this project raises of
itself. Every other error is a bug, and keeps its traceback: Python's own, those
of libraries, and whatever is raised while jax traces a program, as in a rule or
a drafter that somebody is writing.

A command reads the flags that its module defines, and those that it names with
`reads`: it takes no others, and `--help` lists no others.
"""

import dis
import logging
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence

import jax
from absl import app, flags
from ml_collections import config_flags

from launch import processes, terminal, usage, without_tpu

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
  "target", None, "The target: its law (0.2,0.3,0.5), or the shape of a plan."
)
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
COUNT = flags.DEFINE_integer("count", None, "How many to make.", lower_bound=1)
SEED = flags.DEFINE_integer(
  "seed", None, "Of what is sampled, where no config says.", lower_bound=0,
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

_ROOT = pathlib.Path(__file__).parents[1]
_OURS = tuple(
  _ROOT / name for name in ("configs", "launch", "models", "specjax")
)


class UserError(Exception):
  """Something the user can mend; its text is the whole message."""


def reads(*shared: flags.FlagHolder) -> None:
  """Declares which flags of other modules the command reads that calls this.

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


def takes_the_rest(flag: flags.FlagHolder) -> None:
  """Lets a list flag's values stand apart, as in `--flag A B`, if it is given.

  Who calls this reads what is left over by the flags as more values of it.
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
  _default_flag("jax_compilation_cache_dir", str(_cache_dir()))
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
  with terminal.guarded():
    try:
      rest = _parse(command, argv)
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
    code = command(argv)
    sys.stdout.flush()
    return code
  except BrokenPipeError:
    return terminal.reader_left()
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
      print(usage.of_drafters())
      raise SystemExit(0)
    wants_help = not usage.ASKS.isdisjoint(argv)
    if wants_help:
      print(usage.of_flags(command, full="--helpfull" in argv))
      argv = [arg for arg in argv if arg not in usage.ASKS]
    elif unread := usage.unread(command, argv):
      raise UserError(
        f"this command does not read {', '.join(unread)}; --help lists the "
        "flags that it reads (settings of a config are --config.NAME=VALUE)"
      )
    rest = flags.FLAGS(list(argv))
    if wants_help:
      print("\n" + usage.of_settings(command, flags.FLAGS[CONFIG.name]))
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
  """Why flags could not be parsed: what absl or a config's file raised."""
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


def _is_mistake(error: BaseException) -> bool:
  """Whether an error's text is all that a user needs."""
  if isinstance(error, UserError):
    return True
  *_, (frame, instruction) = _frames(error)
  through_jax = any(
    _is_in(f, pathlib.Path(jax.__file__).parent) for f, _ in _frames(error)
  ) or any("JAX has removed" in x for x in getattr(error, "__notes__", ()))
  if through_jax or isinstance(error, OSError):
    return not through_jax
  own = any(_is_in(frame, folder) for folder in _OURS)
  return own and dis.opname[frame.f_code.co_code[instruction]].startswith(
    "RAISE"
  )


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
  """The frames of a traceback, outermost first, and where each was."""
  trace = error.__traceback__
  while trace:
    yield trace.tb_frame, trace.tb_lasti
    trace = trace.tb_next


def _is_in(frame: types.FrameType, folder: pathlib.Path) -> bool:
  return folder in pathlib.Path(frame.f_code.co_filename).parents


def _default_flag(name: str, value) -> None:
  """Sets a jax option unless the environment has; a flag still overrides."""
  if name.upper() not in os.environ:
    jax.config.update(name, value)
    flags.FLAGS.set_default(name, value)


def _cache_dir() -> pathlib.Path:
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "specjax" / "xla"
