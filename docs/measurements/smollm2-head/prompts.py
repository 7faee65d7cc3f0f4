"""Prompts made of text on this machine, for `launch.tools.self_data`.

  python docs/measurements/smollm2-head/prompts.py 6000 > PROMPTS.jsonl

Docstrings are the documents that are asked about, summarised and translated,
functions are what is explained and completed, messages of programs (gettext's
*.mo files below /usr/share) are what is translated into English, and problems
of mathematics are made up: a line {"messages": [{"role": "user", ...}]} each,
seven kinds in turn. Of Python only training files of `launch.training.corpus`.
"""

import ast
import gettext
import inspect
import json
import pathlib
import random
import sys
from collections.abc import Iterator

from launch.training import corpus

_LEAST, _MOST = 280, 1800  # characters of a document
_CODE = 1400  # of a function, at most
_LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian"}
_NAMES = "Anna Ben Clara David Emma Farid Grace Hugo Ines Jonas Kim Leo".split()
_THINGS = "apples books candles eggs muffins notebooks pencils shirts".split()


def documented(source: str) -> Iterator[tuple[str, str, str]]:
  """Name, text without docstring's indentation, and source of definitions."""
  try:
    nodes = list(ast.walk(ast.parse(source)))
  except SyntaxError:
    return
  for node in nodes:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      if text := ast.get_docstring(node):
        yield node.name, text, ast.get_source_segment(source, node) or ""


def asked_of(rng: random.Random, name: str, text: str, code: str) -> list[str]:
  """What is asked of a definition: kinds 0 to 4, "" for what it cannot give."""
  first, *_ = text.split("\n\n")
  first = " ".join(first.split())
  is_document = len(text) > _LEAST
  document = text[:_MOST].rpartition("\n")[0] or text[:_MOST]
  about = rng.choice((
    f"What is {name} for?", f"How is {name} used?",
    f"What should I know before I use {name}?",
    f"Which arguments matter most for {name}, and why?",
    "What are the most important points?",
    "What happens if something is wrong?",
  ))  # fmt: skip
  summary = rng.choice((
    "Summarize:", "Summarize:", "Summarize this in two sentences:",
    "Give the key points of the following text:", "Explain in simple words:",
  ))  # fmt: skip
  language = rng.choice([*_LANGUAGES.values()])
  is_short = len(code) < _CODE
  head = code.partition(":\n")[0]
  task = rng.choice((
    f"Explain what this Python code does:\n\n{code}",
    f"Write a test for this function:\n\n{code}",
    f"Find possible problems in this code and improve it:\n\n{code}",
  ))  # fmt: skip
  complete = rng.choice((
    f"Write a Python function named {name}. {first}",
    f'Complete this function:\n\n{head}:\n    """{first}"""\n',
    f'{head}:\n    """{first}"""\n',
    f"Write a program in {rng.choice(('C++', 'Java', 'Python'))}: {first}",
  ))  # fmt: skip
  return [
    f"{document}\n\n{about}" if is_document else "",
    f"{summary} {document}" if is_document else "",
    f"Translate English to {language}: {first}"
    if 40 < len(first) < 300
    else "",
    task if is_short and code.startswith("def") else "",
    complete if is_short and code.startswith("def") and len(first) > 25 else "",
  ]


def problem(rng: random.Random) -> str:
  """A problem of mathematics in words."""
  name, other = rng.sample(_NAMES, 2)
  thing, more = rng.sample(_THINGS, 2)
  a, b, c, d = (rng.randint(2, top) for top in (12, 40, 9, 20))
  return rng.choice((
    f"{name} buys {b} {thing} for ${a} each and {c} {more} for ${d} each. "
    f"How much does {name} spend?",
    f"{name} has {b + d} {thing} and gives {d} of them to {other}. Then "
    f"{other} gives back {c}. How many {thing} does {name} have now?",
    f"A shop sells {b} {thing} a day. How many does it sell in {a} weeks if it "
    f"is closed on {rng.choice((1, 2))} days of each week?",
    f"{name} drives {b * a} miles in {a} hours. At the same speed, how far "
    f"does {name} get in {c} hours?",
    f"Solve for x: {a}x + {b} = {a * d + b}. Show each step.",
    f"What is {rng.choice((10, 15, 20, 25))}% of {b * 20}, and what is left?",
    f"The {thing} in a box weigh {a} pounds each. {name} and {other} share {c} "
    f"boxes of {b} equally. How many pounds does each of them carry?",
  ))  # fmt: skip


def foreign(rng: random.Random) -> list[str]:
  """Translations into English that are asked for, half of them from German."""
  asked: dict[str, list[str]] = {}
  for code, language in _LANGUAGES.items():
    said = set()
    for path in pathlib.Path("/usr/share").rglob(f"{code}/LC_MESSAGES/*.mo"):
      try:
        with path.open("rb") as file:
          said.update(gettext.GNUTranslations(file)._catalog.values())
      except (OSError, UnicodeDecodeError):
        continue
    texts = [
      f"Translate {language} to English: {text}"
      for text in sorted(said)
      if 40 < len(text) < 250 and text.count(" ") > 5 and text.isprintable()
      and "%" not in text
    ]  # fmt: skip
    rng.shuffle(texts)
    asked[code] = texts
  german, others = (
    asked.pop("de"),
    [x for texts in asked.values() for x in texts],
  )
  rng.shuffle(others)
  pairs = zip(german, others, strict=False)
  return [text for pair in pairs for text in pair]


def main(count: int) -> None:
  """Prints so many prompts."""
  rng = random.Random(0)
  every = [
    found
    for file in corpus.python_files(split="train")
    for found in documented(inspect.cleandoc(file.text))
  ]
  rng.shuffle(every)
  kinds = zip(*(asked_of(rng, *found) for found in every), strict=True)
  waiting = [list(dict.fromkeys(filter(None, kind))) for kind in kinds]
  waiting.append(list({problem(rng): None for _ in range(count)}))
  waiting.append(foreign(rng))
  turns = zip(*waiting, strict=False)
  lines = [text for texts in turns for text in texts][:count]
  if len(lines) < count:
    sys.exit(f"this machine's source gives {len(lines)} prompts, not {count}")
  for text in lines:
    print(json.dumps({"messages": [{"role": "user", "content": text}]}))


if __name__ == "__main__":
  main(int(sys.argv[1]))
