"""The page of an evaluation, from `launch.evaluate`'s results."""

import pathlib
from collections.abc import Mapping, Sequence

from launch import report
from launch.evaluation import explain, questions

_MOST_DIFFERENCES = 20


def page(result: Mapping, throughput: str | None = None) -> str:
  """The page, in Markdown.

  Args:
    result: from `launch.evaluate`.
    throughput: path of the explanation's figure relative to the page, or None.
  """
  config, given = result["config"], result["questions"]
  machine = result["machine"]
  counts = [f"{n} of {name}" for name, n in given["by_category"].items()]
  form = "the chat template" if given["chat_template"] else "plain text"
  sections = [
    f"# {pathlib.Path(config['target']).name}: speculative decoding",
    f"Target `{config['target']}` in {config['dtype']}, at most "
    f"{config['max_new_tokens']} new tokens a turn, on "
    f"{', '.join(sorted(set(machine['devices'])))} ({machine['cores']} cores). "
    f"{given['count']} questions ({', '.join(counts)}), as {form}.",
    over_all(result),
    _agreement(result),
  ]
  if {*given["by_category"]} != {questions.PROMPTS}:
    kinds = {(group["task"], group["category"]) for group in result["groups"]}
    tasks, names = zip(*kinds, strict=True)
    own = [c for t, c in kinds if tasks.count(t) == names.count(c) == 1]
    shown = lambda r: r["level"] == "task" or r["category"] not in (*own, "all")
    rows = [row for row in result["runs"] if shown(row)]
    sections += ["## By task and category", _table(result, rows)]
  sections += ["## Systems", _systems(result)]
  if throughput:
    sections += explain.section(result, figure=throughput)
  if result["refused"]:
    sections.append(
      f"{len(result['refused'])} prompts were too long and were not decoded "
      "(`refused` in the JSON file)."
    )
  sections.append(
    f"Every system answered everything {result['rounds']} times, in random "
    "order. Rates exclude compilation. docs/pay.md explains the columns. "
    f"Command: `{result['provenance']['command']}`."
  )
  return "\n\n".join(sections) + "\n"


def over_all(result: Mapping) -> str:
  """The table over all questions: a row per system and setting."""
  return _table(result, [r for r in result["runs"] if r["level"] == "all"])


def _table(result: Mapping, rows: Sequence[Mapping]) -> str:
  of = lambda name, form=".2f": lambda row: report.number(row[name], form)
  with_interval = lambda name: lambda row: report.estimate(row, name)
  unsure = {
    (cost["system"], cost["batch_size"])
    for cost in result["costs"]
    if cost["doubts"]
  }

  def speedup(row: Mapping) -> str:
    text, system = report.estimate(row, "speedup"), result["systems"]
    kind = system[row["system"]]
    if not kind["rule"]:
      return text
    return f"{text}, " + report.loss_in_words(
      kind["rule"], kind["lossless"], row["total_variation"]
    )

  def predicted(row: Mapping) -> str:
    if (row["system"], row["batch_size"]) in unsure:
      return "none: inconsistent timings"
    return report.number(row["predicted_speedup"])

  return report.columns(
    rows,
    {
      "T": of("temperature", "g"),
      "batch": of("batch_size", "d"),
      "questions of": lambda row: row["category"],
      "number": of("num_questions", "d"),
      "system": lambda row: f"`{row['system']}`",
      "tok/s": of("tokens_per_second", ".1f"),
      "speed-up (95%)": speedup,
      "predicted": predicted,
      "tokens per target call (95%)": with_interval("block_efficiency"),
      "mean of requests": of("block_efficiency_request_mean"),
      "accepted": of("acceptance_rate"),
      "first token, s": of("time_to_first_token"),
      "as plain": of("identical_to_plain", ".1%"),
    },
  )


def _agreement(result: Mapping) -> str:
  text = (
    "`as plain` is the share of completions at temperature 0 that equal plain "
    "decoding's"
  )
  differences = result["differences"]
  if not differences:
    return f"{text}."
  size = lambda d: float("inf") if d["margin"] is None else abs(d["margin"])
  worst = sorted(differences, key=size, reverse=True)[:_MOST_DIFFERENCES]
  margins = report.columns(
    worst,
    {
      "system": lambda d: f"`{d['system']}`",
      "batch": lambda d: str(d["batch_size"]),
      "question, turn": lambda d: f"{d['question']}, {d['turn'] + 1}",
      "alike": lambda d: f"{d['place']} tokens",
      "margin": lambda d: (
        "one has ended" if d["margin"] is None else f"{d['margin']:+.1e}"
      ),
    },
  )
  return (
    f"{text}; {len(differences)} differ. The margin is the logit of plain "
    "decoding's token minus that of the system's, in one target pass over "
    "their common text. Passes over one and over several tokens add in "
    "different orders, so tokens with a margin near 0 may swap. "
    f"The {len(worst)} largest:\n\n{margins}"
  )


def _systems(result: Mapping) -> str:
  costs = {(c["system"], c["batch_size"]): c for c in result["costs"]}
  sizes = sorted({row["batch_size"] for row in result["runs"]})
  cost = lambda name: (
    lambda item: " / ".join(
      report.number(costs.get((item[0], size), {}).get(name)) for size in sizes
    )
  )
  batches = " / ".join(map(str, sizes))
  lines = [
    report.columns(
      result["systems"].items(),
      {
        "system": lambda item: f"`{item[0]}`",
        "rule": lambda item: item[1]["rule"] or "–",
        "draft": lambda item: item[1]["draft_shape"] or "–",
        f"draft passes, batch {batches}": cost("draft_cost"),
        f"round, batch {batches}": cost("round_cost"),
      },
    ),
    "A round, and the draft passes in it, relative to a round of plain "
    "decoding; timed separately, on a prompt of median length.",
  ]
  lines += [
    f"Of `{cost['system']}` at batch size {cost['batch_size']} nothing is "
    f"predicted: {'; '.join(cost['doubts'])}."
    for cost in result["costs"]
    if cost["doubts"]
  ]
  return "\n\n".join(lines)
