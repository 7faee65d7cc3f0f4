"""Exports of a run: only its own models are replaced.

WORKDIR/exports.json has the hash of the weights that the run wrote to each
folder, null while it writes them.
"""

import contextlib
import json
import os
import pathlib

import ml_collections

from launch import cli, processes, provenance, results
from launch.assembly import registry
from models.formats import checksums

# The tokenizer stays as it is where it is the run's.
_READ = (
  "teacher", "target", "init_from", "encoder_from", "dataset", "features",
)  # fmt: skip


def check(
  config: ml_collections.ConfigDict, workdir: str, export: str | None
) -> None:
  """Raises, before any work is done, if a model cannot go into a folder.

  Args:
    config: of the run.
    workdir: of the run.
    export: the folder, or None.

  Raises:
    UserError: for --overwrite without a folder.
    ValueError: if the run reads that folder; or if another model is there,
      without --overwrite.
    NotADirectoryError, PermissionError: see `results.check_folder`.
  """
  if export is None:
    cli.refuse_with("a run that is not exported", cli.OVERWRITE)
    return
  results.check_folder("--export", export)
  if not processes.is_chief():
    return
  read = {f"config.{name}": config.get(name) for name in _READ}
  if pair := config.get("pair"):
    models = {"target": pair.target, **provenance.read_by(registry.of(pair))}
    read |= {f"config.pair's {role}": path for role, path in models.items()}
  for name, path in {"--workdir": workdir, **read}.items():
    if path and os.path.realpath(path) == os.path.realpath(export):
      raise ValueError(f"--export is also {name}: {export}")
  weights = pathlib.Path(export) / "model.safetensors"
  before = _read(workdir)
  key = os.path.realpath(export)
  if key in before and weights.is_file():
    if before[key] in (None, checksums.hash_file(weights)):
      return
  results.check_folder("--export", export, model=True)


@contextlib.contextmanager
def noted(workdir: str, export: str):
  """Notes in WORKDIR what is written to a folder within; the chief does."""
  key = os.path.realpath(export)
  _write(workdir, _read(workdir) | {key: None})
  yield
  weights = pathlib.Path(export) / "model.safetensors"
  _write(workdir, _read(workdir) | {key: checksums.hash_file(weights)})


def _read(workdir: str) -> dict[str, str | None]:
  try:
    hashes = json.loads((pathlib.Path(workdir) / "exports.json").read_bytes())
  except (FileNotFoundError, ValueError):
    return {}
  return hashes if isinstance(hashes, dict) else {}


def _write(workdir: str, exports: dict[str, str | None]) -> None:
  path = pathlib.Path(workdir) / "exports.json"
  results.write_json(str(path), exports)
