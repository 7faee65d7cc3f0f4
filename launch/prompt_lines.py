r"""Lines of a prompts file: a prompt, and settings of its own.

  {"id": ..., "prompt": "...", or "messages": [{"role": ..., "content": ...}],
   "num_samples": 4, "temperature": 0.8, "top_k": 40, "top_p": 0.95,
   "min_p": 0.05, "max_new_tokens": 64, "seed": 7, "stop": ["\n\n", "END"],
   "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
   "logit_bias": {"42": -100}, "min_tokens": 8, "stop_token_ids": [13],
   "ignore_eos": true}

All but the prompt (or the messages) may be left out, or null. To an
encoder-decoder a line is

  {"id": ..., "input": "what the encoder reads", "prompt": "how to begin", ...}

without messages, and the prompt may be left out too. Other keys are not read,
so that a data set's own columns may stay, but one that is nearly the name of
one of these is refused: it would be missed silently.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from models import chat
from models.tokenizers import Tokenizer
from specjax import suggestions
from specjax.runtime.requests import Settings

_OTHERS = ("id", "prompt", "messages", "stop")
_INPUT = "input"  # of encoder-decoders
# How near an unknown key must be to a known one to be refused.
_NEAR = 0.83
_EXPECTED = 'expected an object {"id": ..., "prompt": "..."}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
  """Requirements of lines to an encoder-decoder.

  Attributes:
    start_token: what all texts of the decoder begin with.
    max_tokens: longest input.
  """

  start_token: int
  max_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """A good line.

  Attributes:
    text: the prompt, or what the chat template makes of the messages.
    token_ids: its tokens, at least one.
    input: what the encoder reads, or None.
    input_ids: its tokens, or None.
    is_chat: whether there were messages.
    num_samples: completions that are wanted, or None: one, without a number.
    settings: what it wants in place of the config's.
    stop: texts before the first of which a completion ends.
  """

  text: str
  token_ids: tuple[int, ...]
  input: str | None
  input_ids: tuple[int, ...] | None
  is_chat: bool
  num_samples: int | None
  settings: Settings
  stop: tuple[str, ...]


def read(
  record: Any,
  tokenizer: Tokenizer,
  *,
  max_tokens: int,
  max_new_tokens: int | None,
  encoder: Encoder | None = None,
) -> Line:
  """Checks a line.

  Args:
    record: whatever JSON the line holds.
    tokenizer: of the pair.
    max_tokens: longest prompt that fits the buffer.
    max_new_tokens: the largest budget that fits it, or None for any.
    encoder: of an encoder-decoder, or None.

  Raises:
    ValueError: in one line, for what is no good.
  """
  if not isinstance(record, dict):
    raise ValueError(f"{_EXPECTED}, got {type(record).__name__}")
  _check_keys(record, [_INPUT] if encoder else [])
  text_in, input_ids = None, None
  if encoder is not None:
    text_in, input_ids = _input(record, tokenizer, encoder)
    text = _string(record, "prompt") if record.get("prompt") is not None else ""
    token_ids = [encoder.start_token, *tokenizer.encode_text(text)]
  elif record.get("messages") is not None:
    text, token_ids = _conversation(record, tokenizer)
  else:
    text = _string(record, "prompt")
    token_ids = tokenizer.encode(text) if text else []
  _check_length(token_ids, max_tokens=max_tokens)
  return Line(
    text=text,
    token_ids=tuple(token_ids),
    input=text_in,
    input_ids=input_ids,
    is_chat=record.get("messages") is not None,
    num_samples=number(record, "num_samples"),
    settings=_settings(record, max_new_tokens, tokenizer.vocab_size),
    stop=stop_texts(record.get("stop")),
  )


def encode(text: str, tokenizer: Tokenizer, *, max_tokens: int):
  """The tokens of a prompt; ValueError if they are none or too many."""
  token_ids = tuple(tokenizer.encode(text)) if text else ()
  _check_length(token_ids, max_tokens=max_tokens)
  return token_ids


def _check_length(token_ids: Sequence[int], *, max_tokens: int) -> None:
  if not token_ids:
    raise ValueError("the prompt is empty")
  if len(token_ids) > max_tokens:
    raise ValueError(
      f"the prompt has {len(token_ids)} tokens, but only {max_tokens} fit "
      "beside max_new_tokens (max_length, and the models' positions, bound "
      "both together)"
    )


def _check_keys(record: dict, more: Sequence[str]) -> None:
  known = [*_OTHERS, *_NUMBERS, *_READ, *more]
  for key in record:
    guess = suggestions.guess(key, known, cutoff=_NEAR)
    if key not in known and guess:
      raise ValueError(f"unknown key {key!r}{guess}")


def _string(record: dict, key: str) -> str:
  text = record.get(key)
  if not isinstance(text, str):
    raise ValueError(
      f'expected a string under "{key}", got '
      + (type(text).__name__ if key in record else "no such key")
    )
  return text


def _input(
  record: dict, tokenizer: Tokenizer, encoder: Encoder
) -> tuple[str, tuple[int, ...]]:
  """The encoder's input, as text and as ids."""
  if record.get("messages") is not None:
    raise ValueError('an encoder-decoder reads an "input", got "messages"')
  text = _string(record, _INPUT)
  ids = tuple(tokenizer.encode(text)) if text else ()
  if not ids:
    raise ValueError("the input is empty")
  if len(ids) > encoder.max_tokens:
    raise ValueError(
      f"the input has {len(ids)} tokens, but only {encoder.max_tokens} are "
      "read (max_length)"
    )
  return text, ids


