"""Measures one pair in one run: rates, step costs, and the prediction.

  python -m launch.benchmark --config=configs/embedded.py --output=B.json
  python -m launch.benchmark --suite=rules --output=costs.json

The second line measures the rules alone, without a pair
(`launch.verifying.costs`).

Autoregressive, speculative and (if torch and transformers are installed)
transformers' plain and assisted generation take turns on the same prompts, and
so do runs in pieces, whose rounds and passes are timed one by one
(`launch.measuring.timing`): from these whole runs are predicted
(`predicted_speedup`; `prediction_error` and its interval compare it with the
runs beside which it was timed), and `round_seconds` says where a round's time
goes. Only ratios inside one run mean anything: machines drift. The compilation
cache is off, so `compile_seconds` is real. `memory_bandwidth` says how much of
the memory's bandwidth plain decoding reaches (`launch.measuring.bandwidth`); it
is one line on stderr too, and null on a mesh.

transformers runs on the CPU, so it is left out where jax runs elsewhere.
"""

import dataclasses
import json
import sys

import jax
import numpy as np
from absl import flags

from launch import main, outputs, provenance
from launch.decoding import engine, pair, prompts
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
  """What systems decoded in turn.

  Attributes:
    tokens, seconds: by system, `[rounds, batches]`.
    last: by system and number of the batch, completions of the last round.
  """

  tokens: dict[str, np.ndarray]
  seconds: dict[str, np.ndarray]
  last: dict[tuple[str, int], list]

  def rate(self, name: str) -> float | None:
    """Tokens per second of a system over all rounds; None if it is not here."""
    if name not in self.tokens:
      return None
    return float(self.tokens[name].sum() / self.seconds[name].sum())

  def units(self, name: str = "speculative") -> list[metrics.Unit]:
    """A system beside plain decoding, a measured unit a batch.

    A round repeats the same prompts: it is no new sample, and means count.
    """
    of = lambda who, number: (
      self.last[who, number],
      float(self.seconds[who][:, number].mean()),
    )
    return [
      engine.unit_of(*of(name, number), of("autoregressive", number))
      for number in range(self.seconds[name].shape[1])
    ]


