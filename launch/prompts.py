"""Prompts: reading them, and grouping them into batches of few shapes."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from models.tokenizers import Tokenizer

# What `launch.decode` decodes when no file is given.
BUILT_IN = (
  'def read_json(path):\n  """Read a JSON file and return its contents."""\n',
  "class Stack:\n  def __init__(self):\n    self.items = []\n\n  def push(",
  "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser(",
  "def __eq__(self, other):\n        if not isinstance(other, ",
  "    def test_empty(self):\n        self.assertEqual(",
  'def parse_args(argv=None):\n    """Parse the command line arguments.',
)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt.

  Attributes:
    stream: what it draws from, `fold_in(key(seed), stream)`; of prompts that
      are decoded together, each has its own.
    id: whatever the file calls it, or the number of its line.
    text: the prompt.
    token_ids: the prompt's tokens, at least one.
  """

  stream: int
  id: Any
  text: str
  token_ids: tuple[int, ...]

  @property
  def key(self) -> str:
    """A hash of what it is: id, text and stream."""
    text = json.dumps([self.id, self.text, self.stream], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def built_in(tokenizer: Tokenizer, *, max_tokens: int) -> list[Prompt]:
  """The built-in prompts; ValueError if one does not fit the buffer."""
  return [
    Prompt(i, i, text, _encode(text, tokenizer, max_tokens=max_tokens))
    for i, text in enumerate(BUILT_IN)
  ]


def first_tokens(
  texts: Sequence[str], tokenizer: Tokenizer, *, num_tokens: int
) -> list[Prompt]:
  """Prompts of at most `num_tokens` tokens, the first ones of each text."""
  return [
    Prompt(i, i, text, tuple(tokenizer.encode(text)[:num_tokens]))
    for i, text in enumerate(texts)
  ]


def all_of(
  path: str | None, tokenizer: Tokenizer, *, max_tokens: int
) -> list[Prompt]:
  """The prompts of a file, every line of which must be good; or the built-in.

  Args:
    path: the file, or None.
    tokenizer: of the pair.
    max_tokens: longest prompt that fits the buffer.

  Raises:
    ValueError: for a bad line or prompt, or a file without prompts.
  """
  if not path:
    return built_in(tokenizer, max_tokens=max_tokens)
  items, problems = read_jsonl(path, tokenizer, max_tokens=max_tokens)
  if problems:
    raise ValueError("; ".join(problems))
  if not items:
    raise ValueError(f"no prompts in {path}")
  return items


def read_jsonl(
  path: str, tokenizer: Tokenizer, *, max_tokens: int
) -> tuple[list[Prompt], list[str]]:
  """Reads `{"id": ..., "prompt": "..."}` lines.

  The stream of a prompt follows from its id alone, so that neither its place in
  the file nor the other prompts change what is drawn. (If the hashes of two ids
  are the same, the second takes another.)

  Args:
    path: the file; blank lines are skipped.
    tokenizer: of the pair.
    max_tokens: longest prompt that fits the buffer.

  Returns:
    The good prompts, and a message for every bad line (named by its number,
    from 1): one bad line does not cost the others. A line without an id gets
    its number; one whose id another line had before is bad.

  Raises:
    FileNotFoundError: if there is no such file.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    what = "is a folder" if file.is_dir() else "no such prompts file"
    raise FileNotFoundError(f"{what}: {path}")
  prompts, problems = [], []
  lines: dict[str, int] = {}
  streams: set[int] = set()
  for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
      text = _text(record)
      identity = record.get("id")
      identity = number if identity is None else identity
      name = json.dumps(identity, sort_keys=True)
      if name in lines:
        raise ValueError(
          f"the id {name} is that of line {lines[name]} already"
          + ("" if record.get("id") is not None else
             " (a line without an id has its number)")
        )  # fmt: skip
      token_ids = _encode(text, tokenizer, max_tokens=max_tokens)
      prompts.append(
        Prompt(_stream(identity, streams), identity, text, token_ids)
      )
      lines[name] = number
    except UnicodeDecodeError:
      problems.append(f"{path}:{number}: not UTF-8")
    except json.JSONDecodeError as error:
      problems.append(f"{path}:{number}: not JSON: {error.msg}")
    except RecursionError:
      problems.append(f"{path}:{number}: nested too deeply")
    except (ValueError, TypeError) as error:  # TypeError: lone surrogates
      problems.append(f"{path}:{number}: {error}")
  return prompts, problems


def _text(record: Any) -> str:
  """The prompt of a line; ValueError if it has none."""
  if not isinstance(record, dict):
    raise ValueError(
      f'expected an object {{"id": ..., "prompt": "..."}}, got '
      f"{type(record).__name__}"
    )
  text = record.get("prompt")
  if not isinstance(text, str):
    raise ValueError(
      'expected a string under "prompt", got '
      + (type(text).__name__ if "prompt" in record else "no such key")
    )
  return text


def _encode(text: str, tokenizer: Tokenizer, *, max_tokens: int):
  """The tokens of a prompt; ValueError if they are none or too many."""
  token_ids = tuple(tokenizer.encode(text)) if text else ()
  if not token_ids:
    raise ValueError("the prompt is empty")
  if len(token_ids) > max_tokens:
    raise ValueError(
      f"the prompt has {len(token_ids)} tokens, but only {max_tokens} fit "
      "beside max_new_tokens (max_length, and the models' positions, bound "
      "both together)"
    )
  return token_ids


_HALF = 1 << 31


def _stream(identity: Any, taken: set[int]) -> int:
  """The stream of an id, an `u32`, which is added to those that are taken.

  That of a number below 2^31 is the number; of any other id, a hash above.
  """
  if type(identity) is int and 0 <= identity < _HALF:
    stream = identity
  else:
    text, stream = json.dumps(identity, sort_keys=True), None
    while stream is None or stream in taken:
      text = hashlib.sha256(text.encode()).hexdigest()
      stream = _HALF + int(text, 16) % _HALF
  taken.add(stream)
  return stream
