r"""Decodes prompts, speculatively and (for comparison) plainly.

  python -m launch.decode --config=configs/embedded.py
  python -m launch.decode --config=configs/embedded.py --config.temperature=1 \
    --prompts=IN.jsonl --output=OUT.jsonl --summary=S.json

Run it from the checkout's root. Without --prompts, a few built-in code prompts
are completed and shown. IN.jsonl has a line {"id": ..., "prompt": "..."} each,
with "messages" in place of a prompt for chat models, and with what it wants for
itself: samples, a temperature, penalties, a budget, a seed, stop strings
(launch/prompts.py); an encoder-decoder reads {"id": ..., "input": "..."}.
OUT.jsonl has, in the same order, {"id", "sample" (of
several), "completion", "token_ids", "stop_reason", "num_target_calls",
"num_drafted", "num_accepted", "accept_counts"}, where accept_counts[i] is the
number of target calls that emitted i drafted tokens. A line without an id gets
its line number. Rows are appended as they are finished, and put in order at the
end. The same command given again goes on where a stopped run was, or with the
prompts that were added since: rows that are in OUT.jsonl are not decoded again
(OUT.jsonl.journal remembers the settings and the times). An OUT.jsonl of other
settings or prompts is refused; --overwrite begins anew. --output=- prints the
rows. Exit code 2: something in the input was wrong (said on stderr); good lines
are decoded all the same.

--log_probs adds to each row "log_probs", the target's own of each token
(temperature 1, no truncation), and "warped_log_probs", those of the law that
was sampled. --steps=TRACE.jsonl writes a line for each round of each row:
{"id", "sample", "round", "position" (tokens before it), "drafted" (the tokens
of nodes 1..N of the tree; node 0 is the newest token), "parents" (each one's
node), "draft_log_probs" (of each in the law that it was drawn from),
"target_log_probs" (in the target's warped law), "node_probs" (of nodes 0..N, to
be the deepest accepted one), "expected_accepted", "accepted" (the nodes that
were), "tokens" (what was emitted), "origins", "warped_log_probs"}; null is
log 0, or a node that is not there. Either flag decodes round by round, without
the comparison with plain decoding: its times would be no measurement.

The draft of --config.drafter='online(model)' learns between rounds of what it
decodes (docs/drafting.md). A row's text then depends on the prompts that were
decoded before it, in the order of their lengths; what was learned is kept in
OUT.jsonl.learned-N, after N batches, so that a run that was killed goes on as
if it had not been.

Several processes (see launch/processes.py) take turns at the batches, if each
holds the whole pair on its own devices, and process 0 writes.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable

import jax
import tqdm
from absl import flags

from launch import (
  cli,
  display,
  jsonl,
  processes,
  prompts,
  provenance,
  results,
  stops,
  terminal,
  tracing,
)
from launch.assembly import pair, registry
from launch.assembly.drafting import Drafting
from launch.prompts import Prompt
from launch.results import Journal
from specjax import intervals
from specjax.runtime import engine, requests
from specjax.runtime.engine import Completion, Engine
from specjax.runtime.requests import Batch, make_batches
from specjax.state import StopReason

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, *processes.FLAGS)
_SUMMARY = flags.DEFINE_string("summary", None, "The run's numbers, JSON.")
_BASELINE = flags.DEFINE_bool(
  "baseline", True, "Also decode plainly, to measure the speed-up."
)
_LOG_PROBS = flags.DEFINE_bool(
  "log_probs", False, "Also write the log-probability of every token."
)
_STEPS = flags.DEFINE_string(
  "steps", None, "Where to write what every round did, JSONL."
)


def decode_batch(
  number: int,
  batch: Batch,
  speculative: Engine,
  baseline: Engine | None,
  trace: Callable[[Batch], tracing.Traced] | None = None,
) -> dict:
  """Decodes a batch with both engines, which takes turns at going first.

  Or, if it is traced, round by round with the first.
  """
  if trace:
    start = time.perf_counter()
    done, beside = trace(batch)
    unit = engine.unit_of(done, time.perf_counter() - start, None)
    record = record_of(batch, done, unit)
    for row, more in zip(record["rows"], beside, strict=True):
      row |= {name: more[name] for name in traced_fields()}
    return record
  engines = [e for e in (speculative, baseline) if e]
  for one in engines:
    one.compile(batch)
  done = {}
  for one in engines if number % 2 == 0 else reversed(engines):
    done[one is speculative] = one.run(batch)
  unit = engine.unit_of(*done[True], done.get(False))
  return record_of(batch, done[True][0], unit)


def record_of(
  batch: Batch, completions: list[Completion], unit: intervals.Unit
) -> dict:
  """The journal's record of a batch: its rows by key, and its measurements."""
  return {
    "batch": batch.prompts[0].key,
    "keys": [p.key for p in batch.prompts],
    "ids": [p.row_id for p in batch.prompts],
    "unit": vars(unit),
    "rows": [vars(c) for c in completions],
  }


