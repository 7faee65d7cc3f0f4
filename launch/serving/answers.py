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

# The client need not ask again: the same would happen.
_NO_RETRY = {"x-should-retry": "false"}
# Made anew for each: an exception that is raised again keeps all its frames.
FAILURES = {
  Finish.NAN: lambda: RefusalError(
    "the model's numbers are none (NaN): the completion ended",
    status=500, kind="server_error", code="nan_logits", headers=_NO_RETRY,
  ),
  Finish.LATE: lambda: RefusalError(
    "the completion took longer than a request may",
    status=408, kind="timeout_error", code="timeout", headers=_NO_RETRY,
  ),
  Finish.UNREADABLE: lambda: RefusalError(
    "the completion's tokens could not be read as text: it ended",
    status=500, kind="server_error", code="unreadable", headers=_NO_RETRY,
  ),
  Finish.BROKEN: lambda: RefusalError(
    "the server ends before the completion does", status=503,
    kind="server_error", code="unavailable",
  ),
  Finish.CANCELLED: lambda: RefusalError(
    "the completion was given up", status=503, kind="server_error",
    code="cancelled",
  ),
}  # fmt: skip


class Choice:
  """A completion of an answer, as far as it is known.

  Attributes:
    index: which.
    text: so far.
    finish: OpenAI's reason, once it has ended.
    num_tokens: of it.
    cached: tokens of its prompt that were not read.
    accepted, drafted: tokens of it that were drafted, and all that were.
  """

  def __init__(self, index: int, ask: Ask, tokenizer: Tokenizer):
    """Nothing is known yet."""
    self.index, self._ask, self._tokenizer = index, ask, tokenizer
    before = ask.prompts[index // ask.num_choices]
    self._reader = Reader(tokenizer, ask.stop, before)
    self._head = tokenizer.decode(before) if ask.echo else ""
    self._prompt = before
    # Every token's own piece, for colours.
    self._shown = Reader(tokenizer, before=before)
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._num_characters = 0  # that its tokens' bytes are so far
    self._tokens: list[dict[str, Any]] = []  # as a chat's log-probabilities
    self._offsets: list[int] = []
    self._origins: list[dict[str, str]] = []
    self.cached = self.accepted = self.drafted = 0
    self.finish: str | None = None
    self._begun = False

  @property
  def text(self) -> str:
    """The text sent so far, after the prompt if that is echoed."""
    return self._head + self._reader.sent

  @property
  def num_tokens(self) -> int:
    """Tokens of the completion."""
    return len(self._reader.token_ids)

  def hear(self, news: News) -> tuple[str, dict[str, Any]]:
    """Adds news to the choice.

    Returns:
      The text that is certain with them, and what else a choice says of them.

    Raises:
      RefusalError: if it failed.
    """
    if news.finish in FAILURES:
      raise FAILURES[news.finish]()
    self.cached, self.drafted = news.cached, news.drafted
    self.accepted += list(news.origins).count(Origin.ACCEPTED)
    piece = "" if self._begun else self._head
    self._begun = True
    piece += self._reader.read(news.token_ids)
    if news.finish is not None:
      piece += self._reader.finish(cut=news.cut)
      self.finish = news.finish.value
    more: dict[str, Any] = {}
    if self._ask.log_probs:
      start = len(self._tokens)
      if news.scores is not None:
        self._place_prompt(news.scores)
      every = news.likeliest or [()] * len(news.token_ids)
      for token, value, likeliest in zip(
        news.token_ids, news.log_probs, every, strict=True
      ):
        self._place(token, value, likeliest)
      more["logprobs"] = self._log_probs(start)
    if self._ask.origins:
      new = self._pieces(news)
      self._origins += new
      more["token_origins"] = new
    return piece, more

  def whole(self) -> dict[str, Any]:
    """Fields of a choice of a whole answer beside its text."""
    more: dict[str, Any] = {"logprobs": None}
    if self._ask.log_probs:
      more["logprobs"] = self._log_probs(0)
    if self._ask.origins:
      more["token_origins"] = self._origins
    return more

  def _pieces(self, news: News) -> list[dict[str, str]]:
    pieces = [self._shown.read([token]) for token in news.token_ids]
    if news.finish is not None and pieces:
      pieces[-1] += self._shown.finish(cut=False)
    return [
      {"text": piece, "origin": Origin(origin).name.lower()}
      for piece, origin in zip(pieces, news.origins, strict=True)
    ]

  def _place_prompt(self, scores: Scores) -> None:
    """Notes the prompt's tokens, of which the first has no law."""
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
    """Notes a token; parts of one character are all where it begins.

    Args:
      token: which.
      value: its log-probability, or None if it has no law.
      likeliest: tokens in its place, with theirs; None likewise.
    """
    piece = token_text.bytes_of(self._tokenizer, token)
    self._tokens.append(
      {
        **self._said(token, value),
        "top_logprobs": None
        if likeliest is None
        else [self._said(*one) for one in likeliest],
      }
    )
    begun, characters = self._num_characters, piece.decode("utf-8", "replace")
    self._num_characters += len(self._decoder.decode(piece))
    if "\ufffd" not in characters:  # a character before it may have broken off
      begun = self._num_characters - len(characters)
    self._offsets.append(begun)

  def _said(self, token: int, value: float | None) -> dict[str, Any]:
    if value is not None and not math.isfinite(value):
      value = -9999.0  # OpenAI's, for minus infinity
    return {
      "token": token_text.name_of(self._tokenizer, token),
      "logprob": value,
      "bytes": list(token_text.bytes_of(self._tokenizer, token)),
    }

  def _log_probs(self, start: int) -> dict[str, Any]:
    """Log-probabilities of the tokens from `start` on."""
    tokens = self._tokens[start:]
    if self._ask.is_chat:
      return {"content": tokens, "refusal": None}
    return {
      "tokens": [one["token"] for one in tokens],
      "token_logprobs": [one["logprob"] for one in tokens],
      "top_logprobs": [_by_name(one) for one in tokens]
      if self._ask.asked.num_likeliest
      else None,
      "text_offset": self._offsets[start:],
    }


def _by_name(one: dict[str, Any]) -> dict[str, float] | None:
  """The likeliest tokens and the one in their place, as completions say them.

  Of several that have one name (parts of characters) the likeliest is told.
  """
  if one["top_logprobs"] is None:
    return None
  all_of_them = [one, *one["top_logprobs"][::-1]]
  return {x["token"]: x["logprob"] for x in all_of_them}


class Answer:
  """An answer, whole or in chunks."""

  def __init__(self, ask: Ask, *, model: str, tokenizer: Tokenizer):
    """Nothing is known yet."""
    self._ask, self._model = ask, model
    count = len(ask.prompts) * ask.num_choices
    self.choices = [Choice(i, ask, tokenizer) for i in range(count)]
    prefix = "chatcmpl" if ask.is_chat else "cmpl"
    self._id = f"{prefix}-{secrets.token_hex(12)}"
    self._created = int(time.time())
    self._begun: set[int] = set()

  @property
  def is_over(self) -> bool:
    """True if every choice has ended."""
    return all(choice.finish is not None for choice in self.choices)

  def hear(self, index: int, news: News) -> dict[str, Any] | None:
    """Adds a choice's news; returns a chunk for the client, or None."""
    choice = self.choices[index]
    piece, more = choice.hear(news)
    if not (piece or news.finish or any(map(_says, more.values()))):
      return None
    one: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
    one |= {"logprobs": None} | more
    if self._ask.is_chat:
      delta = {"content": piece}
      if index not in self._begun:
        delta = {"role": "assistant", **delta}
      one["delta"] = delta
    else:
      one["text"] = piece
    self._begun.add(index)
    chunk = self._object([one], chunk=True)
    if self._ask.usage_so_far:
      chunk["usage"] = self._usage()
    return chunk

  def usage_chunk(self) -> dict[str, Any]:
    """The last chunk, of no choice."""
    return {**self._object([], chunk=True), "usage": self._usage()}

  def whole(self) -> dict[str, Any]:
    """The answer, once it is over."""
    choices = []
    for choice in self.choices:
      one: dict[str, Any] = {"index": choice.index}
      if self._ask.is_chat:
        one["message"] = {"role": "assistant", "content": choice.text}
      else:
        one["text"] = choice.text
      choices.append({**one, "finish_reason": choice.finish, **choice.whole()})
    return {**self._object(choices, chunk=False), "usage": self._usage()}

  def _object(self, choices: list, *, chunk: bool) -> dict[str, Any]:
    kind = "text_completion"
    if self._ask.is_chat:
      kind = "chat.completion.chunk" if chunk else "chat.completion"
    return {
      "id": self._id,
      "object": kind,
      "created": self._created,
      "model": self._model,
      "choices": choices,
    }

  def _usage(self) -> dict[str, Any]:
    prompt = sum(map(len, self._ask.prompts))
    new = sum(choice.num_tokens for choice in self.choices)
    # Of several choices of a prompt all but the first have it from that one.
    first = self.choices[:: self._ask.num_choices]
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


def _says(more: Any) -> bool:
  """True if a chunk's fields beside its text hold any token."""
  if isinstance(more, dict):
    return bool(more.get("content") or more.get("tokens"))
  return bool(more)


def event(data: dict[str, Any]) -> bytes:
  """A server-sent event of a stream."""
  return f"data: {json.dumps(data)}\n\n".encode()


LAST_EVENT = b"data: [DONE]\n\n"
