r"""Trains several drafts for one target at equal compute, and compares them.

  python -m launch.studies.drafts --config=configs/draft_study.py:shapes \
    --workdir=W --output=OUT.jsonl

A draft is trained for as many steps as `config.flops` pays for (or those that
its changes name: 0 for what a study begins with), exported to
WORKDIR/NAME/model, and decodes prompts from validation files with the target,
in turn with plain decoding. OUT.jsonl gets a line a draft: what it is, what
training gave, the cost of its pass beside the target's, and at every
temperature block efficiency and speed-up with their intervals. Started again,
it goes on where it was, inside a training too. `launch.tables drafts` draws
the table.
"""

import json
import math
import pathlib
import statistics

import jax
import ml_collections
from flax import nnx

from launch import cli, outputs, pair, prompts, provenance, rates
from launch.journal import Journal
from launch.training import corpus, flops
from launch.training import run as run_lib
from models import checkpoints
from specjax import engine, metrics, timing

cli.reads(cli.CONFIG, cli.WORKDIR, cli.OUTPUT)


def training_config(config, changes) -> ml_collections.ConfigDict:
  """The config of one draft's training, with its number of steps.

  Args:
    config: the study.
    changes: what is changed in `config.train`.
  """
  one = ml_collections.ConfigDict(config.train.to_dict())
  one.update(changes)
  teacher = checkpoints.load_module(one.teacher).config
  if "num_steps" not in changes:
    per_step = flops.step_flops(one, teacher)
    one.num_steps = max(int(config.flops / per_step), 1)
  one.validate_every = max(one.num_steps, 1)
  one.sample_every = 0
  return one


def train_draft(config, folder: pathlib.Path) -> tuple[dict, bool]:
  """Trains and exports one draft; what training gave, and whether it ended."""
  run = run_lib.Run(config, str(folder))
  module, finished = run.train()
  if not finished:
    return {}, False
  run.export(module, str(folder / "model"))
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  (last,) = [r for r in rows if "validation_next_token_loss" in r][-1:]
  rates = [r["tokens_per_second"] for r in rows if "tokens_per_second" in r]
  return {
    "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(module))),
    "num_steps": config.num_steps,
    "flops": config.num_steps * run.step_flops(),
    "tokens": last["tokens"],
    "training_seconds": last["tokens"] / statistics.median(rates or [math.inf]),
    **{k: v for k, v in last.items() if k.startswith("validation")},
  }, True


def decode_with(config, draft: str) -> dict:
  """Measures a draft beside plain decoding, on prompts of validation files."""
  found: dict[str, dict] = {}
  costs = None
  for temperature in config.temperatures:
    settings = ml_collections.ConfigDict(config.decode.to_dict())
    settings.draft, settings.temperature = draft, temperature
    models = pair.build(settings)
    items = prompts.first_tokens(
      corpus.held_out_prompts(config.num_prompts, split="validation"),
      models.tokenizer,
      num_tokens=config.prompt_tokens,
    )
    batches = engine.make_batches(
      items, batch_size=settings.batch_size, max_width=config.prompt_tokens
    )
    engines = {
      "speculative": pair.engine_of(settings, models),
      "autoregressive": pair.engine_of(settings, models, baseline=True),
    }
    for batch in batches:
      for one in engines.values():
        one.compile(batch)
    pieces = timing.Pieces(
      engines["speculative"], engines["autoregressive"],
      draft=models.draft, typical=batches[-1],
    )  # fmt: skip
    turns = rates.measure_rates(
      batches, engines, None, rounds=config.rounds,
      pieces=None if costs else pieces,
    )  # fmt: skip
    summary = metrics.summarize(turns.units())
    found[f"{temperature:g}"] = {
      name: summary[name]
      for name in (
        "block_efficiency", "block_efficiency_ci", "acceptance_rate",
        "expected_acceptance_rate",
        "tokens_per_second", "baseline_tokens_per_second", "speedup",
        "speedup_ci",
      )
    }  # fmt: skip
    costs = costs or pieces.costs()
  return {
    "draft_pass_seconds": costs.draft[1],
    "target_pass_seconds": costs.target[1],
    "verify_seconds": costs.target[costs.nodes],
    "decoding": found,
  }


def run(_) -> int:
  """The command."""
  run_lib.quiet()
  config = cli.CONFIG.value
  if not cli.OUTPUT.value:
    raise cli.UserError("--output is required; see --help for an example")
  outputs.check({}, grown={"--output": cli.OUTPUT.value})
  workdir = outputs.check_folder("--workdir", cli.WORKDIR.value)
  settings = json.loads(config.to_json_best_effort())
  with Journal(cli.OUTPUT.value, settings, grows=True) as journal:
    for number, (name, changes) in enumerate(config.drafts.items()):
      if number in journal.batches:
        continue
      folder = workdir / name.replace(", ", "-")
      one = training_config(config, changes.to_dict())
      trained, finished = train_draft(one, folder)
      if not finished:  # SIGTERM
        return 0
      draft = str(folder / "model")
      measured = decode_with(config, draft)
      models = {"target": config.decode.target, "draft": draft}
      journal.add(
        {
          "batch": number,
          "name": name,
          "changes": changes.to_dict(),
          "num_speculative_tokens": config.decode.num_speculative_tokens,
          **trained,
          **measured,
          **provenance.record(models=provenance.hashes(models)),
        }
      )
    rows = [journal.batches[i] for i in range(len(config.drafts))]
    journal.finish([{k: v for k, v in r.items() if k != "batch"} for r in rows])
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "workdir"))
