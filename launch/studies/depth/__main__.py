r"""Study of draft depth: static depths, policies and the optimum by batch size.

  python -m launch.studies.depth --config=configs/embedded.py --workdir=W \
    --timings=docs/measurements/embedded-greedy.json,\
  docs/measurements/embedded-greedy-batch-6.json

writes WORKDIR/depth.json (every number), depth.md and depth.svg. The prompts
are decoded with drafts of --most_tokens, and the acceptance of every drafted
token is written down. On those traces are replayed: plain decoding, every
static depth, thresholds on the newest token's confidence and on survival, the
policy that follows its own rate, and with --head one that a head decides, each
by its own code, and the optimum of a process fitted to them. Tokens per second
are predicted from --timings, results of `launch.evaluate --timing=passes` at
one or two batch sizes, as lines in the number of rows.

To measure one of them instead:

  python -m launch.evaluate --config=configs/embedded.py --prompts=built-in \
    --systems='model(tokens=6, policy=survival)' --output=E.json
"""

import sys
from collections.abc import Sequence
from typing import Any

import ml_collections
import numpy as np
from absl import flags

from launch import cli, prompts, provenance, report, results
from launch.assembly import pair, policies, registry
from launch.evaluation import costs as costs_lib
from launch.studies.depth import plots, replay
from launch.studies.depth.replay import Machine, machine_of, without_levels
from launch.studies.depth.traces import Traces, collect
from specjax.adaptive import policies as depth_lib
from specjax.adaptive.estimates import BINS
from specjax.adaptive.policies import Policy

cli.reads(cli.CONFIG, cli.PROMPTS, cli.WORKDIR, cli.TIMINGS)
_MOST = flags.DEFINE_integer(
  "most_tokens", 12, "Drafted tokens of the recorded rounds.", lower_bound=1
)
_HEAD = flags.DEFINE_string(
  "head", None, "A head of configs/train_depth.py, to be compared too."
)
BATCHES = (1, 2, 4, 8, 16)
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Of the chance that something is rejected; SpecDec++'s weight makes it large.
REJECTED = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)


def read_costs(paths: list[str], config: ml_collections.ConfigDict) -> Machine:
  """The costs of a config's pair in results of `launch.evaluate`.

  Raises:
    UserError: if a file is not there, is no such result, or of another pair.
    ValueError: if two of them are of the same batch size.
  """
  read = [costs_lib.read(path, "--timings", config) for path in paths]
  return machine_of([costs for timed in read for _, costs in timed])


