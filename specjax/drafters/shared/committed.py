"""Feeds committed tokens to heads on the target's features.

At position i layer k of a head of D layers (EAGLE has one) reads the state of
layer k - 1 there (for k = 1 the target's feature of token i) and token i + k.
Both are known as soon as token i + k is committed, so the head is fed in
`commit`, and `propose` only drafts. Rounds without a draft need nothing else.

A layer's cache holds position i in slot i. Drafted positions are written after
the committed ones, and the next commit overwrites them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.structs import struct
from specjax.types import Commit, FeatureModel, Params


@struct
class HeadState:
  """State of a head of D layers after a text of `length` tokens.

  Attributes:
    caches: each layer's; layer k has `length - k` committed positions.
    hidden: each layer's state at the last of them, `f[B, H]`.
    logits: `f32[B, V']`, the first layer's there, for the token after the text.
  """

  caches: tuple[Cache, ...]
  hidden: tuple[Array, ...]
  logits: Array


def fields(
  models: tuple[FeatureModel, ...], *, more_slots: int = 0
) -> dict[str, Any]:
  """The `Drafter` fields of a head: its state, and how it is fed.

  Args:
    models: the layers; all take the parameters of the whole head.
    more_slots: extra slots per cache, for drafted nodes that are not verified.
  """

  def begin(params, batch, slots, inputs) -> HeadState:
    del inputs
    return init(models, params, batch, slots + more_slots)

  return dict(
    init=begin,
    prefill=functools.partial(feed, models, after_round=False),
    commit=functools.partial(feed, models, after_round=True),
    row_axes=row_axes,
    max_positions=models[0].max_positions,
    num_refed=max(len(models), 2),
    accepts_foreign_drafts=True,
  )


def init(
  models: tuple[FeatureModel, ...], params: Params, batch: int, slots: int
) -> HeadState:
  """The state before a prompt."""
  caches = tuple(model.init_cache(batch, slots) for model in models)
  token = jnp.zeros((batch, 1), jnp.int32)
  features = jnp.zeros((batch, 1, models[0].num_features))
  logits, hidden, _ = jax.eval_shape(
    lambda params: models[0].apply(
      params, token, models[0].fuse(params, features), caches[0],
      logits_at=token,
    ),
    params.draft,
  )  # fmt: skip
  zeros = lambda x: jnp.zeros((batch, x.shape[-1]), x.dtype)
  return HeadState(
    caches=caches,
    hidden=tuple(zeros(hidden) for _ in models),
    logits=zeros(logits),
  )


def feed(
  models: tuple[FeatureModel, ...],
  params: Params,
  state: HeadState,
  commit: Commit,
  *,
  after_round: bool,
) -> HeadState:
  """Feeds every layer the new positions, in one pass of W tokens each.

  With `after_round`, as after a round, the state covers the text up to
  `commit.start`, and layer k begins k - 1 positions before it. For prompts all
  layers begin at `commit.start`: their newest D tokens are fed again.
  """
  went_on = commit.count > 0
  # Nothing of a one-token text was fed: its token is paired with zero features.
  length = jnp.maximum(commit.length, 2)
  tokens = commit.next_tokens()
  features = commit.features(models[0].num_features)
  features = jnp.take_along_axis(features, commit.path[..., None], axis=1)
  features = jnp.where(went_on[:, None, None], features, 0)
  hidden = models[0].fuse(params.draft, features)
  steps = np.arange(tokens.shape[1])
  back = jnp.zeros_like(commit.start)  # from `start` to the first fed position
  caches, newest, logits = [], [], state.logits
  for k, model in enumerate(models, 1):
    if k > 1 and after_round:
      further = commit.start >= k - 1  # else the layer has no position yet
      shifted = jnp.concatenate(
        [state.hidden[k - 2][:, None], hidden[:, :-1]], axis=1
      )
      hidden = jnp.where(further[:, None, None], shifted, hidden)
      back = back + further
    first = commit.start - back
    at = jnp.minimum((k - 1 - back)[:, None] + steps, len(steps) - 1)
    last = jnp.clip(length - 1 - k - first, 0, len(steps) - 1)[:, None]
    fed = jnp.take_along_axis(tokens, at, axis=1)
    cache = state.caches[k - 1].replace(length=first)
    if k == len(models) and not after_round:
      # States are needed only at the last position, which is fed again.
      nowhere = last[:, :0]
      _, _, cache = model.apply(
        params.draft, fed, hidden, cache, logits_at=nowhere
      )
      cache = cache.replace(length=first + last[:, 0])
      fed = jnp.take_along_axis(fed, last, axis=1)
      hidden = jnp.take_along_axis(hidden, last[..., None], axis=1)
      last = jnp.zeros_like(last)
    output, hidden, cache = model.apply(
      params.draft,
      fed,
      hidden,
      cache,
      logits_at=last if k == 1 else last[:, :0],
    )
    if k == 1:
      logits = output[:, 0].astype(state.logits.dtype)
    caches.append(cache.replace(length=jnp.maximum(length - k, 0)))
    of_last = jnp.take_along_axis(hidden, last[..., None], axis=1)[:, 0]
    newest.append(of_last.astype(state.hidden[0].dtype))
  # Rows that emitted nothing keep what they knew.
  is_new = (went_on | (commit.length == 1))[:, None]
  keep = lambda new, old: jnp.where(is_new, new, old)
  return HeadState(
    caches=tuple(caches),
    hidden=tuple(map(keep, newest, state.hidden)),
    logits=keep(logits, state.logits),
  )


def row_axes(state: HeadState) -> Any:
  """The row axis of each array of a state."""
  return HeadState(
    caches=tuple(map(cache_lib.row_axes, state.caches)),
    hidden=(0,) * len(state.hidden),  # type: ignore[arg-type]
    logits=0,  # type: ignore[arg-type]
  )
