"""A conversation's token ids, and their caches on the device.

Generated ids are kept: an answer is never tokenized again. The tokens between
an answer and the next one are those of the model's template; if the template
rewrites earlier text once a conversation goes on, all of it is rendered anew.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from models import chat
from models.tokenizers import Tokenizer
from specjax.decode import Decoder
from specjax.state import DecodeState, Origin, StopReason
from specjax.types import Params, Sampling

Message = dict[str, str]

# Stands for an answer while a template is asked what it writes around it; a
# character that Unicode assigns to nobody.
_PLACE = "\ufdd1"
# What is read at once is padded to a power of two, of at least so many tokens.
_SMALLEST = 16
# The first buffer; later ones are twice as long. A round reads all of it.
_FIRST_BUFFER = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """The messages so far, and their ids.

  Attributes:
    tokenizer: of the model, with a chat template.
    stop_tokens: ids that end an answer.
    messages: as templates read them, the last answer last.
    ids: of all of it, as the model read and wrote them; empty before the first
      answer.
  """

  tokenizer: Tokenizer
  stop_tokens: tuple[int, ...]
  messages: tuple[Message, ...] = ()
  ids: tuple[int, ...] = ()

  def ask(self, text: str) -> "Conversation":
    """The conversation with a question added, up to where its answer begins.

    Raises:
      ValueError: if the template refuses it.
    """
    messages = (*self.messages, {"role": "user", "content": text})
    more = self.ids and following(
      self.tokenizer, messages, self.ids,
      ended=self.ids[-1] in self.stop_tokens,
    )  # fmt: skip
    ids = (*self.ids, *more) if more else chat.encode(self.tokenizer, messages)
    return dataclasses.replace(self, messages=messages, ids=tuple(ids))

  def answered(self, token_ids: Sequence[int]) -> "Conversation":
    """The conversation with the answer, whole or not, to its last question."""
    answer = self.tokenizer.decode(token_ids, after=self.ids)
    return dataclasses.replace(
      self,
      messages=(*self.messages, {"role": "assistant", "content": answer}),
      ids=(*self.ids, *token_ids),
    )


def following(
  tokenizer: Tokenizer,
  messages: Sequence[Message],
  ids: Sequence[int],
  *,
  ended: bool,
) -> list[int] | None:
  """The ids that the template writes after an answer, up to the next one.

  Args:
    tokenizer: with the template.
    messages: the conversation: an answer, then the question after it.
    ids: of all up to the answer, the tokens that were generated last.
    ended: whether the last of them is a stop token.

  Returns:
    The ids; None where those of the whole conversation would not begin with
    `ids`.
  """
  safe, forged = chat.protect(tokenizer, messages)
  answer: Any = safe[-2]
  render = lambda *said: chat.render(tokenizer, said)
  text = render(*safe[:-2], {**answer, "content": _PLACE}, safe[-1])
  head, place, tail = text.partition(_PLACE)
  if not place or _PLACE in tail or head != render(*safe[:-2]):
    return None  # it rewrites what came before an answer
  whole = head + answer["content"] + tail
  if render(*safe) != whole:
    return None  # it rewrites answers
  if tail.startswith(tuple(tokenizer.special_tokens())):
    rest = chat.encode_rendered(tokenizer, tail, forged)
    if not ended:  # the end of its turn is the template's
      return rest
    return rest[1:] if rest[0] == ids[-1] else None
  # Tokens might reach over the border.
  every = chat.encode_rendered(tokenizer, whole, forged)
  return every[len(ids) :] if tuple(every[: len(ids)]) == tuple(ids) else None


class CachedText:
  """A text with its caches on the device, which rounds continue.

  Attributes:
    max_length: tokens of the longest text.
    held: the text that the caches hold.
    state: as of the last round; None if nothing is held.
    seconds: spent on the rounds since the last `read`.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    *,
    stop_tokens: Sequence[int],
    max_length: int,
    first_buffer: int = _FIRST_BUFFER,
    waiting: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
  ):
    """Reads nothing yet.

    Args:
      decoder: the decoder.
      params: its parameters.
      stop_tokens: ids that end an answer.
      max_length: tokens of the longest text.
      first_buffer: tokens that caches have room for at first.
      waiting: makes a context, from words for the work, to enter during it.
    """
    self.max_length, self.seconds = max_length, 0.0
    self.held: list[int] = []
    self.state: DecodeState | None = None
    self._decoder, self._params = decoder, params
    self._first_buffer, self._waiting = first_buffer, waiting
    self._compiled: set[tuple] = set()
    self._init = jax.jit(
      functools.partial(decoder.init, stop_tokens=tuple(stop_tokens)),
      static_argnames="buffer_length",
    )
    self._extend = jax.jit(decoder.extend, donate_argnums=1)
    self._steps = jax.jit(decoder.steps, donate_argnums=1)

  @property
  def buffer_length(self) -> int:
    """Tokens that the caches have room for; 0 if nothing was read."""
    return self._decoder.buffer_length(self.state) if self.state else 0

  def read(
    self,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    key: jax.Array,
  ) -> int:
    """Sets the text to continue, reusing the cache of their common prefix.

    Args:
      ids: the text.
      max_new_tokens: of the answer; fewer if the context is full before.
      sampling: the warp of the answer, of one row.
      key: the stream of a text that is read from its beginning.

    Returns:
      The number of tokens that were not cached.

    Raises:
      ValueError: if there is no room for an answer.
    """
    ids = list(ids)
    if len(ids) >= self.max_length:
      raise ValueError(
        f"the conversation would have {len(ids)} tokens, and there is room for "
        f"{self.max_length}: /reset begins a new one"
      )
    budget = np.int32(min(max_new_tokens, self.max_length - len(ids)))
    need, room, kept = len(ids) + int(budget), self.buffer_length, self.held
    more = ids[len(kept) :]
    if need > room or ids[: len(kept)] != kept or not more:
      more, kept = ids, []
      room = max(need, min(self._first_buffer, self.max_length), room)
      room = min(_power_of_two(room), self.max_length)
    width = min(_power_of_two(len(more)), room - bool(kept))
    tokens = np.pad(np.array(more, np.int32), (0, width - len(more)))
    with self._whole_or_nothing(), self._compiling(bool(kept), room, width):
      if kept:
        self.state = self._extend(
          self._params, self.state, np.int32(0), tokens, np.int32(len(more)),
          max_new_tokens=budget, sampling=sampling,
        )  # fmt: skip
      else:
        self.state = None  # its memory is free before the new one's is taken
        self.state = self._init(
          self._params, tokens[None], np.array([len(more)]), key[None],
          buffer_length=room, max_new_tokens=budget, sampling=sampling,
        )  # fmt: skip
      self.state = self._steps(self._params, self.state, np.int32(0))
      jax.block_until_ready(self.state)
    self.held, self.seconds = ids, 0.0
    return len(more)

  def rounds(self) -> Iterator[list[tuple[int, Origin]]]:
    """Continues: the tokens of each round and where they came from."""
    state, start = self.state, time.perf_counter()
    while state is not None:
      tokens, origins, length, reason = jax.device_get(
        (state.tokens, state.origins, state.length, state.stop_reason)
      )
      new = slice(len(self.held), int(length[0]))
      self.held = tokens[0, : new.stop].tolist()
      self.seconds += time.perf_counter() - start
      if new.stop > new.start:
        yield [
          (int(token), Origin(int(origin)))
          for token, origin in zip(tokens[0, new], origins[0, new], strict=True)
        ]
      if reason[0] != StopReason.RUNNING:
        return
      start = time.perf_counter()
      with self._whole_or_nothing():
        state = self.state = self._steps(self._params, state, np.int32(1))

  def forget(self) -> None:
    """Holds nothing any more; what was compiled stays."""
    self.state, self.held = None, []

  @contextlib.contextmanager
  def _whole_or_nothing(self) -> Iterator[None]:
    """Forgets the caches if anything breaks off: they are donated."""
    try:
      yield
    except BaseException:
      self.forget()
      raise

  def _compiling(self, *shape) -> AbstractContextManager:
    if shape in self._compiled:
      return contextlib.nullcontext()
    self._compiled.add(shape)
    return self._waiting("compiling ...")


def _power_of_two(count: int) -> int:
  return 1 << (max(count, _SMALLEST) - 1).bit_length()
