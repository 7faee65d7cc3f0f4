r"""Decodes prompts speculatively and, for comparison, autoregressively.

  python -m launch.decode --config=configs/embedded.py
  python -m launch.decode --config=configs/embedded.py --config.temperature=1 \
    --prompts=IN.jsonl --output=OUT.jsonl --summary=S.json

Run it from the checkout's root. Without --prompts it completes a few examples
of code. A line of IN.jsonl is {"id": ..., "prompt": "..."}, or has "messages"
or, for an encoder-decoder, "input" (see launch/prompts.py). Without --output,
completions are shown in color; --svg=FILE draws them. Repeat the command to
resume a killed run (from OUT.jsonl.journal). docs/decode.md describes outputs.
"""

import hashlib
import pathlib
import sys
import time
from collections.abc import Callable

import rich.console
import tqdm
from absl import flags

from launch import (
  cli,
  display,
  processes,
  prompts,
  provenance,
  results,
  stops,
  tracing,
)
from launch.assembly import pair, registry
from launch.evaluation import intervals
from launch.prompts import Prompt
from launch.results import Journal
from specjax.runtime import requests
from specjax.runtime.engine import Completion, Engine
from specjax.runtime.requests import Batch, make_batches
from specjax.state import StopReason

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_SUMMARY = flags.DEFINE_string(
  "summary", None, "Where to write the run's statistics, as JSON."
)
_BASELINE = flags.DEFINE_bool(
  "baseline", True, "Also decode autoregressively, to measure the speed-up."
)
_LOG_PROBS = flags.DEFINE_bool(
  "log_probs", False, "Also write the log-probability of every token."
)
_STEPS = flags.DEFINE_string(
  "steps", None, "Where to write a trace of every round, as JSONL."
)
_SVG = flags.DEFINE_string("svg", None, "Where to draw completions, as SVG.")


def is_traced() -> bool:
  """True if rows are decoded round by round, without timing."""
  return bool(_LOG_PROBS.value or _STEPS.value)


def measures_speedup() -> bool:
  """True if prompts are also decoded plainly, for comparison."""
  return _BASELINE.value and not is_traced()


def decode_batch(
  number: int, batch: Batch, speculative: Engine, baseline: Engine | None
) -> dict:
  """Decodes a batch with both engines, which take turns going first."""
  engines = [e for e in (speculative, baseline) if e]
  for one in engines:
    one.compile(batch)
  done = {}
  for one in engines if number % 2 == 0 else reversed(engines):
    done[one is speculative] = one.run(batch)
  rows = [vars(c) for c in done[True][0]]
  return _record(batch, rows, intervals.unit_of(*done[True], done.get(False)))


def trace_batch(batch: Batch, trace: Callable[[Batch], tracing.Traced]) -> dict:
  """Like `decode_batch`, but round by round, with a trace of every row."""
  start = time.perf_counter()
  done, seen = trace(batch)
  unit = intervals.unit_of(done, time.perf_counter() - start, None)
  rows = [vars(c) | more for c, more in zip(done, seen, strict=True)]
  return _record(batch, rows, unit)


def _record(batch: Batch, rows: list[dict], unit: intervals.Unit) -> dict:
  keys = [p.key for p in batch.prompts]
  return {"batch": keys[0], "keys": keys, "rows": rows, "unit": vars(unit)}


def decode_missing(
  config, models: pair.Pair, items: list[Prompt], journal: Journal
) -> None:
  """Decodes the prompts that the journal lacks, and adds them to it."""
  done = {k for record in journal.batches.values() for k in record["keys"]}
  speculative = pair.engine_of(config, models)
  batches = make_batches(
    [p for p in items if p.key not in done],
    batch_size=config.batch_size,
    max_width=models.room(config.max_new_tokens),
    total=len(items),
  )
  if is_traced():
    trace = tracing.tracer(speculative)
    work = lambda _, batch: trace_batch(batch, trace)
  else:
    baseline = None
    if measures_speedup():
      baseline = pair.engine_of(config, models, baseline=True)
    work = lambda i, batch: decode_batch(i, batch, speculative, baseline)
  progress = tqdm.tqdm(
    total=len(items), initial=len(items) - sum(len(b.prompts) for b in batches),
    unit="prompt", disable=not (processes.is_chief() and sys.stderr.isatty()),
  )  # fmt: skip
  with progress:
    for record in processes.round_robin(
      batches, work, together=processes.spanned_by(models.params)
    ):
      journal.add(record)
      progress.update(len(record["rows"]))
  if learner := speculative.learner:
    print(
      f"the draft was updated {learner.updates} times, in "
      f"{learner.seconds:.1f} s",
      file=sys.stderr,
    )