def measure_rates(
  batches, engines, reference, *, rounds: int, pieces=None
) -> Turns:
  """Decodes every batch with every system, in turn.

  Args:
    batches: what to decode.
    engines: {name: engine}, compiled, one of them "autoregressive".
    reference: a `hf_reference.Reference` or None.
    rounds: passes over the batches, after one that warms up.
    pieces: a `timing.Pieces` of the engines "speculative" and "autoregressive"
      that takes its turns too, or None.

  Returns:
    The `Turns`.
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
  blank = lambda: {name: np.zeros((rounds, len(batches))) for name in systems}
  turns = Turns(tokens=blank(), seconds=blank(), last={})
  rng = np.random.default_rng(0)
  for index in range(rounds + 1):
    for number, batch in enumerate(batches):
      order = rng.permutation([*systems, *([None] if pieces else [])]).tolist()
      if not index:  # in pieces last: it is asked how many rounds there are
        order.sort(key=lambda name: name is None)
      for name in order:
        if name is None:
          calls = {
            who: max(one.num_target_calls for one in turns.last[who, number])
            for who in ("speculative", "autoregressive")
          }
          pieces.add(batch, calls, index=index, number=number)
          continue
        out, seconds = systems[name](batch)
        turns.last[name, number] = out
        if index:
          ids = [x if isinstance(x, list) else x.token_ids for x in out]
          turns.tokens[name][index - 1, number] = sum(map(len, ids))
          turns.seconds[name][index - 1, number] = seconds
  return turns


def prediction(turns: Turns, pieces: timing.Pieces) -> dict:
  """The speed-up that runs in pieces predict, beside the one measured.

  Every run in pieces stands beside a whole run of the same prompts in the same
  round, so that the interval of the error has one unit for each.
  """
  names = ("speculative", "autoregressive")
  whole = {name: turns.seconds[name].ravel() for name in names}
  should = {name: pieces.predicted(name).ravel() for name in names}
  rate = lambda seconds, name: turns.tokens[name].sum() / seconds[name].sum()
  speedup = lambda seconds: rate(seconds, names[0]) / rate(seconds, names[1])
  interval = metrics.interval(
    [whole["speculative"], should["autoregressive"]],
    [should["speculative"], whole["autoregressive"]],
  )
  return {
    "predicted_speedup": speedup(should),
    "prediction_error": speedup(should) / speedup(whole) - 1,
    "prediction_error_ci": interval and [end - 1 for end in interval],
  }


def run(_) -> int:
  """The command."""
  if _SUITE.value == "rules":
    main.refuse_with("--suite=rules", main.CONFIG, main.PROMPTS, _REFERENCE)
    return costs.run(rounds=_ROUNDS.value)
  if main.CONFIG.value is None:
    raise main.UserError("--config is required; see --help for an example")
  main.refuse_with("--suite=pair", *costs.FLAGS)
  return _measure_pair(pair.settled(main.CONFIG.value))


def _measure_pair(config) -> int:
  jax.config.update("jax_compilation_cache_dir", None)
  outputs.check({"--output": main.OUTPUT.value}, stdout=True)
  models = pair.build(config)
  room = models.room(config.max_new_tokens)
  items = prompts.all_of(main.PROMPTS.value, models.tokenizer, max_tokens=room)
  made_by = provenance.record(
    models=provenance.checkpoints(config),
    prompts=main.PROMPTS.value,
    texts=[p.text for p in items],
  )
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
    reference = hf_reference.Reference(
      config,
      stop_tokens=models.stop_tokens,
      vocab_size=models.tokenizer.vocab_size,
    )
  # Batches come in the order of their width, on which a pass's time depends.
  typical = batches[len(batches) // 2]
  pieces = timing.Pieces(
    engines["speculative"], engines["autoregressive"],
    drafter_name=config.drafter, typical=typical, widths=_WIDTHS,
  )  # fmt: skip
  turns = measure_rates(
    batches, engines, reference, rounds=_ROUNDS.value, pieces=pieces
  )
  summary = metrics.summarize(turns.units())
  costs = pieces.costs()
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
  same = None
  if reference is not None and config.temperature == 0:
    same = sum(
      ours.token_ids == theirs
      for number in range(len(batches))
      for ours, theirs in zip(
        turns.last["autoregressive", number],
        turns.last["hf_autoregressive", number],
        strict=True,
      )
    ) / len(items)
    if same < 1:
      print(
        f"transformers wrote the same text for {same:.0%} of the prompts",
        file=sys.stderr,
      )
  passes = costs.draft_passes
  result = {
    "autoregressive_tokens_per_second": turns.rate("autoregressive"),
    "speculative_tokens_per_second": turns.rate("speculative"),
    "speedup": summary["speedup"],
    "speedup_ci": summary["speedup_ci"],
    "rule": config.rule,
    "lossless": models.decoder.rule.lossless,
    "total_variation": summary["total_variation"],
    **prediction(turns, pieces),
    "hf_autoregressive_tokens_per_second": turns.rate("hf_autoregressive"),
    "hf_assisted_tokens_per_second": turns.rate("hf_assisted"),
    "hf_identical_completions": same,
    "block_efficiency": summary["block_efficiency"],
    "acceptance_rate": summary["acceptance_rate"],
    "expected_acceptance_rate": summary["expected_acceptance_rate"],
    "prefill_seconds": costs.prefill,
    "baseline_prefill_seconds": costs.plain_prefill,
    "dispatch_seconds": costs.dispatch,
    "draft_step_seconds": costs.draft[passes[-1]] if passes else None,
    "draft_forwards_seconds": sum(costs.draft[t] for t in passes),
    "verify_seconds": costs.target[costs.nodes],
    "autoregressive_forward_seconds": costs.target[1],
    "autoregressive_step_seconds": costs.plain_step,
    "step_seconds": costs.step,
    "round_seconds": costs.attribution,
    "loop_overhead": costs.step / costs.forwards,
    "autoregressive_loop_overhead": costs.plain_step / costs.target[1],
    "target_pass_seconds": costs.target,
    "memory_bandwidth": memory,
    "compile_seconds": sum(compile_seconds.values()),
    "compile_seconds_by_system": compile_seconds,
    "rounds": _ROUNDS.value,
    "num_prompts": len(items),
    "config": json.loads(config.to_json_best_effort()),
    **made_by,
    "reference": reference.versions if reference else None,
  }
  if memory:
    print(bandwidth.row(memory), file=sys.stderr)
  outputs.show_json(main.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  main.run(run, required=())
