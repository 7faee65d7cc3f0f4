r"""Does speculation pay for this pair, and why: one page of numbers.

  python -m launch.studies.report --config=configs/embedded.py \
    --config.temperature=1.0 --prompts=IN.jsonl --workdir=W

writes WORKDIR/report.md (the answer in its first sentence), report.json (every
number) and its figures. It decodes the prompts plainly and with several numbers
N of drafted tokens, all in turn; times rounds and passes between the rounds of
such runs; runs draft and target along the decoded text for their laws; and
holds what follows from the one against the other: rejections against Theorem 1
of Yin et al. (2024), block efficiency and tokens per second against
`specjax.theory.throughput`.

A model drafts one path (drafter model or layer_skip), and rule token verifies
it: that is what the theory is about. Which depth policy suits the pair, and
what it would gain, is predicted from traces of its drafts
(`launch.studies.depth`).
"""

import functools
import json
import sys

import jax
from absl import flags

from launch import cli, figures, prompts, provenance, results
from launch.build import drafters, pair
from launch.studies.depth import compare, machine, traces
from launch.studies.report import findings, page

cli.reads(cli.CONFIG, cli.PROMPTS, cli.WORKDIR)
_SWEEP = flags.DEFINE_list(
  "sweep_tokens",
  ["1", "2", "3", "4", "6", "8", "10", "12"],
  "Each N to measure.",
)
_ROUNDS = flags.DEFINE_integer(
  "report_rounds",
  9,
  "Timed turns of everything.",
  lower_bound=1,
)


def check(config) -> list[int]:
  """Each N to sweep; ValueError for a config that the theory is not about."""
  drafting = drafters.of(config)
  drawn = (
    drafting.reads in ("model", "layers", "weights") and drafting.takes_policy
  )
  static = not (drafting.policy or drafting.lengths or drafting.learning)
  if config.rule != "token" or not (
    drawn and static and drafting.tree.is_chain
  ):
    raise ValueError(
      "a report is of rule 'token' on one path of a static depth that a model "
      f"draws, model(tokens=N) or layer_skip(tokens=N), got {config.drafter!r} "
      "(`launch.studies.rules` compares rules and trees)"
    )
  try:
    sweep = [int(text) for text in _SWEEP.value]
  except ValueError:
    sweep = []
  if not sweep or min(sweep) < 1:
    raise ValueError(
      f"--sweep_tokens must be positive integers, got {_SWEEP.value}"
    )
  if max(sweep) > config.max_new_tokens:
    raise ValueError(
      f"--sweep_tokens must be at most config.max_new_tokens "
      f"({config.max_new_tokens}), got {','.join(_SWEEP.value)}"
    )
  return sweep


def policies(config, models, items, found: dict, *, most: int) -> dict | None:
  """What each depth policy would gain; None if none fits the drafter.

  Nor is there anything to tell of timings that disagree.
  """
  if found["costs"].get("doubts"):
    return None
  deepest = drafters.recording(drafters.of(config), most)
  recorded = traces.collect(config, models, items, deepest)
  return compare.compare(
    recorded, machine.machine_of_report(found), batches=(config.batch_size,)
  )


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  sweep = check(config)
  folder = results.check_folder("--workdir", cli.WORKDIR.value)
  if folder.is_dir():
    names = ("report.md", "throughput.svg", "acceptance.svg", "distances.svg")
    results.check(
      {"--workdir": str(folder / "report.json")},
      drawn={name: str(folder / name) for name in names},
    )
  jax.config.update("jax_compilation_cache_dir", None)
  models, drafting = pair.load(config), drafters.of(config)
  chosen = drafting.tree.max_depth
  pairs = {
    n: pair.assemble(config, models, drafting=drafters.with_tokens(drafting, n))
    for n in {*sweep, chosen}
  }
  if pairs[chosen].draft is None:
    raise ValueError(
      "a report compares the laws of a draft and a target, and with "
      f"config.drafter={config.drafter} no model drafts"
    )
  items = prompts.all_of(
    cli.PROMPTS.value,
    models.tokenizer,
    max_tokens=next(iter(pairs.values())).room(config.max_new_tokens),
  )
  made_by = provenance.record(
    models=provenance.checkpoints(config),
    prompts=cli.PROMPTS.value,
    texts=[p.text for p in items],
  )
  folder.mkdir(parents=True, exist_ok=True)
  found = findings.measure(
    config, items, pairs, chosen=chosen, rounds=_ROUNDS.value
  )
  found |= {
    "depth": policies(config, models, items, found, most=max(pairs)),
    "num_prompts": len(prompts.distinct(items)),
    "config": json.loads(config.to_json_best_effort()),
    **made_by,
  }
  results.write_json(str(folder / "report.json"), found)
  results.write(str(folder / "report.md"), page.page(found))
  for name, make in page.FIGURES.items():
    figures.save(functools.partial(make, found), folder / f"{name}.svg")
  print(page.verdict(found))
  if found["depth"]:
    print(compare.advice(found["depth"]))
  print(f"see {folder / 'report.md'}", file=sys.stderr)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "workdir"))