def _conversation(
  record: dict, tokenizer: Tokenizer
) -> tuple[str, Sequence[int]]:
  """The messages by the chat template, as text and as ids."""
  messages = record["messages"]
  if record.get("prompt") is not None:
    raise ValueError('give either "prompt" or "messages", got both')
  if not (
    isinstance(messages, list)
    and messages
    and all(isinstance(message, dict) for message in messages)
  ):
    raise ValueError(
      'expected a list of {"role": ..., "content": ...} under "messages"'
    )
  ids = chat.encode(tokenizer, messages)
  return chat.render(tokenizer, messages), ids


# A number's type, its test, and the test in words. Programs have 32 bits.
_Test = tuple[type, Callable[[Any], bool], str]
_MOST, _MOST_SAMPLES = 2**31 - 1, 10_000
_SIGNED = (float, lambda x: -2 <= x <= 2, "a number in [-2, 2]")
_NUMBERS: dict[str, _Test] = {
  "temperature": (float, lambda x: 0 <= x, "a number >= 0"),
  "top_k": (int, lambda x: 0 <= x <= _MOST, f"a whole number in 0..{_MOST}"),
  "top_p": (float, lambda x: 0 < x <= 1, "a number in (0, 1]"),
  "min_p": (float, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
  "max_new_tokens": (
    int,
    lambda x: 1 <= x <= _MOST,
    f"a whole number in 1..{_MOST}",
  ),
  "seed": (int, lambda x: 0 <= x < 2**32, f"in 0..{2**32 - 1}"),
  "num_samples": (
    int,
    lambda x: 1 <= x <= _MOST_SAMPLES,
    f"a whole number in 1..{_MOST_SAMPLES}",
  ),
  "presence_penalty": _SIGNED,
  "frequency_penalty": _SIGNED,
  # Beyond, logits may overflow, and no law is left.
  "repetition_penalty": (
    float,
    lambda x: 1e-3 <= x <= 1e3,
    "a number in [0.001, 1000]",
  ),
  "min_tokens": (
    int,
    lambda x: 0 <= x <= _MOST,
    f"a whole number in 0..{_MOST}",
  ),
}


def number(record: dict, name: str) -> Any:
  """A number of the line as it is meant, or None; ValueError if it is none."""
  value = record.get(name)
  if value is None:
    return None
  kind, valid, expected = _NUMBERS[name]
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if is_number and kind is float:
    with np.errstate(over="ignore"):
      value = float(np.float32(value)) if abs(value) < 1e300 else math.inf
    is_number = math.isfinite(value)
  elif kind is int:
    is_number = is_number and isinstance(value, int)
  if not is_number or not valid(value):
    raise ValueError(
      f'"{name}" must be {expected}, got {json.dumps(record[name])[:40]}'
    )
  return record[name]


# Programs that are compiled before they are asked have room for so many.
MOST_BIASES, MOST_STOP_IDS, _STRONGEST = 300, 64, 100


def logit_bias(record: dict, vocab_size: int) -> tuple | None:
  """Pairs of a token and what is added to its logit, or None.

  Args:
    record: of JSON, whose keys are texts.
    vocab_size: one more than the largest token id.

  Raises:
    ValueError: for anything but OpenAI's `{"ID": -100 .. 100}`.
  """
  value = record.get("logit_bias")
  if value is None:
    return None
  if not isinstance(value, dict) or len(value) > MOST_BIASES:
    raise ValueError(
      f'"logit_bias" must be an object of at most {MOST_BIASES} biases by '
      'token id, as in {"42": -100}'
    )
  pairs = {}
  for key, bias in value.items():
    is_id = key.isascii() and key.isdigit() and len(key) < len(f"{_MOST}")
    if not is_id or int(key) >= vocab_size:
      raise ValueError(
        f'"logit_bias" must be of token ids in 0..{vocab_size - 1}, got '
        f"{json.dumps(key)[:40]}"
      )
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -_STRONGEST <= bias <= _STRONGEST:
      raise ValueError(
        f'"logit_bias" must be numbers in [-{_STRONGEST}, {_STRONGEST}], got '
        f"{json.dumps(bias)[:40]}"
      )
    pairs[int(key)] = float(bias)
  return tuple(sorted(pairs.items()))


def stop_ids(record: dict, vocab_size: int) -> tuple[int, ...] | None:
  """Token ids that end a completion, each once, or None; raises ValueError."""
  value = record.get("stop_token_ids")
  if value is None:
    return None
  good = isinstance(value, list) and len(value) <= MOST_STOP_IDS
  if not good or not all(type(x) is int and 0 <= x < vocab_size for x in value):
    raise ValueError(
      f'"stop_token_ids" must be a list of at most {MOST_STOP_IDS} token ids '
      f"in 0..{vocab_size - 1}"
    )
  return tuple(dict.fromkeys(value))


def _flag(record: dict, name: str) -> bool | None:
  value = record.get(name)
  if not isinstance(value, bool | None):
    raise ValueError(f'"{name}" must be true or false')
  return value


# What is no number, and how it is read.
_READ: dict[str, Callable[[dict, int], Any]] = {
  "logit_bias": logit_bias,
  "stop_token_ids": stop_ids,
  "ignore_eos": lambda record, _: _flag(record, "ignore_eos"),
}


def _settings(
  record: dict, max_new_tokens: int | None, vocab_size: int
) -> Settings:
  names = [field.name for field in dataclasses.fields(Settings)]
  wanted = {
    name: _READ[name](record, vocab_size)
    if name in _READ
    else number(record, name)
    for name in names
  }
  budget = wanted["max_new_tokens"]
  if budget and max_new_tokens is not None and budget > max_new_tokens:
    raise ValueError(
      f'"max_new_tokens" is {budget}, but buffers are made for '
      f"{max_new_tokens}: raise --config.max_new_tokens"
    )
  most, least = budget or max_new_tokens, wanted["min_tokens"]
  if least and most is not None and least > most:
    raise ValueError(
      f'"min_tokens" is {least}, and at most {most} are emitted '
      "(max_new_tokens)"
    )
  return Settings(**wanted)


def stop_texts(value: Any) -> tuple[str, ...]:
  """The stop strings of a line, each once."""
  if value is None:
    return ()
  texts = [value] if isinstance(value, str) else value
  if not (
    isinstance(texts, list) and all(isinstance(x, str) and x for x in texts)
  ):
    raise ValueError('"stop" must be a text, or a list of them, none empty')
  return tuple(dict.fromkeys(texts))
