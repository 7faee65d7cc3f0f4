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
lines, from 0. Rows are appended as they are finished, and put in order at the
end. The same command given again goes on where a stopped run was: ids that are
in OUT.jsonl are not decoded again (OUT.jsonl.partial, later OUT.jsonl.journal,
remembers the settings and the times). Exit code 2: something in the input was
wrong (said on stderr); good lines are decoded all the same.

Several processes (see launch/processes.py) take turns at the batches, if each
holds the whole pair on its own devices, and process 0 writes.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import jax
import tqdm
from absl import flags

import specjax
from launch import main, processes, terminal
from launch.decoding import display, engine, networks, pair, prompts
from launch.decoding.engine import Completion, Engine
from launch.decoding.prompts import Batch, Prompt
from launch.journal import Results, check_writable, write_json
from specjax import metrics
from specjax.types import StopReason

main.reads(main.CONFIG, main.PROMPTS, main.OUTPUT, *processes.FLAGS)
_SUMMARY = flags.DEFINE_string("summary", None, "The run's numbers, JSON.")
_BASELINE = flags.DEFINE_bool(
  "baseline", True, "Also decode plainly, to measure the speed-up."
)
_SAMPLE_BYTES = 1 << 20


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
    "ids": [p.id for p in batch.prompts],
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
  """Of all that decides a run's results, the checkpoints' files included.

  Dates of files do not count: a machine that was preempted comes back with
  fresh copies.
  """
  files = [
    (str(file), _sample(file))
    for directory in filter(None, (config.target, config.draft))
    for file in networks.files(directory)
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


def _sample(file: pathlib.Path) -> str:
  """A hash of a file's size, beginning, middle and end: weights are large."""
  size = file.stat().st_size
  digest = hashlib.sha256(str(size).encode())
  with file.open("rb") as data:
    for place in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
      data.seek(place)
      digest.update(data.read(_SAMPLE_BYTES))
  return digest.hexdigest()


def decode_all(
  batches: list[Batch],
  done: dict[int, dict],
  decode_one: Callable[[int, Batch], dict],
  *,
  together: bool,
) -> Iterator[dict]:
  """The records of the batches that are not done, on every process.

  Args:
    batches: all of them, the same on every process.
    done: records by number; what the chief has counts, and the others get it.
    decode_one: makes the record of a batch of a number.
    together: whether every process must take part in every batch, because the
      pair's arrays lie on the devices of several; otherwise they take turns.

  Yields:
    A record at a time, the same ones in the same order on every process.
  """
  for record in processes.gather(list(done.values()))[0]:
    done[record["batch"]] = record
  todo = [number for number in range(len(batches)) if number not in done]
  if together or not processes.several():
    for number in todo:
      yield decode_one(number, batches[number])
    return
  rank, count = jax.process_index(), jax.process_count()
  for start in range(0, len(todo), count):
    turn = todo[start : start + count]
    record = None
    if rank < len(turn):
      record = decode_one(turn[rank], batches[turn[rank]])
    yield from filter(None, processes.gather(record))


def run(_) -> int:
  """The command."""
  config = pair.settled(main.CONFIG.value)
  chief = processes.is_chief()
  for path in filter(None, (main.OUTPUT.value, _SUMMARY.value)):
    check_writable(path)
  console = terminal.console(quiet=not chief)
  models = pair.build(config)
  room = models.room(config.max_new_tokens)
  problems: list[str] = []
  if main.PROMPTS.value:
    items, problems = prompts.read_jsonl(
      main.PROMPTS.value, models.tokenizer, max_tokens=room
    )
    for problem in problems if chief else ():
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
  results = None
  if main.OUTPUT.value:
    results = Results(
      main.OUTPUT.value, fingerprint(config, items, _BASELINE.value)
    )
  records = results.batches if results else {}
  found = decode_all(
    batches,
    records,
    lambda number, batch: decode_batch(number, batch, speculative, baseline),
    together=processes.spanned_by(models.params),
  )
  progress = tqdm.tqdm(
    total=len(items),
    initial=sum(len(r["rows"]) for r in records.values()),
    unit="prompt",
    disable=not (chief and sys.stderr.isatty()),
  )
  with progress:
    for record in found:
      if results:
        results.add(
          record,
          [
            output_row(items[row["index"]], row, models.tokenizer)
            for row in record["rows"]
          ],
        )
      records[record["batch"]] = record
      progress.update(len(record["rows"]))
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
  if results:
    results.finish(
      [output_row(p, rows[p.index], models.tokenizer) for p in items]
    )
  else:
    for item in items:
      completion = {k: v for k, v in rows[item.index].items() if k != "index"}
      display.show_completion(
        console, models.tokenizer, item, Completion(**completion)
      )
    display.show_legend(console)
  display.show_summary(console, summary, models.decoder.rule)
  broken = [
    p.id
    for p in items
    if rows[p.index]["stop_reason"] == StopReason.NAN_LOGITS.name.lower()
  ]
  if broken:
    return main.fail(f"NaN logits ended the rows with id {broken}")
  return 2 if problems else 0


if __name__ == "__main__":
  main.run(run, several_processes=True)
