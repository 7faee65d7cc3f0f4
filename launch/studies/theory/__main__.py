"""Compares theorems about speculative decoding with the shipped loop.

  python -m launch.studies.theory --figure=all --workdir=W

Writes WORKDIR/NAME.json (all plotted numbers), NAME.svg and NAME.png per
figure. Simulations use the shipped loop, predictions use `specjax.theory`;
neither depends on the other.

  single       rejections of one draft against Theorem 1, over the runs
  batch        rejections with 4 and 5 drafts against Theorem 3
  drafts       expected rejections against M, and the limit
  improvement  what M drafts save, for Bernoulli and uniform distributions
  tradeoff     the Pareto front of loss and rejection, Decoding-OPT and -UNO
  throughput   tokens per second against N, the best N marked
  acceptance   acceptance of K drafts by every lossless rule
  mixture      the cost of verification on a mixture of experts, and its best N

Together they take five and a half minutes on two cores.
"""

import os
import pathlib
import sys

import jax
import numpy as np
from absl import flags

from launch import cli, provenance, report, results
from launch.evaluation import timing
from launch.studies.rules import on_pair, on_vectors
from launch.studies.theory import plots, simulation
from specjax.theory import (
  experts,
  markov,
  optimum,
  rejections,
  throughput,
  tradeoff,
)

cli.reads(cli.WORKDIR)
_FIGURE = flags.DEFINE_list("figure", ["all"], "Figures to draw, or all.")
_RUNS = flags.DEFINE_integer(
  "simulate", 100_000, "Runs through the loop.", lower_bound=100
)

# The setting of the paper's figures. How its matrices were made is unknown;
# here laws are uniform on the simplex.
_SEED, _VOCAB, _HORIZON = 2024, 7, 50
_MANY = 2048  # drafts, for the last point before the limit
# Laws on which rules differ (of many random ones, those where match, recursive,
# kseq and the optimum are furthest apart).
_DRAFT = (0.08, 0.02, 0.38, 0.22, 0.30)
_TARGET = (0.07, 0.14, 0.20, 0.43, 0.16)


def float64(theorem, *args) -> float:
  """Computes a quantity of `specjax.theory.rejections` in float64."""
  with jax.enable_x64(True):
    return float(theorem(*args))


def running_average(rejected: np.ndarray) -> dict:
  """The average of the first n runs and its standard error, n spread evenly."""
  at = np.unique(np.geomspace(10, len(rejected), 60).astype(int))
  total, squares = np.cumsum(rejected), np.cumsum(rejected.astype(float) ** 2)
  mean = total[at - 1] / at
  variance = (squares[at - 1] - at * mean**2) / (at - 1)
  return {
    "runs": at.tolist(),
    "mean": mean.tolist(),
    "standard_error": np.sqrt(np.maximum(variance, 0) / at).tolist(),
  }


def _converging(counts, runs, horizon=_HORIZON):
  pair = markov.random_pair(_SEED, vocab_size=_VOCAB, horizon=horizon)
  lines = {}
  for m in counts:
    rejected, _ = simulation.simulate(pair, runs=runs, num_drafts=m, seed=_SEED)
    lines[str(m)] = {
      "theory": float64(rejections.theorem3, pair, m),
      "simulated": simulation.summary(rejected),
      **running_average(rejected),
    }
  return {
    "vocab_size": _VOCAB, "horizon": horizon, "seed": _SEED, "drafts": lines
  }  # fmt: skip


def single(runs: int) -> dict:
  """Figure 1: rejections of one draft against Theorem 1, at both horizons."""
  horizons = (_HORIZON, 2 * _HORIZON)
  return {"horizons": {str(n): _converging([1], runs, n) for n in horizons}}


def batch(runs: int) -> dict:
  """Figure 2: rejections with 4 and 5 drafts against Theorem 3."""
  return _converging([4, 5], runs)