def compare(
  traces: Traces,
  machine: Machine,
  *,
  batches: Sequence[int] | None = None,
  predictor: tuple[Policy, Any] | None = None,
) -> dict:
  """Plain decoding, every static depth, each rule at its best, the optimum.

  A rule's threshold and width are the best for the batch, found on the traces
  themselves, as the best static depth is; `optimal` is told what a level costs
  and how many rows pay for it, and only its width is chosen. The optimum is of
  one row's rounds, and knows the acceptances of the traces from the first round
  on, which no rule in the loop does.

  Args:
    traces: the rounds.
    machine: what they cost.
    batches: rows of a batch; by default `BATCHES`, or the one that was timed
      if only one was.
    predictor: a trained policy and its parameters, whose own cost is not
      counted.
  """
  alone = machine.batch_size
  batches = batches or (BATCHES if alone is None else (alone,))
  every = np.full(traces.present.shape, traces.depth)
  process = replay.process_of(traces)
  named = lambda text, values: [f"{text}threshold={t:g})" for t in values]

  def tried(names, policy, prices, params=None):
    drafted = replay.depths(
      traces, replay.priced(policy), np.array(prices), params=params
    )
    return dict(zip(names, drafted, strict=True))

  by_rule = {
    name: tried(named(f"{name}(", THRESHOLDS), make(), THRESHOLDS)
    for name, make in (
      ("confidence", depth_lib.confidence), ("survival", depth_lib.survival),
    )
  }  # fmt: skip
  if predictor is not None:
    policy, params = predictor
    by_rule["predicted"] = tried(
      named("predicted(head=HEAD,", REJECTED),
      policy,
      [1 - t for t in REJECTED],
      params,
    )
  widths = range(1, traces.depth + 1)
  result = []
  for rows in batches:
    costs = machine.costs(rows)
    at = lambda drafted, width, rows=rows, costs=costs: replay.rate(
      traces, drafted, costs, rows=rows, width=width
    )
    best = lambda named, at=at: _fastest(
      [
        {"name": name, **at(drafted, width)}
        for name, drafted in named.items()
        for width in widths
      ]
    )
    static = {k: at(every, k) for k in range(traces.depth + 1)}
    most = max(static, key=lambda k: static[k]["tokens_per_second"])
    told = [round(costs.draft / without_levels(costs, w), 3) for w in widths]
    limits, predicted = zip(
      *(replay.optimum(process, costs, width) for width in widths), strict=True
    )
    tables = np.full((len(widths), traces.depth, BINS + 1), 2.0)
    for width, limit in zip(widths, limits, strict=True):
      tables[width - 1, :width] = limit
    known = replay.depths(traces, replay.limited, tables, known=process)
    by_rate = replay.depths(
      traces,
      lambda value, rows=rows: replay.capped(
        depth_lib.by_rate(value[0], rows), value[1]
      ),
      (np.array(told), np.array(widths)),
    )
    result.append(
      {
        "batch_size": rows,
        "draft_cost": float(costs.draft / costs.of_round(0)),
        "plain": static[0]["tokens_per_second"],
        "static": {k: v["tokens_per_second"] for k, v in static.items()},
        "best_static": {"name": str(most), **static[most]},
        **{name: best(named) for name, named in by_rule.items()},
        "optimal": _fastest(
          [
            {
              "name": depth_lib.optimal(cost=cost, rows=rows).name,
              **at(by_rate[width - 1], width),
            }
            for width, cost in zip(widths, told, strict=True)
          ]
        ),
        "optimum": _fastest(
          [
            {
              "name": "table",
              **at(known[width - 1], width),
              "predicted_alone": predicted[width - 1],
              "limits": tables[width - 1, :width].tolist(),
            }
            for width in widths
          ]
        ),
      }
    )
  return {
    "num_rounds": traces.num_rounds,
    "depth": traces.depth,
    "process": {
      name: getattr(process, name).tolist()
      for name in ("first", "following", "acceptance")
    },
    "batches": result,
  }


def _fastest(options: list[dict]) -> dict:
  return max(options, key=lambda one: one["tokens_per_second"])


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  if not cli.TIMINGS.value:
    raise cli.UserError("--timings is required; see --help for an example")
  costs = read_costs(cli.TIMINGS.value, config)
  predictor, width = None, 0
  if _HEAD.value:
    policy = policies.predicted(_HEAD.value)
    predictor, width = (policy, policies.load(_HEAD.value)), policy.width
  folder = results.check_folder("--workdir", cli.WORKDIR.value)
  if folder.is_dir():
    names = ("depth.md", "depth.svg")
    results.check(
      {"--workdir": str(folder / "depth.json")},
      drawn={name: str(folder / name) for name in names},
    )
  models = pair.load(config)
  deepest = registry.recording(registry.of(config), _MOST.value, width=width)
  items = prompts.all_of(
    cli.PROMPTS.value,
    models.tokenizer,
    max_tokens=pair.assemble(config, models, drafting=deepest).room(
      config.max_new_tokens
    ),
  )
  made_by = provenance.of_config(
    config,
    texts=[p.text for p in items],
    files={f"--timings {i}": path for i, path in enumerate(cli.TIMINGS.value)},
  )
  if _HEAD.value:
    read = provenance.hashes({"depth": _HEAD.value})
    made_by["provenance"]["checkpoints"] |= read
  recorded = collect(config, models, items, deepest)
  result = compare(recorded, costs, predictor=predictor) | {
    "num_prompts": len(prompts.distinct(items)),
    **made_by,
  }
  folder.mkdir(parents=True, exist_ok=True)
  results.write_json(str(folder / "depth.json"), result)
  results.write(str(folder / "depth.md"), plots.page(result))
  report.save(lambda: plots.figure(result), folder / "depth.svg")
  print(plots.advice(result))
  print(f"see {folder / 'depth.md'}", file=sys.stderr)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "workdir"))
