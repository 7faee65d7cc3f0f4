"""Explains an evaluation: whether drafting pays, why, and with which N.

For a drafter measured with several draft lengths N, costs and acceptance
predict each rate (`specjax.theory.throughput`), to compare with the rate that
was measured.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from launch import report
from launch.evaluation.costs import Costs
from launch.evaluation.systems import PLAIN, SYSTEMS
from specjax import calls
from specjax.theory import throughput

# Draft lengths that are measured if no systems are named.
SWEEP = (1, 2, 3, 4, 6, 8, 10, 12)

_TOKENS = {
  "measured": "measured",
  "rao_blackwell": "expected given the drafts (Rao-Blackwell)",
  "identity": "from acceptance by position (exact where nothing cuts a round)",
  "independent": "with i.i.d. acceptance",
}
# Wrappers that keep a drafter's draft length.
_WRAPPERS = ("online", "with_rule", "with_widths")


def with_tokens(name: str, tokens: int | None) -> str:
  """A system with draft length `tokens`; None gives its family's name."""
  call = calls.parse(name)
  args, keywords = call.args, dict(call.keywords)
  if call.name in _WRAPPERS:
    args = (calls.parse(with_tokens(str(args[0]), tokens)), *args[1:])
  else:
    keywords.pop("tokens", None)
    if tokens is not None:
      keywords["tokens"] = tokens
  return str(calls.Call(call.name, args, keywords))


def findings(result: Mapping) -> list[dict]:
  """Explains each drafter with costs, in each setting of a result.

  Reports what was measured and predicted for the config's N or the largest, and
  the `sweep` over N. Trees get no prediction from acceptance, and inconsistent
  timings give none at all.
  """
  rows = {
    (r["temperature"], r["batch_size"], r["system"]): r
    for r in result["runs"]
    if r["level"] == "all"
  }
  costs = {(c["system"], c["batch_size"]): c for c in result["costs"]}
  families: dict[tuple, dict[int, tuple[dict, dict]]] = {}
  for (temperature, batch_size, system), row in rows.items():
    cost = costs.get((system, batch_size))
    # A drafter that never drafted has no acceptance.
    drafted = row["acceptance_rate"] is not None
    if drafted and cost is not None and cost["draft_cost"] is not None:
      family = (temperature, batch_size, with_tokens(system, None))
      families.setdefault(family, {})[cost["depth"]] = (row, cost)
  own = SYSTEMS.canonical(result["config"]["drafter"])
  parents = lambda row: result["systems"][row["system"]]["parents"]
  found = []
  for (temperature, batch_size, _), sweep in families.items():
    names = {row["system"]: n for n, (row, _) in sweep.items()}
    chains = [
      n for n, (row, _) in sweep.items() if parents(row) == [*range(-1, n)]
    ]
    plain = rows[temperature, batch_size, PLAIN]
    chosen = names.get(own, max(sweep))
    found.append(_finding(plain, dict(sorted(sweep.items())), chosen, chains))
  return found


def by_position(row: Mapping) -> dict:
  """Acceptance of the drafted tokens 1..N of chains, by position.

  A round cut short by the row's budget or a stop token is censored: joint
  acceptance is the product of the conditional ones (Kaplan and Meier).

  Returns:
    How often each position was `tried`, the share of tries that were accepted
    (`conditional`), and the probability that all up to it are (`joint`).
  """
  counts, cut = np.array(row["accept_counts"]), np.array(row["cut_counts"])
  passed = counts[::-1].cumsum()[::-1][1:]  # rounds that accepted at least i
  tried = passed + (counts - cut)[:-1]
  conditional = passed / np.maximum(tried, 1)
  return {
    "tried": tried.tolist(),
    "accepted": int(passed.sum()),
    "conditional": conditional.tolist(),
    "joint": np.cumprod(conditional).tolist(),
  }


