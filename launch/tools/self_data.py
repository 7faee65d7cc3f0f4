r"""Writes conversations that a chat model makes up, to train a draft on.

  python -m launch.tools.self_data --config=configs/smollm2.py --output=FOLDER \
    --count=2000 --temperatures=0.6,0.8,1.0 --keep_out=spec_bench.jsonl
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=TARGET --config.dataset=FOLDER --workdir=W

The model is given what its template puts before a user's words, says what a
user might, and answers (Magpie, Xu et al. 2024); --config.max_new_tokens is the
budget of either. Each line of --system_prompts is what the system says before
that user, in turn, so that they ask for more than the model thinks of by itself
(launch/training/users.txt has a few: mathematics, translation, summaries); the
answer is given without. --prompts has users who are given and not made up:
lines {"messages": [...]} that end with a user's turn, answered before the
others. --answer_temperatures has the answers drawn at other temperatures than
the users' turns, 0 among them: a draft for greedy decoding learns most from
greedy answers. FOLDER gets conversations.jsonl, a line
{"messages": [...], "temperature", "answer_temperature", "number", "whole":
whether the answer came to its end} each, and about.json: what made it, and what
was dropped.

What was asked before is dropped, and whatever has something in common with the
questions that models are measured with, the project's own and those of
--keep_out: 13 words in a row. The same command goes on where a stopped one was
(FOLDER/conversations.jsonl.journal), and with a larger --count it adds to what
is there. --rows conversations are made at a time; where one ends the next one
begins. With --in_groups all rows begin and end together, and twice as many
conversations are under way: for a device that decodes thousands of rows.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence

import tqdm
from absl import flags

from launch import cli, provenance, results
from launch.assembly import pair
from launch.evaluation import questions
from launch.results import Journal
from launch.serving import assembly, jobs
from launch.serving.control import Asked
from launch.training import data, self_data
from specjax.runtime.requests import Batch, Settings
from specjax.state import StopReason

cli.reads(
  cli.CONFIG, cli.OUTPUT, cli.PROMPTS, cli.TEMPERATURES, cli.COUNT, cli.TURNS
)  # fmt: skip
_TEMPERATURES = ("0.6", "0.8", "1.0")
_NARROW = 96  # tokens of a prompt that begins a user's turn
_ROUNDS = 32  # of an iteration, which ends with the first row that does
_KEEP_OUT = flags.DEFINE_list(
  "keep_out", [], "Files of questions that must not be in it."
)
_SYSTEM_PROMPTS = flags.DEFINE_string(
  "system_prompts", "", "A file; its lines stand before made-up users, in turn."
)
_ANSWER_TEMPERATURES = flags.DEFINE_list(
  "answer_temperatures", None, "Of the answers; those of the users' turns."
)
_ROWS = flags.DEFINE_integer(
  "rows", 16, "Conversations that are made at a time.", lower_bound=1
)
_IN_GROUPS = flags.DEFINE_bool(
  "in_groups", False, "Rows begin and end together."
)


def _count() -> int:
  return cli.COUNT.value or 1000


def temperatures() -> list[float]:
  """Those of users' turns; UserError if they are none."""
  asked = cli.TEMPERATURES.value or _TEMPERATURES
  return _read(asked, "--temperatures must be positive numbers", zero=False)


def answer_temperatures() -> list[float] | None:
  """Those of answers, None for the users'; UserError if they are none."""
  asked = _ANSWER_TEMPERATURES.value
  told = "--answer_temperatures must be numbers of 0 or more"
  return None if asked is None else _read(asked, told, zero=True)


def _read(asked: Sequence[str], told: str, *, zero: bool) -> list[float]:
  try:
    temperatures = [float(x) for x in asked]
  except ValueError:
    temperatures = []
  if not temperatures or not all(
    0 < x < 100 or (zero and not x) for x in temperatures
  ):
    raise cli.UserError(f"{told}, as in 0.6,1.0, got {','.join(asked)!r}")
  return temperatures


def tested_texts(more: Sequence[str]) -> list[str]:
  """Texts of test questions, which nothing may hold: ours, and `more`."""
  files = [questions.OWN, *more]
  return [t for f in files for q in questions.read(f) for t in q.turns]


def system_prompts() -> list[str]:
  """System prompts; "" is the template's own.

  Raises:
    UserError: if there is no such file, or nothing in it.
  """
  if not _SYSTEM_PROMPTS.value:
    return [""]
  try:
    with open(_SYSTEM_PROMPTS.value, encoding="utf-8") as file:
      lines = [line.strip() for line in file]
  except (OSError, UnicodeDecodeError) as error:
    raise cli.UserError(f"--system_prompts: {error}") from error
  if not any(lines):
    raise cli.UserError(f"there is nothing in {_SYSTEM_PROMPTS.value}")
  return [line for line in lines if line]


def given_prompts() -> list[data.Document]:
  """The conversations that --prompts begins.

  Raises:
    UserError: for a line whose last message is not a user's.
  """
  if not cli.PROMPTS.value:
    return []
  documents = list(data.documents_of(pathlib.Path(cli.PROMPTS.value)))
  for number, document in enumerate(documents, 1):
    if isinstance(document, str) or document[-1]["role"] != "user":
      raise cli.UserError(
        f"--prompts: document {number} of {cli.PROMPTS.value} must be "
        '{"messages": [...]} that end with a user\'s'
      )
  return documents


