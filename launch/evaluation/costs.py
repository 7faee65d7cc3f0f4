"""Seconds of a system's rounds and passes, timed separately from the answers.

`specjax.runtime.timing` decodes the turn of a middling group in pieces, between
which passes are timed. From the ratio of two rounds, and from how many rounds
the answers took, follows the speed-up that should be measured (`summary`).
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from launch import cli
from launch.assembly import registry
from launch.assembly.pair import Pair
from launch.evaluation import measure
from launch.evaluation.measure import Contest, Group
from launch.evaluation.systems import PLAIN, System
from specjax.runtime import timing

# Settings on which seconds depend, beside the drafter and the batch size.
_PAIR = ("target", "checkpoints", "dtype", "weights", "cache", "mesh")
# Tokens of the target passes that `--timing=passes` times.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_RUNS = 3  # that count; one for each place that `timing` stops at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of a round and of its parts, as a result has them.

  Attributes:
    batch_size: rows.
    depth: levels that the draft has, one or more.
    step, plain_step: of a drafted round, and of a plain one.
    drafting: of a round's draft passes.
    target: of a target pass, by the tokens that a row feeds.
    nodes: tokens that a drafted round feeds it.
    prefill, plain_prefill: of the prompts' passes.
  """

  batch_size: int
  depth: int
  step: float
  plain_step: float
  drafting: float
  target: Mapping[int, float]
  nodes: int
  prefill: float
  plain_prefill: float

  @classmethod
  def of(cls, record: Mapping) -> "Costs":
    """The costs in a record; KeyError or TypeError if any is missing."""
    seconds = record["seconds"]
    return cls(
      batch_size=record["batch_size"],
      depth=record["depth"],
      step=seconds["step"],
      plain_step=seconds["plain_step"],
      drafting=record["draft_cost"] * seconds["plain_step"],
      target={int(n): s for n, s in seconds["target"].items()},
      nodes=seconds["nodes"],
      prefill=seconds["prefill"],
      plain_prefill=seconds["plain_prefill"],
    )

  @property
  def forwards(self) -> float:
    """Seconds of a drafted round's passes."""
    return self.drafting + self.target[self.nodes]

  @property
  def rest(self) -> float:
    """Seconds of a round beside its passes, as of a plain round."""
    plain = max(self.plain_step - self.target[1], 0.0)
    return min(plain, max(self.step - self.forwards, 0.0))

  @property
  def level(self) -> float:
    """Seconds of a level of the draft: its passes, and a share of the rest."""
    left = max(self.step - self.forwards, 0.0) - self.rest
    return (self.drafting + left) / self.depth


def read(
  path: str, flag: str, config: ml_collections.ConfigDict
) -> list[tuple[dict, Costs]]:
  """The costs of a config's pair in a result of `launch.evaluate`.

  Args:
    path: of the file.
    flag: that names it.
    config: of the pair and its drafter, of any number of tokens.

  Returns:
    Records, with the settings of their run, and their costs.

  Raises:
    UserError: if it is no such result, has no costs of a draft, or of timings
      that disagree, or none of this pair.
  """
  try:
    result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    records = result["costs"]
    timed = [
      (result["config"] | record, Costs.of(record)) for record in records
    ]
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise cli.UserError(
      f"{flag}: {path} is not what launch.evaluate writes of a draft: "
      f"{type(error).__name__}: {error}"
    ) from error
  if doubts := [doubt for record in records for doubt in record["doubts"]]:
    raise cli.UserError(
      f"{flag}: timings in {path} disagree, measure it again: "
      + "; ".join(doubts)
    )
  fitting, others = [], {}
  for record, costs in timed:
    if other := _other_pair(record, config):
      others |= other
    else:
      fitting.append((record, costs))
  if not fitting:
    raise no_costs(flag, path, others)
  return fitting


def no_costs(flag: str, path: str, others: Mapping[str, Any]) -> cli.UserError:
  """The error of costs that are of other settings than those asked for."""
  named = ", ".join(f"{name} ({value!r})" for name, value in others.items())
  return cli.UserError(f"{flag}: {path} is of another {named or 'kind'}")


