r"""Compares drafters on questions or prompts: speed, acceptance and texts.

  python -m launch.evaluate --config=configs/huggingface.py:target=DIR \
    --systems=plain,ngram,hf,hf_prompt_lookup --temperatures=0,1 \
    --batch_sizes=1,8 --questions=FILE --subset=120 --output=E.json
  python -m launch.evaluate --config=configs/embedded.py --prompts=built-in \
    --rounds=5 --explain --output=E.json
  python -m launch.evaluate --compare BEFORE.json AFTER.json
  python -m launch.evaluate --compare E.json --over=ngram

All systems answer the same questions in turn (--rounds times), and every
speed-up is against plain decoding of the same questions at the same batch size.
FILE has a line {"question_id": 81, "category": "writing", "turns": ["...",
"..."]} each, as Spec-Bench's question file has; without it, the forty of our
own are asked, eight of each of five tasks, for answers of at most 64 tokens
unless --config.max_new_tokens says another number. --prompts=FILE reads plain
prompts in place of them, as launch.decode does, or `built-in` ones. A system is
a drafter as config.drafter is, `ngram(tokens=8, max_ngram=2)` or
`package.module:NAME`; transformers' hf, hf_assisted and hf_prompt_lookup; or
`llama_cpp("ENVIRONMENT/bin/python")`, of a GGUF file, by the package of that
environment. `with_rule(eagle3, block)` has a rule of its own. What all share is
the config's. The draft of `online(model)` learns of what it decodes, one group
of questions after the other (docs/drafting.md).

Rounds are timed apart from the answers, and the speed-up is predicted from
them; --timing=passes times target passes over 1 to 16 tokens too, --timing=none
nothing.
--explain says whether drafting pays, why not, and what would: without --systems
it measures the config's drafter with several numbers of tokens.

E.json has a row for each system, temperature, batch size and category, and all
that it was made of; E.md shows it, E.svg draws it (docs/evaluation.md says how
to read them), E-explained.md explains it, with E-throughput.svg. A run that was
stopped goes on when the same command is given again; E.json.journal remembers
what was measured.

Several processes (see launch/processes.py) take turns at the groups of
questions, if each holds the models on its own devices; process 0 writes.
"""

import collections
import io
import os
import sys
from collections.abc import Container

import ml_collections
import rich.console
from absl import flags
from ml_collections import config_flags

from launch import (
  cli,
  processes,
  prompts,
  provenance,
  report,
  results,
)
from launch.assembly import pair, registry
from launch.evaluation import (
  compare,
  experts,
  explain,
  explain_page,
  measure,
  page,
  questions,
  reference,
  result,
  running,
  systems,
)
from launch.evaluation.measure import Contest
from launch.evaluation.systems import System
from launch.results import Journal
from models import checkpoints

cli.reads(
  cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.TEMPERATURES, cli.BATCH_SIZES,
)  # fmt: skip
_QUESTIONS = flags.DEFINE_string(
  "questions", None, "The questions, JSONL; our own if not given."
)
_SYSTEMS = flags.DEFINE_string(
  "systems", None, "What to compare; plain and the config's drafter."
)
_SUBSET = flags.DEFINE_integer(
  "subset", None, "So many questions, of every category its share.",
  lower_bound=1,
)  # fmt: skip
_CATEGORIES = flags.DEFINE_list(
  "categories", None, "Only questions of these categories or tasks."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 1, "Times that every system decodes everything.", lower_bound=1
)
_TIMING = flags.DEFINE_enum(
  "timing", "rounds", running.TIMINGS,
  "Also time rounds, which the prediction is made of, and target passes.",
)  # fmt: skip
_EXPLAIN = flags.DEFINE_bool(
  "explain", False, "Also say whether drafting pays, and why."
)
_COMPARE = flags.DEFINE_list(
  "compare", None, "Two results to compare, paired; nothing is decoded."
)
_COUNT_EXPERTS = flags.DEFINE_bool(
  "count_experts", False,
  "Count the different experts that the target's passes touch, of a mixture.",
)  # fmt: skip
_OVER = flags.DEFINE_string(
  "over", None, "With --compare and one result: all its systems over this one."
)
cli.takes_the_rest(_COMPARE)


# Tokens of an answer to our own questions: a few minutes on a laptop.
_OWN_BUDGET = 64
_BUILT_IN = "built-in"


def resolved(
  config: ml_collections.ConfigDict, *, asked: Container[str], is_ours: bool
) -> ml_collections.ConfigDict:
  """The config as it is run: our own questions are answered briefly.

  Args:
    config: of the command line.
    asked: the fields that the command line sets itself.
    is_ours: whether the questions are our own.
  """
  config = ml_collections.ConfigDict(config.to_dict())
  if is_ours and "max_new_tokens" not in asked:
    config.max_new_tokens = min(config.max_new_tokens, _OWN_BUDGET)
  return config


