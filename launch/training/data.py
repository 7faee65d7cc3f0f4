"""Text for training: from a dataset's documents to packed batches, with grain.

  documents of a split -> shuffled anew every epoch -> tokens -> rows of a fixed
  length, cut from their concatenation -> shuffled among their neighbours, so
  that a batch is not one document -> batches

Every process reads its own share of the documents; all of it is a function of
the seed, and an iterator's state (`get_state`, `set_state`) goes into
checkpoints. `config.dataset` names what is read:

  python_source      of `launch.training.python_source`, made if it is not there
  lm1b, xsum, ...    any TFDS name, prepared before or downloadable here
  FOLDER             *.txt, *.md and *.py files, a document each, and *.jsonl
                     files, a document {"text": "..."} or a conversation
                     {"messages": [...]} a line; or such files in subfolders
                     train, validation and test. Conversations become tokens by
                     the chat template. Names that begin with a dot, of files
                     and of folders, are passed over.

Without subfolders the hash of a document's text decides its split (5 in 100 are
test, 2 validation), whatever its file is called: the same text is never in two.
Where that leaves nothing to train on or nothing to validate on, as it does in a
small folder, one document in ten is validation; of fewer than ten the end of
each text is, from the first line in its last tenth on, or a conversation.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import ml_collections
import numpy as np
from absl import logging
from grain import experimental as grain_experimental

from launch import processes, results
from launch.training import corpus
from models import chat, checkpoints, tokenizers
from models.tokenizers import Tokenizer

SPLITS = ("train", "validation", "test")
# A text, or the messages of a conversation.
Document = str | list[dict[str, str]]

# The features that make a document, joined by an empty line.
_FEATURES = {
  "cnn_dailymail": ("article", "highlights"),
  "gsm8k": ("question", "answer"),
  "lm1b": ("text",),
  "python_source": ("text",),
  "wmt14_translate": ("de", "en"),
  "xsum": ("document", "summary"),
}
# What is a document as a whole.
_TEXT_FILES = (".txt", ".md", ".py")
# Of a small folder's text: one part in so many is held out.
_SMALL_SHARE = 10
# Where a dataset has no validation split: one document in 50 of its last ones.
_VALIDATION_SHARE = 50


def documents(
  config: ml_collections.ConfigDict, split: str
) -> Sequence[Document]:
  """The texts of a split, readable in any order.

  Args:
    config: `dataset`, `data_dir` ("" for a folder of this user), and
      `text_features` (for TFDS names that are not known here).
    split: "train", "validation" or "test". A dataset without a validation split
      has the last fiftieth of its training split for it.

  Returns:
    A sequence of texts and conversations.

  Raises:
    ValueError: for an unknown split or dataset, a folder without documents, or
      features that the dataset does not have.
  """
  if split not in SPLITS:
    raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
  if os.path.isdir(config.dataset):
    return _folder(pathlib.Path(config.dataset), split)
  if os.path.isfile(config.dataset):
    raise ValueError(
      f"config.dataset must be a folder, and {config.dataset} is a file"
    )
  if config.dataset.startswith(("/", ".", "~")):
    raise ValueError(f"no such folder: {config.dataset} (config.dataset)")
  from launch.training import python_source  # TFDS takes seconds to import

  data_dir = pathlib.Path(config.data_dir or python_source.default_dir())
  name = config.dataset.partition("/")[0].partition(":")[0]
  features = tuple(config.text_features) or _FEATURES.get(name)
  if name == "python_source":
    builder = python_source.prepare(data_dir)
  else:
    builder = _tfds_builder(config.dataset, data_dir)
  known = list(builder.info.features)
  if not features or not set(features) <= set(known):
    raise ValueError(
      f"text_features must be some of {known} for {config.dataset!r}, got "
      f"{features or ()}"
    )
  return _split_of(builder, split, features)


def _tfds_builder(name: str, data_dir: pathlib.Path):
  """A prepared builder of a TFDS name."""
  # Without TensorFlow's extras the registry stops before the packages.
  import tensorflow_datasets as tfds
  import tensorflow_datasets.summarization
  import tensorflow_datasets.text
  import tensorflow_datasets.translate

  try:
    builder = tfds.builder(
      name, data_dir=str(data_dir), file_format="array_record", try_gcs=False
    )
  except (tfds.core.DatasetNotFoundError, ValueError) as error:
    raise ValueError(
      f"unknown dataset {name!r}: neither a folder here nor a TFDS name"
    ) from error
  if not pathlib.Path(builder.data_path).is_dir():
    logging.warning(
      "%s is not in %s: it is fetched from the network now, which may take "
      "long, and long to fail", name, data_dir,
    )  # fmt: skip
  builder.download_and_prepare()
  return builder


class _Texts(Sequence):
  """Some records of a data source, as text."""

  def __init__(self, source, features: tuple[str, ...], places: range):
    self._source, self._features, self._places = source, features, places

  def __len__(self) -> int:
    return len(self._places)

  def __getitem__(self, index: int) -> str:
    record = self._source[self._places[index]]
    return "\n\n".join(_text(record[name]) for name in self._features)


def _text(value: str | bytes) -> str:
  """TFDS gives bytes, its mock strings."""
  return value.decode() if isinstance(value, bytes) else str(value)


def _split_of(builder, split: str, features: tuple[str, ...]) -> _Texts:
  names = set(builder.info.splits or SPLITS)
  source = builder.as_data_source(
    split=split if split in names or split == "test" else "train"
  )
  count = len(source)
  held_out = 0 if "validation" in names else max(count // _VALIDATION_SHARE, 1)
  places = {
    "train": range(count - held_out),
    "validation": range(count - held_out if held_out else 0, count),
    "test": range(count),
  }[split]
  return _Texts(source, features, places)


def _folder(folder: pathlib.Path, split: str) -> list[Document]:
  """The documents of a folder, by subfolder or as they are shared out."""
  if (folder / "train").is_dir():
    chosen, rest = list(_files(folder / split)), ()
  else:
    shared = _shared_out(list(_files(folder)))
    chosen, rest = shared[split], sum(map(len, shared.values()))
  if chosen:
    return chosen
  if rest:
    raise ValueError(
      f"{folder} has too little text for a {split} split: give it subfolders "
      f"train and {split}"
    )
  kinds = ", ".join(f"*{end}" for end in _TEXT_FILES)
  raise ValueError(
    f"no documents for split {split!r} in {folder}: {kinds} files, or *.jsonl "
    'files with a line {"text": "..."} or {"messages": [...]} each, in '
    "subfolders train, validation and test, or else shared out by their text"
  )


def _shared_out(documents: list[Document]) -> dict[str, list[Document]]:
  """The documents by split; see the module."""
  splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
  for document in documents:
    splits[corpus.split_by_hash(json.dumps(document))].append(document)
  if splits["train"] and splits["validation"]:
    return splits
  splits = {split: [] for split in SPLITS}
  texts = {json.dumps(document) for document in documents}
  by_hash = sorted(texts, key=lambda x: hashlib.sha256(x.encode()).digest())
  if len(texts) < _SMALL_SHARE:
    by_hash = [x for x in by_hash if x.startswith("[")]
  held_out = set(by_hash[::_SMALL_SHARE] if len(texts) > 1 else ())
  for document in documents:
    if isinstance(document, str) and len(texts) < _SMALL_SHARE:
      head, tail = _cut(document)
      splits["train"].append(head)
      splits["validation"].append(tail)
    else:
      is_out = json.dumps(document) in held_out
      splits["validation" if is_out else "train"].append(document)
  return {split: [x for x in some if x] for split, some in splits.items()}


def _cut(text: str) -> tuple[str, str]:
  """A text's beginning and end, cut where a line begins if there is one."""
  place = len(text) - len(text) // _SMALL_SHARE
  line = text.find("\n", place - 1, len(text) - 1) + 1
  return text[: line or place], text[line or place :]