def _other_pair(
  record: Mapping[str, Any], config: ml_collections.ConfigDict
) -> dict[str, Any]:
  """The settings of a record by which it is of another pair."""
  # What lacks one is older than the setting, and had no choice.
  none = {"checkpoints": config.checkpoints.to_dict()} | dict.fromkeys(
    ("weights", "cache", "mesh"), ""
  )
  had, wanted = none | dict(record), none | config.to_dict()
  other = {n: had.get(n) for n in _PAIR if had.get(n) != wanted.get(n)}
  asked = registry.of(config)
  try:
    timed = registry.of(config, record["system"])
  except ValueError:  # of a version that had other drafters
    timed = None
  if not timed or (timed.name, timed.loaded) != (asked.name, asked.loaded):
    other["drafter"] = record["system"]
  return other


def name_of(system: System, batch_size: int) -> str:
  """The name of its record in the journal."""
  return f"costs B={batch_size} {system.name}"


def measure_costs(
  contest: Contest,
  system: System,
  pair: Pair,
  group: Group,
  record: dict,
  *,
  widths: tuple[int, ...] = (),
) -> dict:
  """Times the rounds of a system and of plain decoding, and their passes.

  Args:
    contest: of the systems, at the group's temperature.
    system: one that we decode with drafts.
    pair: its models.
    group: the questions whose first turn is decoded in pieces.
    record: what was measured of the group.
    widths: tokens of further target passes to time.

  Returns:
    The record: `seconds`, which are `timing.StepCosts`, and of them
    `round_cost` and `draft_cost`, a round and its draft passes in plain rounds;
    the round fed the target `round_fed` tokens on average, and one more or less
    makes it `fed_cost` dearer or cheaper; `prompt_tokens` is the width of the
    batch that all was timed at, `depth` the draft's. `doubts` say why nothing
    is predicted of them, if there are any.
  """
  (prompts, _) = measure.first_turns(
    group.questions, contest.tokenizer, contest.room
  )
  batch = measure.batch_of(prompts, group.batch_size, contest.room)
  drafting, plain = contest.engines[system.name], contest.engines[PLAIN]
  # A draft that learns is timed as it began; its answers' times hold updates.
  drafting = dataclasses.replace(drafting, learner=None)
  for one in (drafting, plain):
    one.compile(batch)
  pieces = timing.Pieces(
    drafting, plain, draft=pair.draft, typical=batch, widths=widths
  )
  numbers = record["turns"][0]["systems"]
  calls = {
    "speculative": numbers[system.name]["rounds"],
    "autoregressive": numbers[PLAIN]["rounds"],
  }
  for index in range(_RUNS * (2 if widths else 1) + 1):
    pieces.add(batch, calls, index=index, number=0)
  costs = pieces.costs()
  drafts: float | None = costs.drafting
  untimed = pair.draft is None and pair.params.draft is not None
  if untimed and costs.proposal is None:
    drafts = None  # a head on a mesh, where drafting is not timed apart
  mine, nodes = numbers[system.name], costs.nodes
  wider = costs.target[nodes] - costs.target[1]
  return {
    "batch": name_of(system, group.batch_size),
    "batch_size": group.batch_size,
    "system": system.name,
    "depth": pair.decoder.drafter.tree.max_depth,
    "prompt_tokens": batch.width,
    "round_cost": costs.step / costs.plain_step,
    "round_fed": mine["fed"] / max(mine["rounds"], 1),
    "fed_cost": wider / max(nodes - 1, 1) / costs.plain_step,
    "draft_cost": None if drafts is None else drafts / costs.plain_step,
    "round_seconds": costs.attribution,
    "doubts": costs.doubts,
    "seconds": json.loads(json.dumps(dataclasses.asdict(costs))),
  }


def middling(groups: list[Group], records: dict[str, dict]) -> Group:
  """The group whose prompts are of median length.

  Args:
    groups: of one setting, at least one.
    records: those of the groups, by name.
  """
  length = lambda g: max(records[g.name]["turns"][0]["prompt_tokens"])
  ordered = sorted(groups, key=length)
  return ordered[len(ordered) // 2]
