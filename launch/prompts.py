r"""Prompts: built-in, or from a file of lines with settings of their own.

A line of a prompts file is a JSON object (`Line`):

  {"id": ..., "prompt": "...", or "messages": [{"role": ..., "content": ...}],
   "num_samples": 4, "temperature": 0.8, "max_new_tokens": 64, "seed": 7,
   "stop": ["\n\n", "END"], ...}

All but the prompt (or the messages) may be left out, or null. An
encoder-decoder reads {"id": ..., "input": "what the encoder reads"}, and the
prompt is how its answer begins. Settings are those of HTTP requests too
(`Settings`).
"""

import codecs
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import pydantic_core
from pydantic import (
  BaseModel,
  BeforeValidator,
  ConfigDict,
  Field,
  ValidationError,
)

from models import chat
from models.tokenizers import Tokenizer
from specjax import suggestions
from specjax.runtime import requests

# What `launch.decode` decodes when no file is given.
BUILT_IN = (
  'def read_json(path):\n  """Read a JSON file and return its contents."""\n',
  "class Stack:\n  def __init__(self):\n    self.items = []\n\n  def push(",
  "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser(",
  "def __eq__(self, other):\n        if not isinstance(other, ",
  "    def test_empty(self):\n        self.assertEqual(",
  'def parse_args(argv=None):\n    """Parse the command line arguments.',
)
# The server's programs, compiled before they are asked, have room for so many.
MOST_BIASES, MOST_STOP_IDS = 300, 64
_INT32, _FLOAT32 = 2**31 - 1, 3e38
# A nucleus of less holds the likeliest token alone.
_GREEDY_TOP_P = 1e-30

_Id = Annotated[int, Field(ge=0)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1, max_length=256)]


class Settings(BaseModel):
  """One completion's settings; what is None is as the config says.

  Attributes:
    temperature, top_k, top_p, min_p: the warp. As in vLLM, top_k -1 (or 0)
      keeps all tokens; as in OpenAI's API, top_p 0 is greedy.
    seed: folded to 32 bits if it has more.
    stop: texts before the first of which a completion ends.
    logit_bias: what is added to logits, by token id.
    presence_penalty, frequency_penalty, repetition_penalty, min_tokens,
      stop_token_ids, ignore_eos: see `specjax.runtime.requests.Settings`.
  """

  model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

  temperature: float | None = Field(None, ge=0, le=_FLOAT32)
  top_k: int | None = Field(None, ge=-1, le=_INT32)
  top_p: float | None = Field(None, ge=0, le=1)
  min_p: float | None = Field(None, ge=0, le=1)
  seed: int | None = Field(None, ge=-(2**63), lt=2**64)
  stop: Annotated[
    list[_Text] | None,
    BeforeValidator(lambda x: [x] if isinstance(x, str) else x),
  ] = Field(None, max_length=16)
  presence_penalty: _Penalty | None = None
  frequency_penalty: _Penalty | None = None
  # Beyond, logits may overflow.
  repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
  # JSON's keys are texts.
  logit_bias: dict[Annotated[int, Field(strict=False, ge=0)], _Bias] | None = (
    Field(None, max_length=MOST_BIASES)
  )
  min_tokens: int | None = Field(None, ge=0, le=_INT32)
  stop_token_ids: list[_Id] | None = Field(None, max_length=MOST_STOP_IDS)
  ignore_eos: bool | None = None

  @property
  def stop_texts(self) -> tuple[str, ...]:
    """The stop strings, each once."""
    return tuple(dict.fromkeys(self.stop or ()))

  def given(self, *, vocab_size: int) -> dict[str, Any]:
    """Fields of `specjax.runtime.requests.Settings` that are not None.

    Raises:
      ValueError: for a token id that the vocabulary does not have.
    """
    names = {field.name for field in dataclasses.fields(requests.Settings)}
    given = self.model_dump(include=names, exclude_none=True)
    for name in ("logit_bias", "stop_token_ids"):
      wrong = [x for x in given.get(name, ()) if x >= vocab_size]
      if wrong:
        raise ValueError(
          f"{name}: token ids are 0 to {vocab_size - 1}, got {wrong[0]}"
        )
    if "top_k" in given:
      given["top_k"] = max(given["top_k"], 0)
    if given.get("top_p", 1) < _GREEDY_TOP_P:
      given |= {"top_p": 1.0, "temperature": 0.0}
    if (seed := given.get("seed")) is not None:
      given["seed"] = (seed + (seed >> 32) * 0x9E3779B9) % 2**32
    if "logit_bias" in given:
      given["logit_bias"] = tuple(sorted(given["logit_bias"].items()))
    if "stop_token_ids" in given:
      given["stop_token_ids"] = tuple(dict.fromkeys(given["stop_token_ids"]))
    return given


class Line(Settings):
  """A line of a prompts file.

  Attributes:
    id: whatever the file calls it; None: the number of the line.
    prompt, messages: one of them.
    input: what an encoder reads.
    num_samples: completions that are wanted; None: one, without a number.
    max_new_tokens: the budget.
    task, output: columns of `launch.tools.machine_tasks` that are not read.
  """

  id: Any = None
  prompt: str | None = None
  messages: list[dict[str, Any]] | None = Field(None, min_length=1)
  input: str | None = None
  num_samples: int | None = Field(None, ge=1, le=10_000)
  max_new_tokens: int | None = Field(None, ge=1, le=_INT32)
  task: Any = None
  output: Any = None


