r"""Scores of answers: exact matches and chrF, of each task.

  python -m launch.tools.score_answers --prompts=TEST.jsonl \
    --answers=A.jsonl,B.jsonl --summaries=A.json,B.json --output=SCORES.json

TEST.jsonl has lines {"id", "input", "output"}, and perhaps "task", as
`launch.tools.machine_tasks` writes them; A.jsonl and B.jsonl are what
`launch.decode` made of it. Of each, and of each task in it, are told: the share
of answers that are the expected one to the letter, chrF (Popović, 2015, by
sacrebleu, 0 to 100), and tokens a target call, that of plain decoding being 1.
With the summaries that `launch.decode --summary` wrote beside them, SCORES.json
also has how they were made, and `launch.tables answers` prints that.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping

import sacrebleu
from absl import flags

from launch import cli, jsonl, provenance, report, results, terminal

cli.reads(cli.PROMPTS, cli.OUTPUT)
_ANSWERS = flags.DEFINE_list("answers", None, "What launch.decode wrote.")
_SUMMARIES = flags.DEFINE_list(
  "summaries", [], "What launch.decode --summary wrote, of each."
)
_ALL = "all"


def score(pairs: Iterable[tuple[Mapping, Mapping]]) -> dict[str, float]:
  """Scores of expected lines and of the rows beside them."""
  expected, rows = zip(*pairs, strict=True)
  wanted = [line["output"] for line in expected]
  said = [row["completion"] for row in rows]
  same = [a == b for a, b in zip(wanted, said, strict=True)]
  calls = sum(row["num_target_calls"] for row in rows)
  return {
    "count": len(rows),
    "exact_match": sum(same) / len(same),
    "chrf": sacrebleu.corpus_chrf(said, [wanted]).score,
    "block_efficiency": sum(len(r["token_ids"]) for r in rows) / calls,
  }


def scores(test: str, answers: str) -> dict[str, dict[str, float]]:
  """Scores of a file of answers, of all and by task.

  Raises:
    ValueError: for files that are none, or answers that are not of the test.
  """
  expected = {json.dumps(x.get("id")): x for _, x in jsonl.objects(test)}
  pairs = []
  for _, row in jsonl.objects(answers):
    line = expected.get(json.dumps(row.get("id")))
    if line is None or not isinstance(line.get("output"), str):
      raise ValueError(
        f"{answers} has the id {json.dumps(row.get('id'))}, for which {test} "
        "has no output"
      )
    pairs.append((line, row))
  if not pairs:
    raise ValueError(f"no answers in {answers}")
  by_task = {_ALL: score(pairs)}
  for task in sorted({line["task"] for line, _ in pairs if "task" in line}):
    by_task[task] = score([p for p in pairs if p[0].get("task") == task])
  return by_task


def made(name: str) -> dict:
  """Settings and statistics of the run that made answers, of its summary.

  Raises:
    ValueError: if it is none.
  """
  try:
    record = json.loads(pathlib.Path(name).read_text("utf-8"))
    drafter = record["drafter"]
    return {
      "drafter": drafter,
      "rule": record["rule"] if drafter != "plain" else "",
      "temperature": record["config"]["temperature"],
      "accepted_per_target_call": record["num_accepted"]
      / record["num_target_calls"],
      "block_efficiency_ci": record["block_efficiency_ci"],
      "total_variation": record["total_variation"],
    }
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
      f"{name} is not a summary of launch.decode: {error!r}"
    ) from None


def table(results: dict[str, dict]) -> str:
  """Settings and scores of answers: a row a run."""
  rows = [
    run | {"score": result["scores"][name]["all"]}
    for result in results.values()
    for name, run in result["runs"].items()
  ]
  return report.columns(
    rows,
    {
      "drafter": lambda x: f"`{x['drafter']}`",
      "rule": lambda x: f"`{x['rule']}`" if x["rule"] else "–",
      "temperature": lambda x: f"{x['temperature']:g}",
      "accepted a round": lambda x: f"{x['accepted_per_target_call']:.2f}",
      "tokens a round (95%)": lambda x: (
        f"{x['score']['block_efficiency']:.2f}"
        + report.interval(x["block_efficiency_ci"])
      ),
      "exact match": lambda x: f"{x['score']['exact_match']:.3f}",
      "chrF": lambda x: f"{x['score']['chrf']:.1f}",
      "total variation": lambda x: report.number(x["total_variation"], ".3f"),
    },
  )


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  if not _ANSWERS.value:
    raise cli.UserError("--answers is required; see --help for an example")
  if _SUMMARIES.value and len(_SUMMARIES.value) != len(_ANSWERS.value):
    raise cli.UserError(
      f"--summaries must be of each of the {len(_ANSWERS.value)} --answers, "
      f"got {len(_SUMMARIES.value)}"
    )
  scored = {name: scores(cli.PROMPTS.value, name) for name in _ANSWERS.value}
  pairs = zip(_ANSWERS.value, _SUMMARIES.value, strict=False)
  runs = {answers: made(summary) for answers, summary in pairs}
  if cli.OUTPUT.value:
    made_by = provenance.record(prompts=cli.PROMPTS.value)
    results.write_json(
      cli.OUTPUT.value, {"scores": scored, "runs": runs, **made_by}
    )
  lines = [
    [
      pathlib.Path(name).name if task == _ALL else "", task,
      f"{one['exact_match']:.3f}", f"{one['chrf']:.1f}",
      f"{one['block_efficiency']:.2f}",
    ]
    for name, by_task in scored.items()
    for task, one in by_task.items()
  ]  # fmt: skip
  console = terminal.console(results.beside(cli.OUTPUT.value))
  head = ["answers", "task", "exact match", "chrF", "tokens a call"]
  report.show(console, head, lines)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("prompts",))
