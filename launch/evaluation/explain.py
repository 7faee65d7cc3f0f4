"""Explains an evaluation: does drafting pay, why not, and what would?

Of a drafter that was measured with several numbers N of drafted tokens, costs
and acceptance predict each rate (`specjax.theory.throughput`), beside what was
measured.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from launch.evaluation.costs import Costs
from launch.evaluation.systems import PLAIN, SYSTEMS
from specjax import calls
from specjax.theory import throughput

# Drafted tokens that are measured where no systems are named.
SWEEP = (1, 2, 3, 4, 6, 8, 10, 12)


# Put around a drafter, they draft as many tokens as it does.
_AROUND = ("online", "with_rule", "with_widths")


def with_tokens(name: str, tokens: int | None) -> str:
  """A system that drafts so many tokens; of None, its family's name."""
  return str(_with_tokens(calls.parse(name), tokens))


def _with_tokens(call: calls.Call, tokens: int | None) -> calls.Call:
  keywords = dict(call.keywords)
  if call.name in _AROUND:
    if "drafter" in keywords:
      keywords["drafter"] = _with_tokens(keywords["drafter"], tokens)
      return calls.Call(call.name, call.args, keywords)
    inner, *rest = call.args
    args = (_with_tokens(inner, tokens), *rest)
    return calls.Call(call.name, args, keywords)
  keywords.pop("tokens", None)
  if tokens is not None:
    keywords["tokens"] = tokens
  return calls.Call(call.name, call.args, keywords)


