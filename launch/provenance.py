"""Provenance of a result: code, command, checkpoints, prompts, machine.

Every JSON that a command writes as its result has

  provenance.specjax      version, commit, and whether the code differed from it
                          (null, with a note, where nothing tells)
  provenance.command      the command line
  provenance.checkpoints  by role, path and hash of each model that took part,
                          and of the file of a drafter or rule of one's own
  provenance.prompts      path and hash of the prompts
  provenance.files        by flag, path and hash of other files
  machine                 versions and hardware

The hash of a file is its `sha256sum`, also of a checkpoint that is one; that of
a checkpoint in a folder is that of the list of its files: in it, `sha256sum
FILES | sha256sum`, the files in the order of their names' bytes.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib
from flax import traverse_util

import specjax
from launch import cli
from launch.assembly import registry
from launch.assembly.drafting import Drafting
from models.formats.checksums import hash_file, hash_files
from specjax import calls

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# What results depend on; checkpoints are hashed.
_CODE = ("specjax", "models", "configs", "launch")
# `git archive` writes the commit here: what a TPU worker gets has no .git.
_ARCHIVED = "$Format:%H$"

# Fields of a config that name checkpoints: their contents count, and no path.
_HASHED = ("target", "scorer", "checkpoints", "teacher", "init_from")
# These do not decide what comes out.
_WHERE = (
  "output", "summary", "steps", "workdir", "export", "plot", "overwrite",
)  # fmt: skip


def command() -> str:
  """The command line of this process, as a shell takes it."""
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  name = spec and spec.name.removesuffix(".__main__")  # of a package
  program = ["-m", name] if name else [sys.argv[0]]
  return shlex.join(["python", *program, *cli.arguments()])


def differences(theirs: str, ours: str) -> str:
  """The differences of two command lines in words; "" if none counts.

  Where they write to does not count, nor the order.
  """
  a, b = (set(filter(_counts, _settings(text))) for text in (theirs, ours))
  parts = []
  if a - b:
    parts.append(f"it has {shlex.join(sorted(a - b))}")
  if b - a:
    parts.append(f"this command has {shlex.join(sorted(b - a))}")
  return ", ".join(parts)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """The settings that differ, in words: the first three, and how many more."""
  a, b = (traverse_util.flatten_dict(dict(x), sep=".") for x in (before, now))
  names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
  named = [f"{n} was {a.get(n)!r}, is {b.get(n)!r}" for n in names]
  return ", ".join(named[:3] + [f"{len(named) - 3} more"] * (len(named) > 3))


def check_command(name: str, path: str) -> None:
  """Raises ValueError if a file is not the result of this command.

  Args:
    name: the flag that names it.
    path: the file.
  """
  try:
    content = json.loads(pathlib.Path(path).read_bytes())
    content = content[0] if isinstance(content, list) else content
    different = differences(content["provenance"]["command"], command())
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
    raise ValueError(
      f"{name}: {path} is there, and does not say that this command wrote it: "
      "--overwrite replaces it"
    ) from None
  if different:
    raise ValueError(
      f"{name}: {path} is the result of another command ({different}): "
      "--overwrite replaces it"
    )


def _settings(line: str) -> list[str]:
  """The arguments of a command line, `--name value` as `--name=value`."""
  settings: list[str] = []
  for part in shlex.split(line):
    if not part.startswith("-") and settings and settings[-1].startswith("--"):
      if "=" not in settings[-1]:
        settings[-1] += f"={part}"
        continue
    settings.append(part)
  return settings


def _counts(argument: str) -> bool:
  name = argument.lstrip("-").partition("=")[0]
  return not argument.startswith("-") or name not in _WHERE


@functools.cache
def code() -> dict[str, Any]:
  """Version and commit of the code that runs, as far as they can be known.

  Returns:
    `version`; `commit`, or None; `dirty`, whether what is imported (specjax,
    models, configs, launch) differs from the commit, or None; and a `note` that
    says why where something is None.
  """
  known = {"version": specjax.__version__, "commit": None, "dirty": None}
  if pathlib.Path(specjax.__file__).resolve().parents[1] != _ROOT:
    return known | {"note": "specjax is installed apart from the commands"}
  if not _ARCHIVED.startswith("$"):
    note = "an archive of the commit: changes since would not be seen"
    return known | {"commit": _ARCHIVED, "note": note}
  try:
    top = _git("rev-parse", "--show-toplevel")
    if pathlib.Path(top).resolve() != _ROOT:
      return known | {"note": "no git checkout"}
    changes = _git("status", "--porcelain", "--", *_CODE)
    return known | {"commit": _git("rev-parse", "HEAD"), "dirty": bool(changes)}
  except FileNotFoundError:
    return known | {"note": "git is not installed"}
  except subprocess.SubprocessError as error:
    said = " ".join(str(getattr(error, "stderr", None) or error).split())
    return known | {"note": said[:200]}


def _git(*arguments: str) -> str:
  """Output of git on this checkout, from any working directory."""
  environment = {k: v for k, v in os.environ.items() if k[:4] != "GIT_"}
  done = subprocess.run(
    ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments],
    env=environment, capture_output=True, text=True, check=True, timeout=60,
  )  # fmt: skip
  return done.stdout.strip()


def hash_checkpoint(directory: str) -> str:
  """A hash of all files that decide what a model is."""
  from models import checkpoints

  root = pathlib.Path(directory).absolute()
  if checkpoints.is_file(str(root)):
    return hash_file(root)
  hashes = hash_files(root, checkpoints.files(str(root)))
  lines = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())
  return hashlib.sha256(lines.encode()).hexdigest()


def hash_texts(texts: Sequence[str]) -> str:
  """A hash of a list of texts."""
  return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def inputs() -> dict[str, str]:
  """Paths of what this command reads: its config, the prompts, the models."""
  prompts, config = cli.PROMPTS.value, cli.CONFIG.value
  paths = {"--prompts": prompts} if prompts else {}
  if config is None:
    return paths
  from models import checkpoints

  paths["--config"] = cli.config_file()
  named = {"target": config.get("target")}
  with contextlib.suppress(ValueError, FileNotFoundError):
    named |= read_by(registry.of(config)) if config.get("drafter") else {}
  for role, directory in named.items():
    if isinstance(directory, str) and os.path.exists(directory):
      for file in checkpoints.files(directory):
        paths[f"the {role} ({file})"] = str(file)
  return paths


def checkpoints(config: Any) -> dict[str, dict[str, str]]:
  """Path and hash of each checkpoint that a config reads, by role.

  Args:
    config: with a `target` or a `scorer`, and perhaps a `drafter`, for what it
      reads, and a `rule`, for the code of one's own.
  """
  roles = {role: config.get(role) for role in ("target", "scorer")}
  if config.get("drafter"):
    roles |= read_by(registry.of(config))
  for role in ("drafter", "rule"):
    roles |= modules(role, str(config.get(role) or ""))
  return hashes({role: path for role, path in roles.items() if path})


def modules(role: str, written: str) -> dict[str, str]:
  """Files of the `package.module:NAME`s of one's own in a call.

  Args:
    role: of the first file; another one has its module's name added.
    written: the call, as `config.drafter` or `config.rule` have it.
  """
  paths: dict[str, str] = {}
  for module in dict.fromkeys(calls.modules(written)):
    spec = importlib.util.find_spec(module)
    if spec and spec.origin:
      paths[f"{role} ({module})" if paths else role] = spec.origin
  return paths


def read_by(drafting: Drafting) -> dict[str, str]:
  """Paths that a way to draft reads, by role."""
  roles = {
    "layers" if drafting.reads in ("layers", "weights") else "draft": (
      drafting.checkpoint
    ),
    "corpus": drafting.corpus,
    "policy": getattr(drafting.policy, "head", ""),
  }
  return {role: path for role, path in roles.items() if path}


def hashed(written: str, models: Mapping[str, Mapping[str, str]]) -> str:
  """A drafter's call with the hashes of checkpoints in place of their paths."""
  for model in models.values():
    written = written.replace(f'"{model["path"]}"', f'"{model["sha256"]}"')
  return written


