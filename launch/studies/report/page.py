"""The page of a report, its figures, and the table of several reports."""

import numpy as np
from matplotlib.figure import Figure

from launch import tables
from launch.studies.depth import compare
from launch.studies.depth import page as depth_page


def _interval(ends: list[float] | None, digits: int = 2) -> str:
  return f" ({ends[0]:.{digits}f}–{ends[1]:.{digits}f})" if ends else ""


def verdict(found: dict) -> str:
  """The sentence that a reader needs, and the best N if it is another."""
  chosen, costs = found["num_speculative_tokens"], found["costs"]
  speed, interval = found["speedup"].values()
  alpha, least = (
    found["block_efficiency"]["acceptance"], found["break_even_acceptance"]
  )  # fmt: skip
  low, high = interval or (speed, speed)
  pays = "pays" if low > 1 else "does not pay" if high < 1 else (
    "makes no clear difference"
  )  # fmt: skip
  bound = (
    f"it breaks even at {least:.2f}"
    if least is not None
    else "timings disagree on where it breaks even"
    if costs.get("doubts")
    else "even if all were accepted it would not break even"
  )
  text = (
    f"Speculation {pays} here: {speed:.2f} times plain decoding with N = "
    f"{chosen}, because a round gives "
    f"{found['block_efficiency']['measured']:.2f} tokens and takes "
    f"{costs['step_ratio']:.2f} times as long as a plain step (a drafted token "
    f"is accepted with probability {alpha:.2f}, and {bound})."
  )
  sweep = found["sweep"]
  best = sweep["best_measured"]
  if best != chosen:
    rate = sweep["measured"][str(best)] / found["tokens_per_second"]["plain"]
    text += f" The best N measured is {best}, {rate:.2f} times plain decoding."
  return text


_PARTS = {
  "passes": "its passes, each timed alone",
  "out_of_cache": "more for the same in a round's order",
  "laws": "laws warped, and tokens drafted from them",
  "bookkeeping": "verification, draws, counting",
}


def rejections(found: dict, temperature: float) -> str:
  """What Theorem 1 says of the rejections that were counted."""
  text = (
    f"Rejections: {found['counted']} counted at {found['drafted_positions']} "
    "positions that were drafted. "
  )
  if not temperature:
    return text + (
      "At temperature 0 laws are points, and a drafted token is rejected where "
      "the two differ: the distances that Theorem 1 adds up are this very "
      f"count ({found['predicted']:.0f}), and predict nothing."
    )
  low, high = found["predicted_interval"]
  inside = low <= found["counted"] <= high
  return text + (
    f"Theorem 1 predicts {found['predicted']:.1f} (95% {low:.1f}–{high:.1f}) "
    f"from the distances there: {'inside' if inside else '**outside**'} the "
    "interval. (Were every position drafted, it would be "
    f"{found['every_position']:.1f}.)"
  )


