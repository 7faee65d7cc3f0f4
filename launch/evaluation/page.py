"""The page of an evaluation, from what `launch.evaluate` wrote."""

import pathlib
from collections.abc import Mapping, Sequence

from launch import tables
from launch.evaluation import experts, questions, summary
from launch.evaluation.systems import HF, PLAIN

_MOST_DIFFERENCES = 20


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
    ours = [r for r in every.values() if result["systems"][r["system"]]["rule"]]
    for row in ours or list(every.values())[:1]:
      setting = (row["temperature"], row["batch_size"])
      name = pathlib.Path(path).stem
      if len(ours) > 1:
        name += f", `{row['system']}`, T {setting[0]:g}, batch {setting[1]}"
      cells = ["–"] * 4
      if ours:
        cells = [
          _number(row["tokens_per_second"], ".0f"),
          _with_interval(row, "speedup")
          + f", `{result['systems'][row['system']]['rule']}`:"
          + _loss(result, row).removeprefix(","),
          "none: " + "; ".join(doubts)
          if (doubts := _doubts(result).get((row["system"], setting[1])))
          else _number(row["predicted_speedup"]),
          _number(row["block_efficiency"]),
        ]
      plain = every[*setting, PLAIN]["tokens_per_second"]
      rows.append([name, _number(plain, ".0f"), *cells])
  return tables.table(
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


def _number(value: float | None, form: str = ".2f") -> str:
  return "–" if value is None else format(value, form)


def _with_interval(row: Mapping, name: str, form: str = ".2f") -> str:
  text, ends = _number(row[name], form), row[f"{name}_ci"]
  if ends:
    text += f" ({format(ends[0], form)}–{format(ends[1], form)})"
  return text


def _loss(result: Mapping, row: Mapping) -> str:
  """What a speed-up costs, where our rule is known to be lossy or not."""
  system = result["systems"][row["system"]]
  if system["lossless"] is None:
    return ""
  return ", " + tables.loss_in_words(
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
  text = _number(row["predicted_speedup"])
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
  return tables.table(
    [
      "T", "batch", "system", "tok/s", "speed-up (95%)", "predicted",
      "tokens per target call (95%)", "mean of requests",
      "first token, s", "next token, ms",
    ],
    [
      [
        f"{row['temperature']:g}",
        str(row["batch_size"]),
        f"`{row['system']}`",
        _number(row["tokens_per_second"], ".1f"),
        _with_interval(row, "speedup")
        + (_loss(result, row) if row["speedup"] else ""),
        _predicted(result, row),
        _with_interval(row, "block_efficiency"),
        _number(row["block_efficiency_request_mean"]),
        _number(row["time_to_first_token"]),
        _number(_milli(row["seconds_per_token"]), ".1f"),
      ]
      for row in _rows(result, "all")
    ],
  )  # fmt: skip


def _milli(seconds: float | None) -> float | None:
  return None if seconds is None else 1e3 * seconds


def by_category(result: Mapping) -> str:
  """Tasks first, then categories: speed-ups and tokens per call."""
  rows, seen = [], set()
  for row in _rows(result, "task", "category"):
    key = tuple(
      row[name]
      for name in (
        "temperature", "batch_size", "category", "system", "num_requests"
      )
    )  # fmt: skip
    if row["system"] == PLAIN or key in seen:  # a task of one category
      continue
    seen.add(key)
    rows.append(
      [
        f"{row['temperature']:g}",
        str(row["batch_size"]),
        row["category"],
        f"`{row['system']}`",
        str(row["num_questions"]),
        _with_interval(row, "speedup"),
        _predicted(result, row),
        _with_interval(row, "block_efficiency"),
      ]
    )
  return tables.table(
    [
      "T", "batch", "questions of", "system", "questions", "speed-up (95%)",
      "predicted", "tokens per target call (95%)",
    ],
    rows,
  )  # fmt: skip


def _by_position(result: Mapping) -> str:
  rows = [row for row in _rows(result, "all") if row["accepted_by_position"]]
  if not rows:
    return "Nothing was drafted."
  deepest = max(len(row["accepted_by_position"]) for row in rows)
  return (
    tables.table(
      [
        "T", "batch", "system", "accepted of drafted",
        *(f"{i + 1} or more" for i in range(deepest)),
      ],
      [
        [
          f"{row['temperature']:g}",
          str(row["batch_size"]),
          f"`{row['system']}`",
          _number(row["acceptance_rate"], ".3f"),
          *(
            _number(share, ".3f")
            for share in [
              *row["accepted_by_position"],
              *[None] * (deepest - len(row["accepted_by_position"])),
            ]
          ),
        ]
        for row in rows
      ],
    )
    + "\n\nThe share of target calls that emitted so many drafted tokens; the "
    "histograms are in the JSON file."
    + "".join(f"\n\n{line}" for line in _lengths(result))
  )  # fmt: skip


def _lengths(result: Mapping) -> list[str]:
  """What ladders chose."""
  return [
    f"`{row['system']}` at temperature {row['temperature']:g}, batch size "
    f"{row['batch_size']}: of its rounds "
    + ", ".join(
      f"{rounds / sum(found.values()):.0%} drafted {length}"
      for length, rounds in found.items()
    )
    + "."
    for row in _rows(result, "all")
    if (found := row.get("rounds_by_length"))
  ]


def _agreement(result: Mapping) -> str:
  greedy = [row for row in _rows(result, "all") if not row["temperature"]]
  if not greedy:
    return "No system decoded at temperature 0."
  share = lambda value: "–" if value is None else f"{value:.1%}"
  text = tables.table(
    ["batch", "system", "as plain decoding", "as transformers (`hf`)"],
    [
      [
        str(row["batch_size"]),
        f"`{row['system']}`",
        share(row[f"identical_to_{PLAIN}"]),
        share(row[f"identical_to_{HF}"]),
      ]
      for row in greedy
    ],
  )
  differences = result["differences"]
  if not differences:
    return text
  size = lambda d: float("inf") if d["margin"] is None else abs(d["margin"])
  worst = sorted(differences, key=size, reverse=True)[:_MOST_DIFFERENCES]
  return (
    text
    + f"\n\n{len(differences)} completions differ. The margin is the logit of "
    "the other's token less that of the system's, by one pass of the target "
    "over what they have in common: passes over one token and over several add "
    "in another order, so that tokens with a margin near 0 may change places. "
    + (
      f"The {_MOST_DIFFERENCES} with the largest margins:\n\n"
      if len(differences) > _MOST_DIFFERENCES
      else "By the size of the margin:\n\n"
    )
    + tables.table(
      ["batch", "question, turn", "system", "against", "alike", "margin"],
      [
        [
          str(d["batch_size"]),
          f"{d['question']}, {d['turn'] + 1}",
          f"`{d['system']}`",
          f"`{d['against']}`",
          f"{d['place']} tokens",
          "one has ended" if d["margin"] is None else f"{d['margin']:+.1e}",
        ]
        for d in worst
      ],
    )
  )


def _systems(result: Mapping) -> str:
  costs = {(c["system"], c["batch_size"]): c for c in result["costs"]}
  sizes = sorted({row["batch_size"] for row in result["runs"]})
  rows, doubts = [], _doubts(result)
  for name, system in result["systems"].items():
    of = lambda size, what, name=name: _number(
      costs.get((name, size), {}).get(what), ".2f"
    )
    rows.append(
      [
        f"`{name}`",
        system["rule"] or "–",
        system["draft_shape"] or "–",
        system["dtype"],
        " / ".join(of(size, "draft_cost") for size in sizes),
        " / ".join(of(size, "round_cost") for size in sizes),
        *(
          [
            " / ".join(
              "; ".join(doubts.get((name, size), ())) or "–" for size in sizes
            )
          ]
          if doubts
          else []
        ),
      ]
    )
  batches = " / ".join(map(str, sizes))
  text = tables.table(
    [
      "system", "rule", "draft", "dtype", f"draft passes, batch {batches}",
      f"round, batch {batches}", *(["timings that disagree"] if doubts else []),
    ],
    rows,
  )  # fmt: skip
  return text + (
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
    rows = [
      [str(r["question"]), str(r["turn"] + 1), f"{r['prompt_tokens']}",
       f"{r['room']}", *_settings(r)]
      for r in result["refused"]
    ]  # fmt: skip
    lines.append(
      "Prompts that were too long, and not decoded:\n\n"
      + tables.table(["question", "turn", "tokens", "room", "where"], rows)
    )
  lines.append(f"Made by `{result['provenance']['command']}`.")
  return "\n\n".join(lines)


def _settings(refusal: Mapping) -> Sequence[str]:
  if "temperature" not in refusal:
    return ["everywhere"]
  return [f"T {refusal['temperature']:g}, batch {refusal['batch_size']}"]


def settings_of(result: Mapping) -> list[tuple[float, int]]:
  """Temperatures with batch sizes, in the order they were measured."""
  return list(
    dict.fromkeys((r["temperature"], r["batch_size"]) for r in result["runs"])
  )


def categories_of(result: Mapping) -> list[str]:
  """Of a figure: over all, then each category."""
  names = [row["category"] for row in _rows(result, "category")]
  return [summary.LEVELS[0], *dict.fromkeys(names)]
