"""Penalties, biases and minimum lengths: logits that depend on the text.

Verification stays exact if the target's distribution at every node of a draft
counts the tokens of that node's own path: the committed text and the drafted
tokens from the root to the node. Counting the committed text alone would verify
against the distributions of other texts.

Counts are computed from the text wherever a distribution is needed. Drafts are
drawn without penalties, which only costs acceptance.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.tree import Topology
from specjax.types import Draft, Penalties

NONE = int(np.iinfo(np.int32).max)  # padding: no vocabulary has this id
_LEAST_WIDTH = 4

Bias = Mapping[int, float] | Sequence[tuple[int, float]]


def width(count: int) -> int:
  """Padded number of entries per row: 0, or a power of two >= 4."""
  return count and max(_LEAST_WIDTH, 1 << (count - 1).bit_length())


def make(
  batch: int,
  *,
  presence_penalty=None,
  frequency_penalty=None,
  repetition_penalty=None,
  logit_bias: Mapping[int, float] | Sequence[Bias | None] | None = None,
  min_tokens=None,
  stop_token_ids: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
) -> Penalties | None:
  """The `Penalties` from the arguments of `specjax.make_sampling`.

  Returns:
    None if every argument is; else all penalties, neutral where not given.

  Raises:
    ValueError: for values out of range (checked when they are concrete).
  """
  given = (
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias,
    min_tokens, stop_token_ids,
  )  # fmt: skip
  if all(x is None for x in given):
    return None

  biases: list[Any] = [logit_bias] * batch
  if logit_bias is not None and not isinstance(logit_bias, Mapping):
    biases = list(logit_bias)
  some = [dict(x or ()) for x in biases]
  values = _padded([list(x.values()) for x in some], batch, np.float32, 0)
  if not np.isfinite(values).all():
    raise ValueError(f"logit_bias must be finite, got {logit_bias}")
  stops: list[Any] = list(() if stop_token_ids is None else stop_token_ids)
  if not any(isinstance(x, Sequence | np.ndarray | None) for x in stops):
    stops = [stops] * batch
  f32, finite = jnp.float32, (jnp.isfinite, "finite")
  positive = (lambda x: (x > 0) & (x < jnp.inf), "finite and > 0")
  of = lambda name, x, neutral, dtype, valid, expected: per_row(
    batch, name, neutral if x is None else x, dtype, valid, expected
  )
  return Penalties(
    presence=of("presence_penalty", presence_penalty, 0, f32, *finite),
    frequency=of("frequency_penalty", frequency_penalty, 0, f32, *finite),
    repetition=of("repetition_penalty", repetition_penalty, 1, f32, *positive),
    min_tokens=of(
      "min_tokens", min_tokens, 0, jnp.int32, lambda x: x >= 0, ">= 0"
    ),
    bias_tokens=_ids("logit_bias", [list(x) for x in some], batch),
    bias=jnp.asarray(values),
    stop_tokens=_ids("stop_token_ids", [list(x or ()) for x in stops], batch),
  )


def per_row(
  batch: int, name: str, value, dtype, valid: Callable[..., Any], expected: str
) -> Array:
  """A setting as `[B]`; ValueError if it is concrete and out of range."""
  value = jnp.asarray(value, dtype)
  if not isinstance(value, jax.core.Tracer) and not bool(valid(value).all()):
    raise ValueError(f"{name} must be {expected}, got {value}")
  return jnp.broadcast_to(value, (batch,))


def _ids(name: str, lists: list[list[int]], batch: int) -> Array:
  ids = _padded(lists, batch, np.int64, NONE)
  if (ids < 0).any() or (ids > NONE).any():
    raise ValueError(f"{name} must be token ids >= 0, got {lists}")
  return jnp.asarray(ids, jnp.int32)


def _padded(lists: list[list], batch: int, dtype, filling) -> np.ndarray:
  if len(lists) != batch:
    raise ValueError(f"one entry for each of {batch} rows, got {len(lists)}")
  padded = np.full((batch, width(max(map(len, lists)))), filling, dtype)
  for row, one in enumerate(lists):
    padded[row, : len(one)] = one
  return padded


def match_state(
  row: Penalties | None, state: Penalties | None
) -> Penalties | None:
  """Pads one row's penalties, None if neutral, to a running state's shapes.

  Raises:
    ValueError: if the state has no penalties, or room for fewer entries.
  """
  if state is None:
    if row is not None:
      raise ValueError(
        "this state's program has no penalties: begin it with neutral ones "
        "(repetition_penalty=1.0)"
      )
    return None
  row = row or make(1, repetition_penalty=1.0)
  assert row is not None

  def wide(name: str, filling) -> Array:
    most, value = getattr(state, name).shape[1], getattr(row, name)
    if value.shape[1] > most:
      raise ValueError(
        f"this state's program has room for {most} {name} per row, got "
        f"{value.shape[1]}"
      )
    more = ((0, 0), (0, most - value.shape[1]))
    return jnp.pad(value, more, constant_values=filling)

  return dataclasses.replace(
    row,
    bias_tokens=wide("bias_tokens", NONE),
    bias=wide("bias", 0),
    stop_tokens=wide("stop_tokens", NONE),
  )


def path_tokens(draft: Draft, topology: Topology) -> Array:
  """Tokens from the root to each node, `i32[B, N + 1, G]`; `NONE` beyond it."""
  nodes = draft.tree.num_nodes
  paths = jnp.asarray(topology.paths[..., 1:])
  whole = jnp.broadcast_to(paths, (len(draft.tokens), *paths.shape[1:]))
  tokens = jnp.take_along_axis(draft.tokens[:, None], whole, axis=-1)
  depth = topology.depth[:, :nodes, None]
  return jnp.where(
    np.arange(1, draft.tree.max_depth + 1) <= depth, tokens, NONE
  )


def penalized(logits: Array, state: Any, along: Array) -> Array:
  """Applies a row's penalties to the target's logits at each node.

  The order is that of vLLM's sampler: tokens that would end the row too soon
  are removed and biases added; then repetition (Keskar et al., 2019, section
  4.1, over prompt and completion; negative logits as in transformers), then
  OpenAI's penalties over the completion. Temperature and truncations follow
  (`specjax.warp`). With c(x) the count of a token in the completion:

    l(x) <- -inf       if x ends the row, and it has fewer than `min_tokens`
    l(x) <- l(x) + bias(x)
    l(x) <- l(x) / r  or  l(x) * r    for l > 0 or not, if x is in the text
    l(x) <- l(x) - c(x) frequency - [c(x) > 0] presence

  If no running row has penalties, nothing is computed.

  Args:
    logits: `f32[B, N, V]` at N nodes.
    state: a `specjax.state.DecodeState` before the round, with penalties.
    along: `i32[B, N, G]`, drafted tokens on each node's path, in any order,
      padded with `NONE`.

  Returns:
    `f32[B, N, V]`.
  """
  p = state.sampling.penalties
  assert p is not None
  used = (p.presence != 0) | (p.frequency != 0) | (p.repetition != 1)
  used |= (p.bias != 0).any(axis=1) | (p.min_tokens > 0)
  return lax.cond(
    jnp.any(used & ~state.done),
    lambda x: _penalized(x, p, state, along),
    lambda x: x,
    logits,
  )


def _penalized(logits: Array, p: Penalties, state: Any, along: Array) -> Array:
  vocab, text = jnp.arange(logits.shape[-1]), state.tokens
  row = jnp.arange(len(text))[:, None]
  zeros = jnp.zeros((len(text), len(vocab)), jnp.int32)
  # Tokens of a row at [b, x]; indices beyond the vocabulary are dropped.
  counts = lambda ids: zeros.at[row, ids].add(1, mode="drop")
  place = jnp.arange(text.shape[1])
  begun, ended = state.prompt_length[:, None], state.length[:, None]
  emitted = counts(jnp.where((place >= begun) & (place < ended), text, NONE))
  prompt = counts(jnp.where(place < jnp.minimum(begun, ended), text, NONE))
  count = emitted[:, None]  # [B, N, V] from here on, fused into its readers
  for depth in range(along.shape[-1]):
    count = count + (along[..., depth, None] == vocab)
  ending = (state.stop_tokens >= 0) & ~state.ignores_stop[:, None]
  ends = counts(p.stop_tokens) + counts(
    jnp.where(ending, state.stop_tokens, NONE)
  )
  num_emitted = ended - begun + jnp.sum(along != NONE, axis=-1)  # [B, N]
  too_soon = num_emitted < p.min_tokens[:, None]
  per_row = lambda x: x[:, None, None].astype(logits.dtype)
  bias = zeros.astype(logits.dtype)
  bias = bias.at[row, p.bias_tokens].add(
    p.bias.astype(logits.dtype), mode="drop"
  )
  logits = logits + bias[:, None]
  repetition = per_row(p.repetition)
  seen = (count > 0) | (prompt > 0)[:, None]
  logits = jnp.where(
    seen,
    jnp.where(logits > 0, logits / repetition, logits * repetition),
    logits,
  )
  logits -= per_row(p.frequency) * count.astype(logits.dtype)
  logits -= per_row(p.presence) * (count > 0).astype(logits.dtype)
  return jnp.where(too_soon[..., None] & (ends > 0)[:, None], -jnp.inf, logits)