def drafts(runs: int) -> dict:
  """Figure 3: expected rejections against M, and the limit."""
  pair = markov.random_pair(_SEED, vocab_size=_VOCAB, horizon=_HORIZON)
  counts = [1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, _MANY]
  simulate = lambda m: simulation.simulate(
    pair, runs=runs, num_drafts=m, seed=_SEED + m
  )
  return {
    "vocab_size": _VOCAB,
    "horizon": _HORIZON,
    "seed": _SEED,
    "num_drafts": counts,
    "expected": [float64(rejections.theorem3, pair, m) for m in counts],
    "limit": float64(rejections.limit, pair),
    "simulated": {
      str(m): simulation.summary(simulate(m)[0]) for m in (1, 2, 3)
    },
  }


def improvement(runs: int) -> dict:
  """Figure 4: what M drafts save at one position, for two families."""
  del runs
  counts = list(range(1, 16))
  bernoulli = {
    f"u = {u}, v = {v}": [
      abs(u - v) - rejections.bernoulli(u, v, m) for m in counts
    ]
    for u, v in ((0.1, 0.9), (0.3, 0.8), (0.5, 0.9), (0.7, 0.9))
  }
  uniform = {
    f"V' / V = {small}/10": [
      (1 - small / 10) - rejections.uniform(10, small, m) for m in counts
    ]
    for small in (1, 3, 5, 8)
  }
  return {"num_drafts": counts, "bernoulli": bernoulli, "uniform": uniform}


def tradeoff_front(runs: int) -> dict:
  """Figure 5: the Pareto front, with Decoding-OPT and Decoding-UNO."""
  pair = markov.random_pair(_SEED, vocab_size=_VOCAB, horizon=1)
  p, q = pair.draft_initial, pair.target_initial
  distance = float(np.maximum(q - p, 0).sum())
  error = lambda share: float(np.sqrt(share * (1 - share) / runs))
  lines: dict[str, list] = {}
  simulated: dict[str, list] = {}
  for name in ("opt", "uno"):
    predict = getattr(tradeoff, f"decoding_{name}")
    lines[name] = [
      dict(zip(("rejection", "loss"), predict(p, q, e), strict=True))
      | {"epsilon": float(e)}
      for e in np.linspace(0, 0.4, 41)
    ]
    simulated[name] = []
    for epsilon in (0.0, 0.05, 0.1, 0.2):
      rejected, tokens = simulation.simulate(
        pair, runs=runs, rule=f"decoding_{name}(epsilon={epsilon})", seed=_SEED
      )
      law = np.bincount(tokens[:, 0], minlength=_VOCAB) / runs
      above, predicted = law > q, predict(p, q, epsilon)
      simulated[name].append(
        {
          "epsilon": epsilon,
          "rejection": float(rejected.mean()),
          "rejection_standard_error": error(rejected.mean()),
          "predicted_rejection": predicted[0],
          "loss": float((law - q)[above].sum()),
          "loss_standard_error": error(law[above].sum()),
          "predicted_loss": predicted[1],
        }
      )
  return {
    "total_variation": distance,
    "front": [[0.0, distance], [distance, 0.0]],
    "lines": lines,
    "simulated": simulated,
    "runs": runs,
  }


def speed(runs: int) -> dict:
  """Figure 6: throughput against N, in units of plain decoding."""
  del runs
  counts = np.arange(0, 21)
  lines = [
    {
      "acceptance": p,
      "cost_ratio": ratio,
      "throughput": throughput.throughput(counts, p, ratio, 1.0).tolist(),
      "best": throughput.best_num_tokens(p, ratio, 1.0, most=20),
    }
    for p in (0.5, 0.7, 0.9)
    for ratio in (0.02, 0.1, 0.3)
  ]
  return {"num_tokens": counts.tolist(), "lines": lines}


