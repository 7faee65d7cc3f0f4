"""The page that explains an evaluation, its figure, and a table of several."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from launch import report

_PARTS = {
  "passes": "its passes, each timed alone",
  "out_of_cache": "more for the same in a round's order",
  "laws": "laws warped, and tokens drafted from them",
  "bookkeeping": "verification, draws, counting",
}
_EFFECTS = {
  "independent": "i.i.d. acceptance, passes alone",
  "real_acceptance": "real acceptance, passes alone",
  "with_overhead": "and all else that a round does",
  "with_prompts": "and the prompts' passes",
  "expected": "**predicted**: acceptance as expected given the drafts",
}
_TOKENS = {
  "measured": "measured",
  "rao_blackwell": "expected given the drafts (Rao-Blackwell)",
  "identity": "from acceptance by position (exact where nothing cuts a round)",
  "independent": "if acceptance were i.i.d.",
}


def _title(finding: Mapping) -> str:
  return (
    f"{finding['system']}, temperature {finding['temperature']:g}, batch size "
    f"{finding['batch_size']}"
  )


def verdict(finding: Mapping) -> str:
  """The sentence that a reader needs, and the best N if it is another."""
  chosen, costs = finding["num_speculative_tokens"], finding["costs"]
  speed, interval = (
    finding["speedup"]["measured"],
    finding["speedup"]["measured_ci"],
  )
  efficiency, least = (
    finding["block_efficiency"],
    finding["break_even_acceptance"],
  )
  low, high = interval or (speed, speed)
  pays = "pays" if low > 1 else "does not pay" if high < 1 else (
    "makes no clear difference"
  )  # fmt: skip
  text = (
    f"Speculation {pays} here: {speed:.2f} times plain decoding with N = "
    f"{chosen}, because a round gives {efficiency['measured']:.2f} tokens and "
    f"takes {costs['step_ratio']:.2f} times as long as a plain step"
  )
  if costs["doubts"]:
    text += " (timings disagree on where it breaks even)"
  elif efficiency["acceptance"] is not None:
    text += (
      f" (a drafted token is accepted with probability "
      f"{efficiency['acceptance']:.2f}, and "
      + (
        f"it breaks even at {least:.2f})"
        if least is not None
        else "even if all were accepted it would not break even)"
      )
    )
  sweep, plain = finding["sweep"], finding["tokens_per_second"]["plain"]
  best = sweep["best_measured"]
  if best != chosen:
    rate = sweep["measured"][str(best)] / plain
    text += f". The best N measured is {best}, {rate:.2f} times plain decoding"
  return text + "."


def page(result: Mapping, *, figure: str) -> str:
  """The whole page; `figure` is the path of the figure from it."""
  explained = result["explained"]
  machine = result["machine"]
  parts = ["# Does speculation pay?"]
  if not explained:
    parts.append("Nothing was drafted whose costs are known.")
  for finding in explained:
    if len(explained) > 1:
      parts.append(f"## {_title(finding)}")
    parts.append(verdict(finding))
  if explained:
    parts += [
      f"![Tokens per second against the number of drafted tokens]({figure})",
      "*Tokens per second against the number N of drafted tokens, predicted "
      "and measured (95% over prompts).*",
    ]
  for finding in explained:
    parts += [f"## {_title(finding)}: why", *_why(finding)]
  parts.append(
    f"{machine['processor']}, {machine['cores']} cores, "
    f"{machine['backend']}, jax {machine['jax']}."
  )
  return "\n\n".join(parts) + "\n"


def _why(finding: Mapping) -> list[str]:
  """Rates, acceptance, tokens per call, cost and what each effect changes."""
  rates, costs = finding["tokens_per_second"], finding["costs"]
  sweep, efficiency = finding["sweep"], finding["block_efficiency"]
  places, parts = finding["acceptance_by_position"], costs["round_seconds"]
  ms = lambda seconds: f"{1e3 * seconds:.2f}"
  text = [
    report.table(
      ["N", "predicted tok/s", "measured tok/s (95%)"],
      [
        [
          n,
          report.number(sweep["predicted"].get(n), ".0f"),
          f"{rate:.0f}{report.interval(sweep['measured_ci'][n], '.0f')}",
        ]
        for n, rate in sweep["measured"].items()
      ]
      + [["plain", "", report.estimate(rates, "plain", ".0f")]],
    ),
    f"Best N: {sweep['best_predicted'] or 'none'} predicted, "
    f"{sweep['best_measured']} measured.",
  ]  # fmt: skip
  if costs["doubts"]:
    text.append(f"Nothing is predicted: {'; '.join(costs['doubts'])}.")
  if places:
    rows = zip(
      places["tried"], places["conditional"], places["joint"], strict=True
    )
    text.append(
      report.table(
        ["drafted token", "tried", "accepted, given those before",
         "all accepted so far"],
        [
          [str(i + 1), str(tried)]
          + ([f"{one:.3f}", f"{joint:.3f}"] if tried else ["–", "–"])
          for i, (tried, one, joint) in enumerate(rows)
        ],
      )
    )  # fmt: skip
  text += [
    report.table(
      ["tokens per target call", f"N = {finding['num_speculative_tokens']}"],
      [
        [
          words,
          f"{efficiency[name]:.3f}"
          + report.interval(efficiency.get(f"{name}_ci"), ".3f"),
        ]
        for name, words in _TOKENS.items()
        if efficiency[name] is not None
      ],
    ),
    f"A draft step takes {ms(costs['draft_step_seconds'])} ms, "
    f"{costs['cost_ratio']:.2f} of a target pass over one token "
    f"({ms(costs['plain_pass_seconds'])} ms), and verifying "
    f"{costs['verify_ratio']:.2f} of it. A whole round takes "
    f"{ms(costs['step_seconds'])} ms, {costs['loop_overhead']:.3f} times its "
    f"passes, and a plain step {ms(costs['plain_step_seconds'])} ms.",
  ]  # fmt: skip
  if any(part is not None for part in parts.values()):
    text.append(
      report.table(
        ["a round", "ms", "share"],
        [
          [words, ms(parts[part]), f"{parts[part] / costs['step_seconds']:.1%}"]
          for part, words in _PARTS.items()
          if parts[part] is not None
        ],
      )
    )
  text.append(
    report.table(
      ["tokens in a target pass", "ms", "over one token"],
      [
        [fed, ms(s), f"{s / costs['plain_pass_seconds']:.2f}"]
        for fed, s in costs["verify_seconds"].items()
      ],
    )
  )
  if rates["prediction_error"] is not None:
    text += [
      report.table(
        ["from prediction to measurement", "tok/s"],
        [
          [words, f"{rates['predicted'][name]:.0f}"]
          for name, words in _EFFECTS.items()
          if rates["predicted"][name] is not None
        ]
        + [["measured", report.estimate(rates, "measured", ".0f")]],
      ),
      f"The prediction is off by {rates['prediction_error']:+.1%}.",
    ]  # fmt: skip
  return text


def figure(result: Mapping) -> Figure:
  """Tokens per second against N, a panel for each that is explained."""
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
    if len(explained) > 1:
      panel.set_title(_title(finding).replace("$", r"\$"))
  return drawn


def table(results: Mapping[str, Mapping]) -> str:
  """Prediction against measurement, a row for each that is explained."""
  return report.table(
    [
      "draft", "temperature", "N", "tokens a call: i.i.d.", "identity",
      "Rao-Blackwell", "measured", "tok/s predicted", "measured", "off by",
      "times plain",
    ],
    [
      [
        finding["system"],
        f"{finding['temperature']:g}",
        str(finding["num_speculative_tokens"]),
        *(
          report.number(finding["block_efficiency"][name])
          for name in ("independent", "identity", "rao_blackwell", "measured")
        ),
        report.number(rates["predicted"]["expected"], ".0f"),
        report.estimate(rates, "measured", ".0f"),
        report.number(rates["prediction_error"], "+.1%"),
        report.estimate(finding["speedup"], "measured"),
      ]
      for result in results.values()
      for finding in result["explained"]
      for rates in [finding["tokens_per_second"]]
    ],
  )  # fmt: skip
