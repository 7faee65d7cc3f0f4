"""Measures one pair in one run: rates, step costs, and the prediction.

  python -m launch.benchmark --config=configs/embedded.py --output=B.json
  python -m launch.benchmark --suite=rules --output=costs.json

The second line measures the rules alone, without a pair
(`launch.verifying.costs`).

Autoregressive, speculative and (if torch and transformers are installed)
transformers' plain and assisted generation take turns on the same prompts;
whole steps and their parts are timed apart. Only ratios inside one run mean
anything: machines drift. The compilation cache is off, so `compile_seconds` is
real. `memory_bandwidth` says how much of the memory's bandwidth plain decoding
reaches (`launch.measuring.bandwidth`); it is one line on stderr too, and null
on a mesh.

transformers runs on the CPU, so it is left out where jax runs elsewhere.
"""

import json
import os
import platform
import sys

import jax
import jaxlib
import numpy as np
from absl import flags

from launch import main, terminal
from launch.decoding import engine, pair, prompts
from launch.journal import check_writable, write_json
from launch.measuring import bandwidth, hf_reference, timing
from launch.verifying import costs
from specjax import metrics

main.reads(main.CONFIG, main.PROMPTS, main.OUTPUT)
flags.adopt_module_key_flags(costs)
_SUITE = flags.DEFINE_enum(
  "suite", "pair", ["pair", "rules"], "What to measure: a pair, or the rules."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Timed rounds of everything.", lower_bound=1
)
_REFERENCE = flags.DEFINE_bool(
  "reference", True, "Also measure transformers, if installed, on the CPU."
)
_WIDTHS = (1, 2, 4, 6, 8, 12, 16)


def machine() -> dict:
  """Versions and hardware, for the record."""
  model = platform.processor()
  info = "/proc/cpuinfo"
  if os.path.exists(info):
    with open(info, encoding="utf-8") as lines:
      names = [x.split(":", 1)[1].strip() for x in lines if "model name" in x]
    model = names[0] if names else model
  return {
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
    "backend": jax.default_backend(),
    "devices": [d.device_kind for d in jax.devices()],
    "processor": model,
    "cores": len(os.sched_getaffinity(0)),
    "system": platform.platform(),
  }


def paired_units(timings, last, rounds: int) -> list[metrics.Unit]:
  """One measured unit a batch, from what `measure_rates` returns."""
  per_round = lambda name, number: (
    last[name, number],
    timings[name][number][1] / rounds,
  )
  return [
    engine.unit_of(
      *per_round("speculative", number), per_round("autoregressive", number)
    )
    for number in range(len(timings["speculative"]))
  ]


def measure_rates(batches, engines, reference, *, rounds: int):
  """Decodes every batch with every system, in turn.

  Args:
    batches: what to decode.
    engines: {"speculative": .., "autoregressive": ..}, compiled.
    reference: a `hf_reference.Reference` or None.
    rounds: passes over the batches, after one that warms up.

  Returns:
    `{system: [(tokens, seconds) of each batch]}`, summed over the rounds (a
    round repeats the same prompts: it is no new sample), and
    `{(system, batch number): completions}` of the last round.
  """
  systems = {
    name: lambda batch, one=one: one.run(batch) for name, one in engines.items()
  }
  if reference is not None:
    systems["hf_autoregressive"] = lambda batch: reference.run(
      batch, assisted=False
    )
    if reference.can_assist and all(b.rows == 1 for b in batches):
      systems["hf_assisted"] = lambda batch: reference.run(batch, assisted=True)
  timings = {name: [(0, 0.0)] * len(batches) for name in systems}
  last = {}
  rng = np.random.default_rng(0)
  for index in range(rounds + 1):
    for number, batch in enumerate(batches):
      for name in rng.permutation(list(systems)).tolist():
        out, seconds = systems[name](batch)
        ids = [x if isinstance(x, list) else x.token_ids for x in out]
        last[name, number] = out
        if index:
          tokens, total = timings[name][number]
          timings[name][number] = (
            tokens + sum(map(len, ids)),
            total + seconds,
          )
  return timings, last


def rate(timings: list[tuple[int, float]]) -> float:
  """Tokens per second over all timed batches."""
  return sum(t for t, _ in timings) / sum(s for _, s in timings)


def run(_) -> int:
  """The command."""
  if _SUITE.value == "rules":
    main.refuse_with("--suite=rules", main.CONFIG, main.PROMPTS, _REFERENCE)
    return costs.run(rounds=_ROUNDS.value, machine=machine())
  if main.CONFIG.value is None:
    raise main.UserError("--config is required; see --help for an example")
  main.refuse_with("--suite=pair", *costs.FLAGS)
  return _measure_pair(pair.settled(main.CONFIG.value))


