"""The tables about theory, of what `launch.studies.theory` wrote."""

from launch.tables import plus_minus, table


def rejections(results: dict[str, dict]) -> str:
  """Rejections a run, predicted by Theorems 1 and 3 and simulated."""
  rows = []
  for result in results.values():
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


def tradeoff(results: dict[str, dict]) -> str:
  """Rejection and loss of Decoding-OPT and -UNO, predicted and simulated."""
  (result,) = results.values()
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


def throughput(results: dict[str, dict]) -> str:
  """The best N, and its throughput, for every P and cost ratio."""
  (result,) = results.values()
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


def mixture(results: dict[str, dict]) -> str:
  """The best N on a mixture, and its throughput, by rows and P."""
  (result,) = results.values()
  found = {
    (line["rows"], line["acceptance"]): (
      f"{line['best']} ({line['throughput']:.2f}x)"
    )
    for line in result["lines"]
  }
  chances = sorted({p for _, p in found})
  return table(
    ["rows", *(f"P = {p}" for p in chances)],
    [
      [str(rows), *(found[rows, p] for p in chances)]
      for rows in sorted({rows for rows, _ in found})
    ],
  )


def acceptance(results: dict[str, dict]) -> str:
  """What every rule accepts, a column a K; drafts that are not i.i.d. named."""
  (result,) = results.values()
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
