r"""Has a chat model write conversations to train its draft on.

  python -m launch.tools.self_data --config=configs/smollm2.py --output=FOLDER \
    --count=2000 --temperatures=0.6,0.8,1.0 --keep_out=spec_bench.jsonl
  python -m launch.train --config=configs/train_head.py:eagle3 \
    --config.target=TARGET --config.dataset=FOLDER --workdir=W

After the tokens with which its template opens a user's turn, the model writes a
question and answers it (Magpie, Xu et al. 2024), each in at most
--config.max_new_tokens tokens. Questions in --prompts, a file of lines
{"messages": [...]} that end with a user's turn, are answered first. Lines of
--system_prompts precede the invented questions, in turn, for more variety
(launch/training/users.txt covers mathematics, translation, summaries). Answers
are sampled without them, at --answer_temperatures; 0 suits a draft for greedy
decoding.

FOLDER gets about.json and conversations.jsonl, with lines {"messages",
"number", "whole"}, where "whole" is true if the answer ended on its own.
Repeated questions are dropped, as is everything that shares 13 words in a row
with the project's evaluation questions or those in --keep_out.
"""

import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from launch import cli, provenance, results
from launch.assembly import pair
from launch.evaluation import questions
from launch.prompts import Prompt
from launch.training import data
from models import chat
from models.tokenizers import Tokenizer
from specjax.runtime.requests import Settings, make_batches

Message = Mapping[str, str]

cli.reads(cli.CONFIG, cli.OUTPUT, cli.PROMPTS, cli.TEMPERATURES, cli.COUNT)
_KEEP_OUT = flags.DEFINE_list(
  "keep_out", [], "Files of questions to keep out of the conversations."
)
_SYSTEM_PROMPTS = flags.DEFINE_string(
  "system_prompts", None, "A file of system prompts for invented questions."
)
_ANSWER_TEMPERATURES = flags.DEFINE_list(
  "answer_temperatures", None, "Temperatures for answers; else --temperatures."
)
_ROWS = flags.DEFINE_integer(
  "num_rows", 16, "Conversations decoded together.", lower_bound=1
)
_MARK = "\ufdd1"  # a noncharacter, which no text contains
_WORD = re.compile(r"\w+")
_NGRAM = 13  # words that two texts do not share by chance
_LEAST = 6  # words; a shorter text must be the whole message


def before_user(tokenizer: Tokenizer, system: str = "") -> tuple[int, ...]:
  """The tokens that a chat template puts before a user's first words."""
  messages = [{"role": "user", "content": _MARK}]
  if system:
    messages.insert(0, {"role": "system", "content": system})
  text = chat.render(tokenizer, messages, add_generation_prompt=False)
  before, mark, _ = text.partition(_MARK)
  if not mark or not before or system not in before:
    raise ValueError(
      "the chat template must put tokens, and the system prompt, before the "
      "user's words"
    )
  return tuple(chat.encode_rendered(tokenizer, before))


def overlap(tests: Iterable[str]) -> Callable[[Sequence[Message]], bool]:
  """A test for conversations that contain parts of a test set's texts.

  Two texts overlap if they share 13 words in a row, ignoring case and
  punctuation. All words of a shorter text must occur, and one of fewer than six
  must be a whole message.
  """
  runs: dict[int, set[tuple[str, ...]]] = {}
  whole = set()
  for text in tests:
    words = _words(text)
    whole.add(words)
    if len(words) >= _LEAST:
      size = min(_NGRAM, len(words))
      runs.setdefault(size, set()).update(_runs(words, size))

  def is_tested(messages: Sequence[Message]) -> bool:
    return any(
      words in whole
      or any(not known.isdisjoint(_runs(words, n)) for n, known in runs.items())
      for words in (_words(message["content"]) for message in messages)
    )

  return is_tested


def sift(
  conversations: Iterable[Mapping[str, Any]],
  is_tested: Callable[[Sequence[Message]], bool],
) -> list[Mapping[str, Any]]:
  """Drops conversations that are empty, repeated or contain test questions."""
  kept, prompts = [], set()
  for one in conversations:
    *prompt, answer = (
      _words(message["content"]) for message in one["messages"]
    )
    seen = tuple(prompt) in prompts
    if answer and all(prompt) and not seen and not is_tested(one["messages"]):
      prompts.add(tuple(prompt))
      kept.append(one)
  return kept


