"""Decodes prompts, speculatively and (for comparison) plainly.

  python -m launch.decode --config=configs/embedded.py
  python -m launch.decode --config=configs/embedded.py --config.temperature=1 \
    --prompts=IN.jsonl --output=OUT.jsonl --summary=S.json

Run it from the checkout's root. Without --prompts, a few built-in code prompts
are completed and shown. IN.jsonl has a line {"id": ..., "prompt": "..."} each;
OUT.jsonl has, in the same order, {"id", "completion", "token_ids",
"stop_reason", "num_target_calls", "num_drafted", "num_accepted",
"accept_counts"}, where accept_counts[i] is the number of target calls that
emitted i drafted tokens. A line without an id gets its number among the good
lines, from 0. A stopped run goes on where it was when the same command is given
again. Exit code 2: something in the input was wrong (said on stderr); good
lines are decoded all the same.
"""

import hashlib
import json
import pathlib
import sys

import jax
import rich.console
import tqdm
from absl import flags

import specjax
from launch import display, engine, main, pair, prompts
from launch.engine import Completion, Engine
from launch.journal import Journal, check_writable, write_json
from launch.prompts import Batch, Prompt
from specjax import metrics
from specjax.types import StopReason

flags.adopt_module_key_flags(main)  # so that --help lists them
_SUMMARY = flags.DEFINE_string("summary", None, "The run's numbers, JSON.")
_BASELINE = flags.DEFINE_bool(
  "baseline", True, "Also decode plainly, to measure the speed-up."
)


def decode_batch(
  number: int, batch: Batch, speculative: Engine, baseline: Engine | None
) -> dict:
  """Decodes a batch with both engines, which takes turns at going first."""
  engines = [e for e in (speculative, baseline) if e]
  for one in engines:
    one.compile(batch)
  results = {}
  for one in engines if number % 2 == 0 else reversed(engines):
    results[one is speculative] = one.run(batch)
  unit = engine.unit_of(*results[True], results.get(False))
  return {
    "batch": number,
    "unit": vars(unit),
    "rows": [
      {"index": p.index, **vars(c)}
      for p, c in zip(batch.prompts, results[True][0], strict=True)
    ],
  }


def output_row(prompt: Prompt, row: dict, tokenizer) -> dict:
  """A line of OUT.jsonl."""
  names = (
    "token_ids", "stop_reason", "num_target_calls", "num_drafted",
    "num_accepted", "accept_counts",
  )  # fmt: skip
  return {
    "id": prompt.id,
    "completion": tokenizer.decode(row["token_ids"]),
    **{name: row[name] for name in names},
  }


def fingerprint(config, items: list[Prompt], baseline: bool) -> str:
  """Of all that decides a run's results, the checkpoints' files included."""
  files = [
    (str(file), file.stat().st_size, file.stat().st_mtime_ns)
    for directory in filter(None, (config.target, config.draft))
    for file in sorted(pathlib.Path(directory).iterdir())
  ]
  text = json.dumps(
    [
      config.to_json_best_effort(sort_keys=True),
      [(p.id, p.text) for p in items],
      baseline,
      files,
      jax.__version__,
      specjax.__version__,
    ]
  )
  return hashlib.sha256(text.encode()).hexdigest()


def run(_) -> int:
  """The command."""
  config = main.CONFIG.value
  for path in filter(None, (main.OUTPUT.value, _SUMMARY.value)):
    check_writable(path)
  console = rich.console.Console()
  models = pair.build(config)
  room = models.room(config.max_new_tokens)
  problems: list[str] = []
  if main.PROMPTS.value:
    items, problems = prompts.read_jsonl(
      main.PROMPTS.value, models.tokenizer, max_tokens=room
    )
    for problem in problems:
      print(f"error: {problem}", file=sys.stderr)
    if not items:
      return main.fail(f"no usable prompts in {main.PROMPTS.value}")
  else:
    items = prompts.built_in(models.tokenizer, max_tokens=room)
  batches = prompts.make_batches(
    items, batch_size=config.batch_size, max_width=room
  )
  speculative = engine.from_config(config, models)
  baseline = (
    engine.from_config(config, models, baseline=True)
    if _BASELINE.value
    else None
  )
  journal = None
  if main.OUTPUT.value:
    journal = Journal(
      main.OUTPUT.value, fingerprint(config, items, _BASELINE.value)
    )
  records = journal.batches if journal else {}
  chief = jax.process_index() == 0
  progress = tqdm.tqdm(
    total=len(items),
    initial=sum(len(r["rows"]) for r in records.values()),
    unit="prompt",
    disable=not (chief and sys.stderr.isatty()),
  )
  with progress:
    for number, batch in enumerate(batches):
      if number in records:
        continue
      record = decode_batch(number, batch, speculative, baseline)
      if journal:
        journal.add(record)
      records[number] = record
      progress.update(len(batch.prompts))
  rows = {row["index"]: row for r in records.values() for row in r["rows"]}
  units = [metrics.Unit(**r["unit"]) for _, r in sorted(records.items())]
  summary = metrics.summarize(units)
  if _SUMMARY.value:
    write_json(
      _SUMMARY.value,
      {**summary, "rule": config.rule, "lossless": models.decoder.rule.lossless,
       "num_prompts": len(items), "jax": jax.__version__,
       "config": json.loads(config.to_json_best_effort())},
    )  # fmt: skip
  if journal:
    journal.finish(
      [output_row(p, rows[p.index], models.tokenizer) for p in items]
    )
  else:
    for item in items:
      completion = {k: v for k, v in rows[item.index].items() if k != "index"}
      display.show_completion(
        console, models.tokenizer, item, Completion(**completion)
      )
    display.show_legend(console)
  display.show_summary(console, summary)
  broken = [
    p.id
    for p in items
    if rows[p.index]["stop_reason"] == StopReason.NAN_LOGITS.name.lower()
  ]
  if broken:
    return main.fail(f"NaN logits ended the rows with id {broken}")
  return 2 if problems else 0


if __name__ == "__main__":
  main.run(run)