def reason_of(
  error: ValidationError, model: type[BaseModel]
) -> tuple[str, str]:
  """The field that the first error of a record is about, and the reason."""
  first = error.errors(include_url=False)[0]
  parts = [str(part) for part in first["loc"] if part != "[key]"]
  if first["type"] == "extra_forbidden":
    guess = suggestions.guess(parts[-1][:80], list(model.model_fields))
    return parts[-1][:80], f"unknown field{guess}"
  return ".".join(parts)[:80], first["msg"]


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
  settings: requests.Settings = dataclasses.field(
    default_factory=requests.Settings
  )
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """Requirements of prompts to an encoder-decoder.

  Attributes:
    start_token: the first token of all texts of the decoder.
    max_tokens: longest input.
  """

  start_token: int
  max_tokens: int


def row_id(row: Mapping[str, Any]) -> Any:
  """Identity of a row of an output: its id and the number of the sample."""
  return _row_id(row.get("id"), row.get("sample"))


def _row_id(identity: Any, sample: int | None) -> Any:
  if sample is None:
    return identity
  return {"id": identity, "sample": sample}


def built_in(
  tokenizer: Tokenizer, *, max_tokens: int, encoder: Encoder | None = None
) -> list[Prompt]:
  """The built-in prompts; ValueError if one does not fit the buffer."""
  if encoder is not None:
    raise ValueError(
      "an encoder-decoder reads inputs, and none are built in: give --prompts, "
      'a file of lines {"id": ..., "input": "..."}'
    )
  return [
    Prompt(i, i, text, _checked(tokenizer.encode(text), max_tokens))
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
  encoder: Encoder | None = None,
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
    if item.settings.given() or item.stop or item.sample is not None:
      raise ValueError(
        f"{path}: the prompt of id {json.dumps(item.id)} has settings of its "
        "own, which launch.decode alone reads"
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
  """Reads a prompts file, see the module.

  The stream of a prompt follows from its id alone (and the number of the
  sample), so that neither its place in the file nor the other prompts change
  what is drawn. One with a seed of its own draws what follows from that seed
  and the number of the sample, whatever its id.

  Args:
    path: the file, UTF-8; blank lines are skipped.
    tokenizer: of the pair.
    max_tokens: longest prompt that fits the buffer.
    max_new_tokens: the largest budget that a line may ask for, or None.
    encoder: of an encoder-decoder, or None.

  Returns:
    The good prompts, one for each sample, and a message for every bad line,
    "FILE:LINE: FIELD: REASON": one bad line does not cost the others. A line
    without an id gets its number; one whose id another line had before is bad.

  Raises:
    OSError: if the file cannot be read.
  """
  prompts, problems, seen = [], [], {}
  content = pathlib.Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
  for number, text in enumerate(content.split(b"\n"), start=1):
    if not text.strip():
      continue
    try:
      line = _parsed(text)
      line.id = number if line.id is None else line.id
      samples = _samples(line, tokenizer, max_tokens, max_new_tokens, encoder)
      name = json.dumps(line.id, sort_keys=True)
      if seen.setdefault(name, number) != number:
        raise ValueError(f"id: {name} is that of line {seen[name]} already")
      prompts += samples
    except ValueError as error:
      problems.append(f"{path}:{number}: {error}")
  return prompts, problems


def distinct(rows: Sequence[Prompt]) -> list[Prompt]:
  """The first row of each prompt: several are samples of one."""
  firsts: dict[Any, Prompt] = {}
  for row in rows:
    firsts.setdefault(requests.content_of(row), row)
  return list(firsts.values())


def _parsed(text: bytes) -> Line:
  """A line; ValueError in one line for what is none."""
  try:
    return Line.model_validate(pydantic_core.from_json(text))
  except ValidationError as error:
    field, reason = reason_of(error, Line)
    raise ValueError(f"{field}: {reason}" if field else reason) from None
  except ValueError as error:
    raise ValueError(f"not JSON: {error}") from None


def _samples(
  line: Line,
  tokenizer: Tokenizer,
  max_tokens: int,
  max_new_tokens: int | None,
  encoder: Encoder | None,
) -> list[Prompt]:
  """The prompts of a line: one, or as many as it wants samples."""
  given = line.given(vocab_size=tokenizer.vocab_size)
  budget = line.max_new_tokens or max_new_tokens
  if max_new_tokens is not None and budget > max_new_tokens:
    raise ValueError(
      f"max_new_tokens: {budget}, but buffers are made for {max_new_tokens}: "
      "raise --config.max_new_tokens"
    )
  if budget is not None and (line.min_tokens or 0) > budget:
    raise ValueError(f"min_tokens: at most {budget} tokens are emitted")
  if (line.prompt is not None) + (line.messages is not None) > 1:
    raise ValueError("messages: give a prompt or messages, got both")
  if (line.input is not None) != (encoder is not None):
    raise ValueError(
      "input: an encoder-decoder needs one, and others read none"
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
  return [
    Prompt(
      # Of a seed of its own: the number of the sample.
      (sample or 0)
      if line.seed is not None
      else _stream(_row_id(line.id, sample)),
      line.id,
      text,
      token_ids,
      sample=sample,
      settings=requests.Settings(**given),
      stop=line.stop_texts,
      is_chat=line.messages is not None,
      input=line.input,
      input_ids=input_ids,
    )
    for sample in numbers
  ]


def _checked(token_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
  if not token_ids:
    raise ValueError("prompt: it is empty")
  if len(token_ids) > max_tokens:
    raise ValueError(
      f"prompt: it has {len(token_ids)} tokens, but only {max_tokens} fit "
      "beside max_new_tokens (max_length, and the models' positions, bound "
      "both together)"
    )
  return tuple(token_ids)


def _stream(identity: Any) -> int:
  """The stream of an id, a `u32`: a number below 2^31, or a hash above."""
  if type(identity) is int and 0 <= identity < 1 << 31:
    return identity
  text = json.dumps(identity, sort_keys=True)
  return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 2**31 + 2**31
