"""The page and the figure of an evaluation, of what `launch.evaluate` wrote."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch import report
from launch.evaluation import experts, questions, summary
from launch.evaluation.systems import HF, PLAIN

_MOST_DIFFERENCES = 20
_PANELS = (
  ("speedup", "speed-up over plain decoding"),
  ("block_efficiency", "emitted tokens per target call"),
)
# Columns that begin a row.
_SETTING = {
  "T": lambda row: f"{row['temperature']:g}",
  "batch": lambda row: str(row["batch_size"]),
  "system": lambda row: f"`{row['system']}`",
}


def _of(name: str, form: str = ".2f"):
  """A column of a row's number."""
  return lambda row: report.number(row[name], form)


def _with_interval(name: str):
  """A column of a row's number with its interval."""
  return lambda row: report.estimate(row, name)


def table(results: dict[str, dict]) -> str:
  """Results by file, over all of their questions, as Markdown."""
  return "\n\n".join(
    f"{pathlib.Path(path).stem}:\n\n" + over_all(result)
    for path, result in results.items()
  )


def speed(results: dict[str, dict]) -> str:
  """Speed-ups in a few columns, a row for each system that we draft with."""
  rows = []
  for path, result in results.items():
    every = {(r["temperature"], r["batch_size"], r["system"]): r
             for r in _rows(result, "all")}  # fmt: skip
    rule_of = lambda row, result=result: result["systems"][row["system"]][
      "rule"
    ]
    ours = [row for row in every.values() if rule_of(row)]
    for row in ours or list(every.values())[:1]:
      setting = (row["temperature"], row["batch_size"])
      name = pathlib.Path(path).stem
      if len(ours) > 1:
        name += f", `{row['system']}`, T {setting[0]:g}, batch {setting[1]}"
      plain = every[*setting, PLAIN]["tokens_per_second"]
      cells = ["–"] * 4
      if ours:
        doubts = _doubts(result).get((row["system"], setting[1]))
        cells = [
          report.number(row["tokens_per_second"], ".0f"),
          f"{report.estimate(row, 'speedup')}, `{rule_of(row)}`:"
          + _loss(result, row).removeprefix(","),
          "none: " + "; ".join(doubts)
          if doubts
          else report.number(row["predicted_speedup"]),
          report.number(row["block_efficiency"]),
        ]
      rows.append([name, report.number(plain, ".0f"), *cells])
  return report.table(
    [
      "run", "plain tok/s", "speculative tok/s", "speed-up (95%)", "predicted",
      "tokens a target call",
    ],
    rows,
  )  # fmt: skip


def page(result: Mapping, *, figure: str) -> str:
  """The whole page; `figure` is the path of the figure from it."""
  plain = {*result["questions"]["by_category"]} == {questions.PROMPTS}
  sections = [
    f"# {pathlib.Path(result['config']['target']).name}: "
    f"speculative decoding of {'prompts' if plain else 'real questions'}",
    _what_ran(result),
    over_all(result),
    f"![Speed-up and tokens per target call by category]({figure})",
    "*Speed-up over plain decoding at the same batch size, and emitted tokens "
    "per target call, by category, with 95% intervals.*",
    *([] if plain else ["## By task and category", by_category(result)]),
    "## Acceptance by position",
    _by_position(result),
    *experts.section(result),
    "## Are greedy completions the same?",
    _agreement(result),
    "## Systems",
    _systems(result),
    "## How it was measured",
    _how(result),
  ]
  return "\n\n".join(sections) + "\n"


def _loss(result: Mapping, row: Mapping) -> str:
  """Loss of a system, where its rule is known to be lossy or lossless."""
  system = result["systems"][row["system"]]
  if system["lossless"] is None:
    return ""
  return ", " + report.loss_in_words(
    system["rule"], system["lossless"], row["total_variation"]
  )


def _doubts(result: Mapping) -> dict[tuple[str, int], list[str]]:
  """By system and batch size, what disagrees in the timings of its rounds."""
  return {
    (cost["system"], cost["batch_size"]): cost["doubts"]
    for cost in result["costs"]
    if cost.get("doubts")
  }