def _words(text: str) -> tuple[str, ...]:
  return tuple(_WORD.findall(text.lower()))


def _runs(words: Sequence[str], size: int) -> Iterable[tuple[str, ...]]:
  return (words[i : i + size] for i in range(len(words) - size + 1))


def make(
  config, count: int, given: Sequence, systems: Sequence[str]
) -> Iterator[dict[str, Any]]:
  """Makes `{"number", "messages", "whole"}`, `--num_rows` at once.

  Conversation i has the i-th of the given messages, or else a question invented
  after the (i mod n)-th of n system prompts; likewise temperatures. It is left
  out if the question was cut off or leaves no room for an answer.
  """
  asked_at, answered_at = _temperatures()  # of questions, and of answers
  models = pair.build(config)
  engine, tokenizer = pair.engine_of(config, models), models.tokenizer
  room = models.room(config.max_new_tokens)
  begins = [before_user(tokenizer, text) for text in systems]

  def complete(prompts, temperatures, offset: int) -> dict:
    requests = [
      Prompt(
        stream=(2 * i + offset) % 2**32, id=i, text="", token_ids=tuple(ids),
        settings=Settings(temperature=temperatures[i % len(temperatures)]),
      )
      for i, ids in prompts.items()
      if len(ids) <= room
    ]  # fmt: skip
    completed, rows = {}, _ROWS.value
    for batch in make_batches(
      requests, batch_size=rows, max_width=room, total=rows
    ):
      for request, one in zip(batch.prompts, engine.run(batch)[0], strict=True):
        whole = one.stop_reason == "stop_token"
        ids = one.token_ids[:-1] if whole else one.token_ids
        completed[request.id] = tokenizer.decode(ids).strip(), whole
    return completed

  for start in range(0, count, _ROWS.value):
    group = range(start, min(start + _ROWS.value, count))
    talks = {i: given[i] for i in group if i < len(given)}
    begun = {i: begins[i % len(begins)] for i in group if i not in talks}
    for i, (text, whole) in complete(begun, asked_at, 0).items():
      if whole and text:
        talks[i] = [{"role": "user", "content": text}]
    prompts = {i: chat.encode(tokenizer, talk) for i, talk in talks.items()}
    for i, (text, whole) in sorted(complete(prompts, answered_at, 1).items()):
      answer = {"role": "assistant", "content": text}
      yield {"number": i, "messages": [*talks[i], answer], "whole": whole}
    print(f"{group.stop} of {count} made", file=sys.stderr)


def _temperatures() -> list[list[float]]:
  """The temperatures of questions and of answers."""
  questions = cli.TEMPERATURES.value or ["0.6", "0.8", "1.0"]
  both = questions, _ANSWER_TEMPERATURES.value or questions
  return [[float(text) for text in texts] for texts in both]


def run(_) -> int:
  """The command."""
  config, count = cli.CONFIG.value, cli.COUNT.value or 1000
  folder = pathlib.Path(cli.OUTPUT.value)
  output = folder / "conversations.jsonl"
  results.check(output)
  tests = [questions.OWN, *_KEEP_OUT.value]
  texts = [t for file in tests for q in questions.read(file) for t in q.turns]
  settings = {
    "config": json.loads(config.to_json_best_effort()),
    "prompts": cli.PROMPTS.value,
    "system_prompts": _SYSTEM_PROMPTS.value,
    "temperatures": _temperatures(),
  }
  path, systems = cli.PROMPTS.value, [""]  # the template's own
  given = list(data.documents_of(pathlib.Path(path))) if path else []
  if any(isinstance(x, str) or x[-1]["role"] != "user" for x in given):
    raise cli.UserError(f"{path}: messages must end with a user's turn")
  if _SYSTEM_PROMPTS.value:
    systems = [line for _, line in results.lines_of(_SYSTEM_PROMPTS.value)]
  kept = sift(make(config, count, given, systems), overlap(texts))
  results.write(output, results.dumps(kept))
  about = {**settings, "made": count, "kept": len(kept)}
  results.write_json(folder / "about.json", about | provenance.record())
  print(f"{len(kept)} of {count} conversations kept: {output}")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
