r"""How deep should this pair draft, at every batch size, and who should decide?

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

import json
import sys

from absl import flags

from launch import cli, figures, prompts, provenance, results
from launch.build import drafters, pair, policies
from launch.evaluation import costs as costs_lib
from launch.studies.depth import compare, machine, page, traces

cli.reads(cli.CONFIG, cli.PROMPTS, cli.WORKDIR, cli.TIMINGS)
_MOST = flags.DEFINE_integer(
  "most_tokens", 12, "Drafted tokens of the recorded rounds.", lower_bound=1
)
_HEAD = flags.DEFINE_string(
  "head", None, "A head of configs/train_depth.py, to be compared too."
)


def read_costs(paths: list[str]) -> machine.Machine:
  """The costs in results of `launch.evaluate`.

  Raises:
    UserError: if a file is not there or is no such result.
    ValueError: if they are of one batch size.
  """
  found = [pair for path in paths for pair in costs_lib.read(path, "--timings")]
  return machine.machine_of([costs for _, costs in found])


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  if not cli.TIMINGS.value:
    raise cli.UserError("--timings is required; see --help for an example")
  costs = read_costs(cli.TIMINGS.value)
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
  deepest = drafters.recording(drafters.of(config), _MOST.value, width=width)
  items = prompts.all_of(
    cli.PROMPTS.value,
    models.tokenizer,
    max_tokens=pair.assemble(config, models, drafting=deepest).room(
      config.max_new_tokens
    ),
  )
  made_by = provenance.record(
    models=provenance.checkpoints(config)
    | provenance.hashes({"depth": _HEAD.value} if _HEAD.value else {}),
    prompts=cli.PROMPTS.value,
    texts=[p.text for p in items],
    files={f"--timings {i}": path for i, path in enumerate(cli.TIMINGS.value)},
  )
  recorded = traces.collect(config, models, items, deepest)
  found = compare.compare(recorded, costs, predictor=predictor) | {
    "num_prompts": len(prompts.distinct(items)),
    "config": json.loads(config.to_json_best_effort()),
    **made_by,
  }
  folder.mkdir(parents=True, exist_ok=True)
  results.write_json(str(folder / "depth.json"), found)
  results.write(str(folder / "depth.md"), page.page(found))
  figures.save(lambda: page.figure(found), folder / "depth.svg")
  print(compare.advice(found))
  print(f"see {folder / 'depth.md'}", file=sys.stderr)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "workdir"))
