"""The table of a study of drafts."""

import statistics

from launch import tables
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
  one_shape = len({row["parameters"] for row in rows}) == 1
  temperatures = list(rows[0]["decoding"])
  head = ["draft", "steps", "seconds", "validation nats", "accepted, one token"]
  if not one_shape:
    head[1:1] = ["parameters"]
    head += ["draft pass, ms", "of the target's", "speed-up predicted, best N"]
  for temperature in temperatures:
    head.append(f"block efficiency, T={temperature}")
    if not one_shape:
      head += ["tok/s", "speed-up"]
  lines = []
  # The same target, timed beside every draft.
  target, verify = (
    statistics.median(row[name] for row in rows)
    for name in ("target_pass_seconds", "verify_seconds")
  )
  for row in rows:
    cells = [
      f"`{row['name']}`",
      f"{row['num_steps']:,}",
      f"{row['training_seconds']:,.0f}",
      f"{row['validation_next_token_loss']:.3f}",
      f"{row['validation_acceptance']:.3f}",
    ]
    if not one_shape:
      seconds = row["draft_pass_seconds"]
      cells[1:1] = [f"{row['parameters']:,}"]
      cells += [
        f"{1e3 * seconds:.3f}",
        f"{seconds / target:.3f}",
        "{:.2f}, {}".format(*predicted(row, target, verify)),
      ]
    for temperature in temperatures:
      found = row["decoding"][temperature]
      cells.append(_with_interval(found, "block_efficiency"))
      if not one_shape:
        cells += [
          f"{found['tokens_per_second']:.0f}",
          _with_interval(found, "speedup"),
        ]
    lines.append(cells)
  return tables.table(head, lines)


def _by_position(rows: list[dict]) -> str:
  """A row for each draft and temperature."""
  deepest = max(
    len(found["accepted"]) for row in rows for found in row["decoding"].values()
  )
  head = [
    "draft", "trained parameters", "steps", "operations", "T",
    *(f"accepted, token {i + 1}" for i in range(deepest)),
    "tokens a target call",
  ]  # fmt: skip
  lines = []
  for row in rows:
    for temperature, found in row["decoding"].items():
      lines.append(
        [
          f"`{row['name']}`",
          f"{row['parameters']:,}",
          f"{row['num_steps']:,}",
          f"{row['flops']:.2e}",
          temperature,
          *(
            _share(*each)
            for each in zip(
              found["accepted"], found["accepted_ci"], found["tried"],
              strict=True,
            )
          ),
          _with_interval(found, "block_efficiency"),
        ]
      )  # fmt: skip
  return tables.table(head, lines)


def _share(value: float, interval: list[float] | None, tried: int) -> str:
  if not tried:
    return "never tried"
  text = f"{value:.2f}"
  return text + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def predicted(row: dict, target: float, verify: float) -> tuple[float, int]:
  """What the throughput formula makes of one-token acceptance and latency.

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


def _with_interval(found: dict, name: str) -> str:
  interval = found[f"{name}_ci"]
  text = f"{found[name]:.2f}"
  return text + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")