def findings(result: Mapping) -> list[dict]:
  """An explanation of each drafter in each setting; see `_finding`.

  Args:
    result: of `launch.evaluate`, with its rows, costs and systems. What has no
      costs, as ladders, is not explained.
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
  asked = SYSTEMS.canonical(result["config"]["drafter"])
  return [
    _finding(
      rows[temperature, batch_size, PLAIN],
      {n: members[n] for n in sorted(members)},
      chosen=next(
        (n for n, (row, _) in members.items() if row["system"] == asked),
        max(members),
      ),
      parents=lambda row: result["systems"][row["system"]]["parents"],
    )
    for (temperature, batch_size, _), members in families.items()
  ]


def by_position(row: Mapping) -> dict:
  """Acceptance of the drafted tokens 1..N of chains, in their order.

  A round that the row's budget or a stop token cut short says nothing of the
  positions behind the cut: joint acceptance is the product of the conditional
  ones (Kaplan and Meier).

  Args:
    row: `accept_counts` and `cut_counts`.

  Returns:
    How often each position was `tried`, the share of these that were accepted
    (`conditional`), and the probability that all so far are (`joint`).
  """
  counts, cut = np.array(row["accept_counts"]), np.array(row["cut_counts"])
  passed = counts[::-1].cumsum()[::-1][1:]  # rounds that accepted i or more
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
  *,
  chosen: int,
  parents,
) -> dict:
  """The explanation of a drafter in one setting.

  Returns:
    Of the system that drafts the `chosen` N: `speedup`; `block_efficiency`,
    tokens per target call as measured and predicted; `costs` in seconds and
    ratios; `break_even_acceptance`, None where even all tokens accepted would
    not do; `tokens_per_second` with its predictions, one effect after the
    other; and for every N the `sweep`. Of trees there are no predictions from
    acceptance, of timings that disagree none at all.
  """
  row, cost = sweep[chosen]
  costs = Costs.of(cost)
  is_chain = parents(row) == list(range(-1, chosen))
  # By position only where every round drafted all of them.
  counted = [
    n
    for n, (one, _) in sweep.items()
    if parents(one) == list(range(-1, n))
    and one["num_drafted"] == n * one["num_target_calls"]
  ]
  mine = by_position(row) if chosen in counted else None
  longest = by_position(sweep[max(counted)][0]) if mine else None
  efficiency = _efficiency(row, mine, chosen)
  rates = _rates(plain, row, efficiency, costs)
  least = throughput.break_even(chosen, 0.0, costs.step, costs.plain_step)
  predicted: dict[int, float] = {}
  if longest:
    predicted = _sweep(plain, costs, longest["joint"])
  if rates["expected"]:
    predicted[chosen] = rates["expected"]
  if cost["doubts"]:
    rates, predicted, least = dict.fromkeys(rates), {}, math.inf
  measured = {n: one["tokens_per_second"] for n, (one, _) in sweep.items()}
  here = row["tokens_per_second"]
  return {
    "system": row["system"],
    "temperature": row["temperature"],
    "batch_size": row["batch_size"],
    "num_speculative_tokens": chosen,
    "speedup": {"measured": row["speedup"], "measured_ci": row["speedup_ci"]},
    "acceptance_by_position": longest,
    "block_efficiency": efficiency,
    "break_even_acceptance": least if least <= 1 and is_chain else None,
    "costs": {
      "draft_step_seconds": costs.drafting / chosen,
      "verify_seconds": {str(n): s for n, s in costs.target.items()},
      "plain_pass_seconds": costs.target[1],
      "step_seconds": costs.step,
      "plain_step_seconds": costs.plain_step,
      "round_seconds": cost["round_seconds"],
      "loop_overhead": costs.step / costs.forwards,
      "cost_ratio": costs.drafting / chosen / costs.target[1],
      "verify_ratio": costs.target[costs.nodes] / costs.target[1],
      "step_ratio": costs.step / costs.plain_step,
      "doubts": cost["doubts"],
    },
    "tokens_per_second": {
      "plain": plain["tokens_per_second"],
      "plain_ci": plain["tokens_per_second_ci"],
      "measured": here,
      "measured_ci": row["tokens_per_second_ci"],
      "predicted": rates,
      "prediction_error": rates["expected"] and rates["expected"] / here - 1,
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

  `rao_blackwell` takes drafted tokens at what they were expected to be given
  the drafts; its difference from what was measured has mean zero. `identity`
  (`1 + sum P(the first i are accepted)`) and `independent` (i.i.d. with the
  share of judged tokens that were accepted, `acceptance`) are of chains, and of
  rounds that nothing cuts.
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


def _rates(
  plain: Mapping, row: Mapping, efficiency: Mapping, costs: Costs
) -> dict[str, float | None]:
  """Tokens per second from costs and acceptance, one effect after the other.

  As many times plain decoding's rate as its rounds cost more, so that a
  machine that drifts between answers and timings changes nothing.
  """
  scale = plain["tokens_per_second"] * costs.plain_step
  independent, measured = efficiency["independent"], efficiency["measured"]
  speedup = row["predicted_speedup"]
  given = speedup and speedup * plain["tokens_per_second"]
  # As many fewer or more rounds as the drafts deserved, without their luck.
  luck = measured / efficiency["rao_blackwell"]
  rounds = costs.step * row["num_target_calls"] / row["num_requests"]
  share = rounds / (rounds + costs.prefill)
  return {
    "independent": independent and independent * scale / costs.forwards,
    "real_acceptance": measured * scale / costs.forwards,
    "with_overhead": measured * scale / costs.step,
    "with_prompts": given,
    "expected": given and given / (1 + (luck - 1) * share),
  }


def _sweep(
  plain: Mapping, costs: Costs, joint: Sequence[float]
) -> dict[int, float]:
  """Tokens per second for each N that `joint` and the passes timed cover."""
  verify = throughput.verify_curve(costs.target)
  length = max(round(plain["num_tokens"] / plain["num_requests"]), 1)
  whole = length * costs.plain_step + costs.plain_prefill
  rates = {}
  for n in range(1, len(joint) + 1):
    if n + 1 > max(costs.target):
      break
    step = costs.rest + n * costs.level + float(verify(n + 1))
    calls_made = throughput.expected_calls(joint[:n], length)
    seconds = calls_made * step + costs.prefill
    rates[n] = plain["tokens_per_second"] * whole / seconds
  return rates
