"""Online learning of drafts: a ring buffer of verified rounds to learn from.

Verification yields the target's distribution after every accepted token for
free. Online speculative decoding (Liu et al., ICML 2024) trains the draft on it
while decoding. Here any drafter can keep those distributions in a ring: each
row's newest R fed tokens with their positions and the distribution of the token
*after* each, including the one after the last accepted token, where the draft
was wrong.

`specjax.training.learning` turns a ring into a loss; `Params.draft` changes
between calls of `Decoder.steps`. The output distribution stays the target's,
because parameters depend only on what was committed before the round. But rows
are no longer independent: at temperatures above 0 a row's text depends, through
the draft, on its neighbors and on earlier prompts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.structs import struct
from specjax.types import Commit, Drafter, FeatureModel, LanguageModel

# Log-probabilities are clipped here: zero mass has no logarithm to compare.
FLOOR = -70.0


@struct
class Ring:
  """Each row's newest R tokens fed to the target.

  Attributes:
    tokens: `i32[B, R]`.
    positions: `i32[B, R]`, their positions in the text.
    log_probs: `f32[B, R, K + 1]`, log-probabilities of the token after each at
      temperature 1: those of `ids`, then all other tokens together. If K is V,
      `f32[B, R, V]`.
    ids: `i32[B, R, K]`, the likeliest tokens; None if K is V.
    known: `bool[B, R]`, whether there is a distribution: not for prompts.
    features: `f[B, R, F]`, the target's, for a head; or None.
    written: `i32[B]`, tokens so far; the next one goes to `written % R`.
  """

  tokens: Array
  positions: Array
  log_probs: Array
  ids: Array | None
  known: Array
  features: Array | None
  written: Array


@struct
class OnlineState:
  """A ring and the inner drafter's state."""

  inner: Any
  ring: Ring


def online(
  drafter: Drafter,
  *,
  vocab_size: int,
  entries: int = 512,
  top_k: int = 0,
  num_features: int = 0,
) -> Drafter:
  """Any drafter, with a ring of the target's distributions to learn from.

  Args:
    drafter: the inner drafter.
    vocab_size: V, the number of real tokens.
    entries: R, tokens kept per row. A longer text is learned as if it began
      where the ring does.
    top_k: K, how many of the likeliest tokens to keep of each distribution; the
      others are lumped into one. 0 keeps the whole distribution.
    num_features: F, if the draft is a head on the target's features; else 0.

  Returns:
    The `Drafter`; its state is an `OnlineState`. A refilled row
    (`Decoder.admit`) begins with an empty ring.
  """
  kept, inner = top_k or vocab_size, drafter
  whole = kept == vocab_size

  def init(params, batch, slots, inputs):
    of = lambda *more, dtype: jnp.zeros((batch, entries, *more), dtype)
    ring = Ring(
      tokens=of(dtype=jnp.int32),
      positions=of(dtype=jnp.int32),
      log_probs=of(kept if whole else kept + 1, dtype=jnp.float32),
      ids=None if whole else of(kept, dtype=jnp.int32),
      known=of(dtype=bool),
      features=of(num_features, dtype=jnp.float32) if num_features else None,
      written=jnp.zeros((batch,), jnp.int32),
    )
    return OnlineState(
      inner=inner.init(params, batch, slots, inputs), ring=ring
    )

  def propose(params, state, target_cache, context):
    draft, inner_state, cache = inner.propose(
      params, state.inner, target_cache, context
    )
    return draft, dataclasses.replace(state, inner=inner_state), cache

  def after(of_inner):
    def read(params, state, commit):
      return OnlineState(
        inner=of_inner(params, state.inner, commit),
        ring=_written(state.ring, commit, vocab_size),
      )

    return read

  def row_axes(state):
    return OnlineState(
      inner=inner.row_axes(state.inner),
      ring=jax.tree.map(lambda x: 0, state.ring),
    )

  return dataclasses.replace(
    inner,
    name=f"online {inner.name}",
    init=init,
    propose=propose,
    prefill=after(inner.prefill),
    commit=after(inner.commit),
    row_axes=row_axes,
  )


def carry(state: OnlineState, before: Ring) -> OnlineState:
  """The state after prefill, its rings appended to those in `before`."""
  new = in_order(state.ring)
  count = jnp.minimum(state.ring.written, state.ring.tokens.shape[1])
  names = [f.name for f in dataclasses.fields(Ring) if f.name != "written"]
  entries = {name: getattr(new, name) for name in names}
  return dataclasses.replace(state, ring=_added(before, entries, count))


def in_order(ring: Ring) -> Ring:
  """The ring with the oldest entry of each row first.

  Entries never written come last and are not `known`; `written` becomes the
  number of entries, at most R.
  """
  room = ring.tokens.shape[1]
  first = jnp.where(ring.written > room, ring.written % room, 0)
  count = jnp.minimum(ring.written, room)
  order = (first[:, None] + np.arange(room)) % room
  take = jax.vmap(lambda x, o: x[o])
  rolled = jax.tree.map(lambda x: x if x.ndim == 1 else take(x, order), ring)
  return dataclasses.replace(rolled, written=count)


# ------------------------------------------------------------ how it is filled