def chosen(
  config, contest: Contest, plain: pair.Pair
) -> list[questions.Question]:
  """The questions that are asked, or the prompts."""
  if name := cli.PROMPTS.value:
    asked = questions.of_prompts(
      prompts.all_of(
        None if name == _BUILT_IN else name, contest.tokenizer,
        max_tokens=contest.room, encoder=plain.encoder,
      )
    )  # fmt: skip
  else:
    asked = questions.read(_QUESTIONS.value or questions.OWN)
  if _CATEGORIES.value:
    asked = questions.of_categories(asked, _CATEGORIES.value)
  if _SUBSET.value:
    asked = questions.subset(asked, _SUBSET.value, seed=config.seed)
  return asked


def named(config) -> str:
  """The systems of the command line: the config's drafter, if none is named.

  To explain it, it drafts several numbers of tokens, as far as it can.
  """
  if _SYSTEMS.value or not _EXPLAIN.value:
    return _SYSTEMS.value or config.drafter
  drafting = registry.of(config)
  if not drafting.drafts or not drafting.tree.is_chain or drafting.lengths:
    return config.drafter
  most = config.max_new_tokens
  if drafting.reads == "head":
    shape = checkpoints.read_head(drafting.checkpoint, config.target)
    most = min(most, shape.num_depths or most)
  names = [config.drafter]
  for tokens in explain.SWEEP:
    name = explain.with_tokens(config.drafter, tokens)
    try:
      systems.parse(name, config)
    except ValueError:  # as of fewer tokens than a drafter inside has
      continue
    if tokens <= most:
      names.append(name)
  return ", ".join(dict.fromkeys(map(systems.SYSTEMS.canonical, names)))


def temperatures(config) -> list[float]:
  """The temperatures to decode at; UserError for any that is none."""
  try:
    numbers = [float(x) for x in cli.TEMPERATURES.value or [config.temperature]]
  except ValueError:
    numbers = []
  if not numbers or not all(0 <= t < float("inf") for t in numbers):
    raise cli.UserError(
      "--temperatures must be numbers of 0 or more, got "
      f"{cli.TEMPERATURES.value}"
    )
  return list(dict.fromkeys(numbers))


def check_sizes(sizes: list[int], plain: pair.Pair) -> None:
  """Raises UserError for a batch that cannot be cut over the mesh."""
  count = plain.layout.data if plain.layout else 1
  if wrong := [size for size in sizes if size % count]:
    raise cli.UserError(
      f"--batch_sizes must be multiples of the mesh's 'data' axis ({count}), "
      f"got {wrong}"
    )


def settings_of(config, entered: list[System], asked) -> dict:
  """Settings that decide a measurement (`provenance.settings`)."""
  shared = ml_collections.ConfigDict(config.to_dict())
  del shared.drafter  # it is among the systems, or nothing is measured of it
  return provenance.settings(
    shared,
    systems=[s.name for s in entered],
    temperatures=temperatures(config),
    batch_sizes=cli.integers(cli.BATCH_SIZES, default=[config.batch_size]),
    questions=[[q.id, q.category, q.task, q.turns] for q in asked],
    rounds=_ROUNDS.value,
    timing=timing(),
    **({"count_experts": True} if _COUNT_EXPERTS.value else {}),
  )


def timing() -> str:
  """The kind of timing beside the answers: passes, to explain."""
  return "passes" if _EXPLAIN.value else _TIMING.value


def beside(path: str) -> dict[str, str]:
  """The page and the figure of a result, and what explains it."""
  stem = os.path.splitext(path)[0]
  files = {"the page": f"{stem}.md", "the figure": f"{stem}.svg"}
  if _EXPLAIN.value:
    files["the explanation"] = f"{stem}-explained.md"
    files["its figure"] = f"{stem}-throughput.svg"
  return files


def write(path: str, content: dict) -> None:
  """The result, its page and its figure; the chief does.

  The result comes first: where it is, the same command makes the others again.
  """
  if not processes.is_chief():
    return
  results.write(path, result.as_text(content))
  text, drawing, *more = beside(path).values()
  _write_page(text, page.page, drawing, page.figure, content)
  if more:
    _write_page(
      more[0], explain_page.page, more[1], explain_page.figure, content
    )


def _write_page(text, page_of, drawing, figure_of, content) -> None:
  """A page of a result, and its figure."""
  drawn = io.BytesIO()
  report.save(lambda: figure_of(content), drawn)
  results.write(drawing, drawn.getvalue())
  results.write(text, page_of(content, figure=os.path.basename(drawing)))


