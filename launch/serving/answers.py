"""Answers to clients in OpenAI's form, whole or streamed."""

import codecs
import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from launch.serving.control import Scores
from launch.serving.refusals import RefusalError
from launch.serving.scheduler import Finish, News
from launch.serving.schemas import Ask
from launch.serving.texts import Reader
from models import token_text
from models.tokenizers import Tokenizer
from specjax.state import Origin

LAST_EVENT = b"data: [DONE]\n\n"
# Status, kind and message of an answer that failed.
_FAILURES = {
  Finish.NAN: (500, "server_error", "the model's logits are NaN"),
  Finish.LATE: (408, "timeout_error", "it took longer than a request may"),
  Finish.UNREADABLE: (500, "server_error", "its text cannot be read"),
  Finish.BROKEN: (503, "server_error", "the server ends before it does"),
  Finish.CANCELLED: (503, "server_error", "it was given up"),
}
_CODES = {
  Finish.NAN: "nan_logits",
  Finish.LATE: "timeout",
  Finish.BROKEN: "unavailable",
}


class Choice:
  """A completion of an answer, as far as it is known.

  Attributes:
    index: which.
    finish: OpenAI's reason, once it has ended.
    text: that was sent, after the prompt if that is echoed.
    cached: tokens of its prompt that were not read.
    accepted, drafted: tokens of it that were drafted, and all that were.
  """

  def __init__(self, index: int, ask: Ask, tokenizer: Tokenizer):
    """Nothing is known yet."""
    self.index, self._ask, self._tokenizer = index, ask, tokenizer
    self._prompt = ask.prompts[index // ask.request.n]
    self._reader = Reader(tokenizer, ask.request.stop_texts, self._prompt)
    self._shown = Reader(tokenizer, before=self._prompt)  # each token's piece
    self.text = ""
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._num_characters = 0  # of the tokens' bytes so far
    self._log_probs: list[dict[str, Any]] = []
    self._offsets: list[int] = []
    self._origins: list[dict[str, str]] = []
    self.cached = self.accepted = self.drafted = 0
    self.finish: str | None = None
    self._has_begun = False

  @property
  def token_ids(self) -> list[int]:
    """Tokens of the completion so far."""
    return self._reader.token_ids

  def hear(self, news: News) -> tuple[str, dict[str, Any]]:
    """Adds news to the choice.

    Returns:
      The text that is certain with them, and what else a chunk says of them.

    Raises:
      RefusalError: if it failed.
    """
    if news.finish in _FAILURES:
      raise failure(news.finish)
    self.cached, self.drafted = news.cached, news.drafted
    self.accepted += list(news.origins).count(Origin.ACCEPTED)
    known = len(self._log_probs), len(self._origins), len(self.token_ids)
    piece = ""
    if self._ask.request.echo and not self._has_begun:
      piece = self._tokenizer.decode(self._prompt)
    self._has_begun = True
    piece += self._reader.read(news.token_ids)
    if news.finish is not None:
      piece += self._reader.finish(cut=news.cut)
      self.finish = news.finish.value
    self.text += piece
    if self._ask.log_probs:
      self._place_all(news)
    if self._ask.request.token_origins:
      self._origins += self._pieces(news)
    return piece, self.details(*known)

  def details(
    self, log_probs: int = 0, origins: int = 0, tokens: int = 0
  ) -> dict[str, Any]:
    """What is said beside the text, from these places on."""
    more: dict[str, Any] = {"logprobs": None}
    if self._ask.log_probs:
      more["logprobs"] = self._said_from(log_probs)
    if self._ask.request.token_origins:
      more["token_origins"] = self._origins[origins:]
    if self._ask.request.return_token_ids:
      more["token_ids"] = self.token_ids[tokens:]
      if not tokens:
        more["prompt_token_ids"] = list(self._prompt)
    return more

  def _pieces(self, news: News) -> list[dict[str, str]]:
    pieces = [self._shown.read([token]) for token in news.token_ids]
    if news.finish is not None and pieces:
      pieces[-1] += self._shown.finish(cut=False)
    return [
      {"text": piece, "origin": Origin(origin).name.lower()}
      for piece, origin in zip(pieces, news.origins, strict=True)
    ]

  def _place_all(self, news: News) -> None:
    if news.scores is not None:
      self._place_prompt(news.scores)
    every = news.likeliest or [()] * len(news.token_ids)
    for one in zip(news.token_ids, news.log_probs, every, strict=True):
      self._place(*one)

  def _place_prompt(self, scores: Scores) -> None:
    """Notes the prompt's tokens; the first has no distribution."""
    self._place(self._prompt[0], None, None)
    most = self._ask.asked.num_likeliest
    for token, value, *likeliest in zip(
      self._prompt[1:],
      scores.log_probs.tolist(),
      scores.likeliest[:, :most].tolist(),
      scores.likeliest_log_probs[:, :most].tolist(),
      strict=True,
    ):
      self._place(token, value, list(zip(*likeliest, strict=True)))

  def _place(
    self,
    token: int,
    value: float | None,
    likeliest: Sequence[tuple[int, float]] | None,
  ) -> None:
    """Notes a token, its log-probability, and the likeliest in its place."""
    one = self._said(token, value)
    self._offsets.append(self._num_characters)
    self._num_characters += len(self._decoder.decode(bytes(one["bytes"])))
    one["top_logprobs"] = None
    if likeliest is not None:
      one["top_logprobs"] = [self._said(*other) for other in likeliest]
    self._log_probs.append(one)

  def _said(self, token: int, value: float | None) -> dict[str, Any]:
    if value is not None and not math.isfinite(value):
      value = -9999.0  # OpenAI's, for minus infinity
    return {
      "token": token_text.name_of(self._tokenizer, token),
      "logprob": value,
      "bytes": list(token_text.bytes_of(self._tokenizer, token)),
    }

  def _said_from(self, start: int) -> dict[str, Any]:
    """Log-probabilities as chats or completions have them."""
    tokens = self._log_probs[start:]
    if self._ask.is_chat:
      return {"content": tokens, "refusal": None}
    top = None
    if self._ask.asked.num_likeliest:
      top = [_by_name(one) for one in tokens]
    return {
      "tokens": [one["token"] for one in tokens],
      "token_logprobs": [one["logprob"] for one in tokens],
      "top_logprobs": top,
      "text_offset": self._offsets[start:],
    }


def failure(finish: Finish) -> RefusalError:
  """The error of an answer that failed."""
  status, kind, message = _FAILURES[finish]
  return RefusalError(
    f"the completion ended: {message}", status=status, kind=kind,
    code=_CODES.get(finish, finish.value),
  )  # fmt: skip


def _by_name(one: dict[str, Any]) -> dict[str, float] | None:
  """The likeliest tokens and the one in their place, as completions say them.

  Of several that have one name (parts of characters) the likeliest counts.
  """
  if one["top_logprobs"] is None:
    return None
  all_of_them = [one, *one["top_logprobs"][::-1]]
  return {x["token"]: x["logprob"] for x in all_of_them}


class Answer:
  """An answer, whole or in chunks."""

  def __init__(self, ask: Ask, *, model: str, tokenizer: Tokenizer):
    """Nothing is known yet."""
    self._ask = ask
    wanted = ask.request
    self._details = (
      ask.log_probs or wanted.token_origins or wanted.return_token_ids
    )
    count = len(ask.prompts) * ask.request.n
    self.choices = [Choice(i, ask, tokenizer) for i in range(count)]
    prefix = "chatcmpl" if ask.is_chat else "cmpl"
    self._head = {
      "id": f"{prefix}-{secrets.token_hex(12)}",
      "object": "chat.completion" if ask.is_chat else "text_completion",
      "created": int(time.time()),
      "model": model,
    }
    self._begun: set[int] = set()

  @property
  def is_over(self) -> bool:
    """True if every choice has ended."""
    return all(choice.finish is not None for choice in self.choices)

  def hear(self, index: int, news: News) -> dict[str, Any] | None:
    """Adds a choice's news; returns a chunk for the client, or None."""
    choice = self.choices[index]
    piece, more = choice.hear(news)
    if not (piece or news.finish or self._details):
      return None
    one = {"index": index, "finish_reason": choice.finish, **more}
    if self._ask.is_chat:
      is_first = index not in self._begun
      role = {"role": "assistant"} if is_first else {}
      one["delta"] = {**role, "content": piece}
    else:
      one["text"] = piece
    self._begun.add(index)
    chunk = self._chunk([one])
    if self._ask.request.stream_options.continuous_usage_stats:
      chunk["usage"] = self._usage()
    return chunk

  def usage_chunk(self) -> dict[str, Any]:
    """The last chunk, of no choice."""
    return {**self._chunk([]), "usage": self._usage()}

  def whole(self) -> dict[str, Any]:
    """The answer, once it is over."""
    choices = []
    for choice in self.choices:
      one: dict[str, Any] = {"index": choice.index}
      if self._ask.is_chat:
        one["message"] = {"role": "assistant", "content": choice.text}
      else:
        one["text"] = choice.text
      one |= {"finish_reason": choice.finish, **choice.details()}
      choices.append(one)
    return {**self._head, "choices": choices, "usage": self._usage()}

  def _chunk(self, choices: list) -> dict[str, Any]:
    kind = "chat.completion.chunk" if self._ask.is_chat else "text_completion"
    return {**self._head, "object": kind, "choices": choices}

  def _usage(self) -> dict[str, Any]:
    prompt = sum(map(len, self._ask.prompts))
    new = sum(len(choice.token_ids) for choice in self.choices)
    # Of several choices of a prompt all but the first have it from that one.
    first = self.choices[:: self._ask.request.n]
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
