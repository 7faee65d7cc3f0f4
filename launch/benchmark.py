"""Measures one pair in one run: rates, step costs, and the prediction.

  python -m launch.benchmark --config=configs/embedded.py --output=B.json

What the rules alone cost is another command, `launch.studies.rules.costs`.

Autoregressive, speculative and (if torch and transformers are installed)
transformers' plain and assisted generation take turns on the same prompts, and
so do runs in pieces, whose rounds and passes are timed one by one
(`specjax.runtime.timing`): from these whole runs are predicted
(`predicted_speedup`; `prediction_error` and its interval compare it with the
runs beside which it was timed; all null where `doubts` say which timings
disagree), and `round_seconds` says where a round's time goes. Only ratios
inside one run mean anything: machines drift. The compilation cache is off, so
`compile_seconds` is real. `memory_bandwidth` says how much of the memory's
bandwidth plain decoding reaches (`launch.bandwidth`); it is one line on stderr
too, and null on a mesh.

transformers runs on the CPU, so it is left out where jax runs elsewhere.
`--llama_cpp=ENVIRONMENT/bin/python` measures llama.cpp too, by the package
`llama_cpp` of that environment, on a GGUF target's weights in float32, one
prompt at a time (`launch.llama_cpp_reference`). `ratios` are the medians of our
rates over theirs in the same turns. `--new_tokens` decodes fewer tokens than
config.max_new_tokens, which buffers are made for.
"""

import dataclasses
import json
import sys

import jax
from absl import flags

