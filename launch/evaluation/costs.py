"""Seconds of a system's rounds and passes, timed separately from the answers.

`specjax.runtime.timing` decodes the turn of a middling group in pieces, between
which passes are timed. From the ratio of two rounds, and from how many rounds
the answers took, follows the speed-up that should be measured (`summary`).
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from launch.assembly.pair import Pair
from specjax.runtime import timing
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch

# Tokens of the target passes that `--timing=passes` times.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_RUNS = 3  # that count; one for each place that `timing` stops at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of a round and of its parts, as a result has them.

  Attributes:
    depth: levels that the draft has, one or more.
    step, plain_step: of a drafted round, and of a plain one.
    drafting: of a round's draft passes.
    target: of a target pass, by the tokens that a row feeds.
    nodes: tokens that a drafted round feeds it.
    prefill, plain_prefill: of the prompts' passes.
  """

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
    names = ("step", "plain_step", "nodes", "prefill", "plain_prefill")
    return cls(
      depth=record["depth"],
      drafting=record["draft_cost"] * seconds["plain_step"],
      target={int(n): s for n, s in seconds["target"].items()},
      **{name: seconds[name] for name in names},
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


def measure_costs(
  engine: Engine,
  plain: Engine,
  pair: Pair,
  batch: Batch,
  numbers: Mapping[str, Any],
  plain_numbers: Mapping[str, Any],
  *,
  widths: tuple[int, ...] = (),
) -> dict:
  """Times the rounds of a system and of plain decoding, and their passes.

  Returns:
    `seconds`, which are `timing.StepCosts`, and of them `round_cost` and
    `draft_cost`, a round and its draft passes in plain rounds; the round fed
    the target `round_fed` tokens on average, and one more or less makes it
    `fed_cost` dearer or cheaper; `prompt_tokens` is the width of the batch,
    `depth` the draft's. `doubts` say why nothing is predicted of them, if there
    are any.
  """
  # A draft that learns is timed as it began; its answers' times hold updates.
  engine = dataclasses.replace(engine, learner=None)
  for one in (engine, plain):
    one.compile(batch)
  pieces = timing.Pieces(
    engine, plain, draft=pair.draft, typical=batch, widths=widths
  )
  rounds = numbers["rounds"]
  calls = {"speculative": rounds, "autoregressive": plain_numbers["rounds"]}
  for index in range(_RUNS * (2 if widths else 1) + 1):
    pieces.add(batch, calls, index=index, number=0)
  costs = pieces.costs()
  nodes, drafts = costs.nodes, costs.drafting / costs.plain_step
  # Drafting of a head on a mesh is not timed apart.
  unknown = pair.draft is None and pair.params.draft is not None
  wider = costs.target[nodes] - costs.target[1]
  return {
    "depth": pair.decoder.drafter.tree.max_depth,
    "prompt_tokens": batch.width,
    "round_cost": costs.step / costs.plain_step,
    "round_fed": numbers["fed"] / max(rounds, 1),
    "fed_cost": wider / max(nodes - 1, 1) / costs.plain_step,
    "draft_cost": None if unknown and costs.proposal is None else drafts,
    "round_seconds": costs.attribution,
    "doubts": costs.doubts,
    "seconds": json.loads(json.dumps(dataclasses.asdict(costs))),
  }
