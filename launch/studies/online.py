r"""Study of online learning: a draft that follows its text between domains.

  python -m launch.studies.online --config=configs/online_study.py:prose \
    --output=docs/online/prose.json

Streams of prompts whose domain changes (`config.streams`) are completed by the
target with three drafts: one that stays as it is (frozen), one that learns
between rounds (online; it begins each stream as the frozen one), and for every
domain one that was trained on the target's completions of that domain before,
in the same way, and then stays as it is (offline). OUT.json has for every batch
what was emitted, drafted and accepted, and what updates took; of every block
the acceptance beyond its first `config.after` tokens, and how far it is above
the frozen draft's, with a 95% interval over batches; OUT.svg draws acceptance
over time. A run that was stopped goes on with the streams that are left.
`launch.tables online` draws the tables.

The domain "python" is lines from source files that no embedded model was
trained on, "prose" the reference of the Python language as its interpreter
carries it, in English sentences, which the corpus of the embedded models leaves
out. Every other one is a task of our own questions
(`launch.evaluation.questions`).
"""

import dataclasses
import itertools
import os
import pydoc_data.topics
import re
from collections.abc import Iterator

import ml_collections
import numpy as np

from launch import cli, prompts, provenance, report, results
from launch.assembly import pair
from launch.evaluation import questions
from launch.results import Journal
from launch.studies import online_plots
from launch.studies.online_plots import acceptance
from launch.training import corpus
from specjax import intervals
from specjax.runtime import timing
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch

cli.reads(cli.CONFIG, cli.OUTPUT)

# In this order; the offline draft is one for each domain.
DRAFTS = ("frozen", "online", "offline")
_OF_TRAINING = 1 << 31  # streams of draws that no other prompt has
_PYTHON, _PROSE = "python", "prose"
# Letters of a paragraph of prose, at least, and those of a prompt.
_LEAST, _MOST = 120, 400
_MANY = 400  # prompts of a domain that has as many
_SAMPLES = 10_000


# --------------------------------------------------------------------- domains


