"""The config of a training run, in WORKDIR/config.json."""

import json
import pathlib
import shutil

import ml_collections

from launch import processes, results

# What may change between two parts of a run; all else makes it another run.
_MAY_CHANGE = {
  "num_steps", "learning_rate", "warmup_steps", "decay_share", "weight_decay",
  "mesh", "log_every", "validate_every", "validation_batches",
  "checkpoint_every", "export_dtype", "data_dir",
}  # fmt: skip


def read(workdir: str) -> ml_collections.ConfigDict:
  """The config of the run in a folder; ValueError if there is none."""
  path = pathlib.Path(workdir) / "config.json"
  if not path.is_file():
    raise ValueError(f"no run to go on with in {workdir}: give --config")
  config = ml_collections.ConfigDict(json.loads(path.read_text("utf-8")))
  config.lock()
  return config


def check(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
  """Raises ValueError if the run in a folder has other settings."""
  if not (folder / "checkpoints").is_dir():
    return
  saved = json.loads((folder / "config.json").read_text("utf-8"))
  given = json.loads(config.to_json_best_effort())
  for name in sorted((saved.keys() | given.keys()) - _MAY_CHANGE):
    if saved.get(name) != given.get(name):
      raise ValueError(
        f"the run in {folder} has config.{name} = {saved.get(name)!r}, not "
        f"{given.get(name)!r}: give another --workdir, or --overwrite"
      )


def discard_other(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Deletes a folder's checkpoints if they are of a run of other settings."""
  folder = pathlib.Path(workdir)
  if processes.is_chief():
    try:
      check(config, folder)
    except ValueError:
      shutil.rmtree(folder / "checkpoints")
      (folder / "vocabulary.json").unlink(missing_ok=True)
  processes.gather(None)


def write(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
  """Writes WORKDIR/config.json."""
  text = config.to_json_best_effort(indent=2)
  results.write(folder / "config.json", text + "\n")
