r"""Evaluates ways to draft on real questions: speed, acceptance, agreement.

  python -m launch.evaluate --config=configs/huggingface.py:target=DIR \
    --systems=plain,ngram,hf,hf_prompt_lookup --temperatures=0,1 \
    --batch_sizes=1,8 --questions=FILE --subset=120 --output=E.json
  python -m launch.evaluate --compare BEFORE.json AFTER.json
  python -m launch.evaluate --compare E.json --over=ngram

All systems answer the same questions in turn, and every speed-up is against
plain decoding of the same questions at the same batch size. FILE has a line
{"question_id": 81, "category": "writing", "turns": ["...", "..."]} each, as
Spec-Bench's question file has; without it, the forty of our own are asked,
eight of each of five tasks, for answers of at most 64 tokens unless
--config.max_new_tokens says another number. A system is a drafter as
config.drafter is, `ngram(tokens=8, max_ngram=2)` or `package.module:NAME`, or
transformers' hf, hf_assisted and hf_prompt_lookup; `with_rule(eagle3, block)`
has a rule of its own. What all share is the config's. The draft of
`online(model)` learns of what it decodes, one group of questions after the
other (docs/online.md).

E.json has a row for each system, temperature, batch size and category, and all
that it was made of; E.md shows it, E.svg draws it (docs/evaluation.md says how
to read them). A run that was stopped goes on when the same command is given
again; E.json.journal remembers what was measured.

Several processes (see launch/processes.py) take turns at the groups of
questions, if each holds the models on its own devices; process 0 writes.
"""

import collections
import io
import json
import os
import sys
from collections.abc import Container

import jax
import ml_collections
import tqdm
from absl import flags
from ml_collections import config_flags

import specjax
from launch import (
  cli,
  figures,
  online,
  processes,
  provenance,
  results,
  tables,
  terminal,
)
from launch.build import pair
from launch.evaluation import (
  compare,
  costs,
  experts,
  measure,
  page,
  plots,
  questions,
  reference,
  result,
  systems,
)
from launch.evaluation.measure import Contest, Group
from launch.evaluation.systems import System
from launch.results import Journal
from specjax.runtime import compilation

