"""Provenance of a result: code, command, config and machine.

Every result in JSON has

  provenance   commit, whether the code differed from it ("dirty"; null if
               unknown), and the command line
  machine      versions and devices
  config       if the command has one
"""

import functools
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax
import jaxlib

import specjax

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# `git archive` writes the commit here, since a TPU worker's copy has no .git.
_ARCHIVED = "$Format:%H$"


def record(config: Any = None) -> dict[str, Any]:
  """The provenance of this process's result."""
  made = {"provenance": {**_code(), "command": command()}, "machine": machine()}
  return made if config is None else made | {"config": _as_json(config)}


def settings(config: Any, **more: Any) -> dict[str, Any]:
  """The settings that determine a run's results, for its journal."""
  versions = {"jax": jax.__version__, "specjax": specjax.__version__}
  return {"config": _as_json(config), **versions, **more}


def command() -> str:
  """The command line of this process, quoted for a shell."""
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  name = spec and spec.name.removesuffix(".__main__")
  program = ["-m", name] if name else [sys.argv[0]]
  return shlex.join(["python", *program, *sys.argv[1:]])


def machine() -> dict[str, Any]:
  """Versions and hardware."""
  return {
    "specjax": specjax.__version__,
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "backend": jax.default_backend(),
    "devices": [d.device_kind for d in jax.devices()],
    "cores": len(os.sched_getaffinity(0)),
    "system": platform.platform(),
  }


def _as_json(config: Any) -> dict[str, Any]:
  return json.loads(config.to_json_best_effort(sort_keys=True))


@functools.cache
def _code() -> dict[str, Any]:
  if not _ARCHIVED.startswith("$"):
    return {"commit": _ARCHIVED, "dirty": None}
  git = lambda *words: subprocess.run(
    ["git", "-C", str(_ROOT), *words],
    capture_output=True, text=True, check=True,
  ).stdout.strip()  # fmt: skip
  try:
    return {
      "commit": git("rev-parse", "HEAD"),
      "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
  except (OSError, subprocess.SubprocessError):
    return {"commit": None, "dirty": None}
