"""Data of a head's training: a target's features, and a draft vocabulary.

Features are stored or not. A draft vocabulary is the most frequent tokens of a
text: EAGLE-3 counts those of its training data; most of a large vocabulary is
never drafted, and its part of the output projection would be most of a head's
cost.
"""

import functools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from launch import results
from launch.training import data, features
from launch.training.features import Settings, Stored
from models import checkpoints, head_starts
from models.formats.json_files import read_object
from models.networks.layers import TransformerConfig
from models.networks.transformer import FINAL, Features
from models.tokenizers import Tokenizer

_VOCABULARY = "vocabulary.json"


def layers_read(config, num_layers: int) -> Features:
  """Layers that a config's head reads, of a target of `num_layers` layers.

  Raises:
    ValueError: if the target has no such layers.
  """
  if config.init_from:
    return checkpoints.read_head(config.init_from, config.target).features
  head = config.head
  if head.kind == "eagle3":
    return head_starts.fused_layers(num_layers, tuple(head.layers))
  if head.kind == "dflash":
    return head_starts.spread_layers(
      head.num_layers, num_layers, tuple(head.layers)
    )
  return (FINAL,)


def settings(config, read: Features, target: TransformerConfig) -> Settings:
  """Settings of the features for a head that reads `read` of a target."""
  return Settings(
    target=config.target,
    layers=features.all_layers(read),
    width=target.embed_dim,
    sequence_length=config.sequence_length,
    dataset=config.dataset,
    text_features=tuple(config.text_features),
  )


def stored(
  config,
  read: Features,
  target: TransformerConfig,
  texts: Sequence[data.Document],
  folder: pathlib.Path,
) -> Stored | None:
  """The features that a config names; None if they are made on the fly.

  Args:
    config: see configs/train_head.py.
    read: what the head reads of the target.
    target: its config.
    texts: the documents of the training split.
    folder: WORKDIR, which may know that the run began with others.

  Raises:
    ValueError: if they are not those of this training.
  """
  if not config.get("features"):
    return None
  if config.contexts != "data":
    raise ValueError(
      "config.features are of the data's texts, and config.contexts = "
      f"{config.contexts!r} draws new ones in every step: their features are "
      "made on the fly"
    )
  store = features.read(config.features)
  documents = {"train": lambda: texts}
  if config.validate_every:
    if not store.of("validation"):
      raise ValueError(
        f"{config.features} has no validation text: set "
        "config.validate_every=0, or make it with another"
      )
    documents["validation"] = lambda: data.documents(config, "validation")
  features.check(store, settings(config, read, target), documents)
  before = _noted(folder)
  if before is not None and before != store.sum:
    raise ValueError(
      f"{config.features} has other features than when the run in {folder} "
      "began: take another --workdir (config.init_from can begin with this "
      "run's head)"
    )
  return store


def batches(config, store: Stored | None, read: Features):
  """`(split, seed=...) -> batches` of stored features; None without them."""
  if store is None:
    return None
  return functools.partial(
    features.batches,
    store,
    layers=features.all_layers(read),
    batch_size=config.batch_size,
  )


def note(folder: pathlib.Path, store: Stored) -> None:
  """Notes in WORKDIR which features a run reads."""
  results.write_json(str(folder / features.NAME), {"sum": store.sum})


def _noted(folder: pathlib.Path) -> str | None:
  path = folder / features.NAME
  if not (path.is_file() and (folder / "checkpoints").is_dir()):
    return None
  return read_object(path).get("sum")


def most_frequent(
  documents: Iterable[data.Document], tokenizer: Tokenizer, size: int
) -> tuple[np.ndarray, float]:
  """The tokens that documents, and the ends of them, are made of most.

  Of equally frequent ones those of lower ids are taken: byte-pair merges are
  numbered from the most frequent on, so that is a guess at what other text has.

  Args:
    documents: from `launch.training.data.documents`.
    tokenizer: of V tokens.
    size: how many.

  Returns:
    `i32[size]`, their ids in rising order, and the share of the documents'
    tokens that are among them.

  Raises:
    ValueError: unless `size` is in 1..V.
  """
  if not 1 <= size <= tokenizer.vocab_size:
    raise ValueError(
      f"draft_vocab_size must be in 1..{tokenizer.vocab_size}, got {size}"
    )
  counts = np.zeros(tokenizer.vocab_size, np.int64)
  for document in documents:
    ids = data.token_ids(document, tokenizer)
    counts += np.bincount(ids, minlength=len(counts))
  chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
  covered = counts[chosen].sum() / max(counts.sum(), 1)
  return chosen.astype(np.int32), float(covered)


def write_vocabulary(folder: pathlib.Path, ids: np.ndarray) -> None:
  """Notes in WORKDIR what was chosen: the weights are of these tokens."""
  results.write_json(str(folder / _VOCABULARY), {"token_ids": ids.tolist()})


def read_vocabulary(folder: pathlib.Path) -> np.ndarray | None:
  """The draft vocabulary noted in WORKDIR; None if there is none.

  Raises:
    ValueError: if the file is damaged.
  """
  path = folder / _VOCABULARY
  if not path.is_file():
    return None
  try:
    return np.array(read_object(path)["token_ids"], np.int32)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is not a draft vocabulary: {error}") from None
