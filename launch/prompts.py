r"""Prompts, built-in or from a JSONL file with settings per line.

A line of a prompts file is a JSON object (`Line`):

  {"id": ..., "prompt": "...", or "messages": [{"role": ..., "content": ...}],
   "num_samples": 4, "temperature": 0.8, "max_new_tokens": 64, "seed": 7,
   "stop": ["\n\n", "END"], ...}

Only the prompt (or messages) is required; other fields may be null. An
encoder-decoder takes {"id": ..., "input": "the encoder's text"}; a prompt, if
given, then starts its answer. HTTP requests have the same `Settings`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
  BaseModel,
  BeforeValidator,
  ConfigDict,
  Field,
  ValidationError,
)

from launch import results
from models import chat
from models.tokenizers import Tokenizer
from specjax import calls
from specjax.runtime import requests

# `launch.decode` completes these by default, each up to a blank line; the
# embedded pair gets them right.
EXAMPLES = (
  "    def keys(self):\n        return list(",
  "def is_even(n):\n    return n % 2 ==",
  "    if key not in self.data:\n        raise KeyError(",
  "class Visitor:\n    def visit(self, node):\n        raise",
  "def first(items):\n    return items[",
  "    def get(self, key, default=None):\n        if key in self:\n"
  "            return self[",
)
# Used by `--prompts=built-in`.
BUILT_IN = (
  'def read_json(path):\n  """Read a JSON file and return its contents."""\n',
  "class Stack:\n  def __init__(self):\n    self.items = []\n\n  def push(",
  "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser(",
  "def __eq__(self, other):\n        if not isinstance(other, ",
  "    def test_empty(self):\n        self.assertEqual(",
  'def parse_args(argv=None):\n    """Parse the command line arguments.',
)
# The server's programs are compiled for these counts.
MOST_BIASES, MOST_STOP_IDS = 300, 64
_INT32, _FLOAT32 = 2**31 - 1, 3e38

_Id = Annotated[int, Field(ge=0)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1, max_length=256)]


class Settings(BaseModel):
  """The settings of a completion; None means the config's.

  Those of `specjax.runtime.requests.Settings`, and `stop`: the completion ends
  before the first of these strings. As in vLLM, top_k -1 (or 0) keeps all
  tokens; as in OpenAI's API, top_p 0 is greedy. Seeds of more than 32 bits are
  folded into 32.
  """

  model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

  temperature: float | None = Field(None, ge=0, le=_FLOAT32)
  top_k: int | None = Field(None, ge=-1, le=_INT32)
  top_p: float | None = Field(None, ge=0, le=1)
  min_p: float | None = Field(None, ge=0, le=1)
  seed: int | None = Field(None, ge=-(2**63), lt=2**64)
  stop: Annotated[
    tuple[_Text, ...],
    BeforeValidator(
      lambda x: [x] if isinstance(x, str) else () if x is None else x
    ),
  ] = Field((), max_length=16, strict=False)
  presence_penalty: _Penalty | None = None
  frequency_penalty: _Penalty | None = None
  repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
  # JSON keys are strings.
  logit_bias: dict[Annotated[int, Field(strict=False, ge=0)], _Bias] | None = (
    Field(None, max_length=MOST_BIASES)
  )
  min_tokens: int | None = Field(None, ge=0, le=_INT32)
  stop_token_ids: tuple[_Id, ...] | None = Field(
    None, max_length=MOST_STOP_IDS, strict=False
  )
  ignore_eos: bool | None = None

  def overrides(self, *, vocab_size: int) -> dict[str, Any]:
    """Fields of `specjax.runtime.requests.Settings` that are not None."""
    names = [field.name for field in dataclasses.fields(requests.Settings)]
    values = {name: getattr(self, name, None) for name in names}
    given = {name: x for name, x in values.items() if x is not None}
    for name in ("logit_bias", "stop_token_ids"):
      if max(given.get(name, ()), default=0) >= vocab_size:
        raise ValueError(f"{name}: token ids are 0 to {vocab_size - 1}")
    if "top_k" in given:
      given["top_k"] = max(given["top_k"], 0)
    if given.get("top_p", 1) < 1e-30:  # too small for a float32
      given |= {"top_p": 1.0, "temperature": 0.0}
    if (seed := given.get("seed")) is not None:
      given["seed"] = (seed + (seed >> 32) * 0x9E3779B9) % 2**32
    if "logit_bias" in given:
      given["logit_bias"] = tuple(sorted(given["logit_bias"].items()))
    return given