def compare_files(paths: list[str]) -> int:
  """Prints how a second result, or a result's other systems, compare."""
  cli.refuse_with(
    "--compare", cli.CONFIG, cli.OUTPUT, cli.PROMPTS, _QUESTIONS, _SYSTEMS,
    cli.TEMPERATURES, cli.BATCH_SIZES, _SUBSET, _CATEGORIES, _COUNT_EXPERTS,
    _ROUNDS, _TIMING, _EXPLAIN,
  )  # fmt: skip
  wanted = "one file with --over" if _OVER.value else "two files"
  if len(paths) != (1 if _OVER.value else 2):
    raise cli.UserError(f"--compare takes {wanted}, got {len(paths)}")
  contents = []
  for path in paths:
    try:
      contents.append(report.read(path))
    except ValueError as error:
      raise cli.UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(contents[-1], dict) or "groups" not in contents[-1]:
      raise cli.UserError(f"{path} is no result of launch.evaluate")
  try:
    rows = (
      compare.among(*contents, _OVER.value)
      if _OVER.value
      else compare.compare(*contents)
    )
  except (LookupError, TypeError, AttributeError) as error:
    raise cli.UserError(
      f"{' or '.join(paths)} is no result of launch.evaluate: "
      f"{type(error).__name__}: {error}"
    ) from None
  print(compare.table(rows))
  return 0


def run(argv) -> int:
  """The command."""
  if _COMPARE.value:
    return compare_files([*_COMPARE.value, *argv[1:]])
  if _OVER.value:
    raise cli.UserError("--over is of --compare E.json")
  for flag in (cli.CONFIG, cli.OUTPUT):
    if not flag.value:
      raise cli.UserError(f"--{flag.name} is required; see --help")
  config = resolved(
    cli.CONFIG.value,
    asked=config_flags.get_override_values(flags.FLAGS[cli.CONFIG.name]),
    is_ours=not (_QUESTIONS.value or cli.PROMPTS.value),
  )
  if cli.PROMPTS.value and (_QUESTIONS.value or _CATEGORIES.value):
    raise cli.UserError("--prompts are asked in place of --questions")
  if _EXPLAIN.value and _TIMING.value == "none":
    raise cli.UserError("--explain is made of timings: leave --timing out")
  output = cli.OUTPUT.value
  results.check(output)
  entered = systems.parse(named(config), config)
  for system in entered:
    if system.reference is not None:
      reference.check(system)
  degrees = temperatures(config)
  sizes = cli.integers(cli.BATCH_SIZES, default=[config.batch_size])
  if len(degrees) * len(sizes) * _ROUNDS.value > 1 and any(
    s.drafting and s.drafting.learning for s in entered
  ):
    raise cli.UserError(
      "a draft that learns would be asked again what it learned from: give one "
      "temperature, one batch size and one round"
    )
  if _ROUNDS.value > 1 and any(
    s.drafting and s.drafting.lengths for s in entered
  ):
    raise cli.UserError(
      "a ladder drafts otherwise each time, by what it has timed, and counts "
      "are of the last: give one round"
    )
  pairs = systems.assemble(
    entered, inputs=bool(cli.PROMPTS.value), count_experts=_COUNT_EXPERTS.value
  )
  for note in dict.fromkeys(n for one in pairs.values() for n in one.notes):
    print(note, file=sys.stderr)
  contests = measure.contests(
    config, entered, pairs, degrees, rounds=_ROUNDS.value
  )
  check_sizes(sizes, pairs[systems.PLAIN])
  one = contests[degrees[0]]
  asked = chosen(config, one, pairs[systems.PLAIN])
  fit, refused = measure.first_turns(asked, one.tokenizer, one.room)
  if not fit:
    raise cli.UserError(
      f"no question fits: prompts have room for {one.room} tokens beside "
      "max_new_tokens (max_length, and the models' positions, bound both)"
    )
  groups = measure.groups_of(fit, degrees, sizes, room=one.room)
  by_category = collections.Counter(q.category for q in asked)
  facts = {
    **provenance.record(config),
    "rounds": _ROUNDS.value,
    "systems": result.describe(entered, pairs),
    "questions": {
      "count": len(asked),
      "by_category": dict(by_category),
      "chat_template": one.tokenizer.chat_template is not None
      and not cli.PROMPTS.value,
      "ids": [q.id for q in asked],
    },
    "left_out": result.left_out(entered, sizes),
    "refused": refused,
  }
  if _COUNT_EXPERTS.value:
    facts["experts"] = experts.facts(pairs[systems.PLAIN])
  learns = any(s.drafting and s.drafting.learning for s in entered)
  journal = Journal(  # what was learned is not on disk
    None if learns else output, settings_of(config, entered, asked)
  )
  try:
    records = running.measure_missing(
      contests, groups, pairs, timing=timing(), journal=journal
    )
  finally:
    one.reference.close()
  content = result.result_of(records, facts)
  if _EXPLAIN.value:
    content["explained"] = explain.findings(content)
  write(output, content)
  journal.finish()
  verdicts = map(explain_page.verdict, content.get("explained", ()))
  rich.console.Console(quiet=not processes.is_chief()).print(
    "\n".join([page.over_all(content), *verdicts]), soft_wrap=True, markup=False
  )
  if content["refused"]:
    print(f"{len(content['refused'])} prompts were too long for config."
          f"max_length: see {output}", file=sys.stderr)  # fmt: skip
  if broken := result.ended_by_nan(content["groups"]):
    return cli.fail("NaN logits ended answers: " + ", ".join(broken))
  return 0


if __name__ == "__main__":
  cli.run(run, required=(), several_processes=True)
