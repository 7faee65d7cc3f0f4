"""Measures groups of questions: all systems answer them, in turn.

Every system gets the same prompts: the prompt of a second turn contains *plain*
decoding's answer to the first, at this temperature and batch size, so that
systems can be compared in pairs.
"""

import dataclasses
import hashlib
import statistics
import sys
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np
import tqdm

from launch import processes
from launch.assembly import pair
from launch.assembly.pair import Pair
from launch.evaluation import costs, intervals, margins, questions, systems
from launch.evaluation.hf_reference import Process
from launch.evaluation.questions import Question, Request
from launch.evaluation.systems import PLAIN, System
from launch.evaluation.timing import timed
from launch.results import Journal
from models.tokenizers import Tokenizer
from specjax.runtime import compilation
from specjax.runtime.engine import Completion, Engine, completions
from specjax.runtime.requests import Batch, make_batches
from specjax.state import Origin

TIMINGS = ("none", "rounds", "passes")
_SECONDS = ("seconds", "first_seconds", "prefill_seconds")
# Numbers that transformers does not report.
_UNKNOWN = (
  "prefill_seconds", "fed", "drafted", "accepted", "expected", "accept_counts",
  "cut_counts", "total_variation",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """At most `batch_size` questions of one task and category."""

  temperature: float
  batch_size: int
  questions: tuple[Question, ...]

  @property
  def name(self) -> str:
    """Its name in the journal, unique in a run."""
    ids = ",".join(repr(q.id) for q in self.questions)
    return f"T={self.temperature:g} B={self.batch_size} {ids}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """The systems of a run and what they share.

  Attributes:
    systems: all of them, plain decoding first.
    pairs: pairs by system, except transformers'.
    engines: by temperature and system. Temperatures share programs, but each
      has its own ladder.
    room: tokens of the longest prompt that fits every system.
    seed: seed of sampling and of the order in which systems take turns.
    next_logits: see `margins`; None if the target spans processes or is an
      encoder-decoder.
    rounds: how many times every system decodes a turn; seconds are means.
  """

  systems: tuple[System, ...]
  pairs: dict[str, Pair]
  engines: dict[float, dict[str, Engine]]
  reference: Process
  tokenizer: Tokenizer
  room: int
  seed: int
  next_logits: margins.NextLogits | None
  rounds: int = 1


def comparison_of(
  config: ml_collections.ConfigDict,
  compared: Sequence[System],
  pairs: dict[str, Pair],
  temperatures: Sequence[float],
  *,
  rounds: int = 1,
) -> Comparison:
  """Sets up a comparison, without compiling anything."""
  plain = pairs[PLAIN]
  engines = {
    one.name: pair.engine_of(one.config, pairs[one.name], baseline=one.is_plain)
    for one in compared
    if one.name in pairs
  }
  next_logits = None
  if plain.encoder is None and not processes.spanned_by(plain.params):
    next_logits = margins.next_logits_of(engines[PLAIN])

  def at(temperature: float, one: Engine) -> Engine:
    ladder = one.ladder and dataclasses.replace(one.ladder)
    return dataclasses.replace(one, temperature=temperature, ladder=ladder)

  return Comparison(
    systems=tuple(compared),
    pairs=pairs,
    engines={
      temperature: {name: at(temperature, one) for name, one in engines.items()}
      for temperature in temperatures
    },
    reference=Process(
      stop_tokens=plain.stop_tokens, vocab_size=plain.tokenizer.vocab_size
    ),
    tokenizer=plain.tokenizer,
    room=min(p.room(config.max_new_tokens) for p in pairs.values()),
    seed=config.seed,
    next_logits=next_logits,
    rounds=rounds,
  )


def groups_of(
  requests: Sequence[Request], temperatures: Sequence[float],
  sizes: Sequence[int], *, room: int,
) -> list[Group]:  # fmt: skip
  """Groups questions by task and category, with prompts of similar length."""
  by_category: dict[tuple[str, str], list[Request]] = {}
  for one in requests:
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


def fitting(
  prompts: Sequence[Request], room: int
) -> tuple[list[Request], list[dict]]:
  """The prompts that fit, and records of those that do not."""
  long = [p for p in prompts if len(p.token_ids) > room]
  refused = [
    {
      "question": p.question.id, "turn": p.turn,
      "prompt_tokens": len(p.token_ids), "room": room,
    }
    for p in long
  ]  # fmt: skip
  return [p for p in prompts if len(p.token_ids) <= room], refused


def batch_of(prompts: Sequence[Request], batch_size: int, room: int) -> Batch:
  """Makes a batch with `batch_size` rows from at most that many prompts."""
  (batch,) = make_batches(
    prompts, batch_size=batch_size, max_width=room, total=batch_size
  )
  return batch


def measure_all(
  comparison: Comparison,
  groups: Sequence[Group],
  *,
  timing: str = "rounds",
  journal: Journal | None = None,
) -> list[dict]:
  """Measures groups, then costs of rounds, unless the journal has them.

  Returns:
    All records in the order they were made, costs last, the same on every
    process.
  """
  records = dict(journal.batches) if journal else {}
  spans = processes.spanned_by(comparison.pairs[PLAIN].params)

  def keep(record: dict) -> None:
    records[record["batch"]] = record
    if journal:
      journal.add(record)
    if not spans:  # processes that share programs have them at the same time
      _free_programs(comparison)

  missing = [group for group in groups if group.name not in records]
  sizes = {group.name: len(group.questions) for group in groups}
  there = sum(sizes.values()) - sum(sizes[group.name] for group in missing)
  with _progress(sum(sizes.values()), "question", there) as progress:
    if missing and processes.is_chief():
      count = len(comparison.systems)
      print(f"{count} systems compile at their first groups", file=sys.stderr)
    for record in processes.round_robin(
      missing, lambda _, group: measure(comparison, group), together=spans
    ):
      keep(record)
      progress.update(sizes[record["batch"]])
  if spans or timing == "none":
    return list(records.values())
  missing = [
    (size, system)
    for size in dict.fromkeys(group.batch_size for group in groups)
    for system in comparison.systems
    if system.is_timed and _cost_name(size, system) not in records
  ]
  with _progress(len(missing), "drafter") as progress:

    def costs_of(_, part: tuple[int, System]) -> dict:
      size, system = part
      done = progress.format_dict
      if processes.is_chief():
        progress.write(
          f"timing rounds of {system.name}, batch size {size}, {done['n'] + 1} "
          f"of {len(missing)}, after {done['elapsed']:.0f} s: compiling first",
          file=sys.stderr,
        )
      widths = _widths_of(system, comparison) if timing == "passes" else ()
      return _costs(comparison, groups, records, size, system, widths)

    for record in processes.round_robin(missing, costs_of, together=False):
      keep(record)
      progress.update()
  return list(records.values())


def _progress(total: int, unit: str, initial: int = 0) -> tqdm.tqdm:
  """A progress bar on the chief, or log lines."""
  return tqdm.tqdm(
    total=total, initial=initial, unit=unit, smoothing=0.05,
    disable=not total or not processes.is_chief(),
    mininterval=0.5 if sys.stderr.isatty() else 60,
  )  # fmt: skip


def _free_programs(comparison: Comparison) -> None:
  """Frees programs when there are too many for a process."""
  if compilation.has_many_maps():
    for engines in comparison.engines.values():
      for one in engines.values():
        one.programs.clear()
    jax.clear_caches()


def _cost_name(batch_size: int, system: System) -> str:
  """The name of a record of costs in the journal."""
  return f"costs B={batch_size} {system.name}"


def _costs(
  comparison: Comparison,
  groups: Sequence[Group],
  records: dict[str, dict],
  size: int,
  system: System,
  widths: tuple[int, ...],
) -> dict:
  """Measures a system's costs on median-length prompts, at one temperature."""
  setting = (groups[0].temperature, size)
  some = [g for g in groups if (g.temperature, g.batch_size) == setting]
  turn_of = lambda group: records[group.name]["turns"][0]
  some.sort(key=lambda group: max(turn_of(group)["prompt_tokens"]))
  typical = some[len(some) // 2]
  prompts = [
    questions.request(comparison.tokenizer, q) for q in typical.questions
  ]
  engines, numbers = comparison.engines[setting[0]], turn_of(typical)["systems"]
  measured = costs.measure_costs(
    engines[system.name], engines[PLAIN], comparison.pairs[system.name],
    batch_of(prompts, size, comparison.room), numbers[system.name],
    numbers[PLAIN], widths=widths,
  )  # fmt: skip
  return {
    "batch": _cost_name(size, system), "batch_size": size,
    "system": system.name, **measured,
  }  # fmt: skip


def _widths_of(system: System, comparison: Comparison) -> tuple[int, ...]:
  """Widths of target passes to time; only for the config's drafter."""
  own = systems.SYSTEMS.canonical(system.config.drafter)
  others = {one.name for one in comparison.systems if one.is_timed} - {
    system.name
  }
  return () if own in others else costs.WIDTHS


def measure(comparison: Comparison, group: Group) -> dict:
  """Decodes a group's questions with every system that supports its size.

  Returns:
    The record: the group's setting, `compile_seconds` by system, and for each
    turn the questions, the lengths of their prompts, the prompts `refused`, and
    by system the numbers of `_decoded`; at temperature 0 also
    `identical_to_plain` for each question and the `differences`.
  """
  engines = comparison.engines[group.temperature]
  first = group.questions[0]
  record: dict = {
    "batch": group.name, "temperature": group.temperature,
    "batch_size": group.batch_size, "category": first.category,
    "task": first.task, "compile_seconds": dict.fromkeys(engines, 0.0),
    "turns": [],
  }  # fmt: skip
  answers: dict[int | str, list[list[int]]] = {
    q.id: [] for q in group.questions
  }
  for turn in range(max(len(q.turns) for q in group.questions)):
    prompts = [
      questions.request(comparison.tokenizer, q, turn, answers[q.id])
      for q in group.questions
      if turn < len(q.turns) and len(answers[q.id]) == turn
    ]
    prompts, refused = fitting(prompts, comparison.room)
    if prompts:  # in the order of the batch's rows: answers change lengths
      batch = batch_of(prompts, group.batch_size, comparison.room)
      prompts = list(batch.prompts)
    part: dict = {
      "questions": [p.question.id for p in prompts],
      "prompt_tokens": [len(p.token_ids) for p in prompts],
      "refused": refused,
      "systems": {},
    }
    record["turns"].append(part)
    if not prompts:
      continue
    for name, one in engines.items():
      record["compile_seconds"][name] += one.compile(batch)
    texts: dict[str, list[list[int]]] = {}
    times: dict[str, list[dict]] = {}
    for index in range(comparison.rounds):
      seed = _seed_of(comparison.seed, group.name, turn, "order", index)
      able = [s for s in comparison.systems if s.takes(group.batch_size)]
      for place in np.random.default_rng(seed).permutation(len(able)):
        system = able[place]
        numbers, tokens = _decoded(comparison, system, group, turn, batch)
        times.setdefault(system.name, []).append(numbers)
        texts[system.name] = tokens
    part["systems"] = {name: _mean(numbers) for name, numbers in times.items()}
    for prompt, tokens in zip(prompts, texts[PLAIN], strict=True):
      answers[prompt.question.id].append(tokens)
    if not group.temperature:
      _compare(comparison, prompts, texts, part)
  return record


def _mean(rounds: list[dict]) -> dict:
  """A system's numbers in the last round, but mean seconds over all rounds."""
  names = [name for name in _SECONDS if rounds[-1].get(name) is not None]
  return rounds[-1] | {
    name: statistics.fmean(one[name] for one in rounds) for name in names
  }


def _seed_of(*parts: object) -> int:
  """A 32-bit seed derived from some values."""
  return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16)


def _decoded(
  comparison: Comparison, system: System, group: Group, turn: int, batch: Batch
) -> tuple[dict, list[list[int]]]:
  """A system's numbers on a batch, and the tokens that it emitted.

  The numbers: total `seconds`, `first_seconds` until the end of the first
  round, `prefill_seconds`, `rounds` of the batch and the total width of their
  target passes (`fed`); for each prompt its emitted `tokens`, target `calls`,
  `drafted` and `accepted` tokens, and the acceptances `expected` given the
  drafts; and summed over prompts `accept_counts`, `cut_counts` (the same for
  rounds that a budget or a stop token cut before the target's own token) and
  `total_variation`. Unknown numbers are None.
  """
  if system.reference is not None:
    theirs = comparison.reference.run(
      system, batch, temperature=group.temperature,
      seed=_seed_of(comparison.seed, group.name, turn),
    )  # fmt: skip
    counts = [len(ids) for ids in theirs.token_ids]
    return dict.fromkeys(_UNKNOWN) | {
      "seconds": theirs.seconds,
      "first_seconds": theirs.first_seconds,
      "rounds": theirs.num_target_calls,
      "tokens": counts,
      # Without drafting a row needs a call per token.
      "calls": [theirs.num_target_calls] if batch.rows == 1 else counts,
    }, theirs.token_ids
  one = comparison.engines[group.temperature][system.name]
  prefill, state = timed(one.prefill, batch)
  first, state = timed(one.generate, batch, state, 1)
  rest, state = timed(one.generate, batch, state)
  done = completions(state, len(batch.prompts))
  every = lambda name: [getattr(c, name) for c in done]
  texts = every("token_ids")
  numbers = dict.fromkeys(_UNKNOWN) | {
    "seconds": prefill + first + rest,
    "first_seconds": prefill + first,
    "prefill_seconds": prefill,
    "rounds": max(every("num_target_calls")),
    "fed": max(every("num_fed")),
    "tokens": [len(ids) for ids in texts],
    "calls": every("num_target_calls"),
    "total_variation": intervals.sum_known(every("total_variation")),
    "broken": [reason == "nan_logits" for reason in every("stop_reason")],
  }
  if system.drafts_here:
    numbers |= {
      "drafted": every("num_drafted"),
      "accepted": every("num_accepted"),
      "expected": every("expected_accepted"),
      "accept_counts": np.sum(every("accept_counts"), 0).tolist(),
      "cut_counts": _cut_counts(done),
    }
  return numbers, texts


def _cut_counts(done: Sequence[Completion]) -> list[int]:
  """Counts last rounds without a target token, by accepted tokens."""
  counts = [0] * len(done[0].accept_counts)
  for one in done:
    ends = (
      n for n, x in enumerate(reversed(one.origins)) if x != Origin.ACCEPTED
    )
    if run := next(ends, len(one.origins)):
      counts[run] += 1
  return counts


def _compare(
  comparison: Comparison,
  prompts: Sequence[Request],
  texts: dict[str, list[list[int]]],
  part: dict,
) -> None:
  """Adds to a turn's record where systems differ from plain decoding."""
  part["differences"] = []
  for name in texts.keys() - {PLAIN}:
    same = part["systems"][name]["identical_to_plain"] = []
    for p, one, other in zip(prompts, texts[name], texts[PLAIN], strict=True):
      found = margins.difference(
        p.token_ids, one, other, comparison.next_logits
      )
      same.append(not found)
      if found:
        where = {"question": p.question.id, "turn": p.turn, "system": name}
        part["differences"].append(where | found)