class Line(Settings):
  """A line of a prompts file.

  Attributes:
    id: any JSON value; None means the line's number.
    num_samples: number of completions; None means one, without "sample".
    task, output: ignored; data sets have these columns.
  """

  id: Any = None
  prompt: str | None = None
  messages: list[dict[str, Any]] | None = Field(None, min_length=1)
  input: str | None = None
  num_samples: int | None = Field(None, ge=1, le=10_000)
  max_new_tokens: int | None = Field(None, ge=1, le=_INT32)
  task: Any = None
  output: Any = None


def reason_of(error: ValidationError) -> tuple[str, str]:
  """The field and the reason of a record's first error."""
  first = error.errors(include_url=False)[0]
  field = ".".join(str(x) for x in first["loc"] if x != "[key]")[:80]
  return field, first["msg"].removeprefix("Value error, ")


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt, or one sample of it, with its settings.

  Attributes:
    stream: the completion draws from `fold_in(key(seed), stream)`.
    id: the line's id.
    text: the prompt; messages are rendered by the chat template.
    token_ids: the prompt's tokens, at least one.
    sample: index among several completions of one prompt, or None.
    settings: override the config's.
    stop: the completion ends before the first of these strings.
    is_chat: whether the text was rendered from messages.
    input, input_ids: the encoder's input and its tokens, or None.
  """

  stream: int
  id: Any
  text: str
  token_ids: tuple[int, ...]
  sample: int | None = None
  settings: requests.Settings = dataclasses.field(
    default_factory=requests.Settings
  )
  stop: tuple[str, ...] = ()
  is_chat: bool = False
  input: str | None = None
  input_ids: tuple[int, ...] | None = None

  @property
  def key(self) -> str:
    """A hash of everything that its completion depends on."""
    return _hash(repr(self))[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """An encoder-decoder's decoder start token and maximum input length."""

  start_token: int
  max_tokens: int


def built_in(
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  encoder: Encoder | None = None,
  texts: Sequence[str] = BUILT_IN,
  stop: tuple[str, ...] = (),
) -> list[Prompt]:
  """The built-in prompts; ValueError if one does not fit the buffer."""
  if encoder is not None:
    raise ValueError(
      "there are no built-in inputs for encoder-decoders: give --prompts, a "
      'file of lines {"id": ..., "input": "..."}'
    )
  return [
    Prompt(i, i, text, _checked(tokenizer.encode(text), max_tokens), stop=stop)
    for i, text in enumerate(texts)
  ]


def first_tokens(
  texts: Sequence[str], tokenizer: Tokenizer, *, num_tokens: int
) -> list[Prompt]:
  """Prompts of the first `num_tokens` tokens of each text."""
  return [
    Prompt(i, i, text, tuple(tokenizer.encode(text)[:num_tokens]))
    for i, text in enumerate(texts)
  ]


def all_of(
  path: str | None,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  encoder: Encoder | None = None,
) -> list[Prompt]:
  """The prompts of a file, without settings; ours for None or "built-in".

  ValueError for a bad line, one with settings, or a file without prompts.
  """
  if not path or path == "built-in":
    return built_in(tokenizer, max_tokens=max_tokens, encoder=encoder)
  items, problems = read_jsonl(
    path, tokenizer, max_tokens=max_tokens, encoder=encoder
  )
  if problems:
    raise ValueError("; ".join(problems))
  if not items:
    raise ValueError(f"no prompts in {path}")
  for item in items:
    if item.settings.overrides() or item.stop or item.sample is not None:
      raise ValueError(
        f"{path}: the prompt with id {json.dumps(item.id)} has settings of its "
        "own, which only launch.decode supports"
      )
  return items