def measures_speedup() -> bool:
  """True if prompts are also decoded plainly, for comparison."""
  return _BASELINE.value and not traced_fields()


def traced_fields() -> list[str]:
  """Fields of a traced row beside its completion; empty if untraced."""
  of_rows = ["log_probs", "warped_log_probs"] if _LOG_PROBS.value else []
  return [*of_rows, *(["rounds"] if _STEPS.value else [])]


def output_row(prompt: Prompt, row: dict, tokenizer) -> dict:
  """A line of OUT.jsonl."""
  names = (
    "token_ids", "stop_reason", "num_target_calls", "num_drafted",
    "num_accepted", "accept_counts",
  )  # fmt: skip
  return {
    "id": prompt.id,
    **({} if prompt.sample is None else {"sample": prompt.sample}),
    "completion": stops.text_of(prompt, row, tokenizer),
    **{name: row[name] for name in names},
    **{name: row[name] for name in traced_fields() if name != "rounds"},
  }


def rows_of(records: Iterable[dict]) -> dict[str, dict]:
  """The rows of all records, by the key of their prompt."""
  return {
    key: row
    for record in records
    for key, row in zip(record["keys"], record["rows"], strict=True)
  }


def completion_of(row: dict) -> Completion:
  """The `Completion` of a record's row."""
  names = [field.name for field in dataclasses.fields(Completion)]
  return Completion(**{name: row[name] for name in names})


def decode_missing(
  config, models: pair.Pair, items: list[Prompt], journal: Journal | None
) -> list[dict]:
  """Decodes the prompts that are not in the journal yet.

  Args:
    config: of the run.
    models: the pair.
    items: all prompts.
    journal: of the output, open, or None.

  Returns:
    The records of all prompts, the same on every process.
  """
  # What the chief has counts, and the others get it.
  journals = processes.gather(list(journal.batches.values()) if journal else [])
  records = journals[0]
  done = {key for record in records for key in record["keys"]}
  missing = [p for p in items if p.key not in done]
  speculative = pair.engine_of(config, models)
  learners = {"draft": speculative.learner} if speculative.learner else {}
  saved = journal and results.Saved(cli.OUTPUT.value, learners)
  if saved:
    saved.load(len(records))
  baseline, trace = None, []
  if traced_fields():
    trace = [tracing.tracer(speculative)]
  elif measures_speedup():
    baseline = pair.engine_of(config, models, baseline=True)
  made = processes.round_robin(
    make_batches(
      missing,
      batch_size=config.batch_size,
      max_width=models.room(config.max_new_tokens),
      among=len(items),
    ),
    lambda number, batch: decode_batch(
      number, batch, speculative, baseline, *trace
    ),
    together=processes.spanned_by(models.params),
  )
  progress = tqdm.tqdm(
    total=len(items), initial=len(done), unit="prompt",
    disable=not (processes.is_chief() and sys.stderr.isatty()),
  )  # fmt: skip
  with progress:
    for record in made:
      if saved:
        saved.save(len(records) + 1)
      if journal:
        journal.add(record)
      records.append(record)
      progress.update(len(record["rows"]))
  for learner in learners.values():
    print(
      f"the draft was updated {learner.updates} times, in "
      f"{learner.seconds:.1f} s",
      file=sys.stderr,
    )
  return records


def read_prompts(
  models: pair.Pair, max_new_tokens: int
) -> tuple[list[Prompt], bool]:
  """The good prompts, and True if no line was bad.

  Raises:
    UserError: if none is good.
  """
  room = models.room(max_new_tokens)
  if not cli.PROMPTS.value:
    return prompts.built_in(
      models.tokenizer, max_tokens=room, encoder=models.encoder
    ), True
  items, problems = prompts.read_jsonl(
    cli.PROMPTS.value, models.tokenizer, max_tokens=room,
    max_new_tokens=max_new_tokens, encoder=models.encoder,
  )  # fmt: skip
  for problem in problems if processes.is_chief() else ():
    print(f"error: {problem}", file=sys.stderr)
  if not items:
    raise cli.UserError(f"no usable prompts in {cli.PROMPTS.value}")
  return items, not problems


