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
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import flags
from array_record.python import array_record_module
from flax import nnx
from jax.sharding import Mesh

from launch import cli, provenance, results
from launch.training import data, features, head, head_features, head_loss, step
from launch.training.features import Settings, Shard, encode, halved, restored
from launch.training.records import say
from models import checkpoints, head_starts
from models.networks.transformer import Features, Transformer
from models.tokenizers import Tokenizer

cli.reads(cli.CONFIG, cli.OUTPUT, cli.OVERWRITE)
_FIRST_TOKENS = flags.DEFINE_integer(
  "first_tokens", None, "Of the training text; all by default.", lower_bound=1
)
_SHARD_BYTES = 2**26  # a killed run loses a part of one
# A record can be read by itself; float16 does not get smaller.
_OPTIONS = "group_size:1,uncompressed"
_MARK = ".tmp"
_SHARD = re.compile(r"(train|validation)-\d{5,}-[0-9a-f]{16}\.array_record")


# ----------------------------------------------------------------- the shards
#
# A shard is made of its own documents alone, in batches of their own, and is
# there under its name once it is whole: whatever ends a run, the next one makes
# what is missing, and the same bytes.


def make_seer(
  target: Transformer, layers: Features, vocab_size: int, mesh: Mesh
) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
  """A function that makes records of a batch of rows.

  Args:
    target: is laid out on the mesh.
    layers: whose inputs are kept, FINAL last.
    vocab_size: V, of the law; the output projection may be padded.
    mesh: whose 'data' cuts the rows.

  Returns:
    `rows -> records`, all of their arrays with the rows in front.
  """
  definition, params = nnx.split(target)
  params = jax.device_put(params, step.shardings(params, mesh))
  words = head_loss.Words.of(np.arange(vocab_size), vocab_size)
  watch = head_loss.watcher(target, layers[:-1] or layers)

  @jax.jit
  def see(params, batch):
    seen = watch(params, batch)
    states = seen.final if len(layers) == 1 else jnp.concatenate(
      [seen.features, seen.final], axis=-1
    )  # fmt: skip
    rows, length, _ = states.shape
    parts, exponents = halved(
      states.astype(jnp.float32).reshape(rows, length, len(layers), -1)
    )
    final = restored(parts[:, :, -1], exponents[:, :, -1])
    output = head_starts.output_rows(nnx.merge(definition, params))
    normalisers, likeliest = head_loss.everything(final, output, words)
    return {
      "parts": parts,
      "exponents": exponents,
      "normalisers": normalisers,
      "likeliest": likeliest,
    }

  def records(batch):
    arrays = see(params, step.place_batch(batch, mesh))
    return batch | {name: np.asarray(x) for name, x in arrays.items()}

  return records


def rows_of(
  shard: Shard,
  texts: Sequence[data.Document],
  tokenizer: Tokenizer,
  *,
  row_tokens: int,
  batch_size: int,
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
  """Batches of a shard's rows, and how many of each are rows of text.

  Args:
    shard: from `launch.training.features.plan`, of the same texts.
    texts: the documents.
    tokenizer: makes tokens of them.
    row_tokens: of a row.
    batch_size: rows of a batch; the last one is filled up with empty rows.
  """
  documents = [texts[i] for i in range(shard.first, shard.last)]
  single = data.batches(
    documents, tokenizer, length=row_tokens, batch_size=1, seed=None
  )
  rows = [dict(row) for row in single]
  if len(rows) != shard.rows:
    raise RuntimeError(f"{shard.name}: {len(rows)} rows, not {shard.rows}")
  for begin in range(0, len(rows), batch_size):
    some = rows[begin : begin + batch_size]
    missing = batch_size - len(some)
    full = {
      name: np.pad(
        np.concatenate([row[name] for row in some]), ((0, missing), (0, 0))
      )
      for name in some[0]
    }
    yield full, len(some)


def write_shard(
  path: pathlib.Path,
  batches: Iterator[tuple[dict[str, np.ndarray], int]],
  records: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
  *,
  progress: Callable[[int], Any] = lambda rows: None,
) -> None:
  """Writes a shard, whole or not at all.

  Args:
    path: of its file.
    batches: from `rows_of`.
    records: from `make_seer`.
    progress: is told of rows that are made.

  Raises:
    ValueError: if the target's features are no numbers.
    OSError: if the disk is full.
  """
  new = path.with_name(f".{path.name}.{os.getpid()}{_MARK}")
  try:
    writer = array_record_module.ArrayRecordWriter(str(new), _OPTIONS)
    try:
      for batch, count in batches:
        arrays = records(batch)
        if not np.isfinite(arrays["normalisers"][:count]).all():
          raise ValueError(
            f"{path.name}: the target's hidden states are not all numbers"
          )
        for i in range(count):
          writer.write(encode({name: x[i] for name, x in arrays.items()}))
        progress(count)
    finally:
      writer.close()
    with new.open("rb") as file:
      os.fsync(file.fileno())
    os.replace(new, path)
  except BaseException:
    new.unlink(missing_ok=True)
    raise


def sweep(folder: pathlib.Path, shards: Sequence[Shard]) -> None:
  """Deletes what other shards replaced, and what a killed run left.

  Args:
    folder: of features.
    shards: what is there now; those with numbers beyond them stay, as where a
      part of a text was asked for after all of it.
  """
  kept = {shard.name for shard in shards}
  places = {name.rpartition("-")[0] for name in kept}
  for path in folder.iterdir():
    ours, place = _SHARD.fullmatch(path.name), path.name.rpartition("-")[0]
    if ours and place in places and path.name not in kept:
      path.unlink()
    elif path.name.startswith(".") and path.name.endswith(_MARK):
      path.unlink()


def clear(folder: pathlib.Path) -> None:
  """Deletes all shards."""
  for path in folder.iterdir():
    if _SHARD.fullmatch(path.name):
      path.unlink()


# ---------------------------------------------------------------- the command


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
  records = make_seer(target, layers, tokenizer.vocab_size, mesh)
  total = sum(shard.rows for shard in missing)
  bar = tqdm.tqdm(total=total, unit="row", disable=not sys.stderr.isatty())
  begun, done = time.monotonic(), 0
  with bar:
    for i, shard in enumerate(missing, 1):
      batches = rows_of(
        shard, texts[shard.split], tokenizer,
        row_tokens=config.sequence_length + 1, batch_size=config.batch_size,
      )  # fmt: skip
      write_shard(folder / shard.name, batches, records, progress=bar.update)
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
  folder = pathlib.Path(cli.OUTPUT.value)
  tokenizer = checkpoints.load_tokenizer(config.target)
  target = checkpoints.read_config(config.target)
  settings = head_features.settings(
    config, head_features.layers_read(config, target.num_layers), target
  )
  folder.mkdir(parents=True, exist_ok=True)
  if cli.OVERWRITE.value:
    features.disclaim(folder)
    clear(folder)
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
  sweep(folder, shards)
  tokens = sum(shard.tokens for shard in shards)
  print(f"{tokens:,} tokens in {len(shards)} shards: {folder}")
  return 0


def _about(config, settings: Settings, shards: list[Shard]) -> dict:
  return {
    "settings": settings.as_json(),
    "shards": [dataclasses.asdict(shard) for shard in shards],
    **provenance.record(config),
  }


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
