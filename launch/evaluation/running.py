"""Measures all groups that are missing, then times rounds."""

import sys

import jax
import tqdm

from launch import cli, processes
from launch.assembly.pair import Pair
from launch.evaluation import costs, measure, systems
from launch.evaluation.measure import Contest, Group
from launch.evaluation.systems import System
from launch.results import Journal
from specjax.runtime import compilation

TIMINGS = ("none", "rounds", "passes")


def measure_missing(
  contests: dict[float, Contest],
  groups: list[Group],
  pairs: dict[str, Pair],
  *,
  timing: str = "rounds",
  journal: Journal | None = None,
) -> list[dict]:
  """Measures groups and then costs of rounds, where the journal lacks them.

  Args:
    contests: by temperature.
    groups: of all settings.
    pairs: by the name of the system.
    timing: of TIMINGS.
    journal: of the output, open, or None.

  Raises:
    UserError: if a draft learns in several processes.

  Returns:
    All records by the order of the groups, costs last, the same on every
    process.
  """
  records = dict(journal.batches) if journal else {}
  spans = processes.spanned_by(pairs[systems.PLAIN].params)
  engines = next(iter(contests.values())).engines  # all share learners
  if any(e.learner for e in engines.values()) and processes.several():
    raise cli.UserError("a draft learns online in one process")

  def keep(record: dict) -> None:
    records[record["batch"]] = record
    if journal:
      journal.add(record)

  missing = [group for group in groups if group.name not in records]
  sizes = {group.name: len(group.questions) for group in groups}
  everything = sum(sizes.values())
  there_too = everything - sum(sizes[group.name] for group in missing)
  with _progress(everything, "question", initial=there_too) as progress:
    for record in processes.round_robin(
      missing,
      lambda _, group: measure.measure(contests[group.temperature], group),
      together=spans,
    ):
      keep(record)
      progress.update(sizes[record["batch"]])
      if not spans:  # processes that share programs have them at the same time
        give_up_programs(contests)
  if spans or timing == "none":
    return list(records.values())
  untimed = _costs_missing(contests, groups, records)
  with _progress(len(untimed), "drafter", "timing rounds") as progress:
    for record in processes.round_robin(
      untimed,
      lambda _, part: costs.measure_costs(
        contests[part[1].temperature], part[0], pairs[part[0].name], part[1],
        records[part[1].name], widths=_widths_of(part[0], contests, timing),
      ),
      together=False,
    ):  # fmt: skip
      keep(record)
      progress.update()
      give_up_programs(contests)
  return list(records.values())


def _widths_of(
  system: System, contests: dict[float, Contest], timing: str
) -> tuple[int, ...]:
  """Target passes that are timed with a system's rounds.

  They are the target's alone: the config's drafter has them, if its rounds are
  timed.
  """
  if timing != "passes":
    return ()
  entered = next(iter(contests.values())).systems
  asked = systems.SYSTEMS.canonical(system.config.drafter)
  timed = [
    one.name for one in entered if one.drafts_here and not one.drafting.lengths
  ]
  return () if asked in timed and system.name != asked else costs.WIDTHS


def _progress(
  total: int, unit: str, what: str | None = None, *, initial: int = 0
) -> tqdm.tqdm:
  """A bar, or lines of a log; none on any process but the chief, or of none."""
  return tqdm.tqdm(
    total=total, initial=initial, unit=unit, desc=what, smoothing=0.05,
    disable=not total or not processes.is_chief(),
    mininterval=0.5 if sys.stderr.isatty() else 60,
  )  # fmt: skip


def give_up_programs(contests: dict[float, Contest]) -> None:
  """Frees compiled programs where there are too many; they compile again.

  A dozen systems at several widths, temperatures and batch sizes are more
  programs than a process can hold (`compilation.has_many_maps`).
  """
  if compilation.has_many_maps():
    for contest in contests.values():
      for one in contest.engines.values():
        one.programs.clear()
    jax.clear_caches()


def _costs_missing(
  contests: dict[float, Contest], groups: list[Group], records: dict[str, dict]
) -> list[tuple[System, Group]]:
  """Systems and groups at which their rounds are still to be timed.

  A round's cost does not depend on the temperature: the first one is taken.
  Rounds whose width the host changes have none of their own.
  """
  first = next(iter(contests))
  missing = []
  for size in dict.fromkeys(group.batch_size for group in groups):
    some = [g for g in groups if (g.temperature, g.batch_size) == (first, size)]
    typical = costs.middling(some, records)
    missing += [
      (system, typical)
      for system in contests[first].systems
      if system.name in contests[first].engines
      and system.drafts_here
      and not system.drafting.lengths
      and costs.name_of(system, size) not in records
    ]
  return missing
