r"""Compares verification rules: on two laws, or along a pair's real contexts.

  python -m launch.studies.rules --target=0.2,0.3,0.5 --draft=0.5,0.3,0.2 \
    --num_drafts=2
  python -m launch.studies.rules --laws=LAWS.npz --num_speculative_tokens=3 \
    --rule=all
  python -m launch.studies.rules --config=configs/embedded.py \
    --config.drafter='model(tokens=4, tree=paths(2))' \
    --config.temperature=1.0 --prompts=IN.jsonl \
    --output=R.json

Two laws: every context has the target's law q and the draft's law p. Where all
drafts together fit into memory (V to the power of the drafted tokens, times
nodes, times V, up to four million) the numbers are exact ("method": "exact"):
each draft's outcome through the shipped rule, summed in float64. Else drafts
are sampled, and the acceptance has a standard error; the distance of a lossless
rule is then null (not computed). "acceptance" is the expected
number of accepted tokens, for one drafted token a path the acceptance
probability. "output_law" is the law of the next token (null where it is only
sampled and longer than 64 tokens).

A pair: K, G, the warp and the models are the config's (its rule is not looked
at), and the numbers are means over decoding steps
(`launch.studies.rules.on_pair`). `launch.studies.rules.cases` says what draft
every rule is given, and how rows are named.

Rules that do not fit are listed with the reason; if it is the one rule asked
for, that is an error.
"""

import numpy as np
import rich.console
from absl import flags

from launch import cli, prompts, provenance, report, results
from launch.assembly import registry
from launch.report import plus_minus
from launch.studies import read_arrays
from launch.studies.rules import cases, on_pair, on_vectors
from specjax.runtime.requests import make_batches

cli.reads(
  cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.TARGET, cli.DRAFT, cli.RULE,
  cli.NUM_SPECULATIVE_TOKENS, cli.NUM_DRAFTS, cli.SEED,
)  # fmt: skip
_LAWS = flags.DEFINE_string(
  "laws", None, "Instead of both: an .npz file with arrays target and draft."
)
_MAX_CONTEXTS = flags.DEFINE_integer(
  "max_contexts", 32, "With --config: steps of a prompt.", lower_bound=1
)


def read_laws() -> tuple[np.ndarray, np.ndarray]:
  """The draft's and the target's law that the flags give, `f64[V]`."""
  pair = {"--target": cli.TARGET.value, "--draft": cli.DRAFT.value}
  if _LAWS.value is not None:
    if any(x is not None for x in pair.values()):
      raise cli.UserError("give either --laws or --target and --draft")
    laws = read_arrays(_LAWS.value, ("target", "draft"))
  else:
    missing = [name for name, text in pair.items() if text is None]
    if missing:
      raise cli.UserError(f"{' and '.join(missing)} missing: give both laws")
    laws = {name: _parse(name, text) for name, text in pair.items()}
  for name, law in laws.items():
    if law.ndim != 1:
      raise cli.UserError(f"{name} must be one row of numbers, got {law.shape}")
  target, draft = laws.values()
  if len(target) != len(draft):
    raise cli.UserError(
      f"target and draft must have the same length, got {len(target)} and "
      f"{len(draft)}"
    )
  target, draft = (_normalised(name, law) for name, law in laws.items())
  return draft, target


def _one(flag: flags.FlagHolder, default: int) -> int:
  """The number of a list flag, one here."""
  counts = cli.integers(flag, default=[default])
  if len(counts) != 1:
    raise cli.UserError(f"--{flag.name} must be one number, got {counts}")
  return counts[0]


def _parse(name: str, text: str) -> np.ndarray:
  """The numbers of a flag."""
  try:
    return np.array([float(x) for x in text.split(",")] if text.strip() else [])
  except ValueError:
    raise cli.UserError(
      f"{name} must be numbers, as in 0.2,0.3,0.5, got {text!r}"
    ) from None


def _normalised(name: str, law: np.ndarray) -> np.ndarray:
  """The law, checked, with a sum of 1 in float64."""
  law = law.astype(np.float64)
  if not len(law):
    raise cli.UserError(f"{name} is empty")
  if not np.isfinite(law).all():
    raise cli.UserError(f"{name} must be finite numbers, got NaN or infinity")
  if (law < 0).any():
    raise cli.UserError(f"{name} must not be negative, got {law.min():g}")
  if abs(law.sum() - 1) > 1e-6:
    raise cli.UserError(f"{name} must sum to 1, got {law.sum():.9g}")
  return law / law.sum()


def compare_on_contexts(config) -> dict:
  """The report on a real pair."""
  models = on_pair.build_pair(config)
  tree = registry.of(config).tree
  shape = dict(
    num_drafts=max(tree.max_children, 1), num_speculative_tokens=tree.max_depth
  )
  rows, left_out = cases.cases(
    cli.RULE.value or "all", **shape, vocab_size=models.tokenizer.vocab_size
  )
  room = models.room(config.max_new_tokens)
  items = prompts.all_of(cli.PROMPTS.value, models.tokenizer, max_tokens=room)
  measured = on_pair.measure(
    rows,
    models,
    config,
    make_batches(items, batch_size=config.batch_size, max_width=room),
    max_contexts=_MAX_CONTEXTS.value,
  )
  return {
    **shape,
    "rules": measured,
    "left_out": left_out,
    "num_prompts": len(prompts.distinct(items)),
    "max_contexts": _MAX_CONTEXTS.value,
    **provenance.record(config),
  }


