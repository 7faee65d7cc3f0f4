"""Steps of a draft, unrolled over a whole text: EAGLE's training-time test.

A head that drafts feeds on its own states, so it is trained on them (EAGLE-3,
Li et al., NeurIPS 2025, section 3.2). Step j of the draft that begins at place
t reads token t + 1 + j beside the state that step j - 1 left at the same place.
It may attend to what the head's cache would hold: the pairs of places up to t,
made of the target's features, and what the earlier steps of its own draft have
written, which is one entry each, at the same place. All places take step j in
one pass, and no entry is computed twice.

The network that runs is the one that drafts: only its attention is another
module, with the same parameters.
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
  """Logits of the head at every step of the drafts from every place.

  Args:
    module: the head.
    tokens: `i32[B, T + 1]`, the text; token 0 is read by no step.
    features: `f[B, T, F]`, the target's, of tokens `0 .. T - 1`.
    positions: `i32[B, T]`, where those tokens stand in their documents.
    segments: `i32[B, T]`, of which document of its row each is: nothing of
      another one is attended to.
    steps: G, steps of each draft. A layer with a window sees the same of the
      first step's places at all of them, as the `speculators` library trains.

  Yields:
    For j in `0 .. G - 1`: `f32[B, T, V']`, the logits for token `t + 2 + j` in
    the head's own vocabulary, and `f[B, T, H]`, the states fed to the next
    step. Where the text or the document ends before that token they mean
    nothing.
  """
  module = nnx.merge(*nnx.split(module))  # the caller's stays as it is
  first = module.layer if isinstance(module, Mtp) else module
  first.attention = _Unrolled(first.attention)
  later = getattr(module, "later", ())
  for layer in later:
    layer.attention = _Unrolled(layer.attention)
  # The draft vocabulary is not spread out over the target's.
  if isinstance(module, Eagle):
    module.config = dataclasses.replace(module.config, draft_vocab_size=None)
  length = features.shape[1]
  causal = jnp.asarray(np.tril(np.ones((length, length), bool)))
  mask = causal & (segments[:, :, None] == segments[:, None, :])
  layer = module.config.layers
  masks = {
    w: mask & (positions[:, :, None] - positions[:, None] < (w or length))
    for w in {*layer.windows}
  }
  rope = layer.attention.rope
  assert rope is not None
  hidden, written = module.fuse(features), ((),) * (1 + len(later))
  for step in range(steps):
    logits, hidden, written = module(
      ahead(tokens, 1 + step, length),
      hidden,
      rope.table(positions + step),
      masks,
      written,
      None,
    )
    yield logits, hidden


def ahead(x: Array, count: int, length: int) -> Array:
  """`x[:, t + count]` for t in `0 .. length - 1`, zero beyond its end."""
  shifted = x[:, count : count + length]
  missing = length - shifted.shape[1]
  return jnp.pad(shifted, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))


class _Unrolled(nnx.Module):
  """Attention of a step, to the first one's places and to its own draft's."""

  def __init__(self, attention: Attention):
    self.attention = attention

  def __call__(self, x, rotary, mask, written, start, **_):
    """As `Attention.__call__`, but for what is written.

    That is a tuple of all steps' keys and values, `[B, T, K, C]` each, which
    this step's are added to.
    """
    del start
    attention = self.attention
    q = attention.queries(x, rotary)
    k, v = (jnp.swapaxes(y, 1, 2) for y in attention.keys_and_values(x, rotary))
    written = (*written, (k, v))
    return attention.out(_attend(q, written, mask)), written


def _attend(q: Array, written: tuple, mask: Array) -> Array:
  """Attention to all of the first step's keys, and to one of each later one.

  `[B, T, H, C] -> [B, T, H * C]`; `written` are keys and values of each step so
  far, `[B, T, K, C]`, and `mask`, `bool[B, T, T]`, what is seen of the first.
  """
  batch, length, heads, channels = q.shape
  (keys, values), *later = written
  count = keys.shape[2]
  q = q / math.sqrt(channels)
  grouped = q.reshape(batch, length, count, heads // count, channels)
  scores = scores_of(q, jnp.moveaxis(keys, 1, 2))
  scores = jnp.where(
    mask[:, None, None], scores, jnp.finfo(scores.dtype).min
  )  # a place sees itself, so no row is empty
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
  return out.reshape(batch, length, heads * channels)