def page(found: dict) -> str:
  """The report as Markdown."""
  efficiency, rates = found["block_efficiency"], found["tokens_per_second"]
  costs = found["costs"]
  rejected, sweep = found["rejections"], found["sweep"]
  by_position = found["acceptance_by_position"]
  n = found["num_speculative_tokens"]
  number = lambda x, digits: "–" if x is None else f"{x:.{digits}f}"
  ms = lambda seconds: f"{1e3 * seconds:.2f} ms"
  distances = found["total_variation"]
  parts = costs["round_seconds"]
  lines = [
    "# Does speculation pay?",
    "",
    verdict(found),
    "",
    "![Throughput against N](throughput.svg)",
    "",
    "*Tokens per second against the number N of drafted tokens, predicted and "
    "measured (95% over prompts).*",
    "",
    "| N | predicted tok/s | measured tok/s (95%) |",
    "| --- | --- | --- |",
    *(
      f"| {count} | {number(sweep['predicted'].get(count), 0)} | "
      f"{value:.0f}{_interval(sweep['measured_ci'][count], 0)} |"
      for count, value in sweep["measured"].items()
    ),
    f"| plain | | {rates['plain']:.0f}{_interval(rates['plain_ci'], 0)} |",
    "",
    f"Best N: {sweep['best_predicted'] or 'none'} predicted, "
    f"{sweep['best_measured']} measured.",
    *(
      ["", f"Nothing is predicted: {'; '.join(costs['doubts'])}."]
      if costs.get("doubts")
      else []
    ),
    "",
    "## Acceptance",
    "",
    "![Acceptance by position](acceptance.svg)",
    "",
    "*Drafted tokens accepted by their place in a round, and what independent "
    "acceptance would make of it (dashed).*",
    "",
    "| drafted token | tried | accepted, given those before | all accepted so "
    "far |",
    "| --- | --- | --- | --- |",
    *(
      f"| {i + 1} | {by_position['tried'][i]} | "
      + (
        f"{by_position['conditional'][i]:.3f} | {by_position['joint'][i]:.3f} |"
        if by_position["tried"][i]
        else "– | – |"
      )
      for i in range(len(by_position["joint"]))
    ),
    "",
    f"Total variation of draft and target along the decoded text: "
    f"{distances['mean']:.3f}{_interval(distances['mean_ci'], 3)}, median "
    f"{distances['quantiles']['0.5']:.3f}, nine in ten below "
    f"{distances['quantiles']['0.9']:.3f}, at {distances['positions']} "
    "positions.",
    "",
    rejections(rejected, found["config"]["temperature"]),
    "",
    "## Tokens per target call",
    "",
    "| | N = " + str(n) + " |",
    "| --- | --- |",
    f"| measured | {efficiency['measured']:.3f}"
    f"{_interval(efficiency['measured_ci'], 3)} |",
    f"| expected given the drafts (Rao-Blackwell) | "
    f"{efficiency['rao_blackwell']:.3f} |",
    f"| from acceptance by position (exact where no budget cuts a round) | "
    f"{efficiency['identity']:.3f} |",
    f"| from the laws along the text, any start | "
    f"{number(efficiency['from_the_text'], 3)} |",
    f"| if acceptance were i.i.d. with {efficiency['acceptance']:.3f} | "
    f"{efficiency['independent']:.3f} |",
    "",
    "## Cost",
    "",
    f"A draft step takes {ms(costs['draft_step_seconds'])}, "
    f"{costs['cost_ratio']:.2f} of a target pass over one token "
    f"({ms(costs['plain_pass_seconds'])}), and verifying {n + 1} tokens "
    f"{costs['verify_ratio']:.2f} of it. A whole round takes "
    f"{ms(costs['step_seconds'])}, {costs['loop_overhead']:.3f} times its "
    f"passes, and a plain step {ms(costs['plain_step_seconds'])}.",
    "",
    "| a round | ms | share |",
    "| --- | --- | --- |",
    *(
      f"| {words} | {1e3 * parts[part]:.2f} | "
      f"{parts[part] / costs['step_seconds']:.1%} |"
      for part, words in _PARTS.items()
      if parts[part] is not None
    ),
    "",
    "| tokens in a target pass | ms | over one token |",
    "| --- | --- | --- |",
    *(
      f"| {fed} | {1e3 * s:.2f} | {s / costs['verify_seconds']['1']:.2f} |"
      for fed, s in costs["verify_seconds"].items()
    ),
    "",
    *_from_prediction(found),
    "![Total variation along the text](distances.svg)",
    "",
    "*Positions of the decoded text by the total variation of draft and target "
    "there.*",
    "",
    *depths(found),
    f"{found['machine']['processor']}, {found['machine']['cores']} cores, "
    f"{found['machine']['backend']}, jax {found['machine']['jax']}.",
  ]
  return "\n".join(lines) + "\n"


def _from_prediction(found: dict) -> list[str]:
  """Lines on what each effect changes; of timings that disagree, none."""
  efficiency, rates = found["block_efficiency"], found["tokens_per_second"]
  predicted, costs = rates["predicted"], found["costs"]
  if costs.get("doubts"):
    return []
  gap = rates["prediction_error_given_calls_ci"]
  joint_gap = efficiency["identity"] / efficiency["independent"] - 1
  parts = costs["round_seconds"]
  around = parts["bookkeeping"] + (parts["laws"] or 0)
  return [
    "## From prediction to measurement",
    "",
    "| tokens per second | |",
    "| --- | --- |",
    f"| i.i.d. acceptance, passes alone | {predicted['independent']:.0f} |",
    f"| real acceptance, passes alone | {predicted['real_acceptance']:.0f} |",
    f"| and all else that a round does | {predicted['with_overhead']:.0f} |",
    f"| and the prompts' passes | {predicted['with_prompts']:.0f} |",
    "| **predicted**: the same, acceptance as expected given the drafts | "
    f"{predicted['expected']:.0f} |",
    f"| measured | {rates['measured']:.0f}"
    f"{_interval(rates['measured_ci'], 0)} |",
    "",
    f"Acceptance that is not independent changes tokens per call by "
    f"{joint_gap:+.1%}; around its passes a round spends "
    f"{around / costs['step_seconds']:.1%} of its time. The prediction is off "
    f"by {rates['prediction_error']:+.1%}; given the calls that were made, by "
    f"{rates['prediction_error_given_calls']:+.1%}"
    + (f" (95% {gap[0]:+.1%} to {gap[1]:+.1%})." if gap else "."),
    "",
  ]


