"""What `launch.report` measures, and what it predicts from the measurements.

Predictions use `specjax.theory` on numbers of this run: laws along the decoded
text, costs of passes timed alone. Measurements are of the shipped loop.
"""

import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from launch import benchmark
from launch.decoding import engine, prompts
from launch.decoding.engine import Completion
from launch.decoding.pair import Pair
from launch.measuring import timing
from specjax import metrics, warp
from specjax.theory import throughput
from specjax.types import Origin

_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 17)
_STEPS = 48  # steps or passes in one timing


# ------------------------------------------------------------------ acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One prompt's completion and the laws along it; n tokens.

  Attributes:
    completion: what was decoded.
    distances: `f64[n]`, TV of draft and target where each token was drawn.
    ratios: `f64[n]`, `min(1, p / q)` of each token.
  """

  completion: Completion
  distances: np.ndarray
  ratios: np.ndarray

  @property
  def drafted(self) -> np.ndarray:
    """`bool[n]`: tokens at positions that were drafted, accepted or not."""
    return np.asarray(self.completion.origins) != Origin.BONUS

  @property
  def rejected(self) -> np.ndarray:
    """`bool[n]`: tokens drawn after a rejection."""
    return np.asarray(self.completion.origins) == Origin.RESIDUAL


def laws_along(
  models: Pair,
  config: ml_collections.ConfigDict,
  items: list[tuple[prompts.Prompt, Completion]],
) -> list[Row]:
  """The warped laws of draft and target along completions.

  They are those of the loop: a draft model reads the text with its own cache, a
  thinned target (drafter layer_skip) each round with the target's.
  """
  nodes = config.num_speculative_tokens + 1
  longest = max(len(p.token_ids) for p, _ in items)
  width = longest + config.max_new_tokens + nodes
  sampling = warp.make_sampling(
    1, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
    min_p=config.min_p,
  )  # fmt: skip
  vocab = models.tokenizer.vocab_size
  law = lambda logits: warp.warp(
    logits[..., :vocab].astype(jnp.float32), sampling
  )[0]

  @functools.partial(jax.jit, static_argnums=0)
  def whole(model, params, tokens):
    output, cache = model.apply(params, tokens, model.init_cache(1, width))
    return law(output.logits), cache

  @jax.jit
  def of_round(params, cache, tokens, root):
    fed = jax.lax.dynamic_slice(tokens, (0, root), (1, nodes))
    before = cache.replace(length=jnp.full((1,), root))
    output, _ = models.draft.apply(params, fed, before)
    return law(output.logits)

  @jax.jit
  def compare(log_p, log_q, tokens):
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    following = jnp.roll(tokens[0], -1)[:, None]
    pick = lambda law: jnp.take_along_axis(law, following, axis=1)[:, 0]
    ratio = jnp.where(
      pick(q) > 0, pick(p) / jnp.where(pick(q) > 0, pick(q), 1), 1
    )
    distance = jnp.sum(jnp.where(q > p, q - p, 0), axis=1)
    return distance, jnp.minimum(ratio, 1)

  rows = []
  for prompt, completion in items:
    text = [*prompt.token_ids, *completion.token_ids]
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(text)] = text
    log_q, cache = whole(models.target, models.params.target, tokens)
    if models.params.draft is not None:
      log_p, _ = whole(models.draft, models.params.draft, tokens)
    else:
      log_p = np.array(log_q)  # where nothing is drafted it does not matter
      root = len(prompt.token_ids) - 1
      for count in rounds(completion):
        found = of_round(models.params.target, cache, tokens, root)
        log_p[root : root + count] = found[:count]
        root += count
    distances, ratios = jax.device_get(compare(log_p, log_q, tokens))
    # The law of token i was computed where token i - 1 was fed.
    here = slice(len(prompt.token_ids) - 1, len(text) - 1)
    rows.append(
      Row(
        completion=completion,
        distances=distances[here].astype(np.float64),
        ratios=ratios[here].astype(np.float64),
      )
    )
  return rows


def rounds(completion: Completion) -> list[int]:
  """How many tokens each round of a completion gave."""
  counts, count = [], 0
  for origin in completion.origins:
    count += 1
    if origin != Origin.ACCEPTED:  # a round ends with a token of the target's
      counts.append(count)
      count = 0
  return [*counts, count] if count else counts


def acceptance_by_position(
  completions: list[Completion], num_tokens: int
) -> dict:
  """Conditional and joint acceptance at each drafted position, 1..N.

  A round that the row's budget or a stop token cut short says nothing of the
  positions behind the cut: joint acceptance is the product of the conditional
  ones (Kaplan and Meier).
  """
  tried, passed = np.zeros((2, num_tokens), int)
  for completion in completions:
    place = 0
    for origin in completion.origins:
      if origin == Origin.ACCEPTED:
        tried[place] += 1
        passed[place] += 1
        place += 1
      else:
        if origin == Origin.RESIDUAL:
          tried[place] += 1
        place = 0
  conditional = passed / np.maximum(tried, 1)
  return {
    "tried": tried.tolist(),
    "conditional": conditional.tolist(),
    "joint": np.cumprod(conditional).tolist(),
  }


def rejections(rows: list[Row]) -> dict:
  """Rejections counted, and what Theorem 1 says from the laws met.

  Along a decoded text a drafted position is rejected with probability TV given
  all before it, so that `counted - predicted` is a martingale of variance `sum
  TV (1 - TV)`. Positions of bonus tokens cannot be rejected and do not count;
  `every_position` is the theorem's own number, for drafts that never end.
  """
  counted = sum(int(row.rejected.sum()) for row in rows)
  met = np.concatenate([row.distances[row.drafted] for row in rows])
  spread = float(np.sqrt((met * (1 - met)).sum()))
  predicted = float(met.sum())
  return {
    "counted": counted,
    "predicted": predicted,
    "predicted_interval": [
      predicted - metrics.SIDE * spread,
      predicted + metrics.SIDE * spread,
    ],
    "every_position": float(sum(row.distances.sum() for row in rows)),
    "drafted_positions": len(met),
  }


def block_efficiencies(
  rows: list[Row], joint: list[float], num_tokens: int
) -> dict:
  """Tokens per target call: measured, and predicted in four ways.

  `rao_blackwell` takes the drafted tokens that were emitted at what they were
  expected to be given the drafts, and every other token as it came: a round
  that a budget or a stop token cuts emits no residual or bonus token. The
  difference from what was measured has mean zero, whatever cuts a completion.
  `identity`, `independent` and `from_the_text` are of rounds that nothing cuts.
  """
  completions = [row.completion for row in rows]
  tokens = [len(c.token_ids) for c in completions]
  calls = [c.num_target_calls for c in completions]
  alpha = 1 - float(np.concatenate([row.distances for row in rows]).mean())
  ahead = []
  for row in rows:
    overlap, ratios = 1 - row.distances, row.ratios
    for start in range(len(overlap) - num_tokens + 1):
      reach, total = 1.0, 1.0
      for i in range(start, start + num_tokens):
        total += reach * overlap[i]
        reach *= ratios[i]
      ahead.append(total)
  surplus = sum(c.expected_accepted - c.num_accepted for c in completions)
  return {
    "measured": sum(tokens) / sum(calls),
    "measured_ci": metrics.ratio_interval(tokens, calls),
    "independent": float(throughput.tokens_per_cycle(num_tokens, alpha)),
    "identity": throughput.exact_tokens(joint[:num_tokens]),
    "rao_blackwell": (sum(tokens) + surplus) / sum(calls),
    "from_the_text": float(np.mean(ahead)) if ahead else None,
    "acceptance": alpha,
  }


# ------------------------------------------------------------------ throughput


def with_tokens(config: ml_collections.ConfigDict, num_tokens: int):
  """The config with another number of drafted tokens."""
  config = ml_collections.ConfigDict(config.to_dict())
  config.num_speculative_tokens = num_tokens
  return config


def rate_interval(timing_of: list[tuple[int, float]]):
  """95% interval of tokens over seconds, over batches."""
  return metrics.ratio_interval(*zip(*timing_of, strict=True))


def _decode(one: engine.Engine, batch, states: dict, name) -> None:
  """Decodes a batch and keeps its final state under a name."""
  states[name] = jax.block_until_ready(one.generate(batch, one.prefill(batch)))


def measure(
  config: ml_collections.ConfigDict,
  items: list[prompts.Prompt],
  pairs: dict[int, Pair],
  *,
  rounds: int,
) -> dict:
  """Everything the page says; see `launch.report`.

  Args:
    config: of the pair; N is its num_speculative_tokens.
    items: the prompts.
    pairs: by the number of drafted tokens, N and all others to measure.
    rounds: timings of every part, of which the mean counts.
  """
  chosen, sweep = config.num_speculative_tokens, sorted(pairs)
  models = pairs[chosen]
  batches = prompts.make_batches(
    items, batch_size=config.batch_size,
    max_width=models.room(config.max_new_tokens),
  )  # fmt: skip
  engines = {
    "autoregressive": engine.from_config(config, models, baseline=True)
  }
  for n, one in pairs.items():
    engines[f"N={n}"] = engine.from_config(with_tokens(config, n), one)
  for one in engines.values():
    for batch in batches:
      one.compile(batch)
  # Batches come in the order of their width, on which a pass's time depends.
  typical = batches[len(batches) // 2]
  # Decoding and its parts take turns, so that a machine's drift falls on what
  # is predicted and on what is measured alike.
  states = {}
  parts = {
    **{
      f"run {name} {number}": functools.partial(
        _decode, one, batch, states, (name, number)
      )
      for number, batch in enumerate(batches)
      for name, one in engines.items()
    },
    **timing.step_parts(
      engines[f"N={chosen}"], engines["autoregressive"], typical,
      drafter_name=config.drafter, repeats=_STEPS,
    ),
    **timing.curve_parts(
      engines["autoregressive"], typical,
      widths=tuple(sorted({*_WIDTHS, *(n + 1 for n in sweep)})), repeats=_STEPS,
    ),
    # Decoding of no tokens: the prompts' passes and two calls from the host.
    "prefill": lambda: jax.block_until_ready(
      engines[f"N={chosen}"].generate(
        typical, engines[f"N={chosen}"].prefill(typical, budget=0)
      )
    ),
  }  # fmt: skip
  seconds = timing.alternate(parts, rounds=rounds, average=statistics.fmean)
  last = {
    (name, number): engine.completions(state, len(batches[number].prompts))
    for (name, number), state in states.items()
  }
  timings = {
    name: [
      (
        sum(len(c.token_ids) for c in last[name, number]),
        seconds[f"run {name} {number}"],
      )
      for number in range(len(batches))
    ]
    for name in engines
  }
  in_order = lambda name: [
    (prompt, completion)
    for number, batch in enumerate(batches)
    for prompt, completion in zip(
      batch.prompts, last[name, number], strict=True
    )
  ]
  rows = laws_along(models, config, in_order(f"N={chosen}"))
  longest = max(sweep)
  by_position = acceptance_by_position(
    [c for _, c in in_order(f"N={longest}")], longest
  )
  efficiency = block_efficiencies(
    rows,
    acceptance_by_position([r.completion for r in rows], chosen)["joint"],
    chosen,
  )
  costs = timing.step_costs(
    seconds, timing.draft_passes(models, config.drafter), repeats=_STEPS
  )
  curve = timing.curve_of(seconds, repeats=_STEPS)
  # Rows of a batch share its steps until the last of them is done.
  steps = sum(
    max(c.num_target_calls for c in last[f"N={chosen}", number])
    for number in range(len(batches))
  )
  predicted = predictions(
    costs, curve, efficiency, by_position["joint"],
    prefill=seconds["prefill"], steps=steps, batches=len(batches),
    tokens=sum(len(row.completion.token_ids) for row in rows),
    rows=config.batch_size, num_tokens=chosen,
  )  # fmt: skip
  return {
    "num_speculative_tokens": chosen,
    "acceptance_by_position": by_position,
    "total_variation": _summary_of_distances(rows),
    "rejections": rejections(rows),
    "block_efficiency": efficiency,
    **predicted["costs"],
    **_measured(timings, predicted, chosen=chosen, sweep=sweep),
  }


def _summary_of_distances(rows: list[Row]) -> dict:
  every = np.concatenate([row.distances for row in rows])
  return {
    "mean": float(every.mean()),
    "mean_ci": metrics.ratio_interval(
      [row.distances.sum() for row in rows],
      [len(row.distances) for row in rows],
    ),
    "quantiles": {
      str(level): float(np.quantile(every, level))
      for level in (0.1, 0.25, 0.5, 0.75, 0.9)
    },
    "histogram": np.histogram(every, bins=20, range=(0, 1))[0].tolist(),
    "positions": len(every),
  }


def predictions(
  costs: timing.StepCosts, curve: dict[int, float], efficiency: dict,
  joint: list[float], *, prefill: float, steps: int, batches: int, tokens: int,
  rows: int, num_tokens: int,
) -> dict:  # fmt: skip
  """Tokens per second from costs and acceptance, one effect after the other.

  Args:
    costs: of a step at N and of its passes.
    curve: seconds of a target pass by the tokens fed.
    efficiency: from `block_efficiencies`.
    joint: P(the first i drafted tokens are accepted), i = 1, 2, ...
    prefill: seconds of the prompts' passes of a batch.
    steps: that the loop made in all batches.
    batches: how many.
    tokens: emitted in all of them.
    rows: of a batch.
    num_tokens: N.

  Returns:
    `costs`, what the page says of them; `rates`, tokens per second predicted
    for N; `sweep`, for each N that `joint` and `curve` cover.
  """
  draft_seconds = sum(costs.draft[t] for t in costs.draft_passes) / num_tokens
  plain, whole = costs.target[1], steps * costs.step + batches * prefill
  # What the loop adds to its passes: as much as in a plain step, and the rest
  # in proportion to the drafted tokens, each of which is warped and drawn.
  constant = costs.plain_step - plain
  each = (costs.step - costs.forwards - constant) / num_tokens
  # As many fewer or more steps as the drafts deserved, without their luck.
  luck = efficiency["measured"] / efficiency["rao_blackwell"]
  rates = {
    "independent": rows * efficiency["independent"] / costs.forwards,
    "real_acceptance": rows * efficiency["measured"] / costs.forwards,
    "with_overhead": rows * efficiency["measured"] / costs.step,
    "with_prompts": tokens / whole,
    "expected": tokens / (whole + (luck - 1) * steps * costs.step),
  }
  # Whole steps, so that the loop's own costs count too.
  least = throughput.break_even(num_tokens, 0.0, costs.step, costs.plain_step)
  verify = throughput.verify_curve(curve)
  sweep = {}
  for n in range(1, len(joint) + 1):
    if n + 1 > max(curve):
      break
    step = constant + n * (draft_seconds + each) + float(verify(n + 1))
    needed = tokens / throughput.exact_tokens(joint[:n]) / rows
    sweep[n] = tokens / (needed * step + batches * prefill)
  return {
    "costs": {
      "costs": {
        "draft_step_seconds": draft_seconds,
        "verify_seconds": {str(fed): s for fed, s in curve.items()},
        "plain_pass_seconds": plain,
        "step_seconds": costs.step,
        "plain_step_seconds": costs.plain_step,
        "loop_overhead": costs.step / costs.forwards,
        "prefill_seconds": prefill,
        "cost_ratio": draft_seconds / plain,
        "verify_ratio": costs.target[max(costs.target)] / plain,
        "step_ratio": costs.step / costs.plain_step,
      },
      # None where even all tokens accepted would not do (JSON has no infinity).
      "break_even_acceptance": least if least <= 1 else None,
    },
    "rates": rates,
    "sweep": sweep,
  }


def _measured(timings, predicted, *, chosen, sweep) -> dict:
  """What the loop did, beside the predictions."""
  speedup_ci = metrics.speedup_interval(
    [
      metrics.Unit(
        num_tokens=tokens, num_target_calls=0, num_drafted=0, num_accepted=0,
        expected_accepted=0, total_variation=0, seconds=seconds,
        baseline_num_tokens=plain_tokens, baseline_seconds=plain_seconds,
      )
      for (tokens, seconds), (plain_tokens, plain_seconds) in zip(
        timings[f"N={chosen}"], timings["autoregressive"], strict=True
      )
    ]
  )  # fmt: skip
  rate = {name: benchmark.rate(cells) for name, cells in timings.items()}
  measured = {n: rate[f"N={n}"] for n in sweep}
  here, rates = measured[chosen], predicted["rates"]
  return {
    "tokens_per_second": {
      "plain": rate["autoregressive"],
      "plain_ci": rate_interval(timings["autoregressive"]),
      "measured": here,
      "measured_ci": rate_interval(timings[f"N={chosen}"]),
      "predicted": rates,
      "prediction_error": rates["expected"] / here - 1,
      "prediction_error_given_calls": rates["with_prompts"] / here - 1,
    },
    "speedup": {
      "measured": here / rate["autoregressive"],
      "measured_ci": speedup_ci,
    },
    "sweep": {
      "predicted": {str(n): v for n, v in predicted["sweep"].items()},
      "measured": {str(n): v for n, v in measured.items()},
      "measured_ci": {str(n): rate_interval(timings[f"N={n}"]) for n in sweep},
      "best_predicted": max(predicted["sweep"], key=predicted["sweep"].get),
      "best_measured": max(measured, key=measured.get),
    },
  }
