"""Makes E.json from measured records, and measures without the command."""

import collections
import json
from collections.abc import Callable, Sequence

import ml_collections

from launch.assembly.pair import Pair
from launch.evaluation import measure, running, summary, systems
from launch.evaluation.questions import Question
from launch.evaluation.systems import System
from models.tokenizers import Tokenizer
from specjax.tree import Tree


def describe(entered: Sequence[System], pairs: dict[str, Pair]) -> dict:
  """The rule of each system, and the shape of its drafts."""
  described = {}
  for system in entered:
    told = {
      "dtype": system.config.dtype, "rule": None, "lossless": None,
      "draft_shape": None, "parents": None,
    }  # fmt: skip
    if system.drafts_here:
      decoder = pairs[system.name].decoder
      tree = decoder.drafter.tree
      told |= {
        "rule": decoder.rule.name,
        "lossless": decoder.rule.lossless,
        "draft_shape": _shape(tree, pairs[system.name].drafting.lengths),
        "parents": list(tree.parents),
      }
      if notes := pairs[system.name].notes:
        told["weights"] = list(notes)
    elif system.reference and system.reference.tokens:
      told["draft_shape"] = f"chain of {system.reference.tokens}"
    described[system.name] = told
  return described


def _shape(tree: Tree, ladder: Sequence[int]) -> str:
  if ladder:
    return f"chains of {', '.join(map(str, ladder))}"
  if tree.is_chain:
    return f"chain of {tree.max_depth}"
  return f"tree of {tree.num_nodes} nodes, {tree.max_depth} deep"


def result_of(records: Sequence[dict], facts: dict) -> dict:
  """E.json: the rows of the summary, and what they were made of.

  `runs` are of all questions ("all") and of each category, so that each
  question stands in two; `runs_by_task` are of each task.
  """
  groups = [record for record in records if "turns" in record]
  timed = [record for record in records if "turns" not in record]
  seconds: dict[str, float] = collections.defaultdict(float)
  refused, differences = list(facts["refused"]), []
  for record in groups:
    for name, value in record["compile_seconds"].items():
      seconds[name] += value
    where = {n: record[n] for n in ("temperature", "batch_size")}
    for turn in record["turns"]:
      refused += [r | where for r in turn["refused"]]
      differences += [d | where for d in turn.get("differences", ())]
  rows = summary.rows_of(groups, timed, facts.get("experts"))
  return {
    **facts,
    "reference": next((r["reference"] for r in groups if r["reference"]), None),
    "refused": refused,
    "compile_seconds": dict(seconds),
    "runs": [r for r in rows if r["level"] != "task"],
    "runs_by_task": [r for r in rows if r["level"] == "task"],
    "costs": timed,
    "differences": differences,
    "groups": groups,
  }


def of_prompts(
  config: ml_collections.ConfigDict,
  names: str,
  asked_of: Callable[[Tokenizer], Sequence[Question]],
  *,
  temperatures: Sequence[float] | None = None,
  rounds: int = 1,
  timing: str = "rounds",
) -> dict:
  """Measures systems in this process.

  Args:
    config: of the run.
    names: of the systems.
    asked_of: the questions, made by the target's tokenizer.
    temperatures: the config's alone by default; they share programs.
    rounds: times that every system decodes everything.
    timing: of `running.TIMINGS`.

  Returns:
    The rows and what they were made of, as `result_of`.
  """
  entered = systems.parse(names, config)
  pairs = systems.assemble(entered)
  asked_at = temperatures or [config.temperature]
  contests = measure.contests(config, entered, pairs, asked_at, rounds=rounds)
  one = contests[asked_at[0]]
  fit, refused = measure.first_turns(
    asked_of(one.tokenizer), one.tokenizer, one.room
  )
  groups = measure.groups_of(fit, asked_at, [config.batch_size], room=one.room)
  records = running.measure_missing(contests, groups, pairs, timing=timing)
  one.reference.close()
  facts = {
    "config": json.loads(config.to_json_best_effort()),
    "systems": describe(entered, pairs),
    "refused": refused,
  }
  return result_of(records, facts)


def as_text(result: dict) -> str:
  """JSON, each entry of the long lists on a line of its own."""
  parts = []
  for name, value in result.items():
    text = json.dumps(value, indent=2)
    if isinstance(value, list) and value and isinstance(value[0], dict):
      text = "[\n" + ",\n".join(f"  {json.dumps(x)}" for x in value) + "\n]"
    parts.append(f"{json.dumps(name)}: {text}")
  return "{\n" + ",\n".join(parts) + "\n}\n"


def left_out(entered: Sequence[System], sizes: Sequence[int]) -> list[str]:
  """Combinations that were asked for and cannot be measured, in words."""
  return [
    f"`{system.name}` at batch size {size}, since it takes one prompt at a time"
    for system in entered
    for size in sizes
    if not system.takes(size)
  ]


def ended_by_nan(groups: Sequence[dict]) -> list[str]:
  """The systems whose answers ended so, with their questions."""
  return [
    f"{name} on {question}"
    for record in groups
    for turn in record["turns"]
    for name, numbers in turn["systems"].items()
    for question, broken in zip(
      turn["questions"], numbers.get("broken", ()), strict=False
    )
    if broken
  ]
