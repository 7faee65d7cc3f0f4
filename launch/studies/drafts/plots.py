r"""The table of a study of drafts, and the figure of acceptance by position.

  python -m launch.studies.drafts.plots docs/measurements/drafts/heads.jsonl \
    docs/figures/acceptance-by-position.svg

The same measurements give the same file, byte for byte.
"""

import statistics

import numpy as np
from matplotlib.figure import Figure

from launch import report
from specjax.theory import throughput


def table(results: dict[str, list[dict]]) -> str:
  """One row a draft, as `launch.studies.drafts` wrote them into one file.

  What a pass costs and how fast it all is are left out where the drafts are of
  one shape: they were not trained to differ in that. Where nothing was timed
  the table is of acceptance by position.
  """
  (rows,) = results.values()
  if "draft_pass_seconds" not in rows[0]:
    return _by_position(rows)
  shapes = len({row["parameters"] for row in rows}) > 1
  # The same target, timed beside every draft.
  target, verify = (
    statistics.median(row[name] for row in rows)
    for name in ("target_pass_seconds", "verify_seconds")
  )
  cells = {
    "draft": lambda x: f"`{x['name']}`",
    "parameters": lambda x: f"{x['parameters']:,}",
    "steps": lambda x: f"{x['num_steps']:,}",
    "seconds": lambda x: f"{x['training_seconds']:,.0f}",
    "validation nats": lambda x: f"{x['validation_next_token_loss']:.3f}",
    "accepted, one token": lambda x: f"{x['validation_acceptance']:.3f}",
    "draft pass, ms": lambda x: f"{1e3 * x['draft_pass_seconds']:.3f}",
    "of the target's": lambda x: f"{x['draft_pass_seconds'] / target:.3f}",
    "speed-up predicted, best N": lambda x: "{:.2f}, {}".format(
      *predicted(x, target, verify)
    ),
  }
  if not shapes:
    for name in ("parameters", *[*cells][-3:]):
      del cells[name]
  head, lines = [*cells], [[cell(x) for cell in cells.values()] for x in rows]
  for temperature in rows[0]["decoding"]:
    head.append(f"block efficiency, T={temperature}")
    head += ["tok/s", "speed-up"] * shapes
    for row, line in zip(rows, lines, strict=True):
      numbers = row["decoding"][temperature]
      line.append(report.estimate(numbers, "block_efficiency"))
      if shapes:
        line.append(f"{numbers['tokens_per_second']:.0f}")
        line.append(report.estimate(numbers, "speedup"))
  return report.table(head, lines)


def _by_position(rows: list[dict]) -> str:
  """A row for each draft and temperature."""
  every = [
    (row, temperature, numbers)
    for row in rows
    for temperature, numbers in row["decoding"].items()
  ]
  deepest = max(len(numbers["accepted"]) for *_, numbers in every)
  head = [
    "draft", "trained parameters", "steps", "operations", "T",
    *(f"accepted, token {i + 1}" for i in range(deepest)),
    "tokens a target call",
  ]  # fmt: skip
  return report.table(
    head,
    [
      [
        f"`{row['name']}`",
        f"{row['parameters']:,}",
        f"{row['num_steps']:,}",
        f"{row['flops']:.2e}",
        temperature,
        *(
          f"{value:.2f}" + report.interval(ends) if tried else "never tried"
          for value, ends, tried in zip(
            numbers["accepted"],
            numbers["accepted_ci"],
            numbers["tried"],
            strict=True,
          )
        ),
        report.estimate(numbers, "block_efficiency"),
      ]
      for row, temperature, numbers in every
    ],
  )


def predicted(row: dict, target: float, verify: float) -> tuple[float, int]:
  """The throughput formula's answer for one-token acceptance and latency.

  Args:
    row: of a draft.
    target: seconds of a target pass over one token.
    verify: seconds of one over all drafted tokens of the study and one more.

  Returns:
    Tokens per second over those of plain decoding, with the best number of
    drafted tokens up to the study's, and that number.
  """
  most = row["num_speculative_tokens"]
  passes = throughput.verify_curve({1: target, 1 + most: verify})
  acceptance, draft = row["validation_acceptance"], row["draft_pass_seconds"]
  best = throughput.best_num_tokens(acceptance, draft, passes, most=most)
  rate = throughput.throughput(best, acceptance, draft, passes(best + 1))
  return float(rate) * target, best


def by_position(rows: list[dict]) -> Figure:
  """Acceptance at each position given all before it, with intervals.

  A panel a temperature and a line a draft.

  Args:
    rows: of `launch.studies.drafts`, with `config.rounds=0`.
  """
  temperatures = list(rows[0]["decoding"])
  figure, panels = report.panels(
    7.2, 3.4, columns=len(temperatures), sharey=True
  )
  for panel, temperature in zip(panels.flat, temperatures, strict=True):
    for number, row in enumerate(rows):
      numbers = row["decoding"][temperature]
      value = np.array(numbers["accepted"])
      # Beside each other, so that intervals can be told apart.
      places = np.arange(1, len(value) + 1)
      panel.errorbar(
        places + 0.06 * (number - (len(rows) - 1) / 2), value,
        yerr=report.sides(value, numbers["accepted_ci"]), capsize=2,
        marker=report.MARKERS[number % len(report.MARKERS)],
        label=row["name"], color=f"C{number}",
      )  # fmt: skip
    panel.set_title(f"temperature {temperature}")
    panel.set_xlabel("drafted token")
    panel.set_xticks(places)
    panel.set_ylim(0, 1)
  panels[0, 0].set_ylabel("accepted, given those before")
  panels[0, -1].legend()
  return figure


def main(argv: list[str]) -> int:
  """`plots STUDY.jsonl FIGURE.svg`; returns the exit code."""
  figures = {"by_position": by_position}
  return report.draw("launch.studies.drafts.plots", figures, argv[1:])


if __name__ == "__main__":
  report.run(main)