def check_between_rounds(drafting: Drafting) -> None:
  """Raises UserError where a draft cannot learn, or a ladder be climbed."""
  if (drafting.learning or drafting.lengths) and traced_fields():
    raise cli.UserError(
      "--log_probs and --steps trace rounds of one width of a draft that stays "
      "as it is: not with online and ladder"
    )
  if drafting.learning and processes.several():
    raise cli.UserError("a draft learns online in one process")


def run(_) -> int:
  """The command."""
  config, output = cli.CONFIG.value, cli.OUTPUT.value
  drafting = pair.check_config(config)
  check_between_rounds(drafting)
  results.check(
    {"--summary": _SUMMARY.value},
    grown={"--output": output, "--steps": _STEPS.value},
    stdout=True,
  )
  if traced_fields() and _BASELINE.present and _BASELINE.value:
    raise cli.UserError(
      "--baseline measures a speed-up, and --log_probs and --steps take time "
      "of their own: give one or the other"
    )
  if _LOG_PROBS.value and not output:
    raise cli.UserError("--log_probs are written to --output: give one")
  models = pair.build(config, inputs=True, learns=True, climbs=True)
  items, good = read_prompts(models, config.max_new_tokens)
  made_by = {}
  journal = contextlib.nullcontext()
  if processes.is_chief() and (output or _SUMMARY.value):
    made_by = provenance.record(
      models=provenance.checkpoints(config),
      prompts=cli.PROMPTS.value,
      texts=[(p.input or "") + p.text for p in items],
    )
  on_disk = output and output != results.STDOUT
  by_key = {p.key: p for p in items}

  def lines_of(record: dict) -> list[dict]:
    return [
      output_row(by_key[key], row, models.tokenizer)
      for key, row in zip(record["keys"], record["rows"], strict=True)
    ]

  if on_disk:
    traced = {"traced": traced_fields()} if traced_fields() else {}
    journal = Journal(
      output,
      provenance.settings(
        config,
        made_by["provenance"]["checkpoints"] if made_by else {},
        baseline=measures_speedup(),
        **traced,
      ),
      rows_of=lines_of,
      wanted={p.key: p.row_id for p in items},
    )
  with journal as opened:
    if _STEPS.value:
      known = rows_of(opened.batches.values() if opened else [])
      finished = [item for item in items if item.key in known]
      tracing.check_trace(_STEPS.value, tracing.lines_of(finished, known))
    records = decode_missing(config, models, items, opened)
    rows = rows_of(records)
    lines = [output_row(p, rows[p.key], models.tokenizer) for p in items]
    content = {p.key: requests.content_of(p) for p in items}
    summary = intervals.summarize(
      intervals.merged(
        [intervals.Unit(**r["unit"]) for r in records],
        intervals.groups_of([[content[k] for k in r["keys"]] for r in records]),
      ),
      max_depth=max(len(row["accept_counts"]) for row in rows.values()) - 1,
    )
    if traced_fields():  # no measurement
      summary |= dict.fromkeys(("seconds", "tokens_per_second"))
    if _STEPS.value:
      trace = "".join(tracing.lines_of(items, rows))
      results.write(_STEPS.value, trace)
    if _SUMMARY.value:
      results.write_json(
        _SUMMARY.value,
        {**summary, "drafter": registry.canonical(config),
         "rule": models.decoder.rule.name,
         "lossless": models.decoder.rule.lossless,
         "num_prompts": len(prompts.distinct(items)), "jax": jax.__version__,
         **({"weights": list(models.notes)} if models.notes else {}),
         "config": json.loads(config.to_json_best_effort()), **made_by},
      )  # fmt: skip
    if opened:
      opened.finish(lines)
  dash = results.STDOUT in (output, _SUMMARY.value, _STEPS.value)
  console = terminal.console(
    sys.stderr if dash else sys.stdout, quiet=not processes.is_chief()
  )
  if output == results.STDOUT:
    results.write(output, jsonl.dumps(lines))
  elif not output:
    for item in items:
      display.show_completion(
        console, models.tokenizer, item, completion_of(rows[item.key])
      )
    display.show_legend(console)
  if not drafting.drafts:
    console.print("nothing is drafted: plain decoding beside itself")
  for note in models.notes:
    console.print(note, markup=False, soft_wrap=True)
  display.show_summary(console, summary, models.decoder.rule)
  broken = [
    p.row_id
    for p in items
    if rows[p.key]["stop_reason"] == StopReason.NAN_LOGITS.name.lower()
  ]
  if broken:
    return cli.fail(f"NaN logits ended the rows with id {broken}")
  return 0 if good else 2


if __name__ == "__main__":
  cli.run(run, several_processes=True)
