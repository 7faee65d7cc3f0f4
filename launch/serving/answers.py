"""Answers to clients in OpenAI's format, whole or streamed."""

import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from launch.serving.scheduler import Finish, Update
from launch.serving.schemas import Call, RefusalError
from launch.stops import Reader
from models import token_text
from models.tokenizers import Tokenizer
from specjax.state import Origin

# Status, kind, code and message of failures.
_FAILURES = {
  Finish.NAN: (500, "server_error", "nan_logits", "the model's logits are NaN"),
  Finish.LATE: (408, "timeout_error", "timeout", "it took too long"),
  Finish.UNREADABLE: (
    500, "server_error", "unreadable", "its text cannot be read",
  ),
  Finish.BROKEN: (503, "server_error", "unavailable", "the server stopped"),
  Finish.CANCELLED: (503, "server_error", "cancelled", "it was cancelled"),
}  # fmt: skip


class Choice:
  """A completion of an answer so far.

  Attributes:
    finish: OpenAI's reason, once it has ended.
    cached: tokens of its prompt that came from the prefix cache.
    accepted, drafted: accepted draft tokens, and all draft tokens.
  """

  def __init__(self, index: int, call: Call, tokenizer: Tokenizer):
    self._index, self._call, self._tokenizer = index, call, tokenizer
    self._prompt = call.prompts[index // call.body.n]
    self._reader = Reader(tokenizer, call.body.stop, self._prompt)
    self._shown = Reader(tokenizer, (), self._prompt)  # each token's piece
    self._text = tokenizer.decode(self._prompt) if call.body.echo else ""
    self._log_probs: list[dict[str, Any]] = []
    self._origins: list[dict[str, str]] = []
    self._sent: tuple[int, int, int, int] | None = None
    self.cached = self.accepted = self.drafted = 0
    self.finish: str | None = None

  @property
  def token_ids(self) -> list[int]:
    """Tokens of the completion so far."""
    return self._reader.token_ids

  def add(self, update: Update) -> None:
    """Adds an update; raises RefusalError if the completion failed."""
    if update.finish in _FAILURES:
      status, kind, code, message = _FAILURES[update.finish]
      message = f"the completion ended: {message}"
      raise RefusalError(message, status=status, kind=kind, code=code)
    self.cached, self.drafted = update.cached, update.drafted
    self.accepted += list(update.origins).count(Origin.ACCEPTED)
    self._text += self._reader.read(update.token_ids)
    if update.finish is not None:
      self._text += self._reader.finish(cut=update.cut)
      self.finish = update.finish.value
    if self._call.log_probs:
      self._add_log_probs(update)
    if self._call.body.token_origins:
      self._add_origins(update)

  def delta(self) -> dict[str, Any]:
    """The contents of the next chunk: everything that is new."""
    text, *others = self._sent or (0, 0, 0, 0)
    piece: dict[str, Any] = {"text": self._text[text:]}
    if self._call.is_chat:
      role = {} if self._sent else {"role": "assistant"}
      piece = {"delta": {**role, "content": piece["text"]}}
    one = piece | self._details(*others)
    self._sent = (
      len(self._text), len(self._log_probs), len(self._origins),
      len(self.token_ids),
    )  # fmt: skip
    return one

  def full(self) -> dict[str, Any]:
    """The whole choice, for an answer that is not streamed."""
    piece: dict[str, Any] = {"text": self._text}
    if self._call.is_chat:
      piece = {"message": {"role": "assistant", "content": self._text}}
    return piece | self._details(0, 0, 0)

  def _details(self, log_probs: int, origins: int, tokens: int):
    """The fields besides the text, from these positions on."""
    more: dict[str, Any] = {
      "index": self._index, "finish_reason": self.finish, "logprobs": None,
    }  # fmt: skip
    if self._call.log_probs:
      more["logprobs"] = self._log_probs_from(log_probs)
    if self._call.body.token_origins:
      more["token_origins"] = self._origins[origins:]
    if self._call.body.return_token_ids:
      more["token_ids"] = self.token_ids[tokens:]
      if not tokens:
        more["prompt_token_ids"] = list(self._prompt)
    return more

  def _add_origins(self, update: Update) -> None:
    pieces = [self._shown.read([token]) for token in update.token_ids]
    if update.finish is not None and pieces:
      pieces[-1] += self._shown.finish(cut=False)
    self._origins += [
      {"text": piece, "origin": Origin(origin).name.lower()}
      for piece, origin in zip(pieces, update.origins, strict=True)
    ]

  def _add_log_probs(self, update: Update) -> None:
    if update.scores is not None:
      self._add_token(self._prompt[0], None, None)  # it has no distribution
      most = self._call.request.num_likeliest
      for token, value, ids, values in zip(
        self._prompt[1:],
        update.scores.log_probs.tolist(),
        update.scores.likeliest[:, :most].tolist(),
        update.scores.likeliest_log_probs[:, :most].tolist(),
        strict=True,
      ):
        self._add_token(token, value, list(zip(ids, values, strict=True)))
    every = update.likeliest or [()] * len(update.token_ids)
    for one in zip(update.token_ids, update.log_probs, every, strict=True):
      self._add_token(*one)

  def _add_token(
    self,
    token: int,
    value: float | None,
    likeliest: Sequence[tuple[int, float]] | None,
  ) -> None:
    """Adds a token, its log-probability, and the top tokens at its position."""
    one = self._entry(token, value)
    one["top_logprobs"] = None
    if likeliest is not None:
      one["top_logprobs"] = [self._entry(*other) for other in likeliest]
    self._log_probs.append(one)

  def _entry(self, token: int, value: float | None) -> dict[str, Any]:
    if value is not None and not math.isfinite(value):
      value = -9999.0  # OpenAI's, for minus infinity
    return {
      "token": token_text.name_of(self._tokenizer, token),
      "logprob": value,
      "bytes": list(token_text.bytes_of(self._tokenizer, token)),
    }

  def _log_probs_from(self, start: int) -> dict[str, Any]:
    """Log-probabilities in the format of chats or completions."""
    tokens = self._log_probs[start:]
    if self._call.is_chat:
      return {"content": tokens}
    has_top = self._call.request.num_likeliest > 0
    return {
      "tokens": [one["token"] for one in tokens],
      "token_logprobs": [one["logprob"] for one in tokens],
      "top_logprobs": [_by_name(x) for x in tokens] if has_top else None,
    }


def _by_name(one: dict[str, Any]) -> dict[str, float] | None:
  """A token and the top tokens at its position, as in completions.

  If several have the same name (parts of characters), the likeliest wins.
  """
  if one["top_logprobs"] is None:
    return None
  every = [one, *one["top_logprobs"][::-1]]
  return {x["token"]: x["logprob"] for x in every}


class Answer:
  """An answer to a request, whole or in chunks."""

  def __init__(self, call: Call, *, model: str, tokenizer: Tokenizer):
    self._call = call
    self.choices = [
      Choice(index, call, tokenizer)
      for index in range(len(call.prompts) * call.body.n)
    ]
    prefix = "chatcmpl" if call.is_chat else "cmpl"
    self._head = {
      "id": f"{prefix}-{secrets.token_hex(12)}",
      "object": "chat.completion" if call.is_chat else "text_completion",
      "created": int(time.time()),
      "model": model,
    }

  @property
  def is_over(self) -> bool:
    """True if every choice has ended."""
    return all(choice.finish is not None for choice in self.choices)

  def add(self, index: int, update: Update) -> None:
    """Adds a choice's update; raises RefusalError if it failed."""
    self.choices[index].add(update)

  def chunk(self, index: int) -> dict[str, Any]:
    """The next chunk of a choice."""
    chunk = self._chunk([self.choices[index].delta()])
    if self._call.body.stream_options.continuous_usage_stats:
      chunk["usage"] = self._usage()
    return chunk

  def usage_chunk(self) -> dict[str, Any]:
    """The last chunk, without choices."""
    return {**self._chunk([]), "usage": self._usage()}

  def full(self) -> dict[str, Any]:
    """The answer, once it is over."""
    choices = [choice.full() for choice in self.choices]
    return {**self._head, "choices": choices, "usage": self._usage()}

  def _chunk(self, choices: list) -> dict[str, Any]:
    kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
    return {**self._head, "object": kind, "choices": choices}

  def _usage(self) -> dict[str, Any]:
    prompt = sum(map(len, self._call.prompts))
    new = sum(len(choice.token_ids) for choice in self.choices)
    # The other choices of a prompt share the first one's.
    first = self.choices[:: self._call.body.n]
    accepted = sum(choice.accepted for choice in self.choices)
    drafted = sum(choice.drafted for choice in self.choices)
    return {
      "prompt_tokens": prompt,
      "completion_tokens": new,
      "total_tokens": prompt + new,
      "prompt_tokens_details": {"cached_tokens": sum(c.cached for c in first)},
      "completion_tokens_details": {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
      },
    }


def event(data: dict[str, Any]) -> bytes:
  """A server-sent event of a stream."""
  return f"data: {json.dumps(data)}\n\n".encode()
