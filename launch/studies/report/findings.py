"""What a report measures, and what it predicts from the measurements.

Predictions use `specjax.theory` on numbers of this run: laws along the decoded
text, costs of rounds and passes timed between the rounds of runs
(`specjax.runtime.timing`). Measurements are of the shipped loop.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from launch import prompts, rates
from launch.build import pair as pair_lib
from launch.build.pair import Pair
from specjax import intervals, warp
from specjax.runtime import engine, requests, timing
from specjax.runtime.engine import Completion
from specjax.state import Origin
from specjax.theory import throughput

_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 17)


# ------------------------------------------------------------------ acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One prompt's completion and the laws along it; n tokens.

  Attributes:
    prompt: which prompt's, see `specjax.runtime.requests.content_of`.
    completion: what was decoded.
    distances: `f64[n]`, TV of draft and target where each token was drawn.
    ratios: `f64[n]`, `min(1, p / q)` of each token.
  """

  prompt: Hashable
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
  nodes = models.drafting.tree.max_depth + 1
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
        prompt=requests.content_of(prompt),
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


def tries(completion: Completion, num_tokens: int) -> np.ndarray:
  """`i64[2, N]`: how often each drafted position was judged, and accepted."""
  tried, passed = counts = np.zeros((2, num_tokens), int)
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
  return counts


def acceptance_by_position(
  completions: list[Completion], num_tokens: int
) -> dict:
  """Conditional and joint acceptance at each drafted position, 1..N.

  A round that the row's budget or a stop token cut short says nothing of the
  positions behind the cut: joint acceptance is the product of the conditional
  ones (Kaplan and Meier).
  """
  counts = [tries(completion, num_tokens) for completion in completions]
  tried, passed = np.sum(counts, axis=0)
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
      predicted - intervals.SIDE * spread,
      predicted + intervals.SIDE * spread,
    ],
    "every_position": float(sum(row.distances.sum() for row in rows)),
    "drafted_positions": len(met),
  }


def _interval(
  rows: list[Row],
  numerators: list[float],
  denominators: list[float],
  limits: tuple[float, float],
) -> tuple[float, float] | None:
  """`intervals.ratio_interval` over prompts."""
  groups = intervals.groups_of([[row.prompt] for row in rows])
  return intervals.ratio_interval(
    intervals.grouped(numerators, groups),
    intervals.grouped(denominators, groups),
    limits=limits,
  )


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
    "measured_ci": _interval(rows, tokens, calls, (1, num_tokens + 1)),
    "independent": float(throughput.tokens_per_cycle(num_tokens, alpha)),
    "identity": throughput.exact_tokens(joint[:num_tokens]),
    "rao_blackwell": (sum(tokens) + surplus) / sum(calls),
    "from_the_text": float(np.mean(ahead)) if ahead else None,
    "acceptance": alpha,
  }


# ------------------------------------------------------------------ throughput


