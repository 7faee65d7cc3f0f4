"""Tries: several continuations of a text, merged into one token tree.

K continuations of D tokens share the nodes of common prefixes. Shapes are
fixed; masks say how much of each continuation is present.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.structs import struct


@struct
class Trie:
  """M nodes of a tree below the root, parents first.

  Attributes:
    tokens: `i32[B, M]`.
    parents: `i32[B, M]`: 0 is the root, n + 1 is entry n; -1 is masked.
    values: `f32[B, M]`, the value each was chosen by; 0 if masked.
  """

  tokens: Array
  parents: Array
  values: Array


def shared_prefixes(tokens: Array, present: Array) -> Array:
  """Pairs of continuations that share a prefix.

  Args:
    tokens: `i32[B, K, D]`.
    present: `bool[B, K, D]`, a prefix of each.

  Returns:
    `bool[B, K, K, D]`: entry (k, j, d) is true if k and j both have d + 1
    tokens, and these are equal.
  """
  same = tokens[:, :, None] == tokens[:, None]
  same &= present[:, :, None] & present[:, None]
  return jnp.cumsum(~same, axis=-1) == 0


def merge(tokens: Array, present: Array) -> tuple[Array, Array]:
  """Merges all continuations into a tree.

  Args:
    tokens: `i32[B, K, D]`.
    present: `bool[B, K, D]`, a prefix of each.

  Returns:
    Tokens and parents `i32[B, K D]` as in `Trie`, one continuation after
    another.
  """
  rows, count, depth = tokens.shape
  first = _first(shared_prefixes(tokens, present))
  is_first = present & (first == np.arange(count)[:, None])
  above = first[..., :-1] * depth + np.arange(depth - 1) + 1
  parents = jnp.concatenate([jnp.zeros_like(first[..., :1]), above], axis=-1)
  parents = jnp.where(is_first, parents, -1).astype(jnp.int32)
  flat = lambda x: x.reshape(rows, count * depth)
  return flat(tokens), flat(parents)


def best_trie(tokens: Array, same: Array, values: Array, count: int) -> Trie:
  """The tree of the prefixes with the largest values.

  Args:
    tokens: `i32[B, K, D]`.
    same: from `shared_prefixes`.
    values: `f32[B, K, D]`, the value of each prefix of d + 1 tokens, never
      above that of a shorter one. Zeros are left out; equal prefixes get the
      largest of their values.
    count: M, the most nodes.

  Returns:
    The `Trie`, largest values first; ties go to shallower nodes, then to those
    of earlier continuations.
  """
  rows, paths, depth = tokens.shape
  most = jnp.max(jnp.where(same, values[:, None], 0), axis=2)
  first = _first(same)
  is_first = first == np.arange(paths)[:, None]
  most = jnp.where(is_first, most, 0)
  # By depth, then by path: of equal values the lowest index comes first, so a
  # parent, whose value is never below its child's, precedes it.
  flat = lambda x: jnp.swapaxes(x, 1, 2).reshape(rows, depth * paths)
  largest, kept = lax.top_k(flat(most), min(count, depth * paths))
  place = kept // paths, kept % paths
  above = jnp.take_along_axis(
    flat(jnp.pad(first, ((0, 0), (0, 0), (1, 0)))[..., :-1]), kept, axis=1
  )
  above = (place[0] - 1) * paths + above  # where the parent is in `flat`
  parents = jnp.argmax(kept[:, None] == above[..., None], axis=-1) + 1
  parents = jnp.where(place[0] == 0, 0, parents)
  missing = ((0, 0), (0, count - kept.shape[1]))
  return Trie(
    tokens=jnp.pad(jnp.take_along_axis(flat(tokens), kept, axis=1), missing),
    parents=jnp.pad(
      jnp.where(largest > 0, parents, -1).astype(jnp.int32),
      missing,
      constant_values=-1,
    ),
    values=jnp.pad(largest, missing),
  )


def _first(same: Array) -> Array:
  """`i32[B, K, D]`: the first continuation with each prefix."""
  is_first = np.eye(same.shape[1], dtype=bool)[..., None]
  return jnp.argmax(same | is_first, axis=2).astype(jnp.int32)
