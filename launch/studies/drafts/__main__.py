r"""Trains several drafts for one target at equal compute, and compares them.

  python -m launch.studies.drafts --config=configs/draft_study.py:shapes \
    --workdir=W --output=OUT.jsonl

A draft is trained for as many steps as `config.flops` pays for (or those that
its changes name: 0 for what a study begins with), exported to
WORKDIR/NAME/model, and decodes prompts from validation files with the target,
in turn with plain decoding. OUT.jsonl gets a line a draft: what it is, what
training gave, the cost of its pass beside the target's, and at every
temperature block efficiency and speed-up with their intervals. With
`config.rounds=0` nothing is timed, and what is accepted at each position of a
draft stands in their place: so in `:heads`, which trains heads on the target's
features beside a draft model. Started again, it goes on where it was, inside a
training too. `launch.tables drafts` draws the table, and
`launch.studies.drafts.plots` acceptance by position.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Sequence

import jax
import ml_collections
import numpy as np

from configs import train_head
from launch import cli, jsonl, prompts, provenance, results
from launch.assembly import pair
from launch.evaluation import questions, result
from launch.results import Journal
from launch.training import corpus, flops, head
from launch.training import run as run_lib
from models import checkpoints
from models.formats.checksums import hash_file
from models.tokenizers import Tokenizer
from specjax import intervals
from specjax.runtime.engine import Completion
from specjax.runtime.requests import make_batches
from specjax.state import Origin

cli.reads(cli.CONFIG, cli.WORKDIR, cli.OUTPUT)


def training_config(config, changes) -> ml_collections.ConfigDict:
  """The config of one draft's training, with its number of steps.

  Args:
    config: the study.
    changes: what is changed in `config.train`; or the kind of a head, `kind`,
      and what is changed in its config, configs/train_head.py.
  """
  kind = changes.get("kind")
  if kind:
    one = head_config(kind, config.train)
    changes = {k: v for k, v in changes.items() if k != "kind"}
  else:
    one = ml_collections.ConfigDict(config.train.to_dict())
  one.update(changes)
  if "num_steps" not in changes:
    if kind:
      per_step = head.step_flops(one)
    else:
      teacher = checkpoints.load_module(one.teacher).config
      per_step = flops.step_flops(one, teacher)
    one.num_steps = max(int(config.flops / per_step), 1)
  one.validate_every = max(one.num_steps, 1)
  one.sample_every = 0
  return one


def head_config(kind: str, train) -> ml_collections.ConfigDict:
  """configs/train_head.py's, trained on what the models of a study are.

  Args:
    kind: of the head, whose learning rate is its own.
    train: what models are trained with; their teacher is the target.
  """
  one = train_head.get_config(kind)
  unshared = ("learning_rate", "init_from", "num_steps")
  shared = [name for name in one if name in train and name not in unshared]
  one.update({name: train[name] for name in shared})
  one.target = train.teacher
  return one


def train_draft(config, folder: pathlib.Path) -> tuple[dict, bool]:
  """Trains and exports one draft; what training gave, and whether it ended."""
  run = run_lib.Run(config, str(folder))
  module, finished = run.train()
  if not finished:
    return {}, False
  run.export(module, str(folder / "model"))
  rows = [row for _, row in jsonl.read(folder / "metrics.jsonl")]
  validated = lambda r: any(k.startswith("validation") for k in r)
  (last,) = [r for r in rows if validated(r)][-1:]
  trained = jax.eval_shape(run.steps.init, jax.random.key(0))
  rates = [r["tokens_per_second"] for r in rows if "tokens_per_second" in r]
  return {
    "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
    "num_steps": config.num_steps,
    "flops": config.num_steps * run.task.step_flops,
    "tokens": last["tokens"],
    "training_seconds": last["tokens"] / statistics.median(rates or [math.inf]),
    **{k: v for k, v in last.items() if k.startswith("validation")},
  }, True


def _asked(config, tokenizer: Tokenizer) -> Sequence[questions.Question]:
  """The beginnings of files as prompts, or questions that fit."""
  if not config.questions:
    return questions.of_prompts(
      prompts.first_tokens(
        corpus.held_out_prompts(config.num_prompts, split="validation"),
        tokenizer,
        num_tokens=config.prompt_tokens,
      )
    )
  every = questions.read(config.questions)
  length = lambda one: len(questions.ask(tokenizer, one, 0, []).token_ids)
  fit = [one for one in every if length(one) <= config.prompt_tokens]
  first = lambda one: dataclasses.replace(one, turns=one.turns[:1])
  chosen = questions.subset(fit, config.num_prompts, seed=0)
  return [first(one) for one in chosen]


def _settings(config, draft: str):
  """The decoding config of a draft, at the first temperature."""
  settings = ml_collections.ConfigDict(config.decode.to_dict())
  settings.drafter, settings.temperature = draft, config.temperatures[0]
  return settings


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


def summary(completions: Sequence[Completion], num_tokens: int) -> dict:
  """Acceptance by position and tokens a target call; intervals over prompts.

  Args:
    completions: one a prompt, of drafts that are chains.
    num_tokens: N, drafted tokens a round.

  Returns:
    `tried`, how often position 1 .. N was judged: all before it were accepted,
    and nothing had ended the text. `accepted`, the share of those that were
    accepted, 0 where none was judged, and `accepted_ci`, its 95% interval or
    None. `block_efficiency` and `block_efficiency_ci`, tokens a target call.
  """
  tried, passed = np.stack(
    [tries(one, num_tokens) for one in completions], axis=1
  )  # [prompts, N] each
  tokens = [len(one.token_ids) for one in completions]
  calls = [one.num_target_calls for one in completions]
  return {
    "tried": tried.sum(0).tolist(),
    "accepted": (passed.sum(0) / np.maximum(tried.sum(0), 1)).tolist(),
    "accepted_ci": [
      intervals.interval([passed[:, i]], [tried[:, i]], limits=(0, 1))
      for i in range(num_tokens)
    ],
    **intervals.ratio(
      "block_efficiency", [tokens], [calls], limits=(1, num_tokens + 1)
    ),
  }


def accepted_with(config, draft: str) -> dict:
  """Acceptance of a draft at each position, on the same prompts."""
  settings = _settings(config, draft)
  models = pair.build(settings)
  one = pair.engine_of(settings, models)
  asked = [
    questions.ask(models.tokenizer, question, 0, [])
    for question in _asked(config, models.tokenizer)
  ]
  batches = make_batches(
    asked, batch_size=settings.batch_size, max_width=config.prompt_tokens
  )
  decoded = {}
  for temperature in config.temperatures:
    at = dataclasses.replace(one, temperature=temperature)  # shares programs
    completions = [c for batch in batches for c in at.run(batch)[0]]
    decoded[f"{temperature:g}"] = summary(completions, config.tokens)
  return {"decoding": decoded}


def decode_with(config, draft: str) -> dict:
  """Measures a draft beside plain decoding, on prompts of validation files."""
  measured = result.of_prompts(
    _settings(config, draft), draft, functools.partial(_asked, config),
    temperatures=config.temperatures, rounds=config.rounds,
  )  # fmt: skip
  decoded: dict[str, dict] = {}
  for temperature in config.temperatures:
    plain, row = [
      r
      for r in measured["runs"]
      if (r["level"], r["temperature"]) == ("all", temperature)
    ]
    decoded[f"{temperature:g}"] = {
      "baseline_tokens_per_second": plain["tokens_per_second"]
    } | {
      name: row[name]
      for name in (
        "block_efficiency", "block_efficiency_ci", "acceptance_rate",
        "expected_acceptance_rate", "tokens_per_second", "speedup",
        "speedup_ci",
      )
    }  # fmt: skip
  timed = measured["costs"][0]["seconds"]
  return {
    "draft_pass_seconds": timed["draft"]["1"],
    "target_pass_seconds": timed["target"]["1"],
    "verify_seconds": timed["target"][str(timed["nodes"])],
    "decoding": decoded,
  }


def settings_of(config) -> dict:
  """Settings that decide a row (`provenance.settings`)."""
  paths = {"target": config.decode.target}
  for name, one in {"all": config.train, **config.drafts}.items():
    for role in ("teacher", "init_from"):
      if one.get(role):
        paths[f"{role} of {name}"] = one[role]
  asked = config.questions and hash_file(pathlib.Path(config.questions))
  read = provenance.hashes(paths)
  return provenance.settings(config, read, questions=asked)


def run(_) -> int:
  """The command."""
  run_lib.quiet()
  config = cli.CONFIG.value
  results.check({}, grown={"--output": cli.OUTPUT.value})
  workdir = results.check_folder("--workdir", cli.WORKDIR.value)
  with Journal(cli.OUTPUT.value, settings_of(config), grows=True) as journal:
    for number, (name, changes) in enumerate(config.drafts.items()):
      if number in journal.batches:
        continue
      folder = workdir / name.replace(", ", "-")
      one = training_config(config, changes.to_dict())
      trained, finished = train_draft(one, folder)
      if not finished:  # SIGTERM
        return cli.UNFINISHED
      folder /= "model"
      kind = changes.get("kind", "model")
      draft = f'{kind}("{folder}", tokens={config.tokens})'
      decode = decode_with if config.rounds else accepted_with
      measured = decode(config, draft)
      models = {"target": config.decode.target, "draft": str(folder)}
      journal.add(
        {
          "batch": number,
          "name": name,
          "changes": changes.to_dict(),
          "num_speculative_tokens": config.tokens,
          **trained,
          **measured,
          **provenance.record(
            models=provenance.hashes(models),
            files={"--config.questions": config.questions or None},
          ),
        }
      )
    rows = [journal.batches[i] for i in range(len(config.drafts))]
    journal.finish([{k: v for k, v in r.items() if k != "batch"} for r in rows])
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "workdir", "output"))
