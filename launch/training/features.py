"""A target's features of a text, computed once and stored on disk.

  documents of a split -> `Shard`s of whole documents -> packed rows of each,
    as `launch.training.data` packs them -> the target, once -> a record a row
    -> FOLDER/SPLIT-NUMBER-SUM.array_record; and FOLDER/features.json at the end
  FOLDER -> `Stored` -> `check` -> records, shuffled anew every epoch -> batches
    -> `launch.training.head_loss.Seen`, as the target would make it

A record is a file of safetensors, of a row of T + 1 tokens:

  tokens, segments, positions   i32[T + 1]
  parts                         f16[T, P, D], what `halved` keeps of the inputs
                                of the layers of `Settings.layers`; the last one
                                is the final state, which logits are read of
  exponents                     i8[T, P], beside it
  normalisers                   f32[T], the log of the sum over all tokens
  likeliest                     i32[T], the token of the largest logit

The target's law of any tokens is then exact without the others: their logits
are one product of the final state, less the normaliser. Normaliser and
likeliest token are those of the state as it is kept, so the law sums to one:
it is that of a target whose final state was rounded, and nothing else is lost.
(Its largest probabilities are no such thing: an objective that asks for the law
over a draft vocabulary would not find it among them.)

A shard's name has the hash of its documents: it is there as a whole or not at
all, nothing else says how far a stopped run came, and when documents are added
after the others, the shards that are there stay.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors import numpy as safetensors

from launch import results
from launch.training import data
from models.formats.json_files import read_object
from models.networks.transformer import FINAL, Features
from models.tokenizers import Tokenizer

NAME = "features.json"
_SETTINGS = "settings.json"  # there from the beginning on
_FORMAT = 1
_REACH = 15  # of float16's 16: what is rounded up stays finite
_LEAST = -100  # of int8's -128; a vector that small is zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings that decide a folder's records, beside the documents.

  Attributes:
    target: hash of the model, with its tokenizer.
    layers: whose inputs are kept, FINAL last.
    width: D, of each.
    sequence_length: T, of a row.
    dataset: its name.
    text_features: of a TFDS dataset.
    format: of the records.
  """

  target: str
  layers: Features
  width: int
  sequence_length: int
  dataset: str
  text_features: tuple[str, ...] = ()
  format: int = _FORMAT

  def as_json(self) -> dict[str, Any]:
    """The settings as JSON reads them back."""
    return json.loads(json.dumps(dataclasses.asdict(self)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """A file of rows.

  Attributes:
    split: "train" or "validation".
    number: its place.
    first: its first document.
    last: the document after its last one.
    sum: of its documents.
    tokens: they have.
    rows: they fill; the last one may not be full.
  """

  split: str
  number: int
  first: int
  last: int
  sum: str
  tokens: int
  rows: int

  @property
  def name(self) -> str:
    """Name of its file."""
    return f"{self.split}-{self.number:05}-{self.sum[:16]}.array_record"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """A folder of features that is complete.

  Attributes:
    folder: where it is.
    settings: what decided them, as JSON.
    shards: in their order.
  """

  folder: pathlib.Path
  settings: dict[str, Any]
  shards: tuple[Shard, ...]

  def of(self, split: str) -> list[Shard]:
    """The shards of a split."""
    return [shard for shard in self.shards if shard.split == split]

  @property
  def sum(self) -> str:
    """Hash of all that decides a run's records."""
    told = [self.settings, [shard.name for shard in self.shards]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


# ------------------------------------------------------------------- the plan


def plan(
  split: str,
  texts: Sequence[data.Document],
  tokenizer: Tokenizer,
  *,
  row_tokens: int,
  shard_rows: int,
  most_rows: int | None = None,
) -> Iterator[Shard]:
  """The shards of some documents, each decided by those before it alone.

  Args:
    split: theirs.
    texts: from `launch.training.data.documents`.
    tokenizer: makes tokens of them.
    row_tokens: of a row, the one after it included.
    shard_rows: a shard ends with the document that fills as many.
    most_rows: documents after the one that fills so many are left out.
  """
  first = number = tokens = done = 0
  digest = hashlib.sha256()
  for i in range(len(texts)):
    document = texts[i]
    tokens += len(data.token_ids(document, tokenizer))
    digest.update(_line(document))
    rows = -(-tokens // row_tokens)
    enough = most_rows is not None and done + rows >= most_rows
    if rows < shard_rows and not enough and i + 1 < len(texts):
      continue
    yield Shard(
      split=split, number=number, first=first, last=i + 1,
      sum=digest.hexdigest(), tokens=tokens, rows=rows,
    )  # fmt: skip
    if enough:
      return
    done, number, first, tokens = done + rows, number + 1, i + 1, 0
    digest = hashlib.sha256()


def sum_of(texts: Sequence[data.Document], first: int, last: int) -> str:
  """The `Shard.sum` of documents `first .. last - 1`."""
  digest = hashlib.sha256()
  for i in range(first, last):
    digest.update(_line(texts[i]))
  return digest.hexdigest()


def _line(document: data.Document) -> bytes:
  return json.dumps(document).encode() + b"\n"


# ---------------------------------------------------------------- the records


def halved(x: Array) -> tuple[Array, Array]:
  """`f32[..., D]` in half the bytes: `f16[..., D]` and exponents `i8[...]`.

  What flows between a target's layers is larger than float16 reaches (65,504)
  in some models, at a few places. bfloat16 reaches there, but keeps 8 bits of
  each number, and float16 11. So a vector is divided by the power of two that
  brings its largest number to just below 2**15. Every number is then kept to
  one part in 2,048 of itself or, where it is very small, to 2**-39 of the
  largest one.
  """
  _, exponents = jnp.frexp(jnp.max(jnp.abs(x), axis=-1))
  exponents = jnp.maximum(exponents - _REACH, _LEAST)
  small = jnp.ldexp(x, -exponents[..., None])
  return small.astype(jnp.float16), exponents.astype(jnp.int8)


def restored(halves: Array, exponents: Array) -> Array:
  """`f32[..., D]` of what `halved` gave."""
  exponents = exponents[..., None].astype(jnp.int32)
  return jnp.ldexp(halves.astype(jnp.float32), exponents)


def encode(row: dict[str, np.ndarray]) -> bytes:
  """A record."""
  return safetensors.save(
    {name: np.ascontiguousarray(x) for name, x in row.items()}
  )


def decode(record: bytes, parts: Sequence[int]) -> dict[str, np.ndarray]:
  """A row, with some of its parts."""
  row = safetensors.load(record)
  for name in ("parts", "exponents"):
    row[name] = row[name][:, parts]
  return row


def record_bytes(settings: Settings) -> int:
  """Bytes of a record."""
  length, count = settings.sequence_length, len(settings.layers)
  whole = np.zeros(length + 1, np.int32)
  row = dict(tokens=whole, segments=whole, positions=whole)
  row["parts"] = np.zeros((length, count, settings.width), np.float16)
  row["exponents"] = np.zeros((length, count), np.int8)
  row["normalisers"] = np.zeros(length, np.float32)
  row["likeliest"] = np.zeros(length, np.int32)
  return len(encode(row))


# -------------------------------------------------------------------- reading


def claim(folder: pathlib.Path, settings: Settings) -> None:
  """Notes what a folder is to hold.

  Raises:
    ValueError: if it holds something else.
  """
  path, ours = folder / _SETTINGS, settings.as_json()
  if path.is_file():
    theirs = read_object(path)
    differ = sorted(x for x in ours if theirs.get(x) != ours[x])
    if differ:
      name = differ[0]
      raise ValueError(
        f"{folder} has features of another {name} ({theirs.get(name)!r}, not "
        f"{ours[name]!r}): write elsewhere, or give --overwrite"
      )
  elif any(path.name != "lock" for path in folder.iterdir()):
    raise ValueError(f"{folder} holds something else: write elsewhere")
  results.write_json(str(path), ours)


def disclaim(folder: pathlib.Path) -> None:
  """Removes the notes of `claim` and of a finished run."""
  for name in (NAME, _SETTINGS):
    (folder / name).unlink(missing_ok=True)


def read(folder: str) -> Stored:
  """The features in a folder.

  Raises:
    ValueError: if it is not complete, or damaged.
  """
  root = pathlib.Path(folder)
  path = root / NAME
  if not path.is_file():
    raise ValueError(
      f"there is no {path}: `python -m launch.tools.features` makes it, or "
      "goes on with it"
    )
  content = read_object(path)
  try:
    stored = Stored(
      folder=root,
      settings=dict(content["settings"]),
      shards=tuple(Shard(**shard) for shard in content["shards"]),
    )
  except (ValueError, TypeError, LookupError) as error:
    raise ValueError(f"{path} is damaged: {error}") from None
  gone = [s.name for s in stored.shards if not (root / s.name).is_file()]
  if gone:
    raise ValueError(
      f"{folder} lacks {len(gone)} of its files ({gone[0]}): "
      "`python -m launch.tools.features` makes them again"
    )
  return stored


def check(
  stored: Stored,
  wanted: Settings,
  texts: Mapping[str, Callable[[], Sequence[data.Document]]],
) -> None:
  """Raises ValueError unless features are those that a training would make.

  Args:
    stored: the features.
    wanted: what the training reads; it need not read all layers that are kept,
      and a dataset may have moved.
    texts: by split, what gives its documents.
  """
  theirs, ours = stored.settings, wanted.as_json()
  for name in ("format", "target", "width", "sequence_length"):
    if theirs.get(name) != ours[name]:
      raise ValueError(
        f"the features in {stored.folder} are not those of this training: "
        f"their {name} is {theirs.get(name)!r}, not {ours[name]!r}"
      )
  has = theirs.get("layers", [])
  if missing := [layer for layer in ours["layers"] if layer not in has]:
    raise ValueError(
      f"the features in {stored.folder} are of the layers "
      f"{','.join(map(str, has))}, and this head reads "
      f"{','.join(map(str, missing))} too"
    )
  for split, documents in texts.items():
    now = documents()
    for s in stored.of(split):
      if s.last > len(now) or sum_of(now, s.first, s.last) != s.sum:
        raise ValueError(
          f"the features in {stored.folder} are of other documents than those "
          f"of {wanted.dataset} ({split}, from {s.first} on): "
          "`python -m launch.tools.features` makes what is missing"
        )


def batches(
  stored: Stored,
  split: str,
  layers: Features,
  *,
  batch_size: int,
  seed: int | None,
) -> grain.IterDataset:
  """Batches of records, as `launch.training.data.batches` has them of text.

  Args:
    stored: from `read`.
    split: "train" or "validation".
    layers: of which parts are wanted, FINAL last; all of them are there.
    batch_size: rows in a batch, over all processes.
    seed: see `launch.training.data.shared`; an incomplete last batch is
      dropped.

  Returns:
    Of records; see the module.

  Raises:
    ValueError: if the processes cannot share the batch evenly, or there is no
      batch.
  """
  paths = [str(stored.folder / shard.name) for shard in stored.of(split)]
  source = grain.sources.ArrayRecordDataSource(paths) if paths else ()
  if len(source) < batch_size:
    raise ValueError(
      f"the features in {stored.folder} are {len(source)} rows of {split} "
      f"text, less than a batch: lower config.batch_size ({batch_size})"
    )
  kept = list(stored.settings["layers"])
  parts = [kept.index(layer) for layer in layers]
  rows, count = data.shared(source, batch_size, seed)
  rows = rows.map(lambda record: decode(record, parts)).to_iter_dataset(
    grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
  )
  return rows.batch(count, drop_remainder=True)


def all_layers(features: Features) -> Features:
  """Layers to store for a head that reads `features`, the final state last."""
  return (*(x for x in features if x != FINAL), FINAL)
