"""Online learning of a draft: the optimizer.

A `Learner` holds the draft's parameters. Every few rounds it takes an Adam step
on everything in the state's ring buffers (`specjax.training.learning`).
Nothing is saved: a killed run starts over.
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from launch.assembly.drafting import Learning
from models.formats.head_checkpoints import Head
from specjax import drafters
from specjax.drafters.families import online
from specjax.drafters.families.online import DraftFn, Ring
from specjax.state import DecodeState
from specjax.training import learning, losses
from specjax.types import Drafter, LanguageModel, Params

# Non-finite gradients are skipped, however many.
_ANY = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
  """What a draft learns.

  Attributes:
    draft: computes the draft's distributions at the entries of a ring.
    fixed: names of parts shared with the target, which are frozen.
  """

  draft: DraftFn
  fixed: frozenset[str] = frozenset()


def wrapped(
  settings: Learning,
  drafter: Drafter,
  draft: LanguageModel | Head | None,
  *,
  vocab_size: int,
) -> tuple[Drafter, Lesson]:
  """A drafter with a ring buffer, and its draft's lesson."""
  width = 0
  if isinstance(draft, Head):
    functions, _ = draft.functions()
    width = functions.num_features
    lesson = Lesson(
      draft=online.head_logits(functions, vocab_size=vocab_size),
      fixed=draft.module.config.shared,
    )
  else:
    assert draft is not None  # of what learns
    lesson = Lesson(draft=online.model_logits(draft, vocab_size=vocab_size))
  made = drafters.online(
    drafter, vocab_size=vocab_size, entries=settings.entries,
    top_k=settings.top_k, num_features=width,
  )  # fmt: skip
  return made, lesson


class Learner:
  """A draft's parameters and their optimizer (`specjax.runtime.engine`).

  Attributes:
    params: parameters of both models; the target's never change.
    updates: optimizer steps so far.
    seconds: time spent on them.
  """

  def __init__(self, settings: Learning, params: Params, lesson: Lesson):
    """Starts from the parameters of a checkpoint."""
    # Committed to their devices, as an update's results are: one program then.
    commit = lambda tree: jax.tree.map(
      lambda x: jax.device_put(x, x.sharding), tree
    )
    self.params = dataclasses.replace(params, draft=commit(params.draft))
    self.updates, self.seconds = 0, 0.0
    self._every = settings.rounds
    self._since = 0
    self._ring: Ring | None = None
    optimizer = optax.apply_if_finite(
      optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.rate)),
      max_consecutive_errors=_ANY,
    )
    weights, _ = _weights(params.draft, lesson.fixed)
    self._state = commit(optimizer.init(weights))
    of = learning.loss(lesson.draft, losses.get(settings.objective))

    def update(draft, state, ring):
      weights, merge = _weights(draft, lesson.fixed)
      slope = jax.grad(lambda w: of(merge(w), ring))(weights)
      change, state = optimizer.update(slope, state, weights)
      return merge(optax.apply_updates(weights, change)), state

    self._update = jax.jit(update)
    self._carry = jax.jit(online.carry)

  @property
  def rounds(self) -> int:
    """Rounds until the next update."""
    return self._every - self._since

  def compile(self, state: DecodeState) -> None:
    """Compiles the update and the filling of rings, without effect."""
    drafter_state = state.drafter_state
    jax.block_until_ready(
      (
        self._update(self.params.draft, self._state, drafter_state.ring),
        self._carry(drafter_state, drafter_state.ring),
      )
    )

  def begin(self, state: DecodeState) -> DecodeState:
    """Carries over the last batch's rings, if it had as many rows."""
    drafter_state = state.drafter_state
    if self._ring is None or len(self._ring.written) != len(state.length):
      return state
    ring = jax.tree.map(
      lambda new, old: jax.device_put(new, old.format),  # as programs want it
      self._carry(drafter_state, self._ring).ring,
      drafter_state.ring,
    )
    drafter_state = dataclasses.replace(drafter_state, ring=ring)
    return dataclasses.replace(state, drafter_state=drafter_state)

  def learn(self, state: DecodeState, rounds: int) -> None:
    """Updates the draft if it is time to, and keeps the rings."""
    self._since += rounds
    ring = state.drafter_state.ring
    if self._since >= self._every:
      self._since = 0
      start = time.perf_counter()
      draft, self._state = jax.block_until_ready(
        self._update(self.params.draft, self._state, ring)
      )
      self.params = dataclasses.replace(self.params, draft=draft)
      self.seconds += time.perf_counter() - start
      self.updates += 1
    # A copy: the state is donated to the next rounds.
    self._ring = jax.tree.map(jnp.copy, ring)


def _weights(
  draft: Any, fixed: Collection[str]
) -> tuple[list[Array], Callable[[list[Array]], Any]]:
  """The trainable parameters, and a function that puts them back.

  Integer tables, such as a head's draft vocabulary, are frozen too.
  """
  named, form = jax.tree_util.tree_flatten_with_path(draft)
  leaves = [x for _, x in named]
  learns = [
    jnp.issubdtype(x.dtype, jnp.inexact)
    and getattr(part, "key", None) not in fixed
    for (part, *_), x in named
  ]

  def merge(weights):
    rest = iter(weights)
    return form.unflatten(
      [next(rest) if w else x for x, w in zip(leaves, learns, strict=True)]
    )

  return [x for x, w in zip(leaves, learns, strict=True) if w], merge
