"""Measures groups of questions: all systems answer them, in turn.

Every system gets the same prompts. That of a second turn holds the answer that
*plain* decoding gave to the first one, at this temperature and batch size:
prompts that differed by system could not be paired.
"""

import dataclasses
import hashlib
import statistics
from collections.abc import Sequence

import ml_collections
import numpy as np

from launch import processes
from launch.assembly.pair import Pair
from launch.evaluation import margins, questions, systems
from launch.evaluation.questions import Asked, Question
from launch.evaluation.reference import Process
from launch.evaluation.systems import HF, PLAIN, System
from models.tokenizers import Tokenizer
from specjax import intervals
from specjax.runtime import timing
from specjax.runtime.engine import Completion, Engine, completions
from specjax.runtime.requests import Batch, make_batches
from specjax.runtime.stopping import fetch
from specjax.state import Origin

_SECONDS = ("seconds", "first_seconds", "prefill_seconds")
# What transformers and llama.cpp do not tell.
_NOT_TOLD = (
  "prefill_seconds", "fed", "drafted", "accepted", "expected", "accept_counts",
  "cut_counts", "rounds_by_length", "total_variation",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Questions that are decoded together; see the package's docstring.

  Attributes:
    temperature, batch_size: of the setting.
    questions: at most `batch_size`, of one task and category.
  """

  temperature: float
  batch_size: int
  questions: tuple[Question, ...]

  @property
  def name(self) -> str:
    """Its name in the journal, unique in a run."""
    ids = ",".join(repr(q.id) for q in self.questions)
    return f"T={self.temperature:g} B={self.batch_size} {ids}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
  """The systems of a run, at one temperature.

  Attributes:
    systems: all of them, plain decoding first.
    engines: by name, of those that we decode; programs are shared by
      temperatures, and what a ladder learns of answers is not.
    reference: transformers' process.
    tokenizer: the target's.
    room: longest prompt that every system has room for, in tokens.
    seed: of draws, and of the order in which systems take turns.
    next_logits: see `margins`; None at temperatures above 0, where the target
      lies on several processes, or reads inputs.
    rounds: times that every system decodes a turn; seconds are means.
  """

  systems: tuple[System, ...]
  engines: dict[str, Engine]
  reference: Process
  tokenizer: Tokenizer
  room: int
  seed: int
  next_logits: margins.NextLogits | None
  rounds: int = 1


def contests(
  config: ml_collections.ConfigDict,
  entered: Sequence[System],
  pairs: dict[str, Pair],
  temperatures: Sequence[float],
  *,
  rounds: int = 1,
) -> dict[float, Contest]:
  """The same contest at several temperatures."""
  plain = pairs[PLAIN]
  room = min(p.room(config.max_new_tokens) for p in pairs.values())
  engines = systems.engines(list(entered), pairs, temperatures[0])
  next_logits = None
  if plain.encoder is None and not processes.spanned_by(plain.params):
    next_logits = margins.next_logits_of(engines[PLAIN])
  reference = Process(
    stop_tokens=plain.stop_tokens, vocab_size=plain.tokenizer.vocab_size
  )
  return {
    temperature: Contest(
      systems=tuple(entered),
      engines={
        name: dataclasses.replace(
          one,
          temperature=temperature,
          ladder=one.ladder and dataclasses.replace(one.ladder),
        )
        for name, one in engines.items()
      },
      reference=reference,
      tokenizer=plain.tokenizer,
      room=room,
      seed=config.seed,
      next_logits=None if temperature else next_logits,
      rounds=rounds,
    )
    for temperature in temperatures
  }


def groups_of(
  asked: Sequence[Asked], temperatures: Sequence[float], sizes: Sequence[int],
  *, room: int,
) -> list[Group]:  # fmt: skip
  """Groups of one task and category each, of prompts of similar length.

  Args:
    asked: the first turns of all questions, which fit.
    temperatures, sizes: of batches; groups are of one of each.
    room: longest prompt.
  """
  by_category: dict[tuple[str, str], list[Asked]] = {}
  for one in asked:
    kind = (one.question.task, one.question.category)
    by_category.setdefault(kind, []).append(one)
  return [
    Group(
      temperature=temperature,
      batch_size=size,
      questions=tuple(p.question for p in batch.prompts),
    )
    for temperature in temperatures
    for size in sizes
    for of_category in by_category.values()
    for batch in make_batches(of_category, batch_size=size, max_width=room)
  ]


def first_turns(
  asked: Sequence[Question], tokenizer: Tokenizer, room: int
) -> tuple[list[Asked], list[dict]]:
  """The first prompts that fit, and those that do not, see `refusal`."""
  prompts = [questions.ask(tokenizer, q, 0, []) for q in asked]
  fit = [p for p in prompts if len(p.token_ids) <= room]
  return fit, [refusal(p, room) for p in prompts if len(p.token_ids) > room]


def refusal(prompt: Asked, room: int) -> dict:
  """The record of a prompt that is too long to be decoded."""
  return {
    "question": prompt.question.id,
    "category": prompt.question.category,
    "turn": prompt.turn,
    "prompt_tokens": len(prompt.token_ids),
    "room": room,
  }


def batch_of(prompts: Sequence[Asked], batch_size: int, room: int) -> Batch:
  """At most `batch_size` prompts as a batch of so many rows."""
  (batch,) = make_batches(
    prompts, batch_size=batch_size, max_width=room, among=batch_size
  )
  return batch


def measure(contest: Contest, group: Group) -> dict:
  """Decodes a group's questions with every system that takes such batches.

  Returns:
    The record: what the group is of, `compile_seconds` by system, versions of
    the `reference` (transformers), and for each turn the questions, the lengths
    of their prompts, the prompts `refused`, and by system what `_decoded`
    returns, with `identical_to_plain` and `identical_to_hf` for each question
    and `differences` at temperature 0.
  """
  record: dict = {
    "batch": group.name,
    "temperature": group.temperature,
    "batch_size": group.batch_size,
    "category": group.questions[0].category,
    "task": group.questions[0].task,
    "compile_seconds": {},
    "turns": [],
  }
  answers: dict[int | str, list[list[int]]] = {
    q.id: [] for q in group.questions
  }
  for turn in range(max(len(q.turns) for q in group.questions)):
    prompts = [
      questions.ask(contest.tokenizer, q, turn, answers[q.id])
      for q in group.questions
      if turn < len(q.turns) and len(answers[q.id]) == turn
    ]
    refused = [p for p in prompts if len(p.token_ids) > contest.room]
    prompts = [p for p in prompts if len(p.token_ids) <= contest.room]
    batch = None
    if prompts:  # whose order is that of its rows: answers change lengths
      batch = batch_of(prompts, group.batch_size, contest.room)
      prompts = list(batch.prompts)
    part: dict = {
      "questions": [p.question.id for p in prompts],
      "prompt_tokens": [len(p.token_ids) for p in prompts],
      "refused": [refusal(p, contest.room) for p in refused],
      "systems": {},
    }
    record["turns"].append(part)
    if batch is None:
      continue
    for name, one in contest.engines.items():
      seconds = record["compile_seconds"].get(name, 0.0) + one.compile(batch)
      record["compile_seconds"][name] = seconds
    texts: dict[str, list[list[int]]] = {}
    times: dict[str, list[dict]] = {}
    for index in range(contest.rounds):
      for system in _order(contest, group, turn, index):
        numbers, tokens = _decoded(contest, system, group, turn, batch)
        times.setdefault(system.name, []).append(numbers)
        texts[system.name] = tokens
    part["systems"] = {name: _mean(numbers) for name, numbers in times.items()}
    for prompt, tokens in zip(prompts, texts[PLAIN], strict=True):
      answers[prompt.question.id].append(tokens)
    if not group.temperature:
      _compare(part, prompts, texts, contest.next_logits)
  record["reference"] = contest.reference.versions or None
  return record


def _order(
  contest: Contest, group: Group, turn: int, index: int
) -> list[System]:
  """The systems in an order that follows from what is decoded."""
  taking = [s for s in contest.systems if s.takes(group.batch_size)]
  parts = [contest.seed, group.name, turn, "order", *([index] if index else [])]
  rng = np.random.default_rng(_seed_of(*parts))
  return [taking[i] for i in rng.permutation(len(taking))]


def _mean(rounds: list[dict]) -> dict:
  """A system's numbers of the last round, with the mean seconds of all."""
  names = [name for name in _SECONDS if rounds[-1].get(name) is not None]
  return rounds[-1] | {
    name: statistics.fmean(one[name] for one in rounds) for name in names
  }


def _seed_of(*parts: object) -> int:
  """32 bits that follow from some values."""
  return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16)


