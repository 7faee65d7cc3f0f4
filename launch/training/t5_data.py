"""Pairs of texts for training encoder-decoders: read, cut and batched.

`config.dataset` names what is read:

  FILE.jsonl            a line {"input": "...", "output": "..."} each, as
                        `launch.tools.machine_tasks` writes
  wmt14_translate/de-en or any TFDS name, prepared before or downloadable here,
                        with `config.pair_features`, as ("de", "en")

With `config.answers`, what `launch.decode` wrote for a FILE.jsonl, each answer
is what was decoded there: sequence-level distillation (Kim and Rush, 2016).
Pairs without an answer are left out, and those whose answer a budget cut off.
"""

import json
from collections.abc import Iterable, Sequence

import grain
import ml_collections
import numpy as np

from launch import results
from launch.training import data
from models import tokenizers
from models.tokenizers import Tokenizer

Pair = tuple[str, str]


def pairs(config: ml_collections.ConfigDict, split: str) -> Sequence[Pair]:
  """Inputs and answers.

  Args:
    config: see configs/train_t5.py.
    split: "train" or "validation".

  Raises:
    ValueError: for files or data sets that hold none.
  """
  name = config.dataset if split == "train" else config.validation
  if not name.endswith(".jsonl"):
    return _of_tfds(config, name, split)
  answers = None
  if config.answers and split == "train":
    answers = {
      json.dumps(record.get("id")): record.get("completion")
      for _, record in results.read_jsonl(config.answers)
      if record.get("stop_reason") != "length"
    }
  texts = []
  for number, record in results.read_jsonl(name):
    output = record.get("output")
    if answers is not None:
      key = json.dumps(record.get("id", number))
      if key not in answers:
        continue
      output = answers[key]
    if not isinstance(record.get("input"), str) or not isinstance(output, str):
      raise ValueError(
        f'{name}:{number}: expected {{"input": "...", "output": "..."}}'
      )
    texts.append((record["input"], output))
  if not texts:
    without = "" if answers is None else f" have an answer in {config.answers}"
    raise ValueError(f"no pairs in {name}{without}")
  return texts


def _of_tfds(config, name: str, split: str) -> Sequence[Pair]:
  features = tuple(config.pair_features)
  if len(features) != 2:
    raise ValueError(
      f"pair_features must be two features of {name!r}, input and answer, got "
      f"{features}"
    )
  sides = []
  for feature in features:
    one = ml_collections.ConfigDict(
      dict(dataset=name, data_dir=config.data_dir, text_features=(feature,))
    )
    sides.append(data.documents(one, split))
  return _Both(*sides)


class _Both(Sequence):
  """Two sides of a data set, read when they are asked for."""

  def __init__(self, inputs: Sequence[str], answers: Sequence[str]):
    self._inputs, self._answers = inputs, answers

  def __len__(self) -> int:
    return len(self._inputs)

  def __getitem__(self, index):
    return self._inputs[index], self._answers[index]


def tokenizer_of(config: ml_collections.ConfigDict) -> Tokenizer:
  """The config's tokenizer, or one trained on some pairs if it has none.

  Raises:
    ValueError: if it has more tokens than the model, or does not end what it
      encodes.
  """

  def some() -> Iterable[str]:
    texts = pairs(config, "train")
    step = max(1, len(texts) // config.tokenizer_pairs)
    for index in range(0, len(texts), step):
      yield from texts[index]

  tokenizer = data.tokenizer_of(config, some, tokenizers.train_encoder)
  if (
    tokenizer.eos_token_id is None
    or tokenizer.encode("a")[-1] != tokenizer.eos_token_id
  ):
    raise ValueError(
      f"the tokenizer in {config.tokenizer} must end what it encodes with its "
      "end-of-text token, as T5's does"
    )
  return tokenizer


def batches(
  config: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  split: str,
  *,
  start_token: int,
  seed: int | None,
) -> grain.IterDataset:
  """Batches of a split's pairs as padded rows; what is longer is cut.

  Args:
    config: `input_length` and `output_length` are tokens of a row, ends among
      them.
    tokenizer: which ends what it encodes.
    split: see `pairs`.
    start_token: what the decoder's texts begin with.
    seed: see `launch.training.data.shared`; an incomplete last batch is
      dropped.

  Returns:
    Of `{"inputs" i32[B, W], "input_lengths" i32[B], "tokens" i32[B, T + 1],
    "lengths" i32[B]}`: tokens begin with the start token, and `lengths` counts
    it.
  """
  input_length, output_length = config.input_length, config.output_length

  def row(pair: Pair) -> dict[str, np.ndarray]:
    inputs = tokenizer.encode(pair[0])[:input_length]
    answer = [start_token, *tokenizer.encode(pair[1])][: output_length + 1]
    pad = lambda ids, width: np.asarray(
      [*ids, *[0] * (width - len(ids))], np.int32
    )
    return {
      "inputs": pad(inputs, input_length),
      "input_lengths": np.int32(len(inputs)),
      "tokens": pad(answer, output_length + 1),
      "lengths": np.int32(len(answer)),
    }

  rows, count = data.shared(pairs(config, split), config.batch_size, seed)
  return (
    rows.map(row)
    .batch(count, drop_remainder=True)
    .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
  )
