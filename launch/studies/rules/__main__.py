r"""Compares verification rules on two distributions, or on a pair's drafts.

  python -m launch.studies.rules --target=0.2,0.3,0.5 --draft=0.5,0.3,0.2 \
    --shapes=2x1
  python -m launch.studies.rules --config=configs/embedded.py \
    --config.drafter='model(tokens=4, tree=paths(2))' \
    --config.temperature=1.0 --prompts=IN.jsonl \
    --output=R.json

Two distributions: every context has the target's q and the draft's p. If all
drafts fit in memory (V to the power of the drafted tokens, times nodes, times
V, up to four million), numbers are exact ("method": "exact"): each draft's
outcome under the shipped rule, summed in float64. Otherwise drafts are sampled,
the acceptance has a standard error, and a lossless rule's distance is null (not
computed). "acceptance" is the expected number of accepted tokens; for one
drafted token per path, it is the acceptance probability. The optimum is for
i.i.d. drafts; for several positions it is that of rule transport.

A pair: the warp and the models are the config's (its rule is ignored),
and numbers are means over decoding steps (for the drafts and the names of rows,
see `launch.studies.rules.on_pair`).

Incompatible rules are listed with the reason; one named by --rule, which takes
a list here, is an error, unless there are several shapes.
"""

import re

import numpy as np
from absl import flags

from launch import cli, prompts, provenance, report, results
from launch.studies.rules import on_pair, on_vectors
from specjax.runtime.requests import make_batches

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.TARGET, cli.RULE, cli.SEED)
_DRAFT = flags.DEFINE_string("draft", None, "The draft's distribution.")
_SHAPES = flags.DEFINE_list(
  "shapes",
  None,
  "Paths x tokens per path, such as 2x4,8x8. By default the drafter's; on two "
  "distributions one shape, by default 2x1.",
)
_MAX_CONTEXTS = flags.DEFINE_integer(
  "max_contexts", 32, "With --config: steps per prompt.", lower_bound=1
)


def _law(flag: flags.FlagHolder) -> np.ndarray:
  """The distribution in a flag, `f64[V]`."""
  law = np.array(flag.value.split(","), float)
  if not (law >= 0).all() or not abs(law.sum() - 1) <= 1e-6:
    raise cli.UserError(
      f"--{flag.name} must be non-negative and sum to 1, got {flag.value}"
    )
  return law / law.sum()


def _shapes(default: str) -> dict[str, tuple[int, int]]:
  """K and G of each shape, by the names in the flag."""
  shapes = {}
  for name in _SHAPES.value or [default]:
    if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", name):
      raise cli.UserError(f"--shapes must be KxG,..., got {name!r}")
    count, _, length = name.partition("x")
    shapes[name] = int(count), int(length)
  return shapes


def compare_on_laws() -> dict:
  """The report on the two distributions of the flags."""
  draft, target = _law(_DRAFT), _law(cli.TARGET)
  if len(target) != len(draft):
    raise cli.UserError("--target and --draft must have the same length")
  shapes = _shapes("2x1")
  if len(shapes) > 1:
    raise cli.UserError("--target and --draft are compared on one shape a run")
  (shape,), seed = shapes.values(), cli.SEED.value or 0
  result = on_vectors.compare(draft, target, cli.RULE.value, shape, seed=seed)
  return {"shapes": [*shapes], **result, **provenance.record()}


def compare_on_contexts(config) -> dict:
  """The report on a real pair."""
  tree = on_pair.drafting_of(config).tree
  shapes = _shapes(f"{max(tree.max_children, 1)}x{tree.max_depth}")
  if max(length for _, length in shapes.values()) > tree.max_depth:
    raise cli.UserError(f"--shapes have more tokens than {config.drafter!r}")
  models = on_pair.build_pair(config)
  rows, left_out = on_pair.cases(
    cli.RULE.value, [*shapes.values()], models.tokenizer.vocab_size
  )
  room = models.room(config.max_new_tokens)
  items = prompts.all_of(cli.PROMPTS.value, models.tokenizer, max_tokens=room)
  batches = make_batches(items, batch_size=config.batch_size, max_width=room)
  measured = on_pair.measure(
    rows, models, config, batches, max_contexts=_MAX_CONTEXTS.value
  )
  return {
    "shapes": [*shapes],
    "rules": measured,
    "left_out": left_out,
    "num_prompts": len(prompts.distinct(items)),
    "max_contexts": _MAX_CONTEXTS.value,
    **provenance.record(config),
  }


def table(result: dict) -> str:
  """A Markdown table of either report, with a row per rule."""
  first, entry = next(iter(result["rules"].items()))
  columns = {
    "rule": lambda row: row[0],
    "siblings": lambda row: row[1]["siblings"],
    "tokens": lambda row: str(row[1]["num_drafted"]),
  }
  if "acceptance" in entry:
    columns |= {
      "accepted": _accepted,
      f"of optimum {result['optimum']:.4f}": lambda row: report.number(
        row[1]["share_of_optimum"], ".4f"
      ),
    }
  else:
    columns |= {
      "accepted": lambda row: f"{row[1]['expected_accepted']:.4f}",
      "block efficiency (95%)": lambda row: report.estimate(
        row[1], "block_efficiency", ".3f"
      ),
      f"over {first} (95%, paired)": lambda row: (
        "" if row[0] == first
        else report.estimate(row[1], "block_efficiency_ratio", ".3f")
      ),
      "contexts": lambda row: str(row[1]["num_contexts"]),
    }  # fmt: skip
  columns["lossless"] = lambda row: "yes" if row[1]["lossless"] else "no"
  columns["distance"] = lambda row: report.number(
    row[1]["total_variation"], ".2g"
  )
  return report.columns(result["rules"].items(), columns)


def _accepted(row) -> str:
  value, error = row[1]["acceptance"], row[1]["standard_error"]
  if error is None:
    return f"{value:.6f}"
  return report.plus_minus(value, error, 3) + " (95%)"


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  laws = [cli.TARGET.value, _DRAFT.value]
  if None in laws if config is None else any(laws):
    raise cli.UserError("give --target and --draft, or --config")
  results.check(cli.OUTPUT.value)
  result = compare_on_laws() if config is None else compare_on_contexts(config)
  out = results.messages(cli.OUTPUT.value)
  print(table(result), file=out)
  for name, reason in result["left_out"].items():
    print(f"left out: {name} ({reason})", file=out)
  if cli.OUTPUT.value:
    results.write_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