def _predicted(result: Mapping, row: Mapping) -> str:
  if (row["system"], row["batch_size"]) in _doubts(result):
    return "none: timings disagree"
  text = report.number(row["predicted_speedup"])
  if row.get("prediction_error") is not None:
    text += f", off by {row['prediction_error']:+.1%}"
  if ends := row.get("prediction_error_ci"):
    text += " ({:+.1%} to {:+.1%})".format(*ends)
  return text


def _rows(result: Mapping, *levels: str) -> list[dict]:
  """Rows of some levels: setting by setting, and in it level by level."""
  every = [*result["runs"], *result.get("runs_by_task", ())]
  order = settings_of(result)
  return sorted(
    (row for row in every if row["level"] in levels),
    key=lambda row: (
      order.index((row["temperature"], row["batch_size"])),
      levels.index(row["level"]),
    ),
  )


def _what_ran(result: Mapping) -> str:
  config, asked = result["config"], result["questions"]
  sizes = ", ".join(
    f"{count} of {name}" for name, count in asked["by_category"].items()
  )
  form = "the chat template" if asked["chat_template"] else "plain text"
  return (
    f"Target `{config['target']}` in {config['dtype']}, at most "
    f"{config['max_new_tokens']} new tokens a turn, on "
    f"{', '.join(sorted(set(result['machine']['devices'])))} "
    f"({result['machine']['processor']}, {result['machine']['cores']} cores). "
    f"{asked['count']} questions ({sizes}), as {form}."
  )


def over_all(result: Mapping) -> str:
  """The table over all questions: a row for each system and setting."""
  loss = lambda row: _loss(result, row) if row["speedup"] else ""
  return report.columns(
    _rows(result, "all"),
    {
      **_SETTING,
      "tok/s": _of("tokens_per_second", ".1f"),
      "speed-up (95%)": lambda row: report.estimate(row, "speedup") + loss(row),
      "predicted": lambda row: _predicted(result, row),
      "tokens per target call (95%)": _with_interval("block_efficiency"),
      "mean of requests": _of("block_efficiency_request_mean"),
      "first token, s": _of("time_to_first_token"),
      "next token, ms": lambda row: report.number(
        row["seconds_per_token"] and 1e3 * row["seconds_per_token"], ".1f"
      ),
    },
  )


def by_category(result: Mapping) -> str:
  """Tasks first, then categories: speed-ups and tokens per call."""
  names = (
    "temperature", "batch_size", "category", "system", "num_requests"
  )  # fmt: skip
  rows: dict[tuple, dict] = {}
  for row in _rows(result, "task", "category"):
    if row["system"] != PLAIN:  # a task of one category counts once
      rows.setdefault(tuple(row[name] for name in names), row)
  return report.columns(
    rows.values(),
    {
      "T": _SETTING["T"],
      "batch": _SETTING["batch"],
      "questions of": lambda row: row["category"],
      "system": _SETTING["system"],
      "questions": lambda row: str(row["num_questions"]),
      "speed-up (95%)": _with_interval("speedup"),
      "predicted": lambda row: _predicted(result, row),
      "tokens per target call (95%)": _with_interval("block_efficiency"),
    },
  )


def _by_position(result: Mapping) -> str:
  rows = [row for row in _rows(result, "all") if row["accepted_by_position"]]
  if not rows:
    return "Nothing was drafted."
  deepest = max(len(row["accepted_by_position"]) for row in rows)
  place = lambda i: (
    lambda row: report.number(
      dict(enumerate(row["accepted_by_position"])).get(i), ".3f"
    )
  )
  cells = {
    **_SETTING,
    "accepted of drafted": _of("acceptance_rate", ".3f"),
    **{f"{i + 1} or more": place(i) for i in range(deepest)},
  }
  return (
    report.columns(rows, cells)
    + "\n\nThe share of target calls that emitted so many drafted tokens; the "
    "histograms are in the JSON file."
    + "".join(f"\n\n{line}" for line in _lengths(result))
  )