def _finding(
  plain: Mapping,
  sweep: Mapping[int, tuple[dict, dict]],
  chosen: int,
  chains: Sequence[int],
) -> dict:
  """The explanation of a drafter in one setting; see `findings`."""
  row, cost = sweep[chosen]
  costs, consistent = Costs.of(cost), not cost["doubts"]
  # By position only if every round drafted N tokens.
  counted = [
    n
    for n in chains
    if sweep[n][0]["num_drafted"] == n * sweep[n][0]["num_target_calls"]
  ]
  mine = by_position(row) if chosen in counted else None
  longest = by_position(sweep[max(counted)][0]) if mine else None
  efficiency = _efficiency(row, mine, chosen)
  expected = None
  least = throughput.break_even(chosen, 0.0, costs.step, costs.plain_step)
  predicted: dict[int, float] = {}
  if consistent and longest:
    predicted = _sweep(plain, costs, longest["joint"])
  if consistent and row["predicted_speedup"]:
    # Correct the number of rounds for luck in acceptance.
    luck = efficiency["measured"] / efficiency["rao_blackwell"]
    rounds = costs.step * row["num_target_calls"] / row["num_requests"]
    share = rounds / (rounds + costs.prefill)
    given = row["predicted_speedup"] * plain["tokens_per_second"]
    predicted[chosen] = expected = given / (1 + (luck - 1) * share)
  pays = consistent and chosen in chains and least <= 1
  measured = {n: one["tokens_per_second"] for n, (one, _) in sweep.items()}
  return {
    "system": row["system"],
    "temperature": row["temperature"],
    "batch_size": row["batch_size"],
    "num_speculative_tokens": chosen,
    "speedup": {"measured": row["speedup"], "measured_ci": row["speedup_ci"]},
    "acceptance_by_position": longest,
    "block_efficiency": efficiency,
    "break_even_acceptance": least if pays else None,
    "costs": {
      "draft_step_seconds": costs.drafting / chosen,
      "verify_seconds": {str(n): s for n, s in costs.target.items()},
      "step_seconds": costs.step,
      "passes_seconds": costs.forwards,
      "plain_step_seconds": costs.plain_step,
      "doubts": cost["doubts"],
    },
    "tokens_per_second": {
      "plain": plain["tokens_per_second"],
      "plain_ci": plain["tokens_per_second_ci"],
      "prediction_error": expected and expected / measured[chosen] - 1,
    },
    "sweep": {
      "predicted": {str(n): predicted[n] for n in sorted(predicted)},
      "measured": {str(n): rate for n, rate in measured.items()},
      "measured_ci": {
        str(n): one["tokens_per_second_ci"] for n, (one, _) in sweep.items()
      },
      "best_predicted": max(predicted, key=predicted.__getitem__, default=None),
      "best_measured": max(measured, key=measured.__getitem__),
    },
  }


def _efficiency(row: Mapping, mine: dict | None, chosen: int) -> dict:
  """Tokens per target call: measured, and predicted in three ways.

  `rao_blackwell` replaces acceptances by their expectations given the drafts,
  which leaves the measured value unchanged on average. `identity` (`1 + sum
  P(the first i are accepted)`) and `independent` (i.i.d. with the accepted
  share of judged tokens, `acceptance`) are for chains, and ignore cuts.
  """
  luck = row["acceptance_rate"] - row["expected_acceptance_rate"]
  drafted = row["num_drafted"] / row["num_target_calls"]
  tokens = {
    "measured": row["block_efficiency"],
    "measured_ci": row["block_efficiency_ci"],
    "rao_blackwell": row["block_efficiency"] - luck * drafted,
    "identity": None,
    "independent": None,
    "acceptance": None,
  }
  if mine:
    alpha = mine["accepted"] / max(sum(mine["tried"]), 1)
    tokens |= {
      "identity": throughput.exact_tokens(mine["joint"]),
      "independent": float(throughput.tokens_per_cycle(chosen, alpha)),
      "acceptance": alpha,
    }
  return tokens


def _sweep(
  plain: Mapping, costs: Costs, joint: Sequence[float]
) -> dict[int, float]:
  """Predicted tokens per second for each N that `joint` and timings cover."""
  verify = throughput.verify_curve(costs.target)
  length = max(round(plain["num_tokens"] / plain["num_requests"]), 1)
  plain_seconds = length * costs.plain_step + costs.plain_prefill
  rates = {}
  for n in range(1, len(joint) + 1):
    if n + 1 > max(costs.target):
      break
    step = costs.rest + n * costs.level + float(verify(n + 1))
    calls_made = throughput.expected_calls(joint[:n], length)
    seconds = calls_made * step + costs.prefill
    rates[n] = plain["tokens_per_second"] * plain_seconds / seconds
  return rates


def verdict(finding: Mapping) -> str:
  """Whether drafting pays, in a sentence, and the best N if different."""
  chosen, costs = finding["num_speculative_tokens"], finding["costs"]
  tokens, sweep = finding["block_efficiency"], finding["sweep"]
  speedup = finding["speedup"]["measured"]
  low, high = finding["speedup"]["measured_ci"] or (speedup, speedup)
  pays = "makes no clear difference"
  if low > 1 or high < 1:
    pays = "pays" if low > 1 else "does not pay"
  ratio = costs["step_seconds"] / costs["plain_step_seconds"]
  text = (
    f"Speculation {pays} here: {speedup:.2f} times plain decoding with N = "
    f"{chosen}, because a round emits {tokens['measured']:.2f} tokens and "
    f"takes {ratio:.2f} times as long as a plain step"
  )
  if costs["doubts"]:
    text += f" (nothing is predicted: {'; '.join(costs['doubts'])})"
  elif tokens["acceptance"] is not None:
    least = finding["break_even_acceptance"]
    text += (
      f" (a drafted token is accepted with probability "
      f"{tokens['acceptance']:.2f}, and "
    ) + (
      "even if all were accepted it would not break even)"
      if least is None
      else f"it breaks even at {least:.2f})"
    )
  best = sweep["best_measured"]
  if best != chosen:
    rate = sweep["measured"][str(best)] / finding["tokens_per_second"]["plain"]
    text += f". The best N measured is {best}, {rate:.2f} times plain decoding"
  return text + "."