def settings_of(config) -> dict:
  """All that decides a conversation, but its number."""
  said, answered = system_prompts(), answer_temperatures()
  given = [json.dumps(prompt) for prompt in given_prompts()]
  return provenance.settings(
    config,
    provenance.checkpoints(config),
    **({"prompts": provenance.hash_texts(given)} if given else {}),
    **({} if said == [""] else {"system_prompts": said}),
    **({} if answered is None else {"answer_temperatures": answered}),
    **({} if cli.TURNS.value in (None, 1) else {"turns": cli.TURNS.value}),
    **({"in_groups": True} if _IN_GROUPS.value else {}),
    temperatures=temperatures(),
    slots=_ROWS.value,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
  """A row of a batch (`specjax.runtime.requests.Request`)."""

  token_ids: Sequence[int]
  stream: int
  settings: Settings
  stop: tuple[str, ...] = ()


def _completing(config, models: pair.Pair, longest: int):
  """A function that completes all that is asked for, `--rows` at a time.

  Of few widths, so that few programs are compiled: users' turns begin with a
  few tokens, and answers with up to `longest`.
  """
  one, rows = pair.engine_of(config, models), _ROWS.value

  def complete(asked: Sequence[Asked]) -> list[jobs.Completed]:
    completed_jobs: list[jobs.Completed | None] = [None] * len(asked)
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].token_ids))
    for start in range(0, len(order), rows):
      places = order[start : start + rows]
      most = len(asked[places[-1]].token_ids)
      batch = Batch(
        tuple(_request(asked[i]) for i in places),
        rows,
        _NARROW if most <= _NARROW else max(longest, most),
      )
      for place, completion in zip(places, one.run(batch)[0], strict=True):
        completed_jobs[place] = jobs.Completed(
          token_ids=tuple(completion.token_ids),
          reason=StopReason[completion.stop_reason.upper()],
        )
    return [completed for completed in completed_jobs if completed is not None]

  return complete


def _request(asked: Asked) -> _Request:
  names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens")
  return _Request(
    token_ids=asked.token_ids,
    stream=asked.stream,
    settings=Settings(**{name: getattr(asked, name) for name in names}),
  )


def make_missing(config, journal: Journal) -> None:
  """Makes the conversations that the journal does not have."""
  missing = [i for i in range(_count()) if i not in journal.batches]
  if not missing:
    return
  loaded = pair.load(config)
  models = pair.assemble(config, loaded)
  maker = self_data.Maker(
    tokenizer=models.tokenizer,
    budget=config.max_new_tokens,
    room=models.room(config.max_new_tokens),
    temperatures=temperatures(),
    answer_temperatures=answer_temperatures(),
    turns=cli.TURNS.value or 1,
    begun=given_prompts(),
    systems=system_prompts(),
    seed=config.seed,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
  )
  progress = tqdm.tqdm(
    total=_count(), initial=_count() - len(missing), unit="conversation",
    disable=not sys.stderr.isatty(),
  )  # fmt: skip

  def numbered(number: int):
    return number, (yield from maker.conversation(number))

  begun = map(numbered, missing)
  if _IN_GROUPS.value:
    complete = _completing(config, models, maker.longest)
    completed_jobs = jobs.in_groups(complete, 2 * _ROWS.value, begun)
  else:
    sizes = assembly.Sizes(
      slots=_ROWS.value, max_prompt=maker.longest, rounds=_ROUNDS,
      gap=math.inf,  # nobody waits for a token
    )  # fmt: skip
    completed_jobs = jobs.done(
      assembly.make_slots(config, loaded, sizes), begun
    )
  with progress:
    for number, made in completed_jobs:
      journal.add({"batch": number, "conversation": made})
      progress.update()


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  if config.mesh:
    raise cli.UserError("self_data runs on one device: give no config.mesh")
  folder = results.check_folder("--output", cli.OUTPUT.value)
  texts, warmth = tested_texts(_KEEP_OUT.value), temperatures()
  answered = answer_temperatures()
  system_prompts(), given_prompts()  # refused before anything is written
  folder.mkdir(parents=True, exist_ok=True)
  output = str(folder / "conversations.jsonl")
  with Journal(output, settings_of(config), grows=True) as journal:
    make_missing(config, journal)
    made = [journal.batches[i]["conversation"] for i in range(_count())]
    kept, counts = self_data.sifted(
      filter(None, made), self_data.overlap(texts)
    )
    about = {
      **counts,
      "asked_for": _count(),
      "temperatures": warmth,
      "answer_temperatures": answered or warmth,
      "system_prompts": [text for text in system_prompts() if text],
      **provenance.record(
        models=provenance.checkpoints(config),
        prompts=cli.PROMPTS.value,
        files={f"--keep_out={f}": f for f in _KEEP_OUT.value},
      ),
    }
    results.write_json(str(folder / "about.json"), about)
    journal.finish([dict(row) for row in kept])
  if not _KEEP_OUT.value:
    print(
      "only this project's own questions were kept out of it: name a test set "
      "with --keep_out",
      file=sys.stderr,
    )
  told = ", ".join(f"{n} {name}" for name, n in counts.items())
  print(f"{told}: {output}")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