def _lengths(result: Mapping) -> list[str]:
  """Lengths that ladders chose, a line a system."""
  return [
    f"`{row['system']}` at temperature {row['temperature']:g}, batch size "
    f"{row['batch_size']}: of its rounds "
    + ", ".join(
      f"{rounds / sum(counts.values()):.0%} drafted {length}"
      for length, rounds in counts.items()
    )
    + "."
    for row in _rows(result, "all")
    if (counts := row.get("rounds_by_length"))
  ]


def _agreement(result: Mapping) -> str:
  greedy = [row for row in _rows(result, "all") if not row["temperature"]]
  if not greedy:
    return "No system decoded at temperature 0."
  text = report.columns(
    greedy,
    {
      "batch": _SETTING["batch"],
      "system": _SETTING["system"],
      "as plain decoding": _of(f"identical_to_{PLAIN}", ".1%"),
      "as transformers (`hf`)": _of(f"identical_to_{HF}", ".1%"),
    },
  )
  differences = result["differences"]
  if not differences:
    return text
  size = lambda d: float("inf") if d["margin"] is None else abs(d["margin"])
  worst = sorted(differences, key=size, reverse=True)[:_MOST_DIFFERENCES]
  which = "By the size of the margin"
  if len(differences) > _MOST_DIFFERENCES:
    which = f"The {_MOST_DIFFERENCES} with the largest margins"
  margins = report.columns(
    worst,
    {
      "batch": _SETTING["batch"],
      "question, turn": lambda d: f"{d['question']}, {d['turn'] + 1}",
      "system": _SETTING["system"],
      "against": lambda d: f"`{d['against']}`",
      "alike": lambda d: f"{d['place']} tokens",
      "margin": lambda d: (
        "one has ended" if d["margin"] is None else f"{d['margin']:+.1e}"
      ),
    },
  )
  return (
    f"{text}\n\n{len(differences)} completions differ. The margin is the logit "
    "of the other's token less that of the system's, by one pass of the target "
    "over what they have in common: passes over one token and over several add "
    "in another order, so that tokens with a margin near 0 may change places. "
    f"{which}:\n\n{margins}"
  )


def _systems(result: Mapping) -> str:
  costs = {(c["system"], c["batch_size"]): c for c in result["costs"]}
  sizes = sorted({row["batch_size"] for row in result["runs"]})
  doubts, batches = _doubts(result), " / ".join(map(str, sizes))

  def at_sizes(text):
    """A column of what is said at each batch size."""
    return lambda item: " / ".join(text((item[0], size)) for size in sizes)

  cost = lambda name: at_sizes(
    lambda key: report.number(costs.get(key, {}).get(name))
  )
  cells: dict[str, Any] = {
    "system": lambda item: f"`{item[0]}`",
    "rule": lambda item: item[1]["rule"] or "–",
    "draft": lambda item: item[1]["draft_shape"] or "–",
    "dtype": lambda item: item[1]["dtype"],
    f"draft passes, batch {batches}": cost("draft_cost"),
    f"round, batch {batches}": cost("round_cost"),
  }
  if doubts:
    cells["timings that disagree"] = at_sizes(
      lambda key: "; ".join(doubts.get(key, ())) or "–"
    )
  return report.columns(result["systems"].items(), cells) + (
    "\n\nA round, and the draft passes in it, take so many times as long as a "
    "round of plain decoding: timed apart from the answers, on a middling "
    "prompt. The predicted speed-up follows from that ratio, from the rounds "
    "that the answers took, and from the time of their prompts' passes; of "
    "timings that disagree, as on a busy machine, nothing is predicted."
  )


