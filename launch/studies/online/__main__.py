r"""Does a draft that learns follow its text from domain to domain?

  python -m launch.studies.online --config=configs/online_study.py:prose \
    --output=docs/online/prose.json

Streams of prompts whose domain changes (`config.streams`) are completed by the
target with three drafts: one that stays as it is (frozen), one that learns
between rounds (online; it begins each stream as the frozen one), and for every
domain one that was trained on the target's completions of that domain before,
in the same way, and then stays as it is (offline). OUT.json has for every batch
what was emitted, drafted and accepted, and what updates took; of every block
the acceptance beyond its first `config.after` tokens, and how far it is above
the frozen draft's, with a 95% interval over batches; OUT.svg draws acceptance
over time. A run that was stopped goes on with the streams that are left.
`launch.tables online` draws the tables.
"""

import dataclasses
import json
import os

import ml_collections

from launch import cli, figures, provenance, results
from launch.build import pair
from launch.results import Journal
from launch.studies.online import decoding, domains, page, plots, summary
from specjax.runtime.engine import Engine

cli.reads(cli.CONFIG, cli.OUTPUT)

# In this order; the offline draft is one for each domain.
DRAFTS = ("frozen", "online", "offline")


def check(config) -> None:
  """Raises ValueError for a study of nothing."""
  for name in ("prompt_tokens", "offline_tokens", "after"):
    if config[name] < 1:
      raise ValueError(f"{name} must be >= 1, got {config[name]}")
  for name, stream in config.streams.items():
    if not stream.domains or stream.tokens <= config.after:
      raise ValueError(
        f"stream {name!r} needs domains, and more tokens of each than "
        f"config.after ({config.after}), got {tuple(stream.domains)} and "
        f"{stream.tokens}"
      )
    for domain in stream.domains:
      domains.texts(domain, training=False)


def learning(config, models: pair.Models, programs: dict) -> Engine:
  """An engine whose draft begins as its checkpoint is, and learns."""
  one = pair.engine_of(config, pair.assemble(config, models, learns=True))
  return dataclasses.replace(one, programs=programs)


def frozen(one: Engine) -> Engine:
  """The same engine, its draft as it is now."""
  assert one.learner is not None
  return dataclasses.replace(one, params=one.learner.params, learner=None)


def run_stream(
  config, models: pair.Models, draft: str, blocks: list[str], programs: dict
) -> list[list[dict]]:
  """The batches of each block of a stream, with one of the drafts.

  Args:
    config: the study, with `tokens` of a block.
    models: of the pair.
    draft: one of `DRAFTS`.
    blocks: the domains.
    programs: compiled by another engine of the study, and shared.
  """
  begun = learning(config, models, programs)
  engines = dict.fromkeys(blocks, begun)
  if draft == "frozen":
    engines = dict.fromkeys(blocks, frozen(begun))
  elif draft == "offline":
    for domain in dict.fromkeys(blocks):
      one = learning(config, models, programs)
      waiting = decoding.Prompts(config, models, training=True)
      decoding.decode_block(one, waiting, domain, config.offline_tokens)
      engines[domain] = frozen(one)
  waiting = decoding.Prompts(config, models, training=False)
  return [
    decoding.decode_block(engines[domain], waiting, domain, config.tokens)
    for domain in blocks
  ]


def result_of(config, records: dict) -> dict:
  """The streams of the result, of all records by stream and draft."""
  found = {}
  for name, stream in config.streams.items():
    runs = {draft: records[f"{name} {draft}"]["runs"] for draft in DRAFTS}
    blocks = list(stream.domains)
    found[name] = {
      "domains": blocks,
      "blocks": summary.blocks_of(blocks, runs, config.after),
      "whole": summary.whole(runs),
      "runs": runs,
    }
  return found


def run(_) -> int:
  """The command."""
  config, output = cli.CONFIG.value, cli.OUTPUT.value
  if not output:
    raise cli.UserError("--output is required; see --help for an example")
  drawing = f"{os.path.splitext(output)[0]}.svg"
  results.check(
    {"--output": output}, drawn={"the figure": drawing}, resumes=True
  )
  check(config)
  models, programs = pair.load(config), {}
  settings = json.loads(config.to_json_best_effort(sort_keys=True))
  with Journal(output, settings) as journal:
    for name, stream in config.streams.items():
      own = ml_collections.ConfigDict(config.to_dict())
      own.tokens = stream.tokens
      for draft in DRAFTS:
        if (key := f"{name} {draft}") not in journal.batches:
          runs = run_stream(own, models, draft, list(stream.domains), programs)
          journal.add({"batch": key, "runs": runs})
    result = {
      "streams": result_of(config, journal.batches),
      "config": settings,
      **provenance.record(models=provenance.checkpoints(config)),
    }
    figures.save(lambda: plots.figure(result["streams"]), drawing)
    results.write_json(output, result)
    journal.finish()
  print(page.table({"": result}))
  return 0


if __name__ == "__main__":
  cli.run(run)