def acceptance(runs: int, counts: tuple[int, ...] = (1, 2, 3, 4)) -> dict:
  """Figure 7: what every lossless rule accepts of K drafts of one token."""
  del runs
  p, q = np.array(_DRAFT), np.array(_TARGET)
  by_rule: dict[str, list] = {}
  # Nearly all of it is compilation, of programs that run once.
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    for count in counts:
      fitting, _ = on_pair.cases(None, [(count, 1)], len(p))
      for case in fitting:
        # A rule of a single path is in the figure where K = 1.
        if case.rule.lossless and case.tree.num_drafted == count:
          entry = on_vectors.evaluate(case, p, q, seed=0)
          point = {key: entry[key] for key in ("acceptance", "standard_error")}
          by_rule.setdefault(case.name, []).append(
            {"num_drafts": count, "siblings": case.siblings.name, **point}
          )
  finally:
    jax.config.update("jax_disable_most_optimizations", False)
  return {
    "draft": p.tolist(),
    "target": q.tolist(),
    "num_drafts": list(counts),
    "optimum": [optimum.iid_optimum(p, q, k) for k in counts],
    "rules": by_rule,
  }


def qwen3_30b_a3b() -> experts.Reads:
  """Qwen3-30B-A3B in bfloat16, from its configuration."""
  width, layers, heads, kv_heads, channels = 2048, 48, 32, 4, 128
  attention = 2 * width * channels * (heads + kv_heads)
  return experts.Reads(
    others=2 * (layers * (attention + 128 * width) + 151_936 * width),
    expert=2 * 3 * width * 768,
    num_layers=layers,
    num_experts=128,
    num_chosen=8,
  )


def mixture(runs: int) -> dict:
  """Figure 8: what verification costs on a mixture, and what speculation gains.

  Times are in units of a pass over one token per row.
  """
  del runs
  model, draft, most = qwen3_30b_a3b(), 0.02, 32
  fed = np.arange(1, most + 1)
  lines, read = [], {}
  for rows in (1, 2, 4, 8, 16, 32, 64, 128):
    verify = model.verify(rows)
    read[str(rows)] = verify(fed).tolist()
    for p in (0.6, 0.7, 0.8, 0.9):
      best = throughput.best_num_tokens(p, draft, verify, most=most - 1)
      rate = float(throughput.throughput(best, p, draft, verify(best + 1)))
      lines.append(
        {"rows": rows, "acceptance": p, "best": best, "throughput": rate}
      )
  return {
    "cost_ratio": draft,
    "fed": fed.tolist(),
    "gigabytes": (model.bytes_of(fed) / 1e9).tolist(),
    "distinct": experts.expected_distinct(fed, 128, 8).tolist(),
    "read": read,
    "lines": lines,
  }


FIGURES = {
  "single": single,
  "batch": batch,
  "drafts": drafts,
  "improvement": improvement,
  "tradeoff": tradeoff_front,
  "throughput": speed,
  "acceptance": acceptance,
  "mixture": mixture,
}


def draw(name: str, folder: pathlib.Path, *, runs: int) -> None:
  """Computes a figure's numbers and draws it; both go to the folder."""
  print(f"drawing {name}: minutes with --simulate=100000 ...", file=sys.stderr)
  seconds, numbers = timing.timed(FIGURES[name], runs)
  print(f"{name} took {seconds:.0f} s", file=sys.stderr)
  result = {"figure": name, **numbers, "seconds": seconds}
  results.write_json(folder / f"{name}.json", result | provenance.record())
  report.save(
    lambda: plots.FIGURES[name](numbers),
    *(folder / f"{name}.{form}" for form in ("svg", "png")),
  )


def run(_) -> int:
  """The command."""
  names = list(FIGURES) if _FIGURE.value == ["all"] else _FIGURE.value
  if unknown := [name for name in names if name not in FIGURES]:
    raise cli.UserError(
      f"unknown figures {unknown}, expected all or some of {list(FIGURES)}"
    )
  folder = pathlib.Path(cli.WORKDIR.value)
  results.check(*(folder / f"{name}.json" for name in names))
  for name in names:
    draw(name, folder, runs=_RUNS.value)
  return 0


if __name__ == "__main__":
  # One device per core; `simulation` deals the runs out to them.
  jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
  cli.run(run, required=("workdir",))
