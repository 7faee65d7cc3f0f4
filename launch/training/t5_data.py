"""Pairs of texts for training encoder-decoders: read, cut and batched.

`config.dataset` is a file of lines {"input": "...", "output": "..."}, as
`launch.tools.machine_tasks` writes. With `config.answers`, what `launch.decode`
wrote for it, each answer is what was decoded there: sequence-level distillation
(Kim and Rush, 2016). Pairs without an answer are left out, and those whose
answer a budget cut off.
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
  """The inputs and answers of "train" or "validation".

  Raises:
    ValueError: for a line that is no pair, or if there is none.
  """
  name = config.dataset if split == "train" else config.validation
  answers = None
  if config.answers and split == "train":
    answers = {
      json.dumps(record.get("id")): record.get("completion")
      for _, record in results.read_jsonl(config.answers)
      if record.get("stop_reason") != "length"
    }
  texts = []
  for number, record in results.read_jsonl(name):
    pair = record.get("input"), record.get("output")
    if answers is not None:
      pair = pair[0], answers.get(json.dumps(record.get("id", number)))
      if pair[1] is None:
        continue
    if not all(isinstance(text, str) for text in pair):
      raise ValueError(
        f'{name}:{number}: expected {{"input": "...", "output": "..."}}'
      )
    texts.append(pair)
  if not texts:
    raise ValueError(f"no pairs in {name} have an answer")
  return texts


def tokenizer_of(config: ml_collections.ConfigDict) -> Tokenizer:
  """The config's tokenizer, or one trained on some pairs if it has none.

  Raises:
    ValueError: as `data.tokenizer_of`.
  """

  def some() -> Iterable[str]:
    texts = pairs(config, "train")
    step = max(1, len(texts) // config.tokenizer_pairs)
    for index in range(0, len(texts), step):
      yield from texts[index]

  return data.tokenizer_of(config, some, tokenizers.train_encoder)


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
    seed: see `launch.training.data.shared`.

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
