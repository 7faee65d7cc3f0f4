"""Prints the tables about theory from committed results, as Markdown.

rejections, tradeoff, throughput and acceptance (of the JSON files of
`launch.theory --figure`), reports (of `launch.report`) and quality (of
`launch.quality`):

  python -m launch.predicting.tables rejections docs/theory/single.json \
    docs/theory/batch.json docs/theory/drafts.json
  python -m launch.predicting.tables reports docs/reports/*/report.json
"""

from collections.abc import Callable

from launch import markdown, quality
from launch.markdown import plus_minus, print_table, table


def rejections(*results: dict) -> str:
  """Rejections a run, predicted by Theorems 1 and 3 and simulated."""
  rows = []
  for result in results:
    for one in result.get("horizons", {"": result}).values():
      lines = one.get("drafts") or {
        count: {
          "theory": one["expected"][one["num_drafts"].index(int(count))],
          "simulated": found,
        }
        for count, found in one["simulated"].items()
      }
      for count, line in lines.items():
        found = line["simulated"]
        away = (found["mean"] - line["theory"]) / found["standard_error"]
        rows.append(
          [
            result["figure"],
            str(one["horizon"]),
            count,
            f"{line['theory']:.3f}",
            plus_minus(found["mean"], found["standard_error"], 3),
            f"{away:+.1f}",
            f"{found['runs']:,}",
          ]
        )
  return table(
    ["figure", "T", "M", "predicted", "simulated (95%)", "away, s.e.", "runs"],
    rows,
  )


def tradeoff(result: dict) -> str:
  """Rejection and loss of Decoding-OPT and -UNO, predicted and simulated."""
  pair = lambda point, name: [
    f"{round(point[f'predicted_{name}'], 4) + 0.0:.4f}",  # no minus zero
    plus_minus(point[name], point[f"{name}_standard_error"], 4),
  ]
  return table(
    [
      "rule", "ε", "P(rejection) predicted", "simulated (95%)",
      "loss predicted", "simulated (95%)",
    ],
    [
      [
        f"Decoding-{rule.upper()}",
        f"{point['epsilon']:g}",
        *pair(point, "rejection"),
        *pair(point, "loss"),
      ]
      for rule, points in result["simulated"].items()
      for point in points
    ],
  )  # fmt: skip


def throughput(result: dict) -> str:
  """The best N, and its throughput, for every P and cost ratio."""
  ratios = sorted({line["cost_ratio"] for line in result["lines"]})
  found = {
    (line["acceptance"], line["cost_ratio"]): (
      f"{line['best']} ({line['throughput'][line['best']]:.2f}x)"
    )
    for line in result["lines"]
  }
  return table(
    ["P", *(f"T_s / T_v = {ratio}" for ratio in ratios)],
    [
      [str(p), *(found[p, ratio] for ratio in ratios)]
      for p in sorted({p for p, _ in found})
    ],
  )


def acceptance(result: dict) -> str:
  """What every rule accepts, a column a K; drafts that are not i.i.d. named."""
  counts = result["num_drafts"]

  def cells(points):
    by_count = {point["num_drafts"]: point for point in points}
    for count in counts:
      point = by_count.get(count)
      error = point and point["standard_error"]
      yield (
        "–"
        if point is None
        else plus_minus(point["acceptance"], error, 4) + " (95%)"
        if error
        else f"{point['acceptance']:.4f}"
      )

  return table(
    ["rule", "siblings", *(f"K = {count}" for count in counts)],
    [
      ["optimum", "iid", *(f"{value:.4f}" for value in result["optimum"])],
      *(
        [f"`{name.split()[0]}`", points[0]["siblings"], *cells(points)]
        for name, points in result["rules"].items()
      ),
    ],
  )


def reports(*results: dict) -> str:
  """Prediction against measurement of a real pair, a row a report."""
  interval = lambda pair, digits: f"({pair[0]:.{digits}f}–{pair[1]:.{digits}f})"
  rows = []
  for result in results:
    config, rejected = result["config"], result["rejections"]
    rates, efficiency = result["tokens_per_second"], result["block_efficiency"]
    rows.append(
      [
        config["drafter"],
        f"{config['temperature']:g}",
        str(result["num_speculative_tokens"]),
        f"{rejected['predicted']:.1f} "
        f"{interval(rejected['predicted_interval'], 1)}"
        if config["temperature"]
        else "the count itself",
        str(rejected["counted"]),
        f"{efficiency['independent']:.2f}",
        f"{efficiency['identity']:.2f}",
        f"{efficiency['rao_blackwell']:.2f}",
        f"{efficiency['measured']:.2f}",
        f"{rates['predicted']['expected']:.0f}",
        f"{rates['measured']:.0f} {interval(rates['measured_ci'], 0)}",
        f"{100 * rates['prediction_error']:+.1f}%",
        f"{result['speedup']['measured']:.2f} "
        f"{interval(result['speedup']['measured_ci'], 2)}",
      ]
    )
  return table(
    [
      "draft", "temperature", "N", "rejections, Theorem 1", "counted",
      "tokens a call: i.i.d.", "identity", "Rao-Blackwell", "measured",
      "tok/s predicted", "measured", "off by", "times plain",
    ],
    rows,
  )  # fmt: skip


TABLES: dict[str, Callable[..., str]] = {
  "rejections": rejections,
  "tradeoff": tradeoff,
  "throughput": throughput,
  "acceptance": acceptance,
  "reports": reports,
  "quality": quality.table,
}


def main(argv: list[str]) -> int:
  """`tables TABLE RESULT.json...`; returns the exit code."""
  return print_table(argv, "launch.predicting.tables", TABLES)


if __name__ == "__main__":
  markdown.run(main)