def _decoded(
  contest: Contest, system: System, group: Group, turn: int, batch: Batch
) -> tuple[dict, list[list[int]]]:
  """A system's numbers on a batch, and the tokens that it emitted.

  The numbers: `seconds` in all, `first_seconds` until the first round was over,
  `prefill_seconds` (None for transformers, whose first pass is both), `rounds`
  of the batch and how many tokens wide their passes were together (`fed`), and
  for each prompt its emitted `tokens`, its target `calls`, and how many were
  `drafted` and `accepted`, and to be accepted given the drafts (`expected`);
  `accept_counts`, `cut_counts` (the same of rounds that a budget or a stop
  token ended before the target's own token) and `total_variation` are sums over
  the prompts. Of a ladder, `rounds_by_length` are the batch's rounds by how
  many tokens they drafted. Where experts are counted, `num_experts` are those
  that the prompts' calls touched, by layer, summed over calls and prompts. What
  transformers does not tell is None.
  """
  if system.reference is not None:
    theirs = contest.reference.run(
      system, batch, temperature=group.temperature,
      seed=_seed_of(contest.seed, group.name, turn),
    )  # fmt: skip
    tokens = theirs.token_ids
    alone = batch.rows == 1
    return {
      "seconds": theirs.seconds,
      "first_seconds": theirs.first_seconds,
      "rounds": theirs.num_target_calls,
      "tokens": [len(ids) for ids in tokens],
      # Without drafts a row takes a call for each token.
      "calls": [theirs.num_target_calls] if alone else [len(x) for x in tokens],
    } | dict.fromkeys(_NOT_TOLD), tokens
  one = contest.engines[system.name]
  before = dict(one.ladder.rounds) if one.ladder else {}
  prefill, state = timing.timed(one.prefill, batch)
  first, state = timing.timed(one.generate, batch, state, 1)
  rest, state = timing.timed(one.generate, batch, state)
  done = completions(state, len(batch.prompts))
  experts = fetch(state.counters.num_experts)
  drafts = system.drafts_here
  return {
    "seconds": prefill + first + rest,
    "first_seconds": prefill + first,
    "prefill_seconds": prefill,
    "rounds": max(c.num_target_calls for c in done),
    "fed": max(c.num_fed for c in done),
    "tokens": [len(c.token_ids) for c in done],
    "calls": [c.num_target_calls for c in done],
    "drafted": [c.num_drafted for c in done] if drafts else None,
    "accepted": [c.num_accepted for c in done] if drafts else None,
    "expected": [c.expected_accepted for c in done] if drafts else None,
    "accept_counts": np.sum([c.accept_counts for c in done], axis=0).tolist()
    if drafts
    else None,
    "cut_counts": _cut_counts(done) if drafts else None,
    "rounds_by_length": {
      str(n): rounds - before[n] for n, rounds in one.ladder.rounds.items()
    }
    if one.ladder
    else None,
    "total_variation": intervals.sum_known(c.total_variation for c in done),
    "broken": [c.stop_reason == "nan_logits" for c in done],
    "num_experts": None
    if experts is None
    else experts[: len(done)].sum(axis=0).tolist(),
  }, [c.token_ids for c in done]


