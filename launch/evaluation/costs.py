"""What a system's round costs, in plain rounds: timed apart from the answers.

`specjax.runtime.timing` decodes the turn of a middling group in pieces, between
which passes are timed. From the ratio of two rounds, and from how many rounds
the answers took, follows the speed-up that should be measured (`summary`).
"""

import dataclasses
import json

from launch.build.pair import Pair
from launch.evaluation import measure
from launch.evaluation.measure import Contest, Group
from launch.evaluation.systems import PLAIN, System
from specjax.runtime import timing

_RUNS = 3  # that count; one for each place that `timing` stops at


def name_of(system: System, batch_size: int) -> str:
  """What its record is called in the journal."""
  return f"costs B={batch_size} {system.name}"


def measure_costs(
  contest: Contest, system: System, pair: Pair, group: Group, record: dict
) -> dict:
  """Times the rounds of a system and of plain decoding, and their passes.

  Args:
    contest: of the systems, at the group's temperature.
    system: one that we decode with drafts.
    pair: its models.
    group: the questions whose first turn is decoded in pieces.
    record: what was measured of the group.

  Returns:
    The record: `timing.StepCosts`, and of them `round_cost` and `draft_cost`,
    a round and its draft passes in plain rounds; the round fed the target
    `round_fed` tokens on average, and one more or less makes it `fed_cost`
    dearer or cheaper; `prompt_tokens` is the width of the batch that all was
    timed at. `doubts` say why nothing is predicted of them, if there are any.
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
  pieces = timing.Pieces(drafting, plain, draft=pair.draft, typical=batch)
  found = record["turns"][0]["systems"]
  calls = {
    "speculative": found[system.name]["rounds"],
    "autoregressive": found[PLAIN]["rounds"],
  }
  for index in range(_RUNS + 1):
    pieces.add(batch, calls, index=index, number=0)
  costs = pieces.costs()
  drafts: float | None = costs.drafting
  untimed = pair.draft is None and pair.params.draft is not None
  if untimed and costs.proposal is None:
    drafts = None  # a head on a mesh, where drafting is not timed apart
  mine, nodes = found[system.name], costs.nodes
  wider = costs.target[nodes] - costs.target[1]
  return {
    "batch": name_of(system, group.batch_size),
    "batch_size": group.batch_size,
    "system": system.name,
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
