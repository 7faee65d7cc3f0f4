"""Training pass of DFlash, over blocks from many positions of a text at once.

Heads that draft blocks are trained on blocks (Chen et al., 2026) from random
positions, the anchors. The block at position t is the one that would be drafted
there: its newest token is token t + 1, masks follow, and it attends to the
target's features of tokens up to t and to its own tokens, in both directions,
or only to earlier ones for JetSpec. Keys and values of features are computed
once for all blocks of a text. DSpark's Markov head and DFlash 2's selector read
the text's tokens.

This runs the drafting network itself; only attention is another module, with
the same parameters.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.networks.attention import scores_of, values_of
from models.networks.dflash import Parallel
from models.networks.dflash2 import DFlash2
from models.networks.dspark import DSpark
from models.networks.layers import Attention


def predict(
  module: Parallel,
  tokens: Array,
  features: Array,
  places: Array,
  *,
  positions: Array,
  segments: Array,
) -> tuple[Array, Any]:
  """The logits of the blocks at some positions.

  Args:
    module: the head.
    tokens: `i32[B, T + 1]`, the text.
    features: `f[B, T, F]`, the target's, of tokens `0 .. T - 1`.
    places: `i32[B, A]`, in `0 .. T - 1`.
    positions: `i32[B, T]`, of these tokens in their documents.
    segments: `i32[B, T]`, the document of each token in its row; blocks only
      attend to their own document.

  Returns:
    `f32[B, A, K, W]`: entry k of the block at t is for token `t + 2 + k`, in
    the draft vocabulary; it is meaningless if text or document end before that
    token. And DSpark's log-odds of acceptance, `f32[B, A, K]`; or the logits
    and candidates of DFlash 2's selector, two of `[B, A, K, C]`; or None.

  Raises:
    ValueError: for a head whose layers have windows.
  """
  if module.config.layers.has_windows:
    raise ValueError("training of blocks does not support sliding windows")
  module = nnx.merge(*nnx.split(module))  # leaves the caller's unchanged
  c, size = module.config.layers, module.config.block_size
  at = lambda x: jnp.take_along_axis(x, places, axis=1)
  before = np.arange(features.shape[1]) <= places[..., None]
  visible = before & (segments[:, None, :] == at(segments)[..., None])
  newest = jnp.take_along_axis(tokens, places + 1, axis=1).reshape(-1, 1)
  first = at(positions).reshape(-1, 1) + 1
  rope = c.attention.rope
  assert rope is not None
  rotary = rope.table(first + np.arange(size))
  read, read_rotary = module.fuse(features), rope.table(positions)
  x = module.embed(module.block(newest))  # [B * A, K + 1, H]
  for layer in module.layers:
    known = layer.attention.keys_and_values(read, read_rotary)
    layer.attention = _OfBlocks(layer.attention, module.config.causal)
    x, _ = layer(x, rotary, visible, known, None)
  hidden, more = module.hidden(x), None
  logits = module.logits(hidden)
  if isinstance(module, DSpark | DFlash2):
    ahead = places[..., None] + 1 + np.arange(logits.shape[1])
    ahead = jnp.minimum(ahead, tokens.shape[1] - 1)
    before = jnp.take_along_axis(tokens[:, None], ahead, axis=2)
    logits, more = module.along(
      logits, hidden, before.reshape(logits.shape[:2])
    )
  in_places = lambda x: x.reshape(*places.shape, *x.shape[1:])
  return in_places(logits), jax.tree.map(in_places, more)


class _OfBlocks(nnx.Module):
  """Attention of blocks, to the visible part of a text and to themselves."""

  def __init__(self, attention: Attention, causal: bool):
    self.attention = attention
    self.causal = causal

  def __call__(self, x, rotary, mask, known, start, **_):
    """Like `Attention.__call__`, for blocks `[B * A, K + 1, D]`.

    `mask`, `bool[B, A, T]`, says what each block sees of its text, and `known`
    are keys and values of the text, `[B, K, T, C]` each.
    """
    del start
    attention = self.attention
    mixed = _attend(
      attention.queries(x, rotary),
      known,
      attention.keys_and_values(x, rotary),
      mask,
      causal=self.causal,
    )
    return attention.out(mixed), known


def _attend(
  q: Array, known: tuple, fed: tuple, mask: Array, *, causal: bool
) -> Array:
  """Attention of blocks of S tokens, `[B * A, S, H, C] -> [B * A, S, H * C]`.

  `fed` are the blocks' keys and values, two of `[B * A, K, S, C]`; `known` and
  `mask` as above.
  """
  rows, count, length = mask.shape
  _, size, heads, channels = q.shape
  (keys, values), (own_keys, own_values) = known, fed
  kv_heads = keys.shape[1]
  each = (kv_heads, heads // kv_heads)  # K, G
  q = q / math.sqrt(channels)
  read = scores_of(q.reshape(rows, count * size, heads, channels), keys)
  read = read.reshape(rows, *each, count, size, length)
  read = jnp.where(
    mask[:, None, None, :, None], read, jnp.finfo(read.dtype).min
  )  # a block sees itself, so no row is empty
  mine = scores_of(q, own_keys).reshape(rows, count, *each, size, size)
  if causal:
    mine = jnp.where(np.tri(size, dtype=bool), mine, jnp.finfo(mine.dtype).min)
  mine = jnp.moveaxis(mine, 1, 3)
  weights = jax.nn.softmax(jnp.concatenate([read, mine], axis=-1), axis=-1)
  weights = weights.astype(values.dtype)
  of_text, of_own = weights[..., :length], weights[..., length:]
  out = values_of(of_text.reshape(rows, *each, count * size, length), values)
  of_own = jnp.moveaxis(of_own, 3, 1).reshape(rows * count, *each, size, size)
  out = out.reshape(q.shape) + values_of(of_own, own_values)
  return out.reshape(rows * count, size, heads * channels)