def _cut_counts(done: Sequence[Completion]) -> list[int]:
  """Last rounds without a token of the target's, by what they accepted."""
  counts = [0] * len(done[0].accept_counts)
  for one in done:
    ends = (
      n for n, x in enumerate(reversed(one.origins)) if x != Origin.ACCEPTED
    )
    if run := next(ends, len(one.origins)):
      counts[run] += 1
  return counts


def _compare(
  part: dict,
  prompts: Sequence[Asked],
  texts: dict[str, list[list[int]]],
  next_logits: margins.NextLogits | None,
) -> None:
  """Adds to a turn where systems differ from plain decoding, and from hf."""
  part["differences"] = []
  for against in (PLAIN, HF):
    if against not in texts:
      continue
    for name, numbers in part["systems"].items():
      if name == against or (name, against) == (PLAIN, HF):
        continue  # the second is the first the other way round
      same = []
      for number, prompt in enumerate(prompts):
        one, other = texts[name][number], texts[against][number]
        difference = margins.difference(
          prompt.token_ids, one, other, next_logits
        )
        same.append(difference is None)
        if difference:
          place = {"question": prompt.question.id, "turn": prompt.turn}
          place |= {"system": name, "against": against}
          part["differences"].append(place | difference)
      numbers[f"identical_to_{against}"] = same