def section(result: Mapping, *, figure: str) -> list[str]:
  """Paragraphs for the page; `figure` is the figure's path relative to it."""
  if not result["explained"]:
    return []
  parts = [
    "## Does speculation pay?",
    f"![Tokens per second against the number of drafted tokens]({figure})",
    "*Tokens per second against the number N of drafted tokens, measured (95% "
    "over prompts) and predicted from acceptance. The first table predicts "
    "from the target calls that were made.*",
  ]
  for finding in result["explained"]:
    parts += [f"### {_title(finding)}", verdict(finding), *_why(finding)]
  return parts


def _title(finding: Mapping) -> str:
  setting = f"temperature {finding['temperature']:g}, batch size"
  return f"{finding['system']}, {setting} {finding['batch_size']}"


def _why(finding: Mapping) -> list[str]:
  """A table over N, and one of the parts of a round."""
  rates, costs = finding["tokens_per_second"], finding["costs"]
  sweep, tokens = finding["sweep"], finding["block_efficiency"]
  places = finding["acceptance_by_position"] or {"conditional": ()}
  accepted = dict(enumerate(places["conditional"], start=1))
  rows = [["plain", "", report.estimate(rates, "plain", ".0f"), ""]]
  for n, rate in sweep["measured"].items():
    one = {"rate": rate, "rate_ci": sweep["measured_ci"][n]}
    predicted = report.number(sweep["predicted"].get(n), ".0f")
    measured = report.estimate(one, "rate", ".0f")
    rows.append([n, predicted, measured, report.number(accepted.get(int(n)))])
  error = rates["prediction_error"]
  text = (
    "The last column is conditional: all tokens before it were accepted. "
    f"Tokens per target call with N = {finding['num_speculative_tokens']}: "
    + ", ".join(
      f"{tokens[name]:.3f} {words}"
      for name, words in _TOKENS.items()
      if tokens[name] is not None
    )
    + ("." if error is None else f". The prediction is off by {error:+.1%}.")
  )
  parts = {
    "a round of plain decoding": costs["plain_step_seconds"],
    "a drafted token": costs["draft_step_seconds"],
    **{
      f"a target pass over {n} token{'s' * (n != '1')}": seconds
      for n, seconds in costs["verify_seconds"].items()
    },
    "a drafted round": costs["step_seconds"],
    "of that, its passes": costs["passes_seconds"],
  }
  return [
    report.table(
      ["N", "predicted tok/s", "measured tok/s (95%)", "N-th token accepted"],
      rows,
    ),
    text,
    report.table(
      ["what", "ms", "in plain rounds"],
      [
        [words, f"{1e3 * s:.2f}", f"{s / costs['plain_step_seconds']:.2f}"]
        for words, s in parts.items()
      ],
    ),
  ]


def figure(result: Mapping) -> Figure:
  """Draws tokens per second against N, one panel per explanation."""
  explained = result["explained"]
  count = max(len(explained), 1)
  drawn, panels = report.panels(5.5, 3.4 * count, count)
  for panel, finding in zip(panels.flat, explained, strict=False):
    sweep = finding["sweep"]
    predicted = {int(n): v for n, v in sweep["predicted"].items()}
    panel.plot([*predicted], [*predicted.values()], label="predicted")
    measured = sweep["measured"]
    values = [*measured.values()]
    panel.errorbar(
      [int(n) for n in measured], values, fmt="o", color="C1", capsize=3,
      yerr=report.sides(values, [sweep["measured_ci"][n] for n in measured]),
      label="measured (95%)",
    )  # fmt: skip
    plain = finding["tokens_per_second"]["plain"]
    panel.axhline(plain, color="black", linewidth=0.8, label="plain decoding")
    panel.set_xlabel("drafted tokens N")
    panel.set_ylabel("tokens per second")
    panel.set_ylim(bottom=0)
    panel.legend()
    panel.set_title(_title(finding).replace("$", r"\$"))
  return drawn
