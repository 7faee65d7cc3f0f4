r"""Writes inputs and answers of tasks whose data a machine makes.

  python -m launch.tools.machine_tasks --split=train --num_pairs=200000 \
    --output=TRAIN.jsonl

A line is {"id", "task", "input", "output"}: a pair to train an encoder-decoder
on (configs/train_t5.py), and a prompt for `launch.decode`. The tasks:

  number: 4217            four thousand two hundred seventeen
  words: four thousand    4000
  date: 2026-11-22        november the twenty-second, two thousand twenty-six
  day: november the ...   2026-11-22
  simplify: 3*(x+2)-x     2*x+6
  signature: mkdir. ...   mkdir(path, mode=511)

The last is Python's own: a function's name and the first sentence of its
docstring, and how it is called, from the files of this machine
(`launch.training.corpus`). All else follows from a seed, and whether something
is trained on from a hash of what it is about: no number, date or expression is
in two splits.
"""

import ast
import calendar
import datetime
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from launch import cli, jsonl, results
from launch.training import corpus

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
_LONGEST = 90  # characters of a docstring's sentence, and of a signature

Pair = tuple[str, str]


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


# ----------------------------------------------------------------- one of each


def _number(rng: random.Random) -> int:
  return rng.randrange(10 ** rng.randint(1, 6))


def _date(rng: random.Random) -> datetime.date:
  first = datetime.date(1500, 1, 1).toordinal()
  return datetime.date.fromordinal(first + rng.randrange(600 * 365))


def _expression(rng: random.Random) -> tuple[str, str]:
  """A sum of terms in x, and the same collected: text and its value."""
  parts, x, rest = [], 0, 0
  for i in range(rng.randint(2, 4)):
    sign = rng.choice((1, -1)) if i else 1
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    kind = rng.randrange(3)
    if kind == 0:
      text, dx, d = f"{a}*(x+{b})", a, a * b
    elif kind == 1:
      text, dx, d = f"{a}*x", a, 0
    else:
      text, dx, d = str(b), 0, b
    parts.append(("-" if sign < 0 else "+" if i else "") + text)
    x, rest = x + sign * dx, rest + sign * d
  return "".join(parts), _collected(x, rest)


def _collected(x: int, rest: int) -> str:
  if not x:
    return str(rest)
  head = {1: "x", -1: "-x"}.get(x, f"{x}*x")
  return head + (f"{rest:+d}" if rest else "")


_MADE: dict[str, tuple[Callable, Callable[[Any], tuple[str, Pair]]]] = {
  "number": (_number, lambda n: (str(n), (f"number: {n}", in_words(n)))),
  "words": (_number, lambda n: (str(n), (f"words: {in_words(n)}", str(n)))),
  "date": (_date, lambda d: (str(d), (f"date: {d}", date_in_words(d)))),
  "day": (_date, lambda d: (str(d), (f"day: {date_in_words(d)}", str(d)))),
  "simplify": (_expression, lambda e: (e[0], (f"simplify: {e[0]}", e[1]))),
}
"""What a task is about, drawn, and the name and the pair of such a thing."""
TASKS = (*_MADE, "signature")


def split_of(about: str) -> str:
  """The split of what a pair is about: 2 in 100 each are held out."""
  percent = hashlib.sha256(about.encode()).digest()[0] * 100 // 256
  return {0: "validation", 1: "validation", 2: "test", 3: "test"}.get(
    percent, "train"
  )


def signatures(split: str) -> list[Pair]:
  """Signature pairs of Python's functions, one an input, in a fixed order."""
  by_name: dict[str, str] = {}
  for file in corpus.python_files(split=split):
    try:
      tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError):
      continue
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef) and (pair := _signature(node)):
        by_name.setdefault(*pair)
  return sorted(by_name.items())


def _signature(node: ast.FunctionDef) -> Pair | None:
  """A function's docstring and signature; None without or of long ones."""
  said = (ast.get_docstring(node) or "").strip().partition("\n")[0]
  answer = f"{node.name}({ast.unparse(node.args)})"
  if len(said) < 10 or max(len(said), len(answer)) > _LONGEST:
    return None
  if not (said + answer).isascii():
    return None
  return f"signature: {node.name}. {said}", answer


def pairs(
  split: str, count: int, *, seed: int = 0, with_signatures: bool = True
) -> Iterator[tuple[str, Pair]]:
  """Pairs of all tasks in turn, each input once.

  Args:
    split: "train", "validation" or "test".
    count: how many; fewer of a task that has no more.
    seed: of what is drawn.
    with_signatures: whether to read the files of this machine too.

  Yields:
    The task's name, and its input and answer.
  """
  rng = random.Random(f"{split} {seed}")
  known = signatures(split) if with_signatures else []
  rng.shuffle(known)
  seen: set[str] = set()
  tasks = list(TASKS if known else _MADE)
  while count > 0:
    for task in tasks[:count]:
      if task == "signature":
        if not known:
          continue
        pair = known.pop()
      else:
        pair = _unseen(task, rng, split, seen)
      seen.add(pair[0])
      yield task, pair
      count -= 1


def _unseen(task: str, rng: random.Random, split: str, seen: set[str]) -> Pair:
  """A new pair of the split; ValueError if none is found."""
  drawn, told = _MADE[task]
  for _ in range(100_000):
    about, pair = told(drawn(rng))
    if split_of(about) == split and pair[0] not in seen:
      return pair
  raise ValueError(f"the {split} split has no more pairs: ask for fewer")


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  made = pairs(_SPLIT.value, _NUM_PAIRS.value, seed=cli.SEED.value or 0)
  lines = [
    {"id": i, "task": task, "input": given, "output": answer}
    for i, (task, (given, answer)) in enumerate(made)
  ]
  results.write(cli.OUTPUT.value, jsonl.dumps(lines))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("output",))