def measure(
  config: ml_collections.ConfigDict,
  items: list[prompts.Prompt],
  pairs: dict[int, Pair],
  *,
  chosen: int,
  rounds: int,
) -> dict:
  """Everything the page says; see `launch.studies.report`.

  Args:
    config: of the pair.
    items: the prompts.
    pairs: by the number of drafted tokens, N and all others to measure.
    chosen: N.
    rounds: timings of everything.
  """
  sweep = sorted(pairs)
  models = pairs[chosen]
  batches = engine.make_batches(
    items, batch_size=config.batch_size,
    max_width=models.room(config.max_new_tokens),
  )  # fmt: skip
  name_of = lambda n: "speculative" if n == chosen else f"N={n}"
  engines = {
    "autoregressive": pair_lib.engine_of(config, models, baseline=True),
    **{name_of(n): pair_lib.engine_of(config, one) for n, one in pairs.items()},
  }
  for one in engines.values():
    for batch in batches:
      one.compile(batch)
  # Batches come in the order of their width, on which a pass's time depends.
  pieces = timing.Pieces(
    engines["speculative"], engines["autoregressive"],
    draft=models.draft, typical=batches[len(batches) // 2],
    widths=(*_WIDTHS, *(n + 1 for n in sweep)),
  )  # fmt: skip
  turns = rates.measure_rates(
    batches, engines, None, rounds=rounds, pieces=pieces
  )
  in_order = lambda n: [
    (prompt, completion)
    for number, batch in enumerate(batches)
    for prompt, completion in zip(
      batch.prompts, turns.last[name_of(n), number], strict=True
    )
  ]
  rows = laws_along(models, config, in_order(chosen))
  longest = max(sweep)
  by_position = acceptance_by_position(
    [c for _, c in in_order(longest)], longest
  )
  efficiency = block_efficiencies(
    rows,
    acceptance_by_position([r.completion for r in rows], chosen)["joint"],
    chosen,
  )
  predicted = predictions(
    pieces.costs(), efficiency, by_position["joint"],
    seconds=float(pieces.predicted("speculative").sum()) / rounds,
    round_seconds=pieces.round_seconds("speculative") / rounds,
    batches=len(batches), lengths=[len(r.completion.token_ids) for r in rows],
    rows=config.batch_size, num_tokens=chosen,
  )  # fmt: skip
  return {
    "num_speculative_tokens": chosen,
    "acceptance_by_position": by_position,
    "total_variation": _summary_of_distances(rows),
    "rejections": rejections(rows),
    "block_efficiency": efficiency,
    **predicted["costs"],
    **_measured(
      turns, predicted, pieces, names={n: name_of(n) for n in sweep},
      chosen=chosen,
    ),
  }  # fmt: skip


def _summary_of_distances(rows: list[Row]) -> dict:
  every = np.concatenate([row.distances for row in rows])
  return {
    "mean": float(every.mean()),
    "mean_ci": _interval(
      rows,
      [row.distances.sum() for row in rows],
      [len(row.distances) for row in rows],
      (0, 1),
    ),
    "quantiles": {
      str(level): float(np.quantile(every, level))
      for level in (0.1, 0.25, 0.5, 0.75, 0.9)
    },
    "histogram": np.histogram(every, bins=20, range=(0, 1))[0].tolist(),
    "positions": len(every),
  }


def predictions(
  costs: timing.StepCosts, efficiency: dict, joint: list[float], *,
  seconds: float, round_seconds: float, batches: int, lengths: list[int],
  rows: int, num_tokens: int,
) -> dict:  # fmt: skip
  """Tokens per second from costs and acceptance, one effect after the other.

  Of costs that disagree (`timing.StepCosts.doubts`) nothing is predicted.

  Args:
    costs: of a round at N and of its passes.
    efficiency: from `block_efficiencies`.
    joint: P(the first i drafted tokens are accepted), i = 1, 2, ...
    seconds: that decoding all batches takes, from runs in pieces.
    round_seconds: of these, those of the rounds.
    batches: how many.
    lengths: tokens of every completion.
    rows: of a batch.
    num_tokens: N.

  Returns:
    `costs`, what the page says of them; `rates`, tokens per second predicted
    for N, each None of such costs; `sweep`, for each N that `joint` and the
    passes timed cover, that of N itself being the prediction in `rates`: empty
    of such costs.
  """
  draft_seconds = sum(costs.draft[t] for t in costs.draft_passes) / num_tokens
  plain, tokens = costs.target[1], sum(lengths)
  # What the loop adds to its passes: as much as in a plain round, and the rest
  # in proportion to the drafted tokens, each of which is warped and drawn.
  constant = costs.plain_step - plain
  each = (costs.step - costs.forwards - constant) / num_tokens
  # As many fewer or more rounds as the drafts deserved, without their luck.
  luck = efficiency["measured"] / efficiency["rao_blackwell"]
  rates = {
    "independent": rows * efficiency["independent"] / costs.forwards,
    "real_acceptance": rows * efficiency["measured"] / costs.forwards,
    "with_overhead": rows * efficiency["measured"] / costs.step,
    "with_prompts": tokens / seconds,
    "expected": tokens / (seconds + (luck - 1) * round_seconds),
  }
  # Whole rounds, so that the loop's own costs count too.
  least = throughput.break_even(num_tokens, 0.0, costs.step, costs.plain_step)
  verify = throughput.verify_curve(costs.target)
  sweep = {}
  for n in range(1, len(joint) + 1):
    if n + 1 > max(costs.target):
      break
    step = constant + n * (draft_seconds + each) + float(verify(n + 1))
    calls = sum(throughput.expected_calls(joint[:n], x) for x in lengths)
    sweep[n] = tokens / (calls / rows * step + batches * costs.prefill)
  sweep[num_tokens] = rates["expected"]
  if costs.doubts:
    rates, sweep, least = dict.fromkeys(rates), {}, math.inf
  return {
    "costs": {
      "costs": {
        "draft_step_seconds": draft_seconds,
        "verify_seconds": {str(fed): s for fed, s in costs.target.items()},
        "plain_pass_seconds": plain,
        "step_seconds": costs.step,
        "round_seconds": costs.attribution,
        "plain_step_seconds": costs.plain_step,
        "loop_overhead": costs.step / costs.forwards,
        "prefill_seconds": costs.prefill,
        "dispatch_seconds": costs.dispatch,
        "doubts": costs.doubts,
        "cost_ratio": draft_seconds / plain,
        "verify_ratio": costs.target[costs.nodes] / plain,
        "step_ratio": costs.step / costs.plain_step,
      },
      # None where even all tokens accepted would not do (JSON has no infinity),
      # or costs disagree.
      "break_even_acceptance": least if least <= 1 else None,
    },
    "rates": rates,
    "sweep": sweep,
  }


def _measured(turns, predicted, pieces, *, names, chosen) -> dict:
  """What the loop did, beside the predictions."""
  ours, plain = names[chosen], "autoregressive"
  measured = {n: turns.rate(name) for n, name in names.items()}
  here, rates = measured[chosen], predicted["rates"]
  error = lambda name: rates[name] and rates[name] / here - 1
  # A run in pieces stands beside a whole one of the same round.
  error_ci = intervals.ratio_interval(
    turns.seconds[ours].ravel(), pieces.predicted(ours).ravel()
  )
  return {
    "tokens_per_second": {
      "plain": turns.rate(plain),
      "plain_ci": turns.rate_interval(plain),
      "measured": here,
      "measured_ci": turns.rate_interval(ours),
      "predicted": rates,
      "prediction_error": error("expected"),
      "prediction_error_given_calls": error("with_prompts"),
      "prediction_error_given_calls_ci": [end - 1 for end in error_ci]
      if error_ci and rates["expected"]
      else None,
    },
    "speedup": {
      "measured": here / turns.rate(plain),
      "measured_ci": intervals.speedup_interval(turns.units()),
    },
    "sweep": {
      "predicted": {str(n): v for n, v in predicted["sweep"].items()},
      "measured": {str(n): v for n, v in measured.items()},
      "measured_ci": {
        str(n): turns.rate_interval(name) for n, name in names.items()
      },
      "best_predicted": max(
        predicted["sweep"], key=predicted["sweep"].get, default=None
      ),
      "best_measured": max(measured, key=measured.get),
    },
  }