def hashes(directories: Mapping[str, str]) -> dict[str, dict[str, str]]:
  """Path and hash of each checkpoint, by role."""
  return {
    role: {"path": directory, "sha256": hash_checkpoint(directory)}
    for role, directory in directories.items()
  }


def settings(
  config: Any, models: Mapping[str, Mapping[str, str]], **more: Any
) -> dict[str, Any]:
  """Settings by which a journal knows its run again (`launch.results`).

  Neither paths nor dates of the checkpoints count: a machine that was preempted
  comes back with fresh copies.

  Args:
    config: of the run.
    models: `checkpoints` of it, or `hashes` of all that it reads.
    **more: what else decides the results.
  """
  kept = json.loads(config.to_json_best_effort(sort_keys=True))
  if kept.get("drafter"):
    kept["drafter"] = hashed(registry.canonical(config), models)
  return {
    "config": _without_paths(kept),
    "checkpoints": {
      hashed(role, models): model["sha256"] for role, model in models.items()
    },
    "jax": jax.__version__,
    "specjax": specjax.__version__,
    **more,
  }


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name: _without_paths(value) if isinstance(value, Mapping) else value
    for name, value in config.items()
    if name not in _HASHED
  }


def record(
  *,
  models: Mapping[str, dict] | None = None,
  prompts: str | None = None,
  texts: Sequence[str] | None = None,
  files: Mapping[str, Any] | None = None,
) -> dict[str, dict]:
  """The provenance of a result, to be merged into it.

  Args:
    models: `checkpoints` of the config, if a pair took part.
    prompts: path of the prompts file, if there was one.
    texts: the prompts, if they came from no file.
    files: by flag, paths of what else was read; None for what was not.
  """
  source = None
  if prompts:
    source = _file(prompts)
  elif texts is not None:
    source = {"path": None, "sha256": hash_texts(texts)}
  return {
    "provenance": {
      "specjax": code(),
      "commit": code()["commit"],
      "command": command(),
      "checkpoints": dict(models or {}),
      "prompts": source,
      "files": {n: _file(path) for n, path in (files or {}).items() if path},
    },
    "machine": machine(),
  }


def of_config(
  config: Any,
  *,
  texts: Sequence[str] | None = None,
  files: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """`record` of a command that decodes with its config's pair, and the config.

  Args:
    config: the config.
    texts: the prompts, if they came from no file.
    files: as `record`'s.
  """
  return {
    "config": json.loads(config.to_json_best_effort(sort_keys=True)),
    **record(
      models=checkpoints(config), prompts=cli.PROMPTS.value, texts=texts,
      files=files,
    ),
  }  # fmt: skip


def _file(path: str | os.PathLike) -> dict[str, str]:
  return {"path": str(path), "sha256": hash_file(pathlib.Path(path))}


def machine() -> dict[str, Any]:
  """Versions and hardware."""
  model = platform.processor()
  info = "/proc/cpuinfo"
  if os.path.exists(info):
    with open(info, encoding="utf-8") as lines:
      names = [x.split(":", 1)[1].strip() for x in lines if "model name" in x]
    model = names[0] if names else model
  return {
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "backend": jax.default_backend(),
    "devices": [d.device_kind for d in jax.devices()],
    "processor": model,
    "cores": len(os.sched_getaffinity(0)),
    "system": platform.platform(),
  }
