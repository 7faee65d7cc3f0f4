"""One text on the device that is read, and written, further and further."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.decode import Decoder
from specjax.state import DecodeState, Origin, StopReason
from specjax.types import Params
from specjax.warp import make_sampling

# What is read at once is padded to a power of two, of at least so many tokens.
_SMALLEST = 16
# The first buffer; later ones are twice as long. A round looks at all of it.
_FIRST_BUFFER = 1024
# Seconds after which somebody who waits is told why.
_PATIENCE = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """What was read before an answer.

  Attributes:
    kept: tokens that the caches had already.
    read: those that were read.
    why: why all of them were, or "".
  """

  kept: int
  read: int
  why: str


class ContextFullError(ValueError):
  """A text leaves no room for an answer."""


class Talk:
  """A text, its caches, and what goes on with it.

  Attributes:
    decoder: what decodes.
    max_length: tokens of the longest text.
    held: the text that the caches hold.
    seconds: that the rounds since the last `read` took.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    *,
    stop_tokens: Sequence[int],
    max_length: int,
    truncation: dict[str, Any],
    because: str = "nothing was read before",
    first_buffer: int = _FIRST_BUFFER,
    say: Callable[[str], None] = lambda text: None,
  ):
    """Reads nothing yet.

    Args:
      decoder: what decodes.
      params: its parameters.
      stop_tokens: ids that end an answer.
      max_length: tokens of the longest text.
      truncation: what `make_sampling` takes beside the temperature.
      because: why this one has read nothing.
      first_buffer: tokens that caches have room for at first.
      say: is told what takes long, and "" once that is over.
    """
    self.decoder, self.max_length = decoder, max_length
    self.held: list[int] = []
    self.seconds = 0.0
    self._because, self._first_buffer = because, first_buffer
    self._say = say
    self._params, self._truncation = params, truncation
    self._state: DecodeState | None = None
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
    if self._state is None:
      return 0
    return self.decoder.buffer_length(self._state)

  def read(
    self,
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    key: jax.Array,
  ) -> Reading:
    """Makes a text the one that goes on; what the caches have of it stays.

    Args:
      ids: the text.
      max_new_tokens: of the answer; fewer if the context is full before.
      temperature: of the answer.
      key: the stream of a text that is read from its beginning.

    Raises:
      ContextFullError: if there is no room for an answer.
    """
    ids = list(ids)
    if len(ids) >= self.max_length:
      raise ContextFullError(
        f"the conversation would have {len(ids)} tokens, and there is room for "
        f"{self.max_length}: /reset begins a new one"
      )
    budget = min(max_new_tokens, self.max_length - len(ids))
    need, room = len(ids) + budget, self.buffer_length
    kept = len(self.held)
    more = ids[kept:]
    why = ""
    if self._state is None:
      why = self._because
    elif ids[:kept] != self.held or not more:
      why = "what came before is another text"
    elif need > room:
      why = "the buffer grew"
    sampling = make_sampling(1, temperature=temperature, **self._truncation)
    with self._whole_or_nothing():
      if why:
        kept, more = 0, ids
        room = max(need, min(self._first_buffer, self.max_length), room)
        room = min(_power_of_two(room), self.max_length)
        width = min(_power_of_two(len(ids)), room)
        self._state = None  # its memory is free before the new one's is taken
        with self._saying("init", room, width):
          self._state = self._init(
            self._params,
            _padded(ids, width)[None],
            np.array([len(ids)]),
            key[None],
            buffer_length=room,
            max_new_tokens=np.int32(budget),
            sampling=sampling,
          )
      else:
        width = min(_power_of_two(len(more)), room - 1)
        with self._saying("extend", room, width):
          self._state = self._extend(
            self._params,
            self._state,
            np.int32(0),
            _padded(more, width),
            np.int32(len(more)),
            max_new_tokens=np.int32(budget),
            sampling=sampling,
          )
      with self._saying("steps", room):  # compiles it, and makes none
        self._state = self._steps(self._params, self._state, np.int32(0))
      jax.block_until_ready(self._state)
    self.held, self.seconds = ids, 0.0
    return Reading(kept=kept, read=len(more), why=why)

  def rounds(self) -> Iterator[list[tuple[int, Origin]]]:
    """Goes on: the tokens of each round and where they came from."""
    state, start = self._state, time.perf_counter()
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
        state = self._state = self._steps(self._params, state, np.int32(1))

  def state(self) -> DecodeState | None:
    """As of the last round; None if nothing is held."""
    return self._state

  def forget(self) -> None:
    """Holds nothing any more; what was compiled stays."""
    self._state, self.held = None, []
    self._because = "nothing was read before"

  @contextlib.contextmanager
  def _whole_or_nothing(self) -> Iterator[None]:
    """Forgets the caches if anything breaks off: they are given away."""
    try:
      yield
    except BaseException:
      self.forget()
      self._because = "something broke off"
      raise

  @contextlib.contextmanager
  def _saying(self, *program) -> Iterator[None]:
    """Says that a program is compiled, while that takes long."""
    if program in self._compiled:
      yield
      return
    self._compiled.add(program)
    said = threading.Event()

    def speak() -> None:
      said.set()
      self._say("compiling ...")

    timer = threading.Timer(_PATIENCE, speak)
    timer.daemon = True
    timer.start()
    try:
      yield
    finally:
      timer.cancel()
      timer.join()
      if said.is_set():
        self._say("")


def _power_of_two(count: int) -> int:
  return 1 << (max(count, _SMALLEST) - 1).bit_length()


def _padded(ids: Sequence[int], width: int) -> np.ndarray:
  return np.pad(np.array(ids, np.int32), (0, width - len(ids)))
