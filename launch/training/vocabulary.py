"""Draft vocabularies: the most frequent tokens of a text.

EAGLE-3 counts those of its training data; most of a large vocabulary is never
drafted, and its part of the output projection would be most of a head's cost.
"""

import json
import pathlib
from collections.abc import Iterable

import numpy as np

from launch import results
from launch.training import data
from models.tokenizers import Tokenizer

_FILE = "vocabulary.json"


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


def write(folder: pathlib.Path, ids: np.ndarray) -> None:
  """Notes in WORKDIR what was chosen: the weights are of these tokens."""
  results.write_json(str(folder / _FILE), {"token_ids": ids.tolist()})


def read(folder: pathlib.Path) -> np.ndarray | None:
  """The draft vocabulary noted in WORKDIR; None if there is none.

  Raises:
    ValueError: if the file is damaged.
  """
  path = folder / _FILE
  if not path.is_file():
    return None
  try:
    ids = json.loads(path.read_bytes())["token_ids"]
    return np.array(ids, np.int32)
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is not a draft vocabulary: {error}") from None