def depths(found: dict) -> list[str]:
  """Lines on who should decide how deep to draft; none in older reports."""
  depth = found.get("depth")
  if not depth:
    return []
  return [
    "## How deep to draft",
    "",
    compare.advice(depth),
    "",
    depth_page.table([("", depth | {"config": found["config"]})]),
    "",
    f"*Predicted, from the acceptances of {depth['num_rounds']} rounds of "
    f"{depth['depth']} drafted tokens and the costs above.*",
    "",
  ]


def _throughput(found: dict) -> Figure:
  figure = Figure((5.5, 3.4), layout="constrained")
  panel = figure.subplots()
  sweep, plain = found["sweep"], found["tokens_per_second"]["plain"]
  predicted = {int(n): v for n, v in sweep["predicted"].items()}
  measured = {int(n): v for n, v in sweep["measured"].items()}
  panel.plot(list(predicted), list(predicted.values()), color="C0",
             label="predicted")  # fmt: skip
  value = np.array(list(measured.values()))
  ends = np.array(
    [sweep["measured_ci"][str(n)] or (v, v) for n, v in measured.items()]
  )
  panel.errorbar(
    list(measured), value, yerr=np.abs(ends - value[:, None]).T,
    fmt="o", color="C1", capsize=3, label="measured (95%)",
  )  # fmt: skip
  panel.axhline(plain, color="black", linewidth=0.8, label="plain decoding")
  panel.set_xlabel("drafted tokens N")
  panel.set_ylabel("tokens per second")
  panel.set_ylim(bottom=0)
  panel.legend(fontsize="small")
  return figure


def _acceptance(found: dict) -> Figure:
  figure = Figure((5.5, 3.4), layout="constrained")
  panel = figure.subplots()
  by_position = found["acceptance_by_position"]
  places = range(1, len(by_position["joint"]) + 1)
  alpha = found["block_efficiency"]["acceptance"]
  panel.plot(places, by_position["conditional"], "o-", markersize=4,
             label="given those before")  # fmt: skip
  panel.plot(places, by_position["joint"], "s-", markersize=4,
             label="all so far")  # fmt: skip
  panel.plot(places, [alpha**i for i in places], "--", color="black",
             linewidth=0.8, label=f"{alpha:.2f} to the power i")  # fmt: skip
  panel.set_xlabel("drafted token i")
  panel.set_ylabel("accepted")
  panel.set_ylim(0, 1)
  panel.legend(fontsize="small")
  return figure


def _distances(found: dict) -> Figure:
  figure = Figure((5.5, 2.8), layout="constrained")
  panel = figure.subplots()
  counts = found["total_variation"]["histogram"]
  width = 1 / len(counts)
  panel.bar([width * (i + 0.5) for i in range(len(counts))], counts, width)
  panel.set_xlabel("total variation of draft and target")
  panel.set_ylabel("positions")
  return figure


FIGURES = {
  "throughput": _throughput,
  "acceptance": _acceptance,
  "distances": _distances,
}


def table(results: dict[str, dict]) -> str:
  """Prediction against measurement of a real pair, a row a report."""
  number = lambda value, form: "–" if value is None else format(value, form)
  rows = []
  for result in results.values():
    config, rejected = result["config"], result["rejections"]
    rates, efficiency = result["tokens_per_second"], result["block_efficiency"]
    rows.append(
      [
        config["drafter"],
        f"{config['temperature']:g}",
        str(result["num_speculative_tokens"]),
        f"{rejected['predicted']:.1f}"
        f"{_interval(rejected['predicted_interval'], 1)}"
        if config["temperature"]
        else "the count itself",
        str(rejected["counted"]),
        f"{efficiency['independent']:.2f}",
        f"{efficiency['identity']:.2f}",
        f"{efficiency['rao_blackwell']:.2f}",
        f"{efficiency['measured']:.2f}",
        number(rates["predicted"]["expected"], ".0f"),
        f"{rates['measured']:.0f}{_interval(rates['measured_ci'], 0)}",
        number(rates["prediction_error"], "+.1%"),
        f"{result['speedup']['measured']:.2f}"
        f"{_interval(result['speedup']['measured_ci'], 2)}",
      ]
    )
  return tables.table(
    [
      "draft", "temperature", "N", "rejections, Theorem 1", "counted",
      "tokens a call: i.i.d.", "identity", "Rao-Blackwell", "measured",
      "tok/s predicted", "measured", "off by", "times plain",
    ],
    rows,
  )  # fmt: skip