def _files(root: pathlib.Path) -> Iterator[Document]:
  for path in sorted(root.rglob("*")):
    if any(part.startswith(".") for part in path.relative_to(root).parts):
      continue
    if path.suffix in _TEXT_FILES and path.is_file():
      yield _read(path)
    elif path.suffix == ".jsonl":
      yield from documents_of(path)


def documents_of(path: pathlib.Path) -> Iterator[Document]:
  """The documents of a JSONL file.

  Raises:
    ValueError: for a line that holds none, naming it.
  """
  for number, record in results.read_jsonl(path):
    document = _document(record)
    if document is None:
      raise ValueError(
        f'{path}:{number}: must be {{"text": "..."}} or {{"messages": [...]}}, '
        f"got {json.dumps(record)[:60]}"
      )
    yield document


def _document(record: Any) -> Document | None:
  """The document of a line; None if it holds none."""
  if not isinstance(record, dict):
    return None
  document = record.get("text", record.get("messages"))
  if isinstance(document, str):
    return document
  strings = lambda m: (
    isinstance(m, dict)
    and all(isinstance(m.get(key), str) for key in ("role", "content"))
  )
  is_talk = (
    isinstance(document, list) and document and all(map(strings, document))
  )
  return document if is_talk else None


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} must be UTF-8: {error}") from None


# -------------------------------------------------------------------- tokens


def tokenizer_of(
  config: ml_collections.ConfigDict,
  texts: Callable[[], Iterable[str]],
  train: Callable[..., Tokenizer] = tokenizers.train,
) -> Tokenizer:
  """The config's tokenizer, or one trained on `texts` if it has none.

  Nothing is written: `Task.begin` does that, once all else is known to be
  right. Every process trains the same one for itself.

  Args:
    config: `tokenizer`, a folder or a GGUF file, `model.vocab_size`, and
      perhaps `teacher`.
    texts: gives texts.
    train: trains on them.

  Raises:
    FileNotFoundError: for a GGUF file that is not there.
    ValueError: if it has more tokens than the model, or would be another than
      the teacher's.
  """
  is_file = checkpoints.is_file(config.tokenizer)
  load = checkpoints.load_tokenizer if is_file else tokenizers.load
  try:
    tokenizer = load(config.tokenizer)
  except FileNotFoundError:
    if is_file:
      raise
    if teacher := config.get("teacher"):
      raise ValueError(
        f"there is no tokenizer in config.tokenizer ({config.tokenizer}), and "
        "a new one would not be that of config.teacher: give config.tokenizer="
        f"{teacher}"
      ) from None
    tokenizer = train(texts(), vocab_size=config.model.vocab_size)
  processes.gather(None)  # all have looked, and the chief may write one
  if tokenizer.vocab_size > config.model.vocab_size:
    raise ValueError(
      f"config.model.vocab_size ({config.model.vocab_size}) is less than the "
      f"{tokenizer.vocab_size} tokens of config.tokenizer ({config.tokenizer})"
    )
  return tokenizer