cli.reads(cli.CONFIG, cli.OUTPUT, cli.TEMPERATURES, *processes.FLAGS)
_QUESTIONS = flags.DEFINE_string(
  "questions", None, "The questions, JSONL; our own if not given."
)
_SYSTEMS = flags.DEFINE_string(
  "systems", None, "What to compare; plain and the config's drafter."
)
_BATCH_SIZES = flags.DEFINE_list(
  "batch_sizes", None, "Questions decoded together; the config's."
)
_SUBSET = flags.DEFINE_integer(
  "subset", None, "So many questions, of every category its share.",
  lower_bound=1,
)  # fmt: skip
_CATEGORIES = flags.DEFINE_list(
  "categories", None, "Only questions of these categories or tasks."
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


def settled(
  config: ml_collections.ConfigDict, *, asked: Container[str], own: bool
) -> ml_collections.ConfigDict:
  """The config as it is run: our own questions are answered briefly.

  Args:
    config: of the command line.
    asked: the fields that the command line sets itself.
    own: whether the questions are our own.
  """
  config = ml_collections.ConfigDict(config.to_dict())
  if own and "max_new_tokens" not in asked:
    config.max_new_tokens = min(config.max_new_tokens, _OWN_BUDGET)
  return config


def chosen(config) -> list[questions.Question]:
  """The questions that are asked."""
  found = questions.read(_QUESTIONS.value or questions.OWN)
  if _CATEGORIES.value:
    found = questions.of_categories(found, _CATEGORIES.value)
  if _SUBSET.value:
    found = questions.subset(found, _SUBSET.value, seed=config.seed)
  return found


def temperatures(config) -> list[float]:
  """Those to decode at; UserError for what is none."""
  try:
    found = [float(x) for x in cli.TEMPERATURES.value or [config.temperature]]
  except ValueError:
    found = []
  if not found or not all(0 <= t < float("inf") for t in found):
    raise cli.UserError(
      "--temperatures must be numbers of 0 or more, got "
      f"{cli.TEMPERATURES.value}"
    )
  return list(dict.fromkeys(found))


def check_sizes(sizes: list[int], plain: pair.Pair) -> None:
  """Raises UserError for a batch that cannot be cut over the mesh."""
  count = plain.layout.data if plain.layout else 1
  if wrong := [size for size in sizes if size % count]:
    raise cli.UserError(
      f"--batch_sizes must be multiples of the mesh's 'data' axis ({count}), "
      f"got {wrong}"
    )


def settings_of(config, entered: list[System], asked, models) -> dict:
  """All that decides what is measured; neither paths nor dates count."""
  kept = json.loads(config.to_json_best_effort(sort_keys=True))
  return {
    "config": kept | {"target": None, "checkpoints": None, "drafter": None},
    "checkpoints": {role: found["sha256"] for role, found in models.items()},
    "systems": [provenance.hashed(s.name, models) for s in entered],
    "temperatures": temperatures(config),
    "batch_sizes": cli.integers(_BATCH_SIZES, default=[config.batch_size]),
    "questions": provenance.hash_texts(
      [json.dumps([q.id, q.category, q.task, q.turns]) for q in asked]
    ),
    "jax": jax.__version__,
    "specjax": specjax.__version__,
    **({"count_experts": True} if _COUNT_EXPERTS.value else {}),
  }


def checkpoints_of(entered: list[System]) -> dict[str, dict]:
  """By role, path and hash of every checkpoint that is read."""
  found = {}
  for system in entered:
    found["target"] = system.config.target
    if system.drafting is not None:
      for role, path in provenance.read_by(system.drafting).items():
        if found.setdefault(role, path) != path:
          found[f"{role} of {system.name}"] = path
    elif system.reference.draft:
      found[f"draft of {system.name}"] = system.reference.draft
  return provenance.hashes(found)


def measure_missing(
  contests: dict[float, Contest],
  groups: list[Group],
  pairs: dict[str, pair.Pair],
  journal: Journal | None,
) -> list[dict]:
  """Measures what is not in the journal: groups, and then rounds' costs.

  Returns:
    All records by the order of the groups, costs last, the same on every
    process.
  """
  there = processes.gather(list(journal.batches.values()) if journal else [])
  records = {record["batch"]: record for record in there[0]}
  spans = processes.spanned_by(pairs[systems.PLAIN].params)
  saved = None
  if learners := learners_of(contests):
    if processes.several():
      raise cli.UserError("a draft learns online in one process")
    if journal:
      saved = online.Saved(cli.OUTPUT.value, learners)
      saved.load(sum(group.name in records for group in groups))

  def keep(record: dict) -> None:
    records[record["batch"]] = record
    if journal:
      journal.add(record)

  missing = [group for group in groups if group.name not in records]
  sizes = {group.name: len(group.questions) for group in groups}
  everything = sum(sizes.values())
  there_too = everything - sum(sizes[group.name] for group in missing)
  with _progress(everything, "question", initial=there_too) as progress:
    for record in processes.in_turn(
      missing,
      lambda _, group: measure.measure(contests[group.temperature], group),
      together=spans,
    ):
      if saved:
        done = sum(group.name in records for group in groups)
        saved.save(done + 1)
      keep(record)
      progress.update(sizes[record["batch"]])
      if not spans:  # processes that share programs have them at the same time
        give_up_programs(contests)
  if spans:
    return list(records.values())
  untimed = _costs_missing(contests, groups, records)
  with _progress(len(untimed), "drafter", "timing rounds") as progress:
    for record in processes.in_turn(
      untimed,
      lambda _, part: costs.measure_costs(
        contests[part[1].temperature], part[0], pairs[part[0].name], part[1],
        records[part[1].name],
      ),
      together=False,
    ):  # fmt: skip
      keep(record)
      progress.update()
      give_up_programs(contests)
  return list(records.values())


def _progress(
  total: int, unit: str, what: str | None = None, *, initial: int = 0
) -> tqdm.tqdm:
  """A bar, or lines of a log; none on any process but the chief, or of none."""
  return tqdm.tqdm(
    total=total, initial=initial, unit=unit, desc=what, smoothing=0.05,
    disable=not total or not processes.is_chief(),
    mininterval=0.5 if sys.stderr.isatty() else 60,
  )  # fmt: skip


def give_up_programs(contests: dict[float, Contest]) -> None:
  """Where there are too many of them; what is needed is compiled again.

  A dozen systems at several widths, temperatures and batch sizes are more
  programs than a process can hold (`compilation.has_many_maps`).
  """
  if compilation.has_many_maps():
    for contest in contests.values():
      for one in contest.engines.values():
        one.programs.clear()
    jax.clear_caches()


def learners_of(contests: dict[float, Contest]) -> dict[str, online.Learner]:
  """By system; those of all temperatures are the same."""
  first = next(iter(contests.values()))
  return {
    name: one.learner for name, one in first.engines.items() if one.learner
  }


def _costs_missing(
  contests: dict[float, Contest], groups: list[Group], records: dict[str, dict]
) -> list[tuple[System, Group]]:
  """Systems and groups at which their rounds are still to be timed.

  A round's cost does not depend on the temperature: the first one is taken.
  Rounds whose width the host changes have none of their own.
  """
  first = next(iter(contests))
  missing = []
  for size in dict.fromkeys(group.batch_size for group in groups):
    some = [g for g in groups if (g.temperature, g.batch_size) == (first, size)]
    typical = costs.middling(some, records)
    missing += [
      (system, typical)
      for system in contests[first].systems
      if system.name in contests[first].engines
      and system.drafts_here
      and not system.drafting.lengths
      and costs.name_of(system, size) not in records
    ]
  return missing


def beside(path: str) -> dict[str, str]:
  """The page and the figure of a result."""
  stem = os.path.splitext(path)[0]
  return {"the page": f"{stem}.md", "the figure": f"{stem}.svg"}


def write(path: str, found: dict) -> None:
  """The result, its page and its figure; the chief does.

  The result comes first: where it is, the same command makes the others again.
  """
  if not processes.is_chief():
    return
  results.write(path, result.as_text(found))
  text, drawing = beside(path).values()
  drawn = io.BytesIO()
  figures.save(lambda: plots.figure(found), drawn)
  results.write(drawing, drawn.getvalue())
  results.write(text, page.page(found, figure=os.path.basename(drawing)))


def compare_files(paths: list[str]) -> int:
  """Prints how a second result, or a result's other systems, compare."""
  cli.refuse_with(
    "--compare", cli.CONFIG, cli.OUTPUT, _QUESTIONS, _SYSTEMS, cli.TEMPERATURES,
    _BATCH_SIZES, _SUBSET, _CATEGORIES, _COUNT_EXPERTS,
  )  # fmt: skip
  wanted = "one file with --over" if _OVER.value else "two files"
  if len(paths) != (1 if _OVER.value else 2):
    raise cli.UserError(f"--compare takes {wanted}, got {len(paths)}")
  found = []
  for path in paths:
    try:
      found.append(tables.read(path))
    except ValueError as error:
      raise cli.UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(found[-1], dict) or "groups" not in found[-1]:
      raise cli.UserError(f"{path} is no result of launch.evaluate")
  try:
    rows = (
      compare.among(*found, _OVER.value)
      if _OVER.value
      else compare.compare(*found)
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
  config = settled(
    cli.CONFIG.value,
    asked=config_flags.get_override_values(flags.FLAGS[cli.CONFIG.name]),
    own=not _QUESTIONS.value,
  )
  output = cli.OUTPUT.value
  results.check(
    {"--output": output}, drawn=beside(output), resumes=True,
    inputs={"--questions": _QUESTIONS.value},
  )  # fmt: skip
  entered = systems.parse(_SYSTEMS.value or config.drafter, config)
  for system in entered:
    if system.reference is not None:
      reference.check(system)
  degrees = temperatures(config)
  sizes = cli.integers(_BATCH_SIZES, default=[config.batch_size])
  if len(degrees) * len(sizes) > 1 and any(
    s.drafting and s.drafting.learning for s in entered
  ):
    raise cli.UserError(
      "a draft that learns would be asked again what it learned from: give one "
      "temperature and one batch size"
    )
  asked = chosen(config)
  pairs = systems.assemble(entered, count_experts=_COUNT_EXPERTS.value)
  contests = measure.contests(config, entered, pairs, degrees)
  check_sizes(sizes, pairs[systems.PLAIN])
  one = contests[degrees[0]]
  fit, refused = measure.first_turns(asked, one.tokenizer, one.room)
  if not fit:
    raise cli.UserError(
      f"no question fits: prompts have room for {one.room} tokens beside "
      "max_new_tokens (max_length, and the models' positions, bound both)"
    )
  groups = [
    group
    for temperature in degrees
    for size in sizes
    for group in measure.groups_of(
      fit, temperature=temperature, batch_size=size, room=one.room
    )
  ]
  by_category = collections.Counter(q.category for q in asked)
  models = checkpoints_of(entered)
  facts = {
    **provenance.record(
      models=models,
      prompts=_QUESTIONS.value or str(questions.OWN),
    ),
    "config": json.loads(config.to_json_best_effort()),
    "systems": result.describe(entered, pairs),
    "questions": {
      "count": len(asked),
      "by_category": dict(by_category),
      "chat_template": one.tokenizer.chat_template is not None,
      "ids": [q.id for q in asked],
    },
    "left_out": result.left_out(entered, sizes),
    "refused": refused,
  }
  if _COUNT_EXPERTS.value:
    facts["experts"] = experts.facts(pairs[systems.PLAIN])
  settings = settings_of(config, entered, asked, models)
  with Journal(output, settings, grows=True) as journal:
    if journal.batches:
      print(f"{output}: {len(journal.batches)} groups and costs are measured "
            "already, and are kept", file=sys.stderr)  # fmt: skip
    try:
      records = measure_missing(contests, groups, pairs, journal)
    finally:
      one.reference.close()
    found = result.result_of(records, facts)
    write(output, found)
    journal.finish()
  terminal.console(quiet=not processes.is_chief()).print(
    page.over_all(found), soft_wrap=True, markup=False
  )
  if found["refused"]:
    print(f"{len(found['refused'])} prompts were too long for config."
          f"max_length: see {output}", file=sys.stderr)  # fmt: skip
  if broken := result.ended_by_nan(found["groups"]):
    return cli.fail("NaN logits ended answers: " + ", ".join(broken))
  return 0


if __name__ == "__main__":
  cli.run(run, required=(), several_processes=True)
