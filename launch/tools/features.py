r"""Keeps a target's features of a text on disk, for heads to be trained on.

  python -m launch.tools.features --config=configs/train_head.py:eagle3 \
    --config.target=MODEL --config.dataset=TEXT --output=FOLDER
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=MODEL --config.dataset=TEXT --config.features=FOLDER \
    --workdir=W

The target, which is not trained, reads the dataset once, and what a head needs
of it is written to FOLDER (`launch.training.features` says what): the layers
that a head of the config reads, and the final hidden state, so that the heads
which read that alone can be trained on it too. The config's dataset, target,
sequence_length and head.layers (or init_from) decide it.

The same command goes on where a stopped one was, to the same bytes; if
documents were added after the others, it adds their features (--overwrite
begins anew). --first_tokens keeps the first part of a dataset. What is needed
of the disk is said before anything is made: about two bytes for each number of
the layers.
"""

import dataclasses
import pathlib
import shutil
import sys
import time

import tqdm
from absl import flags

from launch import cli, provenance, results
from launch.training import (
  data,
  feature_writer,
  features,
  head,
  head_features,
  step,
)
from launch.training.features import Settings, Shard
from launch.training.records import say
from models import checkpoints

cli.reads(cli.CONFIG, cli.OUTPUT, cli.OVERWRITE)
_FIRST_TOKENS = flags.DEFINE_integer(
  "first_tokens", None, "Of the training text; all by default.", lower_bound=1
)
_SHARD_BYTES = 2**26  # a killed run loses a part of one


def _planned(config, texts, tokenizer, record_bytes: int) -> list[Shard]:
  """The shards of both splits; a progress bar, where there is a terminal."""
  row_tokens = config.sequence_length + 1
  most = {"train": None, "validation": None}
  if _FIRST_TOKENS.value:
    most["train"] = -(-_FIRST_TOKENS.value // row_tokens)
  if not config.validate_every:
    del most["validation"]
  elif config.validation_batches:
    most["validation"] = config.validation_batches * config.batch_size
  say("counting tokens")
  return [
    shard
    for split, rows in most.items()
    for shard in features.plan(
      split,
      texts[split],
      tokenizer,
      row_tokens=row_tokens,
      shard_rows=max(_SHARD_BYTES // record_bytes, config.batch_size),
      most_rows=rows,
    )
  ]


def _check_disk(
  folder: pathlib.Path, missing: list[Shard], record_bytes: int, length: int
) -> None:
  """Says what is needed, and raises UserError if there is less."""
  needed = sum(shard.rows for shard in missing) * record_bytes
  free = shutil.disk_usage(folder).free
  told = (
    f"{needed / 1e9:.2f} GB for {sum(s.tokens for s in missing):,} tokens "
    f"({record_bytes / length / 1e3:.1f} kB each), {free / 1e9:.1f} GB free in "
    f"{folder}"
  )
  if needed > free:
    raise cli.UserError(
      f"the disk is too small: {told}; --first_tokens keeps a part of the text"
    )
  say(told)


def _make(config, folder, missing: list[Shard], texts, tokenizer, layers):
  """Makes the shards that are not there."""
  mesh = step.make_mesh(config)
  if config.batch_size % mesh.shape["data"]:
    raise cli.UserError(
      f"config.batch_size ({config.batch_size}) must be a multiple of the "
      f"devices on 'data' ({mesh.shape['data']})"
    )
  target = checkpoints.load_module(config.target)
  records = feature_writer.make_seer(target, layers, tokenizer.vocab_size, mesh)
  total = sum(shard.rows for shard in missing)
  bar = tqdm.tqdm(total=total, unit="row", disable=not sys.stderr.isatty())
  begun, done = time.monotonic(), 0
  with bar:
    for i, shard in enumerate(missing, 1):
      batches = feature_writer.rows_of(
        shard, texts[shard.split], tokenizer,
        row_tokens=config.sequence_length + 1, batch_size=config.batch_size,
      )  # fmt: skip
      feature_writer.write(
        folder / shard.name, batches, records, progress=bar.update
      )
      done += shard.rows
      rate = done / (time.monotonic() - begun)
      say(
        f"shard {i} of {len(missing)}: "
        f"{rate * config.sequence_length:,.0f} tokens/s, "
        f"{(total - done) / rate / 60:.1f} minutes left"
      )


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  if "head" not in config or config.get("features") is None:
    raise cli.UserError("features are kept for heads: configs/train_head.py")
  if config.features:
    raise cli.UserError("config.features is what a training reads: give none")
  head.check(config)
  folder = results.check_folder("--output", cli.OUTPUT.value)
  tokenizer = checkpoints.load_tokenizer(config.target)
  target = checkpoints.read_config(config.target)
  settings = head_features.settings(
    config, head_features.layers_read(config, target.num_layers), target
  )
  folder.mkdir(parents=True, exist_ok=True)
  with results.lock(folder / "lock", what=str(folder)):
    if cli.OVERWRITE.value:
      features.disclaim(folder)
      feature_writer.clear(folder)
    features.claim(folder, settings)
    texts = {
      "train": data.documents(config, "train"),
      "validation": data.documents(config, "validation")
      if config.validate_every
      else (),
    }
    size = features.record_bytes(settings)
    shards = _planned(config, texts, tokenizer, size)
    missing = [s for s in shards if not (folder / s.name).is_file()]
    if len(missing) < len(shards):
      say(f"{len(shards) - len(missing)} of {len(shards)} shards are there")
    if missing:
      _check_disk(folder, missing, size, settings.sequence_length)
      _make(config, folder, missing, texts, tokenizer, settings.layers)
    results.write_json(
      str(folder / features.NAME), _about(config, settings, shards)
    )
    feature_writer.sweep(folder, shards)
  tokens = sum(shard.tokens for shard in shards)
  print(f"{tokens:,} tokens in {len(shards)} shards: {folder}")
  return 0


def _about(config, settings: Settings, shards: list[Shard]) -> dict:
  return {
    "settings": settings.as_json(),
    "shards": [dataclasses.asdict(shard) for shard in shards],
    **provenance.record(models=provenance.hashes({"target": config.target})),
  }


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
