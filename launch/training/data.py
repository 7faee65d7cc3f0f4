"""Training text: turns a dataset's documents into packed batches, with grain.

  documents of a split -> shuffled in every epoch -> tokens -> rows of a fixed
  length, cut from their concatenation -> shuffled locally, so that a batch is
  not one document -> batches

Every process reads its share of the documents; the order depends only on the
seed, and iterators' states are saved in checkpoints. `config.dataset` is

  python_source      the Python files of `launch.training.corpus`
  lm1b, xsum, ...    any TFDS name, prepared or downloadable
  FOLDER             *.txt, *.md and *.py files, one document each, and *.jsonl
                     files with a document {"text": "..."} or a conversation
                     {"messages": [...]} per line; or such files in subfolders
                     train, validation and test

The chat template encodes conversations. Without subfolders, a hash of each
document's text decides its split (5% are test, 2% validation), so equal texts
are never in two splits. Hidden files are skipped.
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import ml_collections
import numpy as np
from grain import experimental as grain_experimental

from launch import processes, results
from launch.training import corpus
from models import chat, checkpoints, tokenizers
from models.tokenizers import Tokenizer

# A text, or the messages of a conversation.
Document = str | list[dict[str, str]]

# Features of TFDS datasets that form a document, joined by an empty line.
_FEATURES = {
  "cnn_dailymail": ("article", "highlights"),
  "gsm8k": ("question", "answer"),
  "lm1b": ("text",),
  "wmt14_translate": ("de", "en"),
  "xsum": ("document", "summary"),
}


def documents(
  config: ml_collections.ConfigDict, split: str
) -> Sequence[Document]:
  """The texts and conversations of "train", "validation" or "test".

  If a TFDS dataset has no validation split, it is the last fiftieth of the
  training split.
  """
  name = config.dataset
  if name == "python_source":
    return [file.text for file in corpus.python_files(split=split)]
  if os.path.isdir(name):
    return _of_folder(pathlib.Path(name), split)
  # Without TensorFlow's extras TFDS's registry fails for these packages.
  import tensorflow_datasets as tfds
  import tensorflow_datasets.summarization
  import tensorflow_datasets.text
  import tensorflow_datasets.translate

  try:
    builder = tfds.builder(name, file_format="array_record", try_gcs=False)
  except (tfds.core.DatasetNotFoundError, ValueError) as error:
    raise ValueError(
      f"unknown dataset {name!r}: neither a folder nor a TFDS name"
    ) from error
  builder.download_and_prepare()
  features = tuple(config.text_features) or _FEATURES.get(builder.name)
  if not features:
    known = list(builder.info.features)
    raise ValueError(f"{name}: set config.text_features, from {known}")
  if "validation" not in builder.info.splits:
    parts = {"train": "train[:98%]", "validation": "train[98%:]"}
    split = parts.get(split, split)
  source = grain.MapDataset.source(builder.as_data_source(split=split))
  as_text = lambda x: x.decode() if isinstance(x, bytes) else str(x)
  return source.map(
    lambda record: "\n\n".join(as_text(record[name]) for name in features)
  )


def _of_folder(folder: pathlib.Path, split: str) -> list[Document]:
  """The documents of a folder, by subfolder or by the hash of their text."""
  if (folder / "train").is_dir():
    chosen = list(documents_in(folder / split))
  else:
    belongs = lambda x: corpus.split_by_hash(json.dumps(x)) == split
    chosen = list(filter(belongs, documents_in(folder)))
  if not chosen:
    raise ValueError(
      f"no {split} documents in {folder}: add *.txt, *.md, *.py or *.jsonl "
      "files, in subfolders train and validation if there are few"
    )
  return chosen


def documents_in(
  root: pathlib.Path, kinds: Sequence[str] = ("text", "messages")
) -> Iterator[Document]:
  """The documents of all files in a folder except hidden ones."""
  for path in sorted(root.rglob("*")):
    if any(part.startswith(".") for part in path.relative_to(root).parts):
      continue
    if path.suffix in (".txt", ".md", ".py") and path.is_file():
      yield path.read_text("utf-8")
    elif path.suffix == ".jsonl":
      yield from documents_of(path, kinds)


def documents_of(
  path: pathlib.Path, kinds: Sequence[str] = ("text", "messages")
) -> Iterator[Document]:
  """The documents of a JSONL file; ValueError with its number for a bad line.

  A line's document is under the first of these keys that it has.
  """
  for number, record in results.read_jsonl(path):
    document = next((record[x] for x in kinds if x in record), None)
    if document is None:
      raise ValueError(
        f"{path}:{number}: must have one of the keys {', '.join(kinds)}, got "
        f"{json.dumps(record)[:60]}"
      )
    yield document


# -------------------------------------------------------------------- tokens


def tokenizer_of(
  config: ml_collections.ConfigDict,
  texts: Callable[[], Iterable[str]],
  train: Callable[..., Tokenizer] = tokenizers.train,
) -> Tokenizer:
  """The tokenizer of `config.tokenizer`, or a new one trained on `texts()`.

  It is not written here but by `Task.begin`. All processes train the same one.
  """
  path, teacher = config.tokenizer, config.get("teacher")
  try:
    tokenizer = checkpoints.load_tokenizer(path)
  except FileNotFoundError:
    if teacher or checkpoints.is_file(path):
      raise
    tokenizer = train(texts(), vocab_size=config.model.vocab_size)
  processes.gather(None)  # all have looked, so the chief may write one
  if tokenizer.vocab_size > config.model.vocab_size:
    raise ValueError(
      f"config.model.vocab_size ({config.model.vocab_size}) is less than the "
      f"{tokenizer.vocab_size} tokens of config.tokenizer ({path})"
    )
  return tokenizer


def text_of(document: Document) -> str:
  """The text of a document."""
  if isinstance(document, str):
    return document
  return "\n".join(message["content"] for message in document)


def token_ids(document: Document, tokenizer: Tokenizer) -> list[int]:
  """Ids of a document, with the end-of-text token last."""
  if tokenizer.eos_token_id is None:
    raise ValueError("training needs a tokenizer with an end-of-text token")
  if isinstance(document, str):
    ids = tokenizer.encode(document)
  else:
    ids = chat.encode(tokenizer, document, add_generation_prompt=False)
  return [*ids, tokenizer.eos_token_id]


def batches(
  texts: Sequence[Document],
  tokenizer: Tokenizer,
  *,
  length: int,
  batch_size: int,
  seed: int | None,
  shuffle_rows: int = 1024,
) -> grain.IterDataset:
  """Batches of packed rows; documents may continue in the next row.

  Args:
    texts: from `documents`.
    tokenizer: with an end-of-text token, which ends every document.
    length: tokens in a row.
    batch_size: rows in a batch, over all processes; an incomplete last batch is
      dropped.
    seed: see `shared`.
    shuffle_rows: size of the window in which rows are shuffled, with a seed.

  Returns:
    Batches of `{"tokens", "segments", "positions"}`, each `i32[rows, length]`:
    segments number a row's documents from 1 (0 for padding in the last row of a
    pass), positions count tokens inside them.
  """
  rows, count = shared(texts, batch_size, seed)
  rows = rows.map(
    lambda text: {"tokens": np.asarray(token_ids(text, tokenizer), np.int32)}
  ).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16))
  rows = grain_experimental.ConcatThenSplitIterDataset(
    rows, length_struct={"tokens": length}
  ).map(
    lambda row: {
      "tokens": row["tokens"],
      "segments": row["tokens_segment_ids"],
      "positions": row["tokens_positions"],
    }
  )
  if seed is not None and shuffle_rows > 1:
    rows = grain_experimental.WindowShuffleIterDataset(
      rows, window_size=shuffle_rows, seed=seed
    )
  return _Restorable(rows.batch(count, drop_remainder=True))


def shared(
  source: Sequence[Any], batch_size: int, seed: int | None
) -> tuple[Any, int]:
  """This process's share of a source's records, and its rows of a batch.

  With a seed, records are reshuffled every epoch, endlessly; None is one pass
  in order.
  """
  count = jax.process_count()
  if batch_size % count:
    raise ValueError(
      f"batch_size ({batch_size}) must be a multiple of the number of "
      f"processes ({count})"
    )
  rows: Any = grain.MapDataset.source(source)
  if seed is not None:
    rows = rows.seed(seed).shuffle()
  rows = rows[jax.process_index() :: count]
  return rows if seed is None else rows.repeat(), batch_size // count


def batches_of(
  config: ml_collections.ConfigDict, tokenizer: Tokenizer
) -> Callable[..., grain.IterDataset]:
  """`(split, seed=...) -> batches` of a config's text."""
  return lambda split, *, seed: batches(
    documents(config, split),
    tokenizer,
    length=config.sequence_length + 1,
    batch_size=config.batch_size,
    seed=seed,
  )


class _Restorable(grain.IterDataset):
  """Passes elements on, and can restore a state that was saved as JSON.

  `ConcatThenSplitIterDataset` (grain 0.2.18) compares parts of its state with
  tuples, but JSON has only lists: a state saved at a document's end would be
  restored at another position.
  """

  def __iter__(self) -> grain.DatasetIterator:
    return _RestorableIterator(iter(self._parent))


class _RestorableIterator(grain.DatasetIterator):
  def __next__(self):
    return next(self._parent)

  def get_state(self):
    return self._parent.get_state()

  def set_state(self, state):
    as_tuples = lambda x: (
      tuple(map(as_tuples, x)) if isinstance(x, list)
      else {k: as_tuples(v) for k, v in x.items()} if isinstance(x, dict)
      else x
    )  # fmt: skip
    self._parent.set_state(as_tuples(state))
