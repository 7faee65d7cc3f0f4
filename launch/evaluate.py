r"""Compares drafters on questions or prompts: speed, acceptance, answers.

  python -m launch.evaluate --config=configs/huggingface.py:target=DIR \
    --systems=plain,ngram,hf,hf_prompt_lookup --temperatures=0,1 \
    --batch_sizes=1,8 --questions=FILE --subset=120 --output=E.json
  python -m launch.evaluate --config=configs/embedded.py --prompts=built-in \
    --rounds=5 --explain --output=E.json

All systems answer the same questions in turn (--rounds times). Every speed-up
is relative to plain decoding of the same questions at the same batch size. FILE
has the format of Spec-Bench's question file, {"question_id": 81, "category":
"writing", "turns": ["...", "..."]} per line. The default is forty questions of
our own, eight for each of five tasks, with answers of at most 64 tokens unless
--config.max_new_tokens is given. --prompts=FILE uses plain prompts instead, as
in launch.decode, or `built-in` ones. A system is a drafter as in
config.drafter, such as `ngram(tokens=8, max_ngram=2)` or `package.module.NAME`,
or transformers' hf, hf_assisted or hf_prompt_lookup; `with_rule(eagle3, block)`
sets its rule. Everything else comes from the config. The draft of
`online(model)` learns from what it decodes, group by group.

Rounds are timed separately from the answers and predict the speed-up;
--timing=passes also times target passes over 1 to 16 tokens, --timing=none
times nothing. --explain reports whether drafting pays, why, and with how many
tokens; without --systems, it measures the config's drafter with 1 to 12 tokens.

E.json has a row for each system, temperature, batch size and category, and its
raw data; E.md shows and explains them, with E-throughput.svg (docs/pay.md says
how to read it). Repeat the command to resume a killed run from E.json.journal.

Several processes (see launch/processes.py) share the groups of questions if
each holds the models on its own devices; process 0 writes the files.
"""

import collections
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli, processes, prompts, provenance, report, results
from launch.assembly import registry
from launch.evaluation import (
  explain,
  hf_reference,
  measure,
  page,
  questions,
  summary,
  systems,
)
from launch.results import Journal
from models import checkpoints
from specjax.warp import make_sampling

cli.reads(
  cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.TEMPERATURES, cli.BATCH_SIZES,
)  # fmt: skip
_QUESTIONS = flags.DEFINE_string(
  "questions", None, "File of questions, JSONL; by default our own."
)
_SYSTEMS = flags.DEFINE_string(
  "systems", None, "Systems to compare; by default the config's drafter."
)
_SUBSET = flags.DEFINE_integer(
  "subset", None, "Use only this many questions, stratified.",
  lower_bound=1,
)  # fmt: skip
_ROUNDS = flags.DEFINE_integer(
  "rounds", 1, "How many times to repeat everything.", lower_bound=1
)
_TIMING = flags.DEFINE_enum(
  "timing", "rounds", measure.TIMINGS,
  "What to time besides answers: rounds, target passes as well, or nothing.",
)  # fmt: skip
_EXPLAIN = flags.DEFINE_bool(
  "explain", False, "Also report whether drafting pays, and why."
)
# Tokens per answer to our own questions: a few minutes' work on a laptop.
_OWN_BUDGET = 64


def questions_of(
  config: ml_collections.ConfigDict, comparison: measure.Comparison
) -> list[questions.Question]:
  """The questions or prompts that the command line asks for."""
  if name := cli.PROMPTS.value:
    selected = questions.of_prompts(
      prompts.all_of(
        name, comparison.tokenizer,
        max_tokens=comparison.room,
        encoder=comparison.pairs[systems.PLAIN].encoder,
      )
    )  # fmt: skip
  else:
    selected = questions.read(_QUESTIONS.value or questions.OWN)
  if _SUBSET.value:
    selected = questions.subset(selected, _SUBSET.value, seed=config.seed)
  return selected


def systems_of(config: ml_collections.ConfigDict) -> str:
  """The systems of the command line, by default the config's drafter.

  To explain that one, it is measured with several draft lengths.
  """
  if _SYSTEMS.value or not _EXPLAIN.value:
    return _SYSTEMS.value or config.drafter
  drafting = registry.of(config)
  if not drafting.drafts or not drafting.tree.is_chain or drafting.lengths:
    return config.drafter
  most = config.max_new_tokens
  if drafting.reads == "head":
    shape = checkpoints.read_head(drafting.checkpoint, config.target)
    most = min(most, shape.config.num_predicted or most)
  names = [config.drafter]
  for tokens in explain.SWEEP:
    name = explain.with_tokens(config.drafter, tokens)
    try:
      systems.parse(name, config)
    except ValueError:  # for example fewer tokens than a nested drafter has
      continue
    if tokens <= most:
      names.append(name)
  return ", ".join(dict.fromkeys(map(systems.SYSTEMS.canonical, names)))


def write(path: str, content: dict) -> None:
  """Writes the result, its page and the figure, on the chief only."""
  if not processes.is_chief():
    return
  text, *figures = report_files(path)
  for figure in figures:
    image = io.BytesIO()
    report.save(lambda: explain.figure(content), image)
    results.write(figure, image.getvalue())
  results.write(text, page.page(content, *map(os.path.basename, figures)))
  results.write_json(path, content)