def _written(ring: Ring, commit: Commit, vocab_size: int) -> Ring:
  """The ring with the newly committed tokens."""
  width = commit.path.shape[1]
  index = np.arange(width, dtype=np.int32)
  # A window that was fed again begins with entries that are there already.
  shifted = jnp.minimum(index + commit.num_refed[:, None], width - 1)
  path = jnp.take_along_axis(commit.path, shifted, axis=1)
  count = jnp.maximum(commit.count - commit.num_refed, 0)
  along = lambda x: jax.vmap(lambda row, at: row[at])(x, path)
  output = commit.target_output
  rows = (len(path), width)
  new: dict[str, Array | None] = {
    "tokens": along(commit.tokens),
    "positions": (commit.start + commit.num_refed)[:, None] + index,
    "features": None,
  }
  if ring.features is not None:
    given = commit.features(ring.features.shape[-1])
    new["features"] = along(given).astype(ring.features.dtype)
  if output.logits.shape[1] != commit.tokens.shape[1]:  # of a prompt
    new |= {
      "log_probs": jnp.zeros(
        (*rows, ring.log_probs.shape[-1]), ring.log_probs.dtype
      ),
      "ids": None if ring.ids is None else jnp.zeros(
        (*rows, ring.ids.shape[-1]), jnp.int32
      ),
      "known": jnp.zeros(rows, bool),
    }  # fmt: skip
  else:
    log_probs = along(output.logits)[..., :vocab_size].astype(jnp.float32)
    log_probs = jax.nn.log_softmax(log_probs, axis=-1)
    is_finite = ~jnp.isnan(log_probs).any(axis=-1)
    log_probs = jnp.where(is_finite[..., None], log_probs, 0)
    ids = None
    if ring.ids is not None:
      _, ids = jax.lax.top_k(log_probs, ring.ids.shape[-1])
      log_probs = lumped(log_probs, ids)
    log_probs = jnp.maximum(log_probs, FLOOR).astype(ring.log_probs.dtype)
    new |= {"log_probs": log_probs, "ids": ids, "known": is_finite}
  return _added(ring, new, count)


def _added(ring: Ring, new: dict[str, Array | None], count: Array) -> Ring:
  """The ring with the first `count` of W new entries of each row."""
  fresh = new["tokens"]
  assert fresh is not None
  place = _places(
    ring.written, count, width=fresh.shape[1], room=ring.tokens.shape[1]
  )
  put = jax.vmap(lambda old, at, x: old.at[at].set(x, mode="drop"))
  changed = {
    name: None if x is None else put(getattr(ring, name), place, x)
    for name, x in new.items()
  }
  return Ring(**changed, written=ring.written + count)  # type: ignore[arg-type]


def _places(written: Array, count: Array, *, width: int, room: int) -> Array:
  """Distinct slots of W new entries, `i32[B, W]`; R for dropped ones."""
  index = np.arange(width)
  wanted = (index < count[:, None]) & (index >= count[:, None] - room)
  return jnp.where(wanted, (written[:, None] + index) % room, room)


def lumped(logits: Array, ids: Array) -> Array:
  """Log-probabilities of some tokens, and of all others together.

  Logits `f32[..., V]` and distinct ids `i32[..., K]` give `f32[..., K + 1]`.
  """
  whole = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
  chosen = jnp.take_along_axis(logits, ids, axis=-1)
  others = jnp.put_along_axis(logits, ids, -jnp.inf, axis=-1, inplace=False)
  rest = jax.scipy.special.logsumexp(others, axis=-1, keepdims=True)
  return jnp.concatenate([chosen, rest], axis=-1) - whole


# ---------------------------------- a draft's distributions on a ring's texts

# `(parameters, ring in order) -> (logits f32[B, R, V], valid bool[B, R])`: the
# draft's logits for the token after each entry, and where it has any.
DraftFn = Callable[[Any, Ring], tuple[Array, Array]]


def texts(ring: Ring) -> Array:
  """`i32[B, R]`, which text each entry belongs to; -1 for missing entries."""
  next_one = ring.positions[:, 1:] == ring.positions[:, :-1] + 1
  text = jnp.cumsum(jnp.pad(~next_one, ((0, 0), (1, 0))), axis=1)
  present = np.arange(text.shape[1]) < ring.written[:, None]
  return jnp.where(present, text, -1)


def model_logits(model: LanguageModel, *, vocab_size: int) -> DraftFn:
  """A draft model's distributions, each text read from its start in the ring.

  Raises:
    ValueError: for an encoder-decoder: rings do not keep inputs.
  """
  if model.encode is not None:
    raise ValueError("an encoder-decoder draft cannot learn online")

  def logits_of(params, ring: Ring):
    rows, room = ring.tokens.shape
    text = texts(ring)
    output, _ = model.apply(
      params,
      ring.tokens,
      model.init_cache(rows, room),
      positions=ring.positions,
      mask=_sees(text, text),
    )
    return output.logits[..., :vocab_size], text >= 0

  return logits_of


def head_logits(model: FeatureModel, *, vocab_size: int) -> DraftFn:
  """A head's distributions, reading the target's own features.

  From the second drafted token on a head reads its own hidden states; it is not
  trained for that here.
  """

  def logits_of(params, ring: Ring):
    if ring.features is None:
      raise ValueError("a head learns from the target's features: num_features")
    rows, room = ring.tokens.shape
    text = texts(ring)
    # A pair is a feature and the token after it, of one text.
    pair = jnp.where(text[:, :-1] == text[:, 1:], text[:, 1:], -1)
    logits, _, _ = model.apply(
      params,
      ring.tokens[:, 1:],
      model.fuse(params, ring.features[:, :-1]),
      model.init_cache(rows, room - 1),
      positions=ring.positions[:, :-1],
      mask=_sees(pair, pair),
    )
    first = lambda x: jnp.pad(x, ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)))
    return first(logits[..., :vocab_size]), first(pair >= 0)

  return logits_of


def _sees(of: Array, seen: Array) -> Array:
  """`bool[B, T, T]`: a causal mask within each text; each token sees itself."""
  same = (of[:, :, None] == seen[:, None]) & (of >= 0)[:, :, None]
  count = of.shape[1]
  return (same & np.tri(count, dtype=bool)) | np.eye(count, dtype=bool)
