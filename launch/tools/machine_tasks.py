r"""Writes inputs and answers of tasks whose data a machine makes.

  python -m launch.tools.machine_tasks --split=train --num_pairs=200000 \
    --output=TRAIN.jsonl

A line is {"id", "task", "input", "output"}: a pair to train an encoder-decoder
on (configs/train_t5.py), and a prompt for `launch.decode`. The tasks:

  number: 4217            four thousand two hundred seventeen
  words: four thousand    4000
  date: 2026-11-22        november the twenty-second, two thousand twenty-six

All follows from a seed, and a hash of the number or date decides its split, so
that none is in two of them.
"""

import calendar
import datetime
import hashlib
import random
from collections.abc import Iterator

from absl import flags

from launch import cli, results

cli.reads(cli.OUTPUT, cli.SEED)
_SPLIT = flags.DEFINE_enum(
  "split", "train", ("train", "validation", "test"), "Which of them."
)
_NUM_PAIRS = flags.DEFINE_integer("num_pairs", 1000, "How many.", lower_bound=1)

_ONES = (
  "zero one two three four five six seven eight nine ten eleven twelve "
  "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ODD_ORDINALS = {
  "one": "first", "two": "second", "three": "third", "five": "fifth",
  "eight": "eighth", "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip

TASKS = ("number", "words", "date")


def in_words(number: int) -> str:
  """A number in 0..999,999 in English words."""
  if number < 20:
    return _ONES[number]
  if number < 100:
    ten, one = divmod(number, 10)
    return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")
  for size, name in ((1000, "thousand"), (100, "hundred")):
    if number >= size:
      many, rest = divmod(number, size)
      tail = f" {in_words(rest)}" if rest else ""
      return f"{in_words(many)} {name}{tail}"
  raise AssertionError


def ordinal(number: int) -> str:
  """A number in 1..99 as in "twenty-second"."""
  head, dash, last = in_words(number).rpartition("-")
  if last in _ODD_ORDINALS:
    last = _ODD_ORDINALS[last]
  else:
    last = (last[:-1] + "ie" if last.endswith("y") else last) + "th"
  return head + dash + last


def date_in_words(date: datetime.date) -> str:
  """As in "november the twenty-second, two thousand twenty-six"."""
  month = calendar.month_name[date.month].lower()
  return f"{month} the {ordinal(date.day)}, {in_words(date.year)}"


def split_of(about: str) -> str:
  """The split of a number or a date: 2 in 100 each are held out."""
  percent = hashlib.sha256(about.encode()).digest()[0] * 100 // 256
  return {0: "validation", 1: "validation", 2: "test", 3: "test"}.get(
    percent, "train"
  )


def pairs(
  split: str, count: int, *, seed: int = 0
) -> Iterator[tuple[str, tuple[str, str]]]:
  """Pairs of the three tasks in turn, each input once.

  Yields:
    The task's name, and its input and answer.
  """
  rng = random.Random(f"{split} {seed}")
  seen: set[str] = set()
  for index in range(count):
    task = TASKS[index % len(TASKS)]
    for _ in range(100_000):
      about, pair = _drawn(task, rng)
      if split_of(about) == split and pair[0] not in seen:
        break
    else:
      raise ValueError(f"the {split} split has no more pairs: ask for fewer")
    seen.add(pair[0])
    yield task, pair


def _drawn(task: str, rng: random.Random) -> tuple[str, tuple[str, str]]:
  """What a pair is about, and its input and answer."""
  if task == "date":
    first = datetime.date(1500, 1, 1).toordinal()
    date = datetime.date.fromordinal(first + rng.randrange(600 * 365))
    return str(date), (f"date: {date}", date_in_words(date))
  number = rng.randrange(10 ** rng.randint(1, 6))
  if task == "number":
    return str(number), (f"number: {number}", in_words(number))
  return str(number), (f"words: {in_words(number)}", str(number))


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  made = pairs(_SPLIT.value, _NUM_PAIRS.value, seed=cli.SEED.value or 0)
  lines = [
    {"id": i, "task": task, "input": given, "output": answer}
    for i, (task, (given, answer)) in enumerate(made)
  ]
  results.write(cli.OUTPUT.value, results.dumps(lines))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("output",))