def report_files(path: str) -> list[str]:
  """Paths of a result's page and, with --explain, its figure."""
  ends = [".md", *["-throughput.svg"] * _EXPLAIN.value]
  return [os.path.splitext(path)[0] + end for end in ends]


def evaluate(
  config: ml_collections.ConfigDict,
  names: str,
  ask: Callable[[measure.Comparison], list[questions.Question]],
  *,
  temperatures: Sequence[float] = (),
  batch_sizes: Sequence[int] = (),
  rounds: int = 1,
  timing: str = "rounds",
  inputs: bool = False,
  output: str | None = None,
) -> dict[str, Any]:
  """Measures systems; returns the content of E.json.

  `names` and options are as the flags; temperatures and batch sizes default to
  the config's. `ask` selects the questions for a comparison; `inputs`: whether
  encoder-decoders are supported. Only the command has an `output` to write.
  """
  temperatures = temperatures or [float(config.temperature)]
  make_sampling(len(temperatures), temperature=temperatures)  # checks them
  sizes = batch_sizes or (config.batch_size,)
  compared = systems.parse(names, config)
  for system in compared:
    if system.reference is not None:
      hf_reference.check(system)
  learns = any(s.drafting and s.drafting.learning for s in compared)
  if learns and len(temperatures) * len(sizes) * rounds > 1:
    raise cli.UserError(
      "a draft that learns would be tested on what it learned from: give one "
      "temperature, one batch size and one round"
    )
  if rounds > 1 and any(s.drafting and s.drafting.lengths for s in compared):
    raise cli.UserError("a ladder drafts differently each time: give one round")
  pairs = systems.assemble(compared, inputs=inputs)
  comparison = measure.comparison_of(
    config, compared, pairs, temperatures, rounds=rounds
  )
  selected = ask(comparison)
  fit, refused = measure.fitting(
    [questions.request(comparison.tokenizer, q) for q in selected],
    comparison.room,
  )
  if not fit:
    raise cli.UserError(
      f"no question fits: there is room for {comparison.room} tokens beside "
      "max_new_tokens (max_length, and the models' positions, bound both)"
    )
  texts = json.dumps([[q.id, q.task, q.category, q.turns] for q in selected])
  settings = provenance.settings(
    config, systems=[s.name for s in compared], temperatures=temperatures,
    batch_sizes=sizes, rounds=rounds, timing=timing,
    questions=hashlib.sha256(texts.encode()).hexdigest(),
  )  # fmt: skip
  # A learned draft is lost with the run.
  journal = Journal(None if learns else output, settings)
  try:
    records = measure.measure_all(
      comparison,
      measure.groups_of(fit, temperatures, sizes, room=comparison.room),
      timing=timing, journal=journal,
    )  # fmt: skip
  finally:
    comparison.reference.close()
  facts = {
    **provenance.record(config),
    "reference": {
      name: importlib.metadata.version(name)
      for name in ("torch", "transformers")
      if any(s.reference for s in compared)
    },
    "rounds": rounds,
    "systems": summary.describe(compared, pairs),
    "questions": {
      "count": len(selected),
      "by_category": dict(collections.Counter(q.category for q in selected)),
      "chat_template": comparison.tokenizer.chat_template is not None
      and selected[0].prompt is None,
    },
    "refused": refused,
  }
  content = summary.result_of(records, facts)
  content["explained"] = explain.findings(content)
  if output:
    write(output, content)
    journal.finish()
  return content


def run(_) -> int:
  """The command."""
  config = ml_collections.ConfigDict(cli.CONFIG.value.to_dict())
  overridden = config_flags.get_override_values(flags.FLAGS[cli.CONFIG.name])
  is_ours = not (_QUESTIONS.value or cli.PROMPTS.value)
  if is_ours and "max_new_tokens" not in overridden:
    config.max_new_tokens = min(config.max_new_tokens, _OWN_BUDGET)
  if cli.PROMPTS.value and _QUESTIONS.value:
    raise cli.UserError("give --prompts or --questions, not both")
  output = cli.OUTPUT.value
  if output == results.STDOUT:
    raise cli.UserError("--output must be a file: a page is written beside it")
  results.check(output, *report_files(output))
  content = evaluate(
    config, systems_of(config), functools.partial(questions_of, config),
    temperatures=[float(text) for text in cli.TEMPERATURES.value or ()],
    batch_sizes=cli.integers(cli.BATCH_SIZES, default=()),
    rounds=_ROUNDS.value,
    timing="passes" if _EXPLAIN.value else _TIMING.value,
    inputs=bool(cli.PROMPTS.value), output=output,
  )  # fmt: skip
  if processes.is_chief():
    print(page.over_all(content))
    if _EXPLAIN.value:
      print(*map(explain.verdict, content["explained"]), sep="\n")
  if content["refused"]:
    print(f"{len(content['refused'])} prompts were too long for config."
          f"max_length: see {output}", file=sys.stderr)  # fmt: skip
  return _exit_code(content["groups"])


def _exit_code(groups: list[dict]) -> int:
  """The exit code; 2 and a message if NaN logits ended answers."""
  broken = {
    name
    for record in groups
    for turn in record["turns"]
    for name, numbers in turn["systems"].items()
    if any(numbers.get("broken", ()))
  }
  if not broken:
    return 0
  return cli.fail(f"NaN logits ended answers of {', '.join(sorted(broken))}")


if __name__ == "__main__":
  cli.run(run, required=("config", "output"), several_processes=True)