def texts(domain: str, *, training: bool) -> Iterator[str]:
  """Prompts of a domain, again from the first when they are all used.

  Args:
    domain: "python", "prose", or a task of our own questions.
    training: for what is trained beforehand: of source and prose other prompts
      than else, of the questions, which are few, the same.

  Raises:
    ValueError: for a domain that is none.
  """
  if domain == _PYTHON:
    split = "validation" if training else "test"
    every = corpus.held_out_prompts(_MANY // 2, split=split)
  elif domain == _PROSE:
    every = paragraphs()[int(training) :: 2]
  else:
    asked = questions.of_categories(questions.read(questions.OWN), [domain])
    every = [question.turns[0] for question in asked]
  return itertools.cycle(every)


def paragraphs() -> list[str]:
  """The paragraphs of the language reference that are prose, shuffled."""
  pieces = []
  for _, topic in sorted(pydoc_data.topics.topics.items()):
    for part in re.split(r"\n\s*\n", topic):
      text = " ".join(part.split())
      letters = sum(c.isalpha() or c == " " for c in text)
      if len(text) >= _LEAST and letters > 0.9 * len(text):
        pieces.append(text[:_MOST])
  unique = list(dict.fromkeys(pieces))
  order = np.random.default_rng(0).permutation(len(unique))
  return [unique[i] for i in order]


class Prompts:
  """Batches of the prompts of each domain, which go on where they were."""

  def __init__(self, config, models: pair.Pair, *, training: bool):
    """Begins with the first prompt of every domain.

    Args:
      config: the study.
      models: for the tokenizer.
      training: see `texts`.
    """
    self._config, self._tokenizer = config, models.tokenizer
    self._training = training
    self._texts: dict[str, Iterator[str]] = {}
    self._next = _OF_TRAINING if training else 0

  def batch(self, domain: str) -> Batch:
    """The next prompts of a domain, each with draws of its own."""
    rows, width = self._config.batch_size, self._config.prompt_tokens
    if domain not in self._texts:
      self._texts[domain] = texts(domain, training=self._training)
    items = prompts.first_tokens(
      [next(self._texts[domain]) for _ in range(rows)],
      self._tokenizer,
      num_tokens=width,
    )
    requests = tuple(
      prompts.Prompt(self._next + i, i, p.text, p.token_ids)
      for i, p in enumerate(items)
    )
    self._next += rows
    return Batch(requests, rows, max(1 << (width - 1).bit_length(), 32))


# ------------------------------------------------------------------- decoding


def decode(one: Engine, batch: Batch) -> dict:
  """Decodes a batch.

  Returns:
    Sums over its rows: `tokens` that were emitted, target `calls`, `drafted`
    and `accepted` tokens, `offered` and `taken`: drafted tokens that came to be
    verified, and of those the expected number that was accepted. `seconds` are
    of the rounds alone, `update_seconds` those of them that updates took.
  """
  one.compile(batch)
  learner = one.learner
  before = learner.seconds if learner else 0.0
  _, state = timing.timed(one.prefill, batch)
  seconds, state = timing.timed(one.generate, batch, state)
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


def check(config) -> None:
  """Raises ValueError for a study of nothing."""
  for name in ("prompt_tokens", "offline_tokens", "after"):
    if config[name] < 1:
      raise ValueError(f"{name} must be >= 1, got {config[name]}")
  for name, stream in config.streams.items():
    if not stream.domains or stream.tokens <= config.after:
      raise ValueError(
        f"stream {name!r} needs domains, and more tokens of each than "
        f"config.after ({config.after}), got {tuple(stream.domains)} and "
        f"{stream.tokens}"
      )
    for domain in stream.domains:
      texts(domain, training=False)


def learning(config, models: pair.Models, programs: dict) -> Engine:
  """An engine whose draft begins as its checkpoint is, and learns."""
  one = pair.engine_of(config, pair.assemble(config, models, learns=True))
  return dataclasses.replace(one, programs=programs)


def frozen(one: Engine) -> Engine:
  """The same engine, its draft as it is now."""
  assert one.learner is not None
  return dataclasses.replace(one, params=one.learner.params, learner=None)


def run_stream(
  config, models: pair.Models, draft: str, blocks: list[str], programs: dict
) -> list[list[dict]]:
  """The batches of each block of a stream, with one of the drafts.

  Args:
    config: the study, with `tokens` of a block.
    models: of the pair.
    draft: one of `DRAFTS`.
    blocks: the domains.
    programs: compiled by another engine of the study, and shared.
  """
  begun = learning(config, models, programs)
  engines = dict.fromkeys(blocks, begun)
  if draft == "frozen":
    engines = dict.fromkeys(blocks, frozen(begun))
  elif draft == "offline":
    for domain in dict.fromkeys(blocks):
      one = learning(config, models, programs)
      waiting = Prompts(config, models, training=True)
      decode_block(one, waiting, domain, config.offline_tokens)
      engines[domain] = frozen(one)
  waiting = Prompts(config, models, training=False)
  return [
    decode_block(engines[domain], waiting, domain, config.tokens)
    for domain in blocks
  ]


# ----------------------------------------------------------------- the numbers


def late(records: list[dict], after: int) -> list[dict]:
  """The batches of a block that begin when so many tokens were emitted."""
  before = np.cumsum([0, *(record["tokens"] for record in records)])[:-1]
  return [r for r, b in zip(records, before, strict=True) if b >= after]


def above(
  some: list[dict], others: list[dict]
) -> tuple[float, float | None, float | None]:
  """Gain of acceptance over that of others, with a 95% interval.

  By the percentile bootstrap over batches, of both independently: they were
  asked the same prompts, and drew other texts. Of fewer than `intervals.LEAST`
  batches there is none.
  """
  difference = acceptance(some) - acceptance(others)
  if min(len(some), len(others)) < intervals.LEAST:
    return difference, None, None
  rng = np.random.default_rng(0)

  def drawn(records):
    taken, offered = (
      np.array([record[name] for record in records])
      for name in ("taken", "offered")
    )
    chosen = rng.integers(len(records), size=(_SAMPLES, len(records)))
    return taken[chosen].sum(axis=1) / offered[chosen].sum(axis=1)

  low, high = np.quantile(drawn(some) - drawn(others), [0.025, 0.975])
  return difference, float(low), float(high)


def blocks_of(
  domains: list[str], runs: dict[str, list[list[dict]]], after: int
) -> list[dict]:
  """A row for each block of a stream.

  Args:
    domains: of the blocks.
    runs: batches by block, of each draft: "frozen", "online", "offline".
    after: tokens of a block that are left out as "late".

  Returns:
    For each block its `domain`, and for each draft `early` and `late`
    acceptance; `online_above` and `offline_above` say how far the late one is
    above the frozen draft's, `early_above` how far the online one's early one.
  """
  rows = []
  for place, domain in enumerate(domains):
    here = {name: blocks[place] for name, blocks in runs.items()}
    beyond = {name: late(records, after) for name, records in here.items()}
    first = {n: r[: len(r) - len(beyond[n])] for n, r in here.items()}
    rows.append(
      {
        "domain": domain,
        "early": {name: acceptance(r) for name, r in first.items()},
        "late": {name: acceptance(r) for name, r in beyond.items()},
        "early_above": above(first["online"], first["frozen"]),
        "online_above": above(beyond["online"], beyond["frozen"]),
        "offline_above": above(beyond["offline"], beyond["frozen"]),
      }
    )
  return rows


def whole(runs: dict[str, list[list[dict]]]) -> dict[str, dict]:
  """Of each draft over a whole stream: acceptance, tokens a call, speed."""
  numbers = {}
  for name, blocks in runs.items():
    records = [record for block in blocks for record in block]
    total = lambda what: sum(record[what] for record in records)  # noqa: B023
    numbers[name] = {
      "acceptance": acceptance(records),
      "num_tokens": total("tokens"),
      "block_efficiency": total("tokens") / total("calls"),
      "tokens_per_second": total("tokens") / total("seconds"),
      "update_share": total("update_seconds") / total("seconds"),
    }
  return numbers


def result_of(config, records: dict) -> dict:
  """The streams of the result, of all records by stream and draft."""
  numbers = {}
  for name, stream in config.streams.items():
    runs = {draft: records[f"{name} {draft}"]["runs"] for draft in DRAFTS}
    blocks = list(stream.domains)
    numbers[name] = {
      "domains": blocks,
      "blocks": blocks_of(blocks, runs, config.after),
      "whole": whole(runs),
      "runs": runs,
    }
  return numbers


def run(_) -> int:
  """The command."""
  config, output = cli.CONFIG.value, cli.OUTPUT.value
  drawing = f"{os.path.splitext(output)[0]}.svg"
  results.check(
    {"--output": output}, drawn={"the figure": drawing}, resumes=True
  )
  check(config)
  models, programs = pair.load(config), {}
  made_by = provenance.of_config(config)
  read = made_by["provenance"]["checkpoints"]
  with Journal(output, provenance.settings(config, read)) as journal:
    for name, stream in config.streams.items():
      stream_config = ml_collections.ConfigDict(config.to_dict())
      stream_config.tokens = stream.tokens
      for draft in DRAFTS:
        if (key := f"{name} {draft}") not in journal.batches:
          runs = run_stream(
            stream_config, models, draft, list(stream.domains), programs
          )
          journal.add({"batch": key, "runs": runs})
    result = {"streams": result_of(config, journal.batches), **made_by}
    report.save(lambda: online_plots.figure(result["streams"]), drawing)
    results.write_json(output, result)
    journal.finish()
  print(online_plots.table({"": result}))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