def read_jsonl(
  path: str,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  max_new_tokens: int | None = None,
  encoder: Encoder | None = None,
) -> tuple[list[Prompt], list[str]]:
  """Reads a prompts file; the module's docstring has its format.

  A prompt's random stream depends on its id (unless it has its own seed) and
  the sample's number, not on its place in the file or on other prompts.

  Returns:
    The valid prompts, one per sample, and a message for every bad line,
    "FILE:LINE: FIELD: REASON". A line without an id gets its number; one that
    repeats an id is bad.
  """
  prompts, problems, seen = [], [], {}
  for number, text in results.lines_of(path):
    try:
      line = _parsed(text)
      line.id = number if line.id is None else line.id
      samples = _samples(line, tokenizer, max_tokens, max_new_tokens, encoder)
      name = json.dumps(line.id, sort_keys=True)
      if seen.setdefault(name, number) != number:
        raise ValueError(f"id: {name} is already used in line {seen[name]}")
      prompts += samples
    except ValueError as error:
      problems.append(f"{path}:{number}: {error}")
  return prompts, problems


def distinct(rows: Sequence[Prompt]) -> list[Prompt]:
  """The first row of each prompt; several rows may be samples of one."""
  firsts: dict[Any, Prompt] = {}
  for row in rows:
    firsts.setdefault(requests.content_of(row), row)
  return list(firsts.values())


def _parsed(text: str) -> Line:
  try:
    return Line.model_validate_json(text)
  except ValidationError as error:
    field, reason = reason_of(error)
    if error.errors()[0]["type"] == "extra_forbidden":
      guess = calls.guess(field, list(Line.model_fields))
      reason = f"unknown field{guess}"
    raise ValueError(f"{field}: {reason}" if field else reason) from None


def _samples(
  line: Line,
  tokenizer: Tokenizer,
  max_tokens: int,
  max_new_tokens: int | None,
  encoder: Encoder | None,
) -> list[Prompt]:
  """The prompts of a line, one per sample."""
  given = line.overrides(vocab_size=tokenizer.vocab_size)
  if max_new_tokens and (line.max_new_tokens or 0) > max_new_tokens:
    raise ValueError(
      f"max_new_tokens: {line.max_new_tokens}, but buffers are made for "
      f"{max_new_tokens}: raise --config.max_new_tokens"
    )
  if line.prompt is not None and line.messages is not None:
    raise ValueError("messages: give a prompt or messages, got both")
  if (line.input is not None) != (encoder is not None):
    raise ValueError(
      "input: required for an encoder-decoder, not allowed for other models"
    )
  text, input_ids = line.prompt or "", None
  if encoder is not None:
    token_ids = [encoder.start_token, *tokenizer.encode_text(text)]
    input_ids = _checked(tokenizer.encode(line.input), encoder.max_tokens)
  elif line.messages is not None:
    token_ids = chat.encode(tokenizer, line.messages)
    text = chat.render(tokenizer, line.messages)
  else:
    token_ids = tokenizer.encode(text) if text else ()
  token_ids = _checked(token_ids, max_tokens)
  numbers = [None] if line.num_samples is None else range(line.num_samples)
  is_seeded = line.seed is not None
  return [
    Prompt(
      (sample or 0) if is_seeded else _stream(line.id, sample),
      line.id, text, token_ids, sample=sample, stop=line.stop,
      settings=requests.Settings(**given), input=line.input,
      is_chat=line.messages is not None, input_ids=input_ids,
    )
    for sample in numbers
  ]  # fmt: skip


def _checked(token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
  if not token_ids:
    raise ValueError("prompt: must not be empty")
  if len(token_ids) > max_tokens:
    raise ValueError(
      f"prompt: has {len(token_ids)} tokens, but only {max_tokens} fit with "
      "max_new_tokens (max_length and the models' positions bound their sum)"
    )
  return tuple(token_ids)


def _stream(identity: Any, sample: int | None) -> int:
  """A row's random stream, `u32`: its id if below 2^31, else a hash above."""
  if sample is not None:
    identity = {"id": identity, "sample": sample}
  elif type(identity) is int and 0 <= identity < 1 << 31:
    return identity
  text = json.dumps(identity, sort_keys=True)
  return int(_hash(text), 16) % 2**31 + 2**31


def _hash(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