def _measure_pair(config) -> int:
  jax.config.update("jax_compilation_cache_dir", None)
  if main.OUTPUT.value:
    check_writable(main.OUTPUT.value)
  models = pair.build(config)
  room = models.room(config.max_new_tokens)
  items = prompts.all_of(main.PROMPTS.value, models.tokenizer, max_tokens=room)
  batches = prompts.make_batches(
    items, batch_size=config.batch_size, max_width=room
  )
  engines = {
    "speculative": engine.from_config(config, models),
    "autoregressive": engine.from_config(config, models, baseline=True),
  }
  compile_seconds = {
    name: sum(one.compile(b) for b in batches) for name, one in engines.items()
  }
  reference = None
  on_cpu = jax.default_backend() == "cpu"
  if _REFERENCE.value and on_cpu and hf_reference.is_available(config):
    reference = hf_reference.Reference(config, stop_tokens=models.stop_tokens)
  timings, last = measure_rates(
    batches, engines, reference, rounds=_ROUNDS.value
  )
  summary = metrics.summarize(paired_units(timings, last, _ROUNDS.value))

  # Batches come in the order of their width, on which a pass's time depends.
  typical = batches[len(batches) // 2]
  costs = timing.measure_step(
    engines["speculative"],
    engines["autoregressive"],
    typical,
    drafter_name=config.drafter,
    rounds=max(5, _ROUNDS.value),
  )
  memory = None
  if models.mesh is None:  # of one device, whose memory all is in
    memory = bandwidth.share(
      weight_bytes=bandwidth.weight_bytes(models.params.target),
      cache_bytes=bandwidth.cache_bytes(
        engines["autoregressive"].prefill(typical, budget=0).target_cache
      ),
      rows=typical.rows,
      step_seconds=costs.plain_step,
      bandwidth=bandwidth.of_device(jax.devices()[0]),
    )
  prefill_seconds = timing.alternate(
    {
      name: lambda one=one: jax.block_until_ready(one.prefill(typical))
      for name, one in engines.items()
    },
    rounds=max(5, _ROUNDS.value),
  )
  curve = timing.verify_curve(
    engines["autoregressive"], typical, widths=_WIDTHS,
    rounds=max(5, _ROUNDS.value),
  )  # fmt: skip

  # Prediction: costs of the passes timed alone, times the target calls that the
  # acceptance gave. All rows of a batch take part until its last row is done,
  # so seconds are those of its longest row.
  predicted, predicted_plain, tokens = 0.0, 0.0, 0
  for number in range(len(batches)):
    done = last["speculative", number]
    plain = last["autoregressive", number]
    predicted += (
      prefill_seconds["speculative"]
      + max(c.num_target_calls for c in done) * costs.forwards
    )
    predicted_plain += (
      prefill_seconds["autoregressive"]
      + max(len(c.token_ids) for c in plain) * costs.target[1]
    )
    tokens += sum(len(c.token_ids) for c in done)
  plain_tokens = sum(
    len(c.token_ids)
    for number in range(len(batches))
    for c in last["autoregressive", number]
  )
  hf_rate = lambda name: rate(timings[name]) if name in timings else None
  same = None
  if reference is not None and config.temperature == 0:
    same = sum(
      ours.token_ids == theirs
      for number in range(len(batches))
      for ours, theirs in zip(
        last["autoregressive", number],
        last["hf_autoregressive", number],
        strict=True,
      )
    ) / len(items)
  passes = costs.draft_passes
  result = {
    "autoregressive_tokens_per_second": rate(timings["autoregressive"]),
    "speculative_tokens_per_second": rate(timings["speculative"]),
    "speedup": summary["speedup"],
    "speedup_ci": summary["speedup_ci"],
    "hf_autoregressive_tokens_per_second": hf_rate("hf_autoregressive"),
    "hf_assisted_tokens_per_second": hf_rate("hf_assisted"),
    "hf_identical_completions": same,
    "block_efficiency": summary["block_efficiency"],
    "acceptance_rate": summary["acceptance_rate"],
    "expected_acceptance_rate": summary["expected_acceptance_rate"],
    "prefill_seconds": prefill_seconds["speculative"],
    "baseline_prefill_seconds": prefill_seconds["autoregressive"],
    "draft_step_seconds": costs.draft[passes[-1]] if passes else None,
    "draft_forwards_seconds": sum(costs.draft[t] for t in passes),
    "verify_seconds": costs.target[max(costs.target)],
    "autoregressive_forward_seconds": costs.target[1],
    "autoregressive_step_seconds": costs.plain_step,
    "step_seconds": costs.step,
    "loop_overhead": costs.step / costs.forwards,
    "autoregressive_loop_overhead": costs.plain_step / costs.target[1],
    "target_pass_seconds": curve,
    "memory_bandwidth": memory,
    "compile_seconds": sum(compile_seconds.values()),
    "compile_seconds_by_system": compile_seconds,
    "predicted_speedup": (tokens / predicted)
    / (plain_tokens / predicted_plain),
    "rounds": _ROUNDS.value,
    "num_prompts": len(items),
    "config": json.loads(config.to_json_best_effort()),
    "machine": machine(),
    "reference": reference.versions if reference else None,
  }
  if main.OUTPUT.value:
    write_json(main.OUTPUT.value, result)
  if memory:
    print(bandwidth.row(memory), file=sys.stderr)
  terminal.console().print_json(json.dumps(result))
  return 0


if __name__ == "__main__":
  main.run(run, required=())