def _distance(entry: dict) -> str:
  value = entry["total_variation"]
  if value is None:
    return "not computed"
  return f"{value:.4f}" if value == 0 or value >= 5e-5 else f"{value:.0e}"


def _lossless(entry: dict) -> str:
  if not entry["lossless"]:
    return "no"
  return "yes" + " (declared)" * (":" in entry["rule"])


def show_laws(console, result: dict) -> None:
  """Prints the report on two laws."""

  def cells(entry: dict) -> list[str]:
    accepted, law = f"{entry['acceptance']:.6f}", entry["output_law"]
    share = report.number(entry["share_of_optimum"], ".4f")
    if entry["method"] == "sampled":
      accepted = plus_minus(entry["acceptance"], entry["standard_error"], 3)
    if error := entry["share_standard_error"]:
      share = plus_minus(entry["share_of_optimum"], error, 3)
    said = "(not sampled)" if law is None else f"({len(law)} tokens)"
    if law and len(law) <= 8:
      said = " ".join(f"{x:.4f}" for x in law)
    return [accepted, share, _lossless(entry), _distance(entry), said]

  report.show(
    console,
    ["rule", "drafted as", "tokens", "accepted", "of optimum", "lossless",
     "distance", "law of the next token"],
    [
      [name, entry["siblings"], str(entry["num_drafted"]), *cells(entry)]
      for name, entry in result["rules"].items()
    ],
    title=f"num_drafts={result['num_drafts']}, "
    f"num_speculative_tokens={result['num_speculative_tokens']}",
    caption=f"Optimum {result['optimum']:.6f}: {result['optimum_is']}. Other "
    "siblings than i.i.d. have optima of their own, rules that look at whole "
    "paths (block, multipath_block, traversal) are not bound node by node, and "
    "lossy rules are not bound at all: shares above 1 are possible. Rules of a "
    f"single path ({', '.join(cases.SINGLE_PATH)}) are given one path. "
    f"{report.PLUS_MINUS} It stands where drafts were too many to enumerate "
    "and were sampled.",
  )  # fmt: skip


def show_contexts(console, result: dict) -> None:
  """Prints the report on a pair."""
  first = next(iter(result["rules"]))
  report.show(
    console,
    ["rule", "drafted as", "tokens", "accepted", "block efficiency (95%)",
     f"over {first} (95%, paired)", "lossless", "distance", "contexts"],
    [
      [
        name,
        entry["siblings"],
        str(entry["num_drafted"]),
        f"{entry['expected_accepted']:.4f}",
        report.estimate(entry, "block_efficiency", ".3f"),
        "" if name == first
        else report.estimate(entry, "block_efficiency_ratio", ".3f"),
        _lossless(entry),
        _distance(entry),
        str(entry["num_contexts"]),
      ]
      for name, entry in result["rules"].items()
    ],
    title=f"{result['num_prompts']} prompts, up to {result['max_contexts']} "
    f"steps, num_drafts={result['num_drafts']}, "
    f"num_speculative_tokens={result['num_speculative_tokens']}, "
    f"temperature={result['config']['temperature']:g}",
    caption="Accepted: expected drafted tokens accepted in one step. Rules "
    "drafted for alike share contexts and drafts, others have their own. "
    "Distance: total variation of the first token's law from the target's, "
    "mean over contexts. Over: ratio of block efficiencies, paired by prompt.",
  )  # fmt: skip


def run(_) -> int:
  """The command."""
  laws = (cli.TARGET, cli.DRAFT, _LAWS)
  sizes = (cli.NUM_DRAFTS, cli.NUM_SPECULATIVE_TOKENS, cli.SEED)
  given = [f"--{f.name}" for f in (*laws, *sizes) if f.value is not None]
  config = cli.CONFIG.value
  if config is not None and given:
    raise cli.UserError(
      f"--config measures a real pair and does not go with {given}: "
      "write --config.NAME=VALUE for what the config holds"
    )
  if config is None and all(flag.value is None for flag in laws):
    raise cli.UserError(
      "nothing to compare on: give --target and --draft, --laws, or --config"
    )
  if config is None:
    cli.refuse_with("two laws, but with --config", cli.PROMPTS, _MAX_CONTEXTS)
  results.check(cli.OUTPUT.value)
  # Rows are wide; what is not a terminal can hold them.
  out = results.beside(cli.OUTPUT.value)
  console = rich.console.Console(file=out, width=None if out.isatty() else 170)
  if config is None:
    draft, target = read_laws()
    result = on_vectors.compare(
      draft,
      target,
      cli.RULE.value or "all",
      count=_one(cli.NUM_DRAFTS, 2),
      length=_one(cli.NUM_SPECULATIVE_TOKENS, 1),
      seed=cli.SEED.value or 0,
    )
    result |= provenance.record()
    show_laws(console, result)
  else:
    result = compare_on_contexts(config)
    show_contexts(console, result)
  for name, reason in result["left_out"].items():
    console.print(f"left out: {name} ({reason})", highlight=False, markup=False)
  if cli.OUTPUT.value:
    results.write_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
