"""Batches of a stream, and what came of each."""

import time
from collections.abc import Iterator

import jax
import numpy as np

from launch import prompts
from launch.build import pair
from launch.studies.online import domains
from specjax.runtime.engine import Batch, Engine

_OF_TRAINING = 1 << 31  # streams of draws that no other prompt has


class Prompts:
  """Batches of the prompts of each domain, which go on where they were."""

  def __init__(self, config, models: pair.Pair, *, training: bool):
    """Begins with the first prompt of every domain.

    Args:
      config: the study.
      models: for the tokenizer.
      training: see `domains.texts`.
    """
    self._config, self._tokenizer = config, models.tokenizer
    self._training = training
    self._texts: dict[str, Iterator[str]] = {}
    self._next = _OF_TRAINING if training else 0

  def batch(self, domain: str) -> Batch:
    """The next prompts of a domain, each with draws of its own."""
    rows, width = self._config.batch_size, self._config.prompt_tokens
    if domain not in self._texts:
      self._texts[domain] = domains.texts(domain, training=self._training)
    found = prompts.first_tokens(
      [next(self._texts[domain]) for _ in range(rows)],
      self._tokenizer,
      num_tokens=width,
    )
    own = tuple(
      prompts.Prompt(self._next + i, i, p.text, p.token_ids)
      for i, p in enumerate(found)
    )
    self._next += rows
    return Batch(own, rows, max(1 << (width - 1).bit_length(), 32))


def decode(one: Engine, batch: Batch) -> dict:
  """Decodes a batch.

  Returns:
    Sums over its rows: `tokens` that were emitted, target `calls`, `drafted`
    and `accepted` tokens, `offered` and `taken`: drafted tokens that came to be
    verified, and of those the expected number that stood. `seconds` are of the
    rounds alone, `update_seconds` those of them that updates took.
  """
  one.compile(batch)
  learner = one.learner
  before = learner.seconds if learner else 0.0
  state = jax.block_until_ready(one.prefill(batch))
  began = time.perf_counter()
  state = jax.block_until_ready(one.generate(batch, state))
  seconds = time.perf_counter() - began
  total = lambda array: float(np.asarray(array).sum())
  counters = state.counters
  return {
    "tokens": int(total(state.length - state.prompt_length)),
    "calls": int(total(counters.num_target_calls)),
    "drafted": int(total(counters.num_drafted)),
    "accepted": int(total(counters.num_accepted)),
    "offered": total(counters.rank_offered),
    "taken": total(counters.rank_accepted),
    "seconds": seconds,
    "update_seconds": learner.seconds - before if learner else 0.0,
  }


def decode_block(
  one: Engine, waiting: Prompts, domain: str, tokens: int
) -> list[dict]:
  """Batches of a domain until so many tokens are emitted."""
  records: list[dict] = []
  while sum(record["tokens"] for record in records) < tokens:
    records.append(decode(one, waiting.batch(domain)))
  return records
