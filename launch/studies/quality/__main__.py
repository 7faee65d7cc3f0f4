"""Which lossy rule writes better: Decoding-OPT against Decoding-UNO.

  python -m launch.studies.quality --config=configs/quality.py --output=OUT.json

Every prompt is completed many times by both rules at every epsilon, and once
more without loss; completions are compared in pairs by a score. The win rate of
OPT is given in both readings: the share of comparisons won, and the share of
prompts on which it wins most of them (ties are half a win), with 95% intervals
over prompts, Student's t of the first, Clopper and Pearson's of the second.
Beside it are the rejections saved against lossless decoding, and the exact
total variation of each rule (the config's own rule is not looked at). All of
--prompts are used; `num_prompts` counts the built-in ones without it. A stopped
run goes on with the same command.
"""

import json
import math
import sys

import ml_collections
import numpy as np
import tqdm

from launch import cli, prompts, provenance, results
from launch.build import pair
from launch.results import Journal
from launch.studies.quality import page, scores
from launch.training import corpus
from specjax import intervals
from specjax.runtime import engine
from specjax.state import Origin

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)


def check(config) -> None:
  """Raises ValueError for an experiment that compares nothing."""
  if config.score not in scores.SCORERS:
    raise ValueError(
      f"score must be one of {sorted(scores.SCORERS)}, got {config.score!r}"
    )
  if config.score == "reward" and not config.scorer:
    raise ValueError("score 'reward' needs config.scorer, a model's directory")
  for name in ("num_comparisons", "num_prompts", "prompt_tokens"):
    if config[name] < 1:
      raise ValueError(f"{name} must be >= 1, got {config[name]}")
  good = [
    isinstance(epsilon, (int, float)) and 0 <= epsilon < math.inf
    for epsilon in config.epsilons
  ]
  if not good or not all(good):
    raise ValueError(
      "epsilons must be one or more numbers >= 0, as in (0.1,0.2), got "
      f"{tuple(config.epsilons)}"
    )


def completions_of(config, one: engine.Engine, prompt, *, seed: int, room: int):
  """`num_comparisons` completions of a prompt, each from its own stream."""
  batches = engine.make_batches(
    [
      prompts.Prompt(seed + i, i, prompt.text, prompt.token_ids)
      for i in range(config.num_comparisons)
    ],
    batch_size=config.batch_size,
    max_width=room,
  )
  return [done for batch in batches for done in one.run(batch)[0]]


def compare(config, engines, scorer, prompt, number: int, *, room: int) -> dict:
  """One prompt's scores and counts, for every rule and epsilon.

  Args:
    config: the experiment.
    engines: by rule, what decodes with it.
    scorer: see `launch.studies.quality.scores`.
    prompt: the prompt.
    number: of the prompt; runs of one rule draw from streams of their own.
    room: longest prompt that fits.
  """
  record: dict = {"batch": number, "rules": {}}
  for place, (rule, one) in enumerate(engines.items()):
    seed = (number * len(engines) + place) * config.num_comparisons
    found = completions_of(config, one, prompt, seed=seed, room=room)
    record["rules"][rule] = {
      "scores": scorer(prompt.token_ids, [c.token_ids for c in found]).tolist(),
      "tokens": sum(len(c.token_ids) for c in found),
      "rejections": sum(c.origins.count(Origin.RESIDUAL) for c in found),
      "total_variation": intervals.sum_known(c.total_variation for c in found),
    }
  return record


def win_rates(first: np.ndarray, second: np.ndarray) -> dict:
  """Win rates of the first, from scores `f[prompts, comparisons]` of both."""
  won = (first > second) + 0.5 * (first == second)
  by_prompt = won.mean(axis=1)
  prompts_won = (by_prompt > 0.5) + 0.5 * (by_prompt == 0.5)
  return {
    "comparisons_won": float(won.mean()),
    "comparisons_won_ci": intervals.mean_interval(by_prompt),
    "prompts_won": float(prompts_won.mean()),
    "prompts_won_ci": intervals.share_interval(prompts_won.sum(), len(won)),
  }


def report(config, records: list[dict]) -> list[dict]:
  """One row an epsilon."""
  column = lambda rule, name: np.array(
    [record["rules"][rule][name] for record in records], float
  )
  rate = lambda rule, name: (
    column(rule, name).sum() / column(rule, "tokens").sum()
  )
  lossless = rate("token", "rejections")
  rows = []
  for epsilon in config.epsilons:
    names = {r: f"decoding_{r}(epsilon={epsilon})" for r in page.RULES}
    plain = column("token", "scores")
    opt, uno = (column(names[r], "scores") for r in page.RULES)
    rows.append(
      {
        "epsilon": epsilon,
        **win_rates(opt, uno),
        "opt_against_lossless": win_rates(opt, plain)["comparisons_won"],
        "uno_against_lossless": win_rates(uno, plain)["comparisons_won"],
        "mean_score": {
          "opt": opt.mean(), "uno": uno.mean(), "lossless": plain.mean()
        },
        "rejections_saved": {  # None where there were none to save
          r: 1 - rate(names[r], "rejections") / lossless if lossless else None
          for r in page.RULES
        },
        "total_variation": {
          r: rate(names[r], "total_variation") for r in page.RULES
        },
      }
    )  # fmt: skip
  return rows


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  if not cli.OUTPUT.value:
    raise cli.UserError("--output is required; see --help for an example")
  results.check({"--output": cli.OUTPUT.value}, resumes=True)
  check(config)
  names = ["token"] + [
    f"decoding_{rule}(epsilon={epsilon})"
    for epsilon in config.epsilons
    for rule in page.RULES
  ]
  models, engines = pair.load(config), {}
  for name in names:
    settings = ml_collections.ConfigDict(config.to_dict())
    settings.rule = name
    assembled = pair.assemble(settings, models)
    engines[name] = pair.engine_of(settings, assembled)
  tokenizer = models.tokenizer
  room = assembled.room(config.max_new_tokens)
  if cli.PROMPTS.value:
    items = prompts.distinct(
      prompts.all_of(cli.PROMPTS.value, tokenizer, max_tokens=room)
    )
  else:
    if config.prompt_tokens > room:
      raise ValueError(
        f"prompt_tokens ({config.prompt_tokens}) must be at most {room}: "
        "prompt and completion share the pair's positions"
      )
    items = prompts.first_tokens(
      corpus.held_out_prompts(config.num_prompts),
      tokenizer,
      num_tokens=config.prompt_tokens,
    )
  scorer = scores.SCORERS[config.score](
    config.scorer or config.target, tokenizer
  )
  settings = json.loads(config.to_json_best_effort(sort_keys=True))
  texts = [p.text for p in items]
  made_by = provenance.record(
    models=provenance.checkpoints(config),
    prompts=cli.PROMPTS.value,
    texts=texts,
  )
  asked = {"config": settings, "prompts": provenance.hash_texts(texts)}
  with Journal(cli.OUTPUT.value, asked) as journal:
    for number, prompt in enumerate(
      tqdm.tqdm(items, unit="prompt", disable=not sys.stderr.isatty())
    ):
      if number not in journal.batches:
        journal.add(compare(config, engines, scorer, prompt, number, room=room))
    result = {
      "rows": report(config, [journal.batches[i] for i in range(len(items))]),
      "num_prompts": len(items),
      "config": settings,
      **made_by,
    }
    results.write_json(cli.OUTPUT.value, result)
    journal.finish()
  print(page.table({"": result}))
  return 0


if __name__ == "__main__":
  cli.run(run)
