"""EAGLE's training-time test: unrolls the steps of drafts over a whole text.

A drafting head reads its own states, so it is trained on them (EAGLE-3, Li et
al., NeurIPS 2025, section 3.2). Step j of the draft from position t reads token
t + 1 + j and the state of step j - 1 at the same position. It attends to what
the head's cache would hold: entries of positions up to t, from the target's
features, and one entry of each earlier step of its own draft, at the same
position. All positions take step j in one pass, and no entry is computed twice.

P-EAGLE (arXiv 2602.01469) reads masks instead of its own states and of the
tokens that it drafts. Step j drafts from a random subset of the positions of
step j - 1 only (its conditional drop-token sampling), so no draft has a gap.

This runs the drafting network itself; only attention is another module, with
the same parameters.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.networks.attention import scores_of, values_of
from models.networks.eagle import Eagle
from models.networks.layers import Attention
from models.networks.mtp import Mtp


def unroll(
  module: Eagle | Mtp,
  tokens: Array,
  features: Array,
  *,
  positions: Array,
  segments: Array,
  steps: int,
) -> Iterator[tuple[Array, Array]]:
  """Yields the head's logits at every step of the drafts from every position.

  Args:
    module: the head.
    tokens: `i32[B, T + 1]`, the text; token 0 is not read.
    features: `f[B, T, F]`, the target's, of tokens `0 .. T - 1`.
    positions: `i32[B, T]`, of these tokens in their documents.
    segments: `i32[B, T]`, the document of each token in its row; tokens only
      attend to their own document.
    steps: G, steps of each draft. In a layer with a window all steps see the
      same entries of the first step, as in training by `speculators`.

  Yields:
    For j in `0 .. G - 1`: `f32[B, T, V']`, the logits for token `t + 2 + j` in
    the head's vocabulary, and `f[B, T, H]`, the states fed to the next step.
    They are meaningless where text or document end before that token.
  """
  module, masks, table = _prepared(module, positions, segments)
  length = features.shape[1]
  hidden, written = module.fuse(features), _no_entries(module)
  for step in range(steps):
    logits, hidden, written = module(
      ahead(tokens, 1 + step, length),
      hidden,
      table(positions + step),
      masks,
      written,
      None,
    )
    yield logits, hidden


def num_kept(length: int, step: int) -> int:
  """Positions of a row of `length` from which P-EAGLE trains a step from 1.

  The share is 0.7 to the power of the step, but at least 0.2, as in
  `speculators`. Positions count even if their drafts leave their document.
  """
  return int((length - step) * max(0.7**step, 0.2))


def unmask(
  module: Eagle,
  tokens: Array,
  features: Array,
  places: Array,
  *,
  positions: Array,
  segments: Array,
  steps: int,
) -> Iterator[tuple[Array, Array | None]]:
  """Like `unroll` for P-EAGLE's head.

  Args:
    module, tokens, features, positions, segments, steps: as for `unroll`.
    places: `i32[B, A]`, positions to draft from, in random order: step j takes
      the first `num_kept(T, j)`, step 0 all T positions.

  Yields:
    Logits at each step, as `unroll`, and the step's positions, None for all.
  """
  mask_token, (rows, length) = module.config.mask_token, positions.shape
  module, masks, table = _prepared(module, positions, segments)
  logits, _, written = module(
    ahead(tokens, 1, length),
    module.fuse(features),
    table(positions),
    masks,
    _no_entries(module),
    None,
  )
  yield logits, None
  unknown = module.fuse(module.mask_hidden[...])
  for step in range(1, steps):
    some = places[:, : num_kept(length, step)]
    size = some.shape[1]
    logits, _, written = module(
      jnp.full((rows, size), mask_token, tokens.dtype),
      jnp.broadcast_to(unknown, (rows, size, unknown.shape[-1])),
      table(jnp.take_along_axis(positions, some, axis=1) + step),
      {
        w: jnp.take_along_axis(mask, some[..., None], axis=1)
        for w, mask in masks.items()
      },
      written,
      None,
    )
    yield logits, some


def _prepared(module, positions: Array, segments: Array):
  """A module with training's attention, its masks, and its rotary table.

  The masks are what each position sees of the first step, by window.
  """
  module = nnx.merge(*nnx.split(module))  # leaves the caller's unchanged
  first = module.layer if isinstance(module, Mtp) else module
  first.attention = _Unrolled(first.attention)
  for layer in getattr(module, "later", ()):
    layer.attention = _Unrolled(layer.attention)
  # Keep logits in the draft vocabulary.
  if isinstance(module, Eagle):
    module.config = dataclasses.replace(module.config, draft_vocab_size=None)
  length = positions.shape[1]
  causal = jnp.asarray(np.tril(np.ones((length, length), bool)))
  mask = causal & (segments[:, :, None] == segments[:, None, :])
  layer = module.config.layers
  masks = {
    w: mask & (positions[:, :, None] - positions[:, None] < (w or length))
    for w in {*layer.windows}
  }
  rope = layer.attention.rope
  assert rope is not None
  return module, masks, rope.table


def _no_entries(module) -> tuple:
  """What each layer has written before the first step."""
  return ((),) * (1 + len(getattr(module, "later", ())))


def ahead(x: Array, count: int, length: int) -> Array:
  """`x[:, t + count]` for t in `0 .. length - 1`, zero beyond its end."""
  shifted = x[:, count : count + length]
  missing = length - shifted.shape[1]
  return jnp.pad(shifted, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))


class _Unrolled(nnx.Module):
  """A step's attention, to entries of the first step and of its own draft."""

  def __init__(self, attention: Attention):
    self.attention = attention

  def __call__(self, x, rotary, mask, written, start, **_):
    """Like `Attention.__call__`, except for `written`.

    This is a tuple of all steps' keys and values, `[B, T, K, C]` each, to which
    it adds this step's. A step may take only the first of the drafts of the
    step before.
    """
    del start
    attention = self.attention
    q = attention.queries(x, rotary)
    k, v = (jnp.swapaxes(y, 1, 2) for y in attention.keys_and_values(x, rotary))
    written = (*written, (k, v))
    return attention.out(_attend(q, written, mask)), written