def text_of(document: Document) -> str:
  """The text of a document."""
  if isinstance(document, str):
    return document
  return "\n".join(message["content"] for message in document)


def token_ids(document: Document, tokenizer: Tokenizer) -> list[int]:
  """Ids of a document, its end-of-text token last.

  Raises:
    ValueError: for a conversation, if the tokenizer has no chat template.
  """
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
  """Batches of packed rows; documents may go on in the next row.

  Args:
    texts: from `documents`.
    tokenizer: see `models.tokenizers`.
    length: tokens in a row.
    batch_size: rows in a batch, over all processes.
    seed: see `shared`; an incomplete last batch is dropped.
    shuffle_rows: so many rows in succession are shuffled among each other, in
      memory; 1 leaves them in the order of the documents. Not without a seed.

  Returns:
    Of `{"tokens", "segments", "positions"}`, each `i32[rows, length]`: segments
    count a row's documents from 1 (0 where the last row of a pass is filled
    up), positions count tokens inside them. Every document ends with the
    end-of-text token.

  Raises:
    ValueError: if the processes cannot share the batch evenly, or the tokenizer
      has no end-of-text token.
  """
  if tokenizer.eos_token_id is None:
    raise ValueError(
      "the tokenizer has no end-of-text token, which documents are to end with"
    )

  documents = _Tokens(texts, tokenizer, kept=seed is not None)
  rows, count = shared(documents, batch_size, seed)
  rows = rows.to_iter_dataset(
    grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
  )
  rows = grain_experimental.ConcatThenSplitIterDataset(
    rows, length_struct={"tokens": length}
  )
  rows = rows.map(
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


class _Tokens(Sequence):
  """Documents as tokens; of texts in memory these are made once, and kept."""

  def __init__(
    self, texts: Sequence[Document], tokenizer: Tokenizer, *, kept: bool
  ):
    self._texts, self._tokenizer = texts, tokenizer
    self._kept: dict[int, np.ndarray] = {}
    self._keeps = kept and isinstance(texts, list)

  def __len__(self) -> int:
    return len(self._texts)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    tokens = self._kept.get(index)
    if tokens is None:
      ids = token_ids(self._texts[index], self._tokenizer)
      tokens = np.asarray(ids, np.int32)
      if self._keeps:
        self._kept[index] = tokens
    return {"tokens": tokens}


def shared(
  source: Sequence[Any], batch_size: int, seed: int | None
) -> tuple[Any, int]:
  """This process's records of a source, and rows of its part of a batch.

  Args:
    source: records, readable in any order.
    batch_size: rows in a batch, over all processes.
    seed: of the order, new every epoch, without end; None for one pass in
      order.

  Raises:
    ValueError: if the processes cannot share a batch evenly.
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


def incomplete_batch(
  config: ml_collections.ConfigDict, tokenizer: Tokenizer
) -> dict[str, np.ndarray]:
  """A validation text that does not fill a batch, rows of nothing below.

  Raises:
    ValueError: if it has no tokens.
  """
  count, length = jax.process_count(), config.sequence_length + 1
  texts = documents(config, "validation")
  rows = list(
    batches(texts, tokenizer, length=length, batch_size=count, seed=None)
  )[: config.batch_size // count]
  if not any(processes.gather(len(rows))):
    raise ValueError("the validation split has no tokens")
  size = config.batch_size // count - len(rows)
  empty = np.zeros((size, length), np.int32)
  return {
    name: np.concatenate([*(row[name] for row in rows), empty])
    for name in ("tokens", "segments", "positions")
  }


class _Restorable(grain.IterDataset):
  """The same elements; a state that was JSON in between restores them too.

  grain's packing compares slices of its state with tuples, and JSON has lists:
  a state at a document's end came back as another place.
  """

  def __iter__(self) -> grain.DatasetIterator:
    return _RestorableIterator(iter(self._parent))


class _RestorableIterator(grain.DatasetIterator):
  def __next__(self):
    return next(self._parent)

  def get_state(self):
    return self._parent.get_state()

  def set_state(self, state):
    self._parent.set_state(_with_tuples(state))


def _with_tuples(state):
  if isinstance(state, dict):
    return {key: _with_tuples(value) for key, value in state.items()}
  if isinstance(state, list):
    return tuple(_with_tuples(value) for value in state)
  return state
