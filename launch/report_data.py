"""What `launch.report` measures, and what it predicts from the measurements.

Predictions use `specjax.theory` on numbers of this run: laws along the decoded
text, costs of passes timed alone. Measurements are of the shipped loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from launch import benchmark, engine, prompts, timing
from launch import pair as pair_lib
from launch.engine import Completion
from launch.pair import Pair
from specjax import metrics, warp
from specjax.theory import throughput
from specjax.types import Origin

_RESAMPLES = 2000
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 17)


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
  """The warped laws of draft and target along completions, in one pass each."""
  width = max(len(p.token_ids) for p, _ in items) + config.max_new_tokens
  sampling = warp.make_sampling(
    1, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
    min_p=config.min_p,
  )  # fmt: skip
  vocab = models.tokenizer.vocab_size
  own = models.params.draft is not None

  @jax.jit
  def along(params, tokens):
    laws = []
    for model, weights in (
      (models.draft, params.draft if own else params.target),
      (models.target, params.target),
    ):
      output, _ = model.apply(weights, tokens, model.init_cache(1, width))
      logits = output.logits[..., :vocab].astype(jnp.float32)
      laws.append(warp.warp(logits, sampling)[0])
    log_p, log_q = laws
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    following = jnp.roll(tokens[0], -1)[:, None]
    pick = lambda law: jnp.take_along_axis(law, following, axis=1)[:, 0]
    ratio = jnp.where(
      pick(q) > 0, pick(p) / jnp.where(pick(q) > 0, pick(q), 1), 1
    )
    return (
      jnp.sum(jnp.where(q > p, q - p, 0), axis=1),
      jnp.minimum(ratio, 1),
    )

  rows = []
  for prompt, completion in items:
    text = [*prompt.token_ids, *completion.token_ids]
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(text)] = text
    distances, ratios = jax.device_get(along(models.params, tokens))
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
      predicted - 1.96 * spread,
      predicted + 1.96 * spread,
    ],
    "every_position": float(sum(row.distances.sum() for row in rows)),
    "drafted_positions": len(met),
  }


def block_efficiencies(
  rows: list[Row], joint: list[float], num_tokens: int
) -> dict:
  """Tokens per target call: measured, and predicted in four ways."""
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
  expected = sum(c.expected_accepted for c in completions)
  return {
    "measured": sum(tokens) / sum(calls),
    "measured_ci": metrics.ratio_interval(tokens, calls),
    "independent": float(throughput.tokens_per_cycle(num_tokens, alpha)),
    "identity": throughput.exact_tokens(joint[:num_tokens]),
    "rao_blackwell": 1 + expected / sum(calls),
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
  """95% bootstrap interval of tokens over seconds, over batches."""
  tokens, seconds = zip(*timing_of, strict=True)
  return metrics.ratio_interval(tokens, seconds, num_resamples=_RESAMPLES)


def measure(
  config: ml_collections.ConfigDict,
  items: list[prompts.Prompt],
  models: Pair,
  *,
  sweep: list[int],
  rounds: int,
) -> dict:
  """Everything the page says; see `launch.report`.

  Args:
    config: of the pair; N is its num_speculative_tokens.
    items: the prompts.
    models: from `launch.pair.build`.
    sweep: numbers of drafted tokens to measure.
    rounds: timed passes over the prompts, all systems in turn.
  """
  chosen = config.num_speculative_tokens
  sweep = sorted({*sweep, chosen})
  batches = prompts.make_batches(
    items, batch_size=config.batch_size,
    max_width=models.room(config.max_new_tokens),
  )  # fmt: skip
  pairs = {
    n: models if n == chosen else pair_lib.build(with_tokens(config, n))
    for n in sweep
  }
  engines = {
    "autoregressive": engine.from_config(config, models, baseline=True)
  }
  for n, one in pairs.items():
    engines[f"N={n}"] = engine.from_config(with_tokens(config, n), one)
  for one in engines.values():
    for batch in batches:
      one.compile(batch)
  timings, last = benchmark.measure_rates(batches, engines, None, rounds=rounds)
  rate = {
    name: sum(t for t, _ in cells) / sum(s for _, s in cells)
    for name, cells in timings.items()
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
  costs = timing.measure_step(
    engines[f"N={chosen}"], engines["autoregressive"], batches[-1],
    drafter_name=config.drafter, rounds=max(rounds, 5),
  )  # fmt: skip
  curve = timing.verify_curve(
    engines["autoregressive"], batches[-1],
    widths=tuple(sorted({*_WIDTHS, *(n + 1 for n in sweep)})),
    rounds=max(rounds, 5),
  )  # fmt: skip
  # Rows of a batch share its steps until the last of them is done.
  steps = sum(
    max(c.num_target_calls for c in last[f"N={chosen}", number])
    for number in range(len(batches))
  )
  prefill = timing.alternate(
    {"prefill": lambda: jax.block_until_ready(
      engines[f"N={chosen}"].prefill(batches[-1])
    )},
    rounds=max(rounds, 5),
  )["prefill"]  # fmt: skip
  return {
    "num_speculative_tokens": chosen,
    "acceptance_by_position": by_position,
    "total_variation": _summary_of_distances(rows),
    "rejections": rejections(rows),
    "block_efficiency": efficiency,
    **_speeds(
      costs, curve, efficiency, by_position["joint"], rate, timings, rows,
      prefill=prefill, chosen=chosen, sweep=sweep, batches=len(batches),
      batch_rows=config.batch_size, steps=steps,
    ),
  }  # fmt: skip


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


def _speeds(
  costs, curve, efficiency, joint, rate, timings, rows, *,
  prefill, chosen, sweep, batches, batch_rows, steps,
) -> dict:  # fmt: skip
  """Costs, and tokens per second predicted step by step and measured."""
  drafting = sum(costs.draft[fed] for fed in costs.draft_passes)
  draft_seconds = drafting / chosen
  verify_seconds = costs.target[max(costs.target)]
  name = f"N={chosen}"
  tokens = sum(len(row.completion.token_ids) for row in rows)
  whole = steps * costs.step + batches * prefill
  passes = drafting + verify_seconds
  predicted = {
    "independent": batch_rows * efficiency["independent"] / passes,
    "real_acceptance": batch_rows * efficiency["measured"] / passes,
    "with_overhead": batch_rows * efficiency["measured"] / costs.step,
    "with_prompts": tokens / whole,
  }
  verify = throughput.verify_curve(curve)
  exact = np.concatenate([[1.0], 1 + np.cumsum(joint)])
  by_tokens = {
    n: batch_rows * float(exact[n] / (n * draft_seconds + verify(n + 1)))
    for n in range(len(exact))
    if n + 1 <= max(curve)
  }
  measured = {n: rate[f"N={n}"] for n in sweep}
  plain = rate["autoregressive"]
  break_even = throughput.break_even(
    chosen, draft_seconds, verify_seconds, costs.target[1]
  )
  paired = [
    (s_tokens / s_seconds) / (p_tokens / p_seconds)
    for (s_tokens, s_seconds), (p_tokens, p_seconds) in zip(
      timings[name], timings["autoregressive"], strict=True
    )
  ]
  return {
    "costs": {
      "draft_step_seconds": draft_seconds,
      "verify_seconds": {str(fed): s for fed, s in curve.items()},
      "plain_pass_seconds": costs.target[1],
      "step_seconds": costs.step,
      "loop_overhead": costs.step / passes,
      "prefill_seconds": prefill,
      "cost_ratio": draft_seconds / costs.target[1],
    },
    "tokens_per_second": {
      "plain": plain,
      "plain_ci": rate_interval(timings["autoregressive"]),
      "measured": rate[name],
      "measured_ci": rate_interval(timings[name]),
      "predicted": predicted,
      "prediction_error": predicted["with_prompts"] / rate[name] - 1,
    },
    "speedup": {
      "measured": rate[name] / plain,
      "by_batch": paired,
    },
    "sweep": {
      "predicted": {str(n): value for n, value in by_tokens.items()},
      "measured": {str(n): value for n, value in measured.items()},
      "measured_ci": {str(n): rate_interval(timings[f"N={n}"]) for n in sweep},
      "best_predicted": max(by_tokens, key=by_tokens.get),
      "best_measured": max(measured, key=measured.get),
    },
    "break_even_acceptance": break_even,
  }