def _how(result: Mapping) -> str:
  compiled = ", ".join(
    f"`{name}` {seconds:.0f} s"
    for name, seconds in result["compile_seconds"].items()
  )
  rounds = result.get("rounds", 1)
  lines = [
    "All systems answer a group of questions in one go, in random order"
    + (f", {rounds} times, and mean seconds count" if rounds > 1 else "")
    + "; a "
    "group is of one category, and its rows are different questions. Speed-ups "
    "are ratios of tokens per second of the same groups, prompts' passes "
    "included; intervals are over groups. One counter counts all tokens, a "
    "stop token included, by the ids that were emitted.",
    "A second turn holds the answer that plain decoding gave to the first "
    "one, at the same temperature and batch size, for every system.",
    f"Compiling is no part of any rate: {compiled} (programs that were "
    "compiled before come from jax's cache).",
    *(f"Left out: {text}." for text in result["left_out"]),
  ]
  if result["refused"]:
    where = lambda r: (
      f"T {r['temperature']:g}, batch {r['batch_size']}"
      if "temperature" in r
      else "everywhere"
    )
    refused = report.columns(
      result["refused"],
      {
        "question": lambda r: str(r["question"]),
        "turn": lambda r: str(r["turn"] + 1),
        "tokens": lambda r: f"{r['prompt_tokens']}",
        "room": lambda r: f"{r['room']}",
        "where": where,
      },
    )
    lines.append(f"Prompts that were too long, and not decoded:\n\n{refused}")
  lines.append(f"Made by `{result['provenance']['command']}`.")
  return "\n\n".join(lines)


def settings_of(result: Mapping) -> list[tuple[float, int]]:
  """Temperatures with batch sizes, in the order they were measured."""
  return list(
    dict.fromkeys((r["temperature"], r["batch_size"]) for r in result["runs"])
  )


def figure(result: Mapping) -> Figure:
  """Speed-up and tokens per call by category, with intervals.

  A row of two panels for each temperature and batch size.
  """
  settings = settings_of(result)
  categories = [row["category"] for row in _rows(result, "category")]
  names = [summary.LEVELS[0], *dict.fromkeys(categories)]
  drawn, axes = report.panels(
    11, 0.6 + len(settings) * (1.1 + 0.28 * len(names)), len(settings), 2,
    sharey="row",
  )  # fmt: skip
  systems = [name for name in result["systems"] if name != PLAIN]
  for (temperature, batch_size), row in zip(settings, axes, strict=True):
    points = {
      (r["system"], r["category"]): r
      for r in result["runs"]
      if (r["temperature"], r["batch_size"]) == (temperature, batch_size)
      and r["level"] != "task"
    }
    for ax, (quantity, label) in zip(row, _PANELS, strict=True):
      _panel(ax, points, systems, names, quantity)
      ax.set_xlabel(label)
      ax.set_title(f"temperature {temperature:g}, batch size {batch_size}")
  report.legend_below(drawn, *axes[0, 0].get_legend_handles_labels())
  return drawn


def _panel(
  ax: Axes, points: Mapping, systems: list[str], names: list[str], quantity: str
) -> None:
  """Points with intervals: a line for each category, a colour a system."""
  places = np.arange(len(names))
  offsets = np.linspace(-0.3, 0.3, len(systems)) if len(systems) > 1 else [0.0]
  shown = [1.0]
  for number, (system, offset) in enumerate(
    zip(systems, offsets, strict=False)
  ):
    rows = {
      place: points[system, name]
      for place, name in enumerate(names)
      if (points.get((system, name)) or {quantity: None})[quantity] is not None
    }
    values = [row[quantity] for row in rows.values()]
    shown += values
    ax.errorbar(
      values, places[[*rows]] + offset, fmt="o", markersize=3,
      xerr=report.sides(values, [r[f"{quantity}_ci"] for r in rows.values()]),
      color=f"C{number % 10}", label=system,
    )  # fmt: skip
  ax.axvline(1, color="0.6", linewidth=0.8)
  # A dollar would begin a formula.
  ax.set_yticks(places, [name.replace("$", r"\$") for name in names])
  ax.set_ylim(len(names) - 0.5, -0.5)
  # An interval of a few groups may be as wide as it likes: points decide.
  ax.set_xlim(0, 1.4 * max(shown))
