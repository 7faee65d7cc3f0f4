"""The config of a training run in its folder, and the fields that may change.

WORKDIR/config.json is what a run was last asked for. With it `--workdir` alone
goes on, and a folder is not taken for that of another run: what decides the
weights and the place in the data stays, a teacher's name too. Numbers of steps,
rates, and what is logged, saved and exported may be changed between two parts
of a run.
"""

import json
import math
import pathlib

import ml_collections

from launch import results
from models import tokenizers
from models.formats import trained
from models.formats.json_files import read_object
from models.tokenizers import Tokenizer

_STAYS = (
  "model", "head", "init_from", "teacher", "target", "dataset", "text_features",
  "sequence_length", "batch_size", "seed", "data_seed", "objective",
  "acceptance_block", "contexts", "prompt_length", "kind", "num_masks",
  "validation", "answers", "pair_features", "input_length", "output_length",
  "encoder_from", "features", "compute_dtype",
  "pair", "num_blocks", "rejection_weight", "temperatures", "rounds",
)  # fmt: skip

_POSITIVE = ("batch_size", "sequence_length", "input_length", "output_length")
_COUNTS = (
  "num_steps", "warmup_steps", "log_every", "validate_every", "sample_every",
  "checkpoint_every", "validation_batches",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16")


def read(workdir: str) -> ml_collections.ConfigDict:
  """The config of the run in a folder.

  Raises:
    ValueError: if there is no run, or its file is damaged.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.is_file():
    raise ValueError(
      f"no run to go on with in {workdir}: a new one needs --config"
    )
  config = ml_collections.ConfigDict(dict(read_object(path)))
  config.lock()
  return config


def check(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
  """ValueError for what no run can have, and in a folder of another run."""
  _check_values(config)
  for name in ("seed", "data_seed"):
    if not 0 <= config[name] < 2**32:
      raise ValueError(
        f"config.{name} must be in 0..{2**32 - 1}, got {config[name]}"
      )
  path = folder / "config.json"
  if not _begun(folder):
    return
  before = read_object(path)
  now = json.loads(config.to_json_best_effort())
  for name in _STAYS:
    # "" and () are what configs had before they had a setting.
    if (before.get(name) or None) != (now.get(name) or None):
      raise ValueError(
        f"the run in {folder} has config.{name} = {before.get(name)!r}, not "
        f"{now.get(name)!r}: take another --workdir (config.init_from can "
        "begin with this run's model)"
      )


def check_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
  """ValueError in a folder of a run that was begun with another tokenizer.

  The path of a tokenizer may change, and what stands there too.
  """
  kept = trained.tokenizer_dir(str(folder))
  if not (_begun(folder) and pathlib.Path(kept).is_dir()):
    return
  if tokenizers.load(kept).fingerprint() != tokenizer.fingerprint():
    raise ValueError(
      f"the run in {folder} has another tokenizer, which is in {kept}: give "
      "that as config.tokenizer, or another --workdir"
    )


def _begun(folder: pathlib.Path) -> bool:
  """True if a folder is that of a run that was begun."""
  return (folder / "config.json").is_file() and (
    folder / "checkpoints"
  ).is_dir()


def _check_values(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for numbers, and a type, that a run would fail with."""
  for names, least in ((_POSITIVE, 1), (_COUNTS, 0)):
    for name in names:
      if (value := config.get(name)) is not None and value < least:
        raise ValueError(f"config.{name} must be >= {least}, got {value}")
  if not 0 < config.learning_rate < math.inf:
    raise ValueError(
      f"config.learning_rate must be > 0, got {config.learning_rate}"
    )
  if not 0 <= config.weight_decay < math.inf:
    raise ValueError(
      f"config.weight_decay must be >= 0, got {config.weight_decay}"
    )
  if config.export_dtype not in _DTYPES:
    raise ValueError(
      f"config.export_dtype must be one of {_DTYPES}, got "
      f"{config.export_dtype!r}"
    )


def write(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
  """Writes WORKDIR/config.json."""
  text = config.to_json_best_effort(indent=2)
  results.write(folder / "config.json", text + "\n")