from launch import (
  bandwidth,
  cli,
  hf_reference,
  llama_cpp_reference,
  prompts,
  provenance,
  rates,
  results,
)
from launch.build import drafters, pair
from specjax import intervals
from specjax.runtime import engine, timing
from specjax.runtime.requests import Settings

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Timed rounds of everything.", lower_bound=1
)
_REFERENCE = flags.DEFINE_bool(
  "reference", True, "Also measure transformers, if installed, on the CPU."
)
_LLAMA_CPP = flags.DEFINE_string(
  "llama_cpp", None, "Also measure llama.cpp, with this Python's `llama_cpp`."
)
_NEW_TOKENS = flags.DEFINE_integer(
  "new_tokens", None, "Decode so many, and not all that buffers hold.",
  lower_bound=1,
)  # fmt: skip
_OTHERS = {"hf_autoregressive": "transformers", "llama_cpp": "llama.cpp"}
_WIDTHS = (1, 2, 4, 6, 8, 12, 16)


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  jax.config.update("jax_compilation_cache_dir", None)
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  if _LLAMA_CPP.value:
    llama_cpp_reference.check(config)
  asked = config.copy_and_resolve_references()
  asked.max_new_tokens = _NEW_TOKENS.value or config.max_new_tokens
  if asked.max_new_tokens > config.max_new_tokens:
    raise cli.UserError("--new_tokens is at most --config.max_new_tokens")
  models = pair.build(config, inputs=True)
  room = models.room(config.max_new_tokens)
  items = prompts.all_of(
    cli.PROMPTS.value, models.tokenizer, max_tokens=room, encoder=models.encoder
  )
  made_by = provenance.record(
    models=provenance.checkpoints(config),
    prompts=cli.PROMPTS.value,
    texts=[p.text for p in items],
  )
  budget = Settings(max_new_tokens=asked.max_new_tokens)
  items = [dataclasses.replace(p, settings=budget) for p in items]
  batches = engine.make_batches(
    items, batch_size=config.batch_size, max_width=room
  )
  engines = {
    "speculative": pair.engine_of(config, models),
    "autoregressive": pair.engine_of(config, models, baseline=True),
  }
  compile_seconds = {
    name: sum(one.compile(b) for b in batches) for name, one in engines.items()
  }
  reference, how = None, models.drafting
  assistant: dict = {}
  if how.reads == "model":
    assistant = dict(draft=how.checkpoint, tokens=how.tree.max_depth)
  paths = filter(None, (config.target, assistant.get("draft")))
  on_cpu = jax.default_backend() == "cpu"
  if _REFERENCE.value and on_cpu and hf_reference.is_available(*paths):
    reference = hf_reference.Reference(
      asked,
      **assistant,
      stop_tokens=models.stop_tokens,
      vocab_size=models.tokenizer.vocab_size,
    )
  # Batches come in the order of their width, on which a pass's time depends.
  typical = batches[len(batches) // 2]
  pieces = timing.Pieces(
    engines["speculative"], engines["autoregressive"],
    draft=models.draft, typical=typical, widths=_WIDTHS,
  )  # fmt: skip
  others: dict = {}
  if _LLAMA_CPP.value:
    others["llama_cpp"] = llama_cpp_reference.LlamaCpp(
      _LLAMA_CPP.value,
      asked,
      stop_tokens=models.stop_tokens,
      slots=batches[-1].width + config.max_new_tokens,
    )
  turns = rates.measure_rates(
    batches, engines | others, reference, rounds=_ROUNDS.value, pieces=pieces
  )
  for one in others.values():
    one.close()
  tree = models.decoder.drafter.tree
  summary = intervals.summarize(turns.units(), max_depth=tree.max_depth)
  costs = pieces.costs()
  memory = None
  if models.mesh is None:  # of one device, whose memory all is in
    state = engines["autoregressive"].prefill(typical, budget=0)
    halfway = int(state.length.max()) + asked.max_new_tokens / 2
    memory = bandwidth.share(
      weight_bytes=bandwidth.weight_bytes(models.params.target),
      cache_bytes=bandwidth.cache_bytes(state.target_cache, halfway),
      rows=typical.rows,
      step_seconds=costs.plain_step,
      bandwidth=bandwidth.of_device(jax.devices()[0]),
    )
  measured = [name for name in _OTHERS if name in turns.tokens]
  same = dict.fromkeys(_OTHERS)
  for name in measured if config.temperature == 0 else ():
    same[name] = turns.alike(name)
    if same[name] < 1:
      print(
        f"{_OTHERS[name]} wrote the same text for {same[name]:.0%} of the "
        "prompts",
        file=sys.stderr,
      )
  passes = costs.draft_passes
  # On a mesh a head's drafting is not timed apart.
  untimed = models.draft is None and models.params.draft is not None
  untimed &= costs.proposal is None
  result = {
    "autoregressive_tokens_per_second": turns.rate("autoregressive"),
    "speculative_tokens_per_second": turns.rate("speculative"),
    "speedup": summary["speedup"],
    "speedup_ci": summary["speedup_ci"],
    "rule": models.decoder.rule.name,
    "lossless": models.decoder.rule.lossless,
    "total_variation": summary["total_variation"],
    **rates.prediction(turns, pieces),
    "hf_autoregressive_tokens_per_second": turns.rate("hf_autoregressive"),
    "hf_assisted_tokens_per_second": turns.rate("hf_assisted"),
    "hf_identical_completions": same["hf_autoregressive"],
    "llama_cpp_tokens_per_second": turns.rate("llama_cpp"),
    "llama_cpp_identical_completions": same["llama_cpp"],
    "ratios": {
      other: {name: turns.over(name, other) for name in engines}
      for other in measured
    },
    "block_efficiency": summary["block_efficiency"],
    "acceptance_rate": summary["acceptance_rate"],
    "expected_acceptance_rate": summary["expected_acceptance_rate"],
    "prefill_seconds": costs.prefill,
    "baseline_prefill_seconds": costs.plain_prefill,
    "dispatch_seconds": costs.dispatch,
    "draft_step_seconds": costs.draft[passes[-1]] if passes else None,
    "draft_forwards_seconds": None if untimed else costs.drafting,
    "verify_seconds": costs.target[costs.nodes],
    "autoregressive_forward_seconds": costs.target[1],
    "autoregressive_step_seconds": costs.plain_step,
    "step_seconds": costs.step,
    "round_seconds": costs.attribution,
    "loop_overhead": None if untimed else costs.step / costs.forwards,
    "autoregressive_loop_overhead": costs.plain_step / costs.target[1],
    "target_pass_seconds": costs.target,
    "memory_bandwidth": memory,
    "compile_seconds": sum(compile_seconds.values()),
    "compile_seconds_by_system": compile_seconds,
    "drafter": drafters.canonical(config),
    "num_speculative_tokens": tree.max_depth,
    "rounds": _ROUNDS.value,
    "new_tokens": asked.max_new_tokens,
    "num_prompts": len(prompts.distinct(items)),
    "config": json.loads(config.to_json_best_effort()),
    **made_by,
    "reference": reference.versions if reference else None,
    **{name: one.versions for name, one in others.items()},
  }
  if memory:
    print(bandwidth.row(memory), file=sys.stderr)
  results.show_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run)
