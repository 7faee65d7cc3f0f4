"""Prompts: built-in, or from a file of lines with settings of their own."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from launch import jsonl, prompt_lines
from models.tokenizers import Tokenizer
from specjax.runtime import requests
from specjax.runtime.requests import Settings

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
  """A prompt, or one sample of it, with its settings.

  Attributes:
    stream: what it draws from, `fold_in(key(seed), stream)`; of prompts that
      are decoded together, each has its own, unless it has a seed of its own.
    id: whatever the file calls it, or the number of its line.
    text: the prompt; of messages, what the chat template makes of them.
    token_ids: the prompt's tokens, at least one.
    input: what an encoder reads beside it, or None.
    input_ids: its tokens, or None.
    sample: which of several completions of one prompt, or None.
    settings: what it wants in place of the config's.
    stop: texts before the first of which its completion ends.
    is_chat: whether the text was made of messages.
  """

  stream: int
  id: Any
  text: str
  token_ids: tuple[int, ...]
  sample: int | None = None
  settings: Settings = dataclasses.field(default_factory=Settings)
  stop: tuple[str, ...] = ()
  is_chat: bool = False
  input: str | None = None
  input_ids: tuple[int, ...] | None = None

  @property
  def row_id(self) -> Any:
    """Identity of its row of an output: `row_id` of the row."""
    return _row_id(self.id, self.sample)

  @property
  def key(self) -> str:
    """A hash of what it is: id, text, stream, and what it wants for itself."""
    wants: dict[str, Any] = {**self.settings.given()}
    if self.sample is not None:
      wants["sample"] = self.sample
    if self.stop:
      wants["stop"] = self.stop
    if self.is_chat:
      wants["is_chat"] = True
    if self.input is not None:
      wants["input"] = self.input
    parts = [self.id, self.text, self.stream, *([wants] if wants else [])]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_id(row: Mapping[str, Any]) -> Any:
  """Identity of a row of an output: its id and the number of the sample."""
  return _row_id(row.get("id"), row.get("sample"))


def _row_id(identity: Any, sample: int | None) -> Any:
  if sample is None:
    return identity
  return {"id": identity, "sample": sample}


def built_in(
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  encoder: prompt_lines.Encoder | None = None,
) -> list[Prompt]:
  """The built-in prompts; ValueError if one does not fit the buffer."""
  if encoder is not None:
    raise ValueError(
      "an encoder-decoder reads inputs, and none are built in: give --prompts, "
      'a file of lines {"id": ..., "input": "..."}'
    )
  return [
    Prompt(
      i, i, text, prompt_lines.encode(text, tokenizer, max_tokens=max_tokens)
    )
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
  path: str | None,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  encoder: prompt_lines.Encoder | None = None,
) -> list[Prompt]:
  """The prompts of a file, every line of which must be good; or the built-in.

  For commands that give all prompts the same settings.

  Args:
    path: the file, or None.
    tokenizer: of the pair.
    max_tokens: longest prompt that fits the buffer.
    encoder: of an encoder-decoder, which reads a file, or None.

  Raises:
    ValueError: for a bad line or prompt, for one that wants settings of its
      own, or for a file without prompts.
  """
  if not path:
    return built_in(tokenizer, max_tokens=max_tokens, encoder=encoder)
  items, problems = read_jsonl(
    path, tokenizer, max_tokens=max_tokens, encoder=encoder
  )
  if problems:
    raise ValueError("; ".join(problems))
  if not items:
    raise ValueError(f"no prompts in {path}")
  for item in items:
    wants = [*item.settings.given()]
    wants += ["stop"] if item.stop else []
    wants += ["num_samples"] if item.sample is not None else []
    if wants:
      raise ValueError(
        f"{path}: the prompt of id {json.dumps(item.id)} has settings of its "
        f"own ({', '.join(wants)}), which launch.decode alone reads"
      )
  return items


def read_jsonl(
  path: str,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  max_new_tokens: int | None = None,
  encoder: prompt_lines.Encoder | None = None,
) -> tuple[list[Prompt], list[str]]:
  """Reads lines as `launch.prompt_lines` describes them.

  The stream of a prompt follows from its id alone (and the number of the
  sample), so that neither its place in the file nor the other prompts change
  what is drawn. (If the hashes of two ids are the same, the second takes
  another.) One with a seed of its own draws what follows from that seed and the
  number of the sample, whatever its id.

  Args:
    path: the file; blank lines are skipped.
    tokenizer: of the pair.
    max_tokens: longest prompt that fits the buffer.
    max_new_tokens: the largest budget that a line may ask for, or None.
    encoder: of an encoder-decoder, or None.

  Returns:
    The good prompts, one for each sample, and a message for every bad line
    (named by its number, from 1): one bad line does not cost the others. A line
    without an id gets its number; one whose id another line had before is bad.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is UTF-16 or UTF-32.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    problem = "is a folder" if file.is_dir() else "no such prompts file"
    raise FileNotFoundError(f"{problem}: {path}")
  prompts, problems = [], []
  lines: dict[str, int] = {}
  streams: set[int] = set()
  for number, line in jsonl.lines(file):
    try:
      record = jsonl.parsed(line, hook=_object)
      parsed = prompt_lines.read(
        record, tokenizer, max_tokens=max_tokens,
        max_new_tokens=max_new_tokens, encoder=encoder,
      )  # fmt: skip
      identity = record.get("id")
      identity = number if identity is None else identity
      rows = [identity, *(_row_id(identity, s) for s in _numbers(parsed))]
      names = [json.dumps(row, sort_keys=True) for row in rows]
      if earlier := [lines[name] for name in names if name in lines]:
        raise ValueError(
          f"the id {names[0]} is that of line {earlier[0]} already"
          + ("" if record.get("id") is not None else
             " (a line without an id has its number)")
        )  # fmt: skip
      prompts += _samples(identity, parsed, streams)
      lines.update(dict.fromkeys(names, number))
    except (ValueError, TypeError) as error:  # TypeError: lone surrogates
      problems.append(f"{path}:{number}: {error}")
  return prompts, problems


def distinct(rows: Sequence[Prompt]) -> list[Prompt]:
  """The first row of each prompt: several are samples of one."""
  firsts: dict[Any, Prompt] = {}
  for row in rows:
    firsts.setdefault(requests.content_of(row), row)
  return list(firsts.values())


def _samples(
  identity: Any, line: prompt_lines.Line, streams: set[int]
) -> list[Prompt]:
  """The prompts of a line: one, or as many as it wants samples."""
  return [
    Prompt(
      # Of a seed of its own: the number of the sample.
      sample or 0
      if line.settings.seed is not None
      else _stream(_row_id(identity, sample), streams),
      identity,
      line.text,
      line.token_ids,
      sample=sample,
      settings=line.settings,
      stop=line.stop,
      is_chat=line.is_chat,
      input=line.input,
      input_ids=line.input_ids,
    )
    for sample in _numbers(line)
  ]


def _numbers(line: prompt_lines.Line) -> Sequence[int | None]:
  """Numbers of a line's samples; None for a single one."""
  return [None] if line.num_samples is None else range(line.num_samples)


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object whose keys are there once."""
  values = dict(pairs)
  if len(values) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in values if names.count(name) > 1)
    raise ValueError(f"the key {twice!r} is there twice")
  return values
