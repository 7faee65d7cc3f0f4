"""Computes and writes a target's features (`launch.training.features`).

A shard is made of its own documents alone, in batches of their own, and stands
under its name once it is whole: whatever ends a run, the next one makes what is
missing, and the same bytes.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_record.python import array_record_module
from flax import nnx
from jax.sharding import Mesh

from launch.training import data, head_step, step
from launch.training.features import Shard, encode
from launch.training.halves import halved, restored
from models import head_starts
from models.networks.transformer import Features, Transformer
from models.tokenizers import Tokenizer

# A record can be read by itself; float16 does not get smaller.
_OPTIONS = "group_size:1,uncompressed"
_MARK = ".tmp"
_SHARD = re.compile(r"(train|validation)-\d{5,}-[0-9a-f]{16}\.array_record")


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
  words = head_step.Words.of(np.arange(vocab_size), vocab_size)
  watch = head_step.watcher(target, layers[:-1] or layers)

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
    normalisers, likeliest = head_step.everything(final, output, words)
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


def write(
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
