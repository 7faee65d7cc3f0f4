"""What `--help` says, and which flags a command does not read."""

import pathlib
import re
import sys
from collections.abc import Callable, Sequence

import ml_collections
from absl import flags

ASKS = {"--help", "-help", "--helpshort", "-helpshort", "-?", "--helpfull"}
_FIELD = re.compile(r"\s*config\.(\w+) = .*?(?:  # (.*))?$")
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_IMPORTS = re.compile(r"^from configs import (.+)$", re.MULTILINE)


def unread(command: Callable, argv: Sequence[str]) -> list[str]:
  """The flags of other commands in `argv`, as they are written there.

  What jax, absl and other libraries define is not ours to refuse.
  """
  read = {flag.name for flag in _key_flags(command)}
  found = []
  for arg in argv[1:]:
    written = arg.partition("=")[0]
    name = written.lstrip("-")
    if name not in flags.FLAGS:
      name = name.removeprefix("no")
    if not arg.startswith("-") or name not in flags.FLAGS or name in read:
      continue
    owner = flags.FLAGS.find_module_defining_flag(name)
    if owner.startswith("launch."):
      found.append(written)
  return found


def of_flags(command: Callable, *, full: bool = False) -> str:
  """The command's own words, and its flags; `full` adds those of libraries."""
  module = sys.modules[command.__module__]
  parts = [(module.__doc__ or "").strip(), "\nflags:"]
  parts.append(flags.FLAGS.module_help(module).partition(":\n")[2])
  if not full:
    parts.append("\n--helpfull lists the flags of jax and absl too.")
  for name in sorted(flags.FLAGS.flags_by_module_dict()) if full else ():
    if not name.startswith("launch.") and name != sys.argv[0]:
      parts.append(flags.FLAGS.module_help(name))
  return "\n".join(parts)


def of_drafters() -> str:
  """What `config.drafter` can be, and what its arguments can be."""
  from launch.build import drafters

  lines = []
  for written, about in drafters.help_table():
    lines += [written, f"    {about}"]
  return "\n".join(lines)


def of_settings(command: Callable, flag: flags.Flag) -> str:
  """The settings of the config that is named, and what its file says of them.

  Args:
    command: the command.
    flag: `--config`, parsed.
  """
  if flag not in _key_flags(command):
    return ""
  if flag.value is None:
    return (
      "settings: name a config, as in --config=FILE --help, to see its own."
    )
  path = flag.config_filename.partition(":")[0]
  values = _flat(flag.value)
  told = _comments(pathlib.Path(path))
  lines = [f"settings of {path}, changed as in --config.NAME=VALUE:"]
  names = [name for name in told if name in values]
  for name in names + [name for name in values if name not in told]:
    above, beside = told.get(name, ([], ""))
    lines += [f"  # {line}" for line in above]
    field = f"  {name}={values.pop(name)!r}"
    lines.append(f"{field}  # {beside}" if beside else field)
  return "\n".join(lines)


def _key_flags(command: Callable) -> list[flags.Flag]:
  return flags.FLAGS.get_key_flags_for_module(sys.modules[command.__module__])


def _flat(config: ml_collections.ConfigDict, prefix: str = "") -> dict:
  """The leaves of a config by their dotted names."""
  found = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict) and len(value):
      found |= _flat(value, f"{prefix}{name}.")
    else:
      found[prefix + name] = value
  return found


def _comments(path: pathlib.Path) -> dict[str, tuple[list[str], str]]:
  """What a config's file, and those it imports, say above and beside a field.

  They come in the order of the files' lines, imported files first.
  """
  try:
    source = path.read_text("utf-8")
  except (OSError, UnicodeDecodeError):
    return {}
  found: dict[str, tuple[list[str], str]] = {}
  for names in _IMPORTS.findall(source):
    for name in names.split(", "):
      found |= _comments(
        pathlib.Path(__file__).parents[1] / f"configs/{name}.py"
      )
  above: list[str] = []
  for line in source.splitlines():
    field = _FIELD.match(line)
    if field and (above or field[2] or field[1] not in found):
      found[field[1]] = above, field[2] or ""
    above = [*above, line.strip()[2:]] if line.strip().startswith("# ") else []
  return found
