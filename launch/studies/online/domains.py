"""Prompts of several domains, for text that changes under a draft's hands.

"python" is lines from source files that no embedded model was trained on,
"prose" the reference of the Python language as its interpreter carries it, in
English sentences, which the corpus of the embedded models leaves out. Every
other domain is a task of our own questions (`launch.evaluation.questions`).
"""

import itertools
import pydoc_data.topics
import re
from collections.abc import Iterator

import numpy as np

from launch.evaluation import questions
from launch.training import corpus

_PYTHON, _PROSE = "python", "prose"
# Letters of a paragraph of prose, at least, and those of a prompt.
_LEAST, _MOST = 120, 400
_MANY = 400  # prompts of a domain that has as many


def texts(domain: str, *, training: bool) -> Iterator[str]:
  """Prompts of a domain, again from the first when they are all used.

  Args:
    domain: "python", "prose", or a task of our own questions.
    training: for what is trained beforehand: of source and prose other prompts
      than else, of the questions, which are few, the same.

  Raises:
    ValueError: for a domain that is none.
  """
  if domain == _PYTHON:
    split = "validation" if training else "test"
    found = corpus.held_out_prompts(_MANY // 2, split=split)
  elif domain == _PROSE:
    found = paragraphs()[int(training) :: 2]
  else:
    asked = questions.of_categories(questions.read(questions.OWN), [domain])
    found = [question.turns[0] for question in asked]
  return itertools.cycle(found)


def paragraphs() -> list[str]:
  """The paragraphs of the language reference that are prose, shuffled."""
  found = []
  for _, topic in sorted(pydoc_data.topics.topics.items()):
    for part in re.split(r"\n\s*\n", topic):
      text = " ".join(part.split())
      letters = sum(c.isalpha() or c == " " for c in text)
      if len(text) >= _LEAST and letters > 0.9 * len(text):
        found.append(text[:_MOST])
  unique = list(dict.fromkeys(found))
  order = np.random.default_rng(0).permutation(len(unique))
  return [unique[i] for i in order]