def output_row(prompt: Prompt, row: dict, tokenizer) -> dict:
  """A line of OUT.jsonl."""
  names = [
    "token_ids", "stop_reason", "num_target_calls", "num_drafted",
    "num_accepted", "accept_counts",
    *(["log_probs", "warped_log_probs"] if _LOG_PROBS.value else []),
  ]  # fmt: skip
  return {
    "id": prompt.id,
    **({} if prompt.sample is None else {"sample": prompt.sample}),
    "completion": stops.text_of(prompt, row, tokenizer),
    **{name: row[name] for name in names},
  }


def read_prompts(
  models: pair.Pair, max_new_tokens: int
) -> tuple[list[Prompt], bool]:
  """The valid prompts, and True if all lines were valid."""
  room = models.room(max_new_tokens)
  if not cli.PROMPTS.value:
    return prompts.built_in(
      models.tokenizer, max_tokens=room, encoder=models.encoder,
      texts=prompts.EXAMPLES, stop=("\n\n",),
    ), True  # fmt: skip
  items, problems = prompts.read_jsonl(
    cli.PROMPTS.value, models.tokenizer, max_tokens=room,
    max_new_tokens=max_new_tokens, encoder=models.encoder,
  )  # fmt: skip
  for problem in problems if processes.is_chief() else ():
    print(f"error: {problem}", file=sys.stderr)
  if not items:
    raise cli.UserError(f"no usable prompts in {cli.PROMPTS.value}")
  return items, not problems


def summary_of(items: list[Prompt], records: list[dict]) -> dict:
  """The statistics of a run (`intervals.summarize`)."""
  content = {p.key: requests.content_of(p) for p in items}
  summary = intervals.summarize(
    intervals.merged(
      [intervals.Unit(**r["unit"]) for r in records],
      intervals.groups_of([[content[k] for k in r["keys"]] for r in records]),
    ),
    max_depth=max(len(x["accept_counts"]) for r in records for x in r["rows"])
    - 1,
  )
  if is_traced():  # tracing distorts the times
    summary |= dict.fromkeys(("seconds", "tokens_per_second"))
  return summary


def run(_) -> int:
  """The command."""
  config, output = cli.CONFIG.value, cli.OUTPUT.value
  drafting = pair.check_config(config)
  if is_traced() and (drafting.learning or drafting.lengths):
    raise cli.UserError(
      "--log_probs and --steps do not support online and ladder drafters"
    )
  if drafting.learning and processes.several():
    raise cli.UserError("online learning needs a single process")
  results.check(output, _SUMMARY.value, _STEPS.value, _SVG.value)
  if cli.PROMPTS.value:
    pathlib.Path(cli.PROMPTS.value).stat()  # fail before loading models
  models = pair.build(config, inputs=True)
  items, all_valid = read_prompts(models, config.max_new_tokens)
  digest = hashlib.sha256("".join(p.key for p in items).encode()).hexdigest()
  journal = Journal(
    None if drafting.learning else output,  # a learned draft is not saved
    provenance.settings(
      config, prompts=digest, baseline=measures_speedup(), traced=is_traced()
    ),
  )
  decode_missing(config, models, items, journal)
  records = list(journal.batches.values())
  rows = {}
  for record in records:
    rows |= zip(record["keys"], record["rows"], strict=True)
  rule = models.decoder.rule
  summary = summary_of(items, records)
  if _STEPS.value:
    results.write(_STEPS.value, tracing.lines_of(items, rows))
  if _SUMMARY.value:
    results.write_json(
      _SUMMARY.value,
      {**summary, "drafter": registry.canonical(config), "rule": rule.name,
       "lossless": rule.lossless, "num_prompts": len(prompts.distinct(items)),
       "weights": list(models.notes), **provenance.record(config)},
    )  # fmt: skip
  if output:
    lines = [output_row(p, rows[p.key], models.tokenizer) for p in items]
    results.write(output, results.dumps(lines))
  journal.finish()
  names = Completion.__dataclass_fields__
  done = [Completion(**{x: rows[p.key][x] for x in names}) for p in items]
  if _SVG.value:
    results.write(_SVG.value, display.svg(models.tokenizer, items, done))
  files = (output, _SUMMARY.value, _STEPS.value, _SVG.value)
  console = rich.console.Console(
    stderr=results.STDOUT in files, quiet=not processes.is_chief()
  )
  if not output:
    display.show_completions(console, models.tokenizer, items, done)
  for note in models.notes:
    console.print(note, markup=False, soft_wrap=True)
  display.show_summary(console, summary, rule)
  nan = StopReason.NAN_LOGITS.name.lower()
  if broken := [p.id for p in items if rows[p.key]["stop_reason"] == nan]:
    return cli.fail(f"NaN logits ended the rows with id {broken}")
  return 0 if all_valid else 2


if __name__ == "__main__":
  cli.run(run, several_processes=True)