def _attend(q: Array, written: tuple, mask: Array) -> Array:
  """Attention to all keys of the first step, and to one of each later step.

  `[B, S, H, C] -> [B, S, H * C]`; `written` are keys and values of each step so
  far, `[B, T, K, C]` of the first and at least S of a later one; `mask`,
  `bool[B, S, T]`, is for those of the first.
  """
  batch, size, heads, channels = q.shape
  (keys, values), *later = written
  length, count = keys.shape[1:3]
  q = q / math.sqrt(channels)
  grouped = q.reshape(batch, size, count, heads // count, channels)
  scores = scores_of(q, jnp.moveaxis(keys, 1, 2))
  scores = jnp.where(
    mask[:, None, None], scores, jnp.finfo(scores.dtype).min
  )  # a place sees itself, so no row is empty
  later = [(k[:, :size], v[:, :size]) for k, v in later]
  written_scores = [
    jnp.einsum(
      "btkgc,btkc->bkgt", grouped, k, preferred_element_type=jnp.float32
    )[..., None]
    for k, _ in later
  ]
  weights = jax.nn.softmax(
    jnp.concatenate([scores, *written_scores], axis=-1), axis=-1
  )
  weights = weights.astype(values.dtype)
  out = values_of(weights[..., :length], jnp.moveaxis(values, 1, 2))
  out = out.reshape(grouped.shape)
  for i, (_, v) in enumerate(later):
    out += jnp.einsum("bkgt,btkc->btkgc", weights[..., length + i], v)
  return out.reshape(batch, size, heads * channels)
