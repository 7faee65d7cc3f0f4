"""Rows of a batched state: take, repeat, replace.

The row axis of each leaf is declared (`Drafter.row_axes`), never guessed from
shapes; None marks a leaf that all rows share.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from specjax import cache as cache_lib
from specjax.state import DecodeState

_COPIED = 256  # slots of a block


def over_leaves(function: Callable[..., Any], axes: Any, tree: Any, *more: Any):
  """Maps `(axis or None, leaf, ..) -> leaf` over pytrees and their row axes."""
  kind: Any = jax.tree.structure(tree)
  columns = [kind.flatten_up_to(x) for x in (axes, tree, *more)]
  return kind.unflatten(function(*x) for x in zip(*columns, strict=True))


def pick(axes: Any, tree: Any, rows: ArrayLike) -> Any:
  """Selects rows `i32[n]` of a pytree by index, with repetition."""

  def of(axis, leaf):
    if axis is None:
      return leaf
    return leaf[(slice(None),) * axis + (rows,)]

  return over_leaves(of, axes, tree)


def put(axes: Any, tree: Any, rows: tuple[Array, ...], fresh: Any) -> Any:
  """Replaces a few rows of a pytree.

  Args:
    axes: the row axis of each leaf.
    tree: the pytree, B rows.
    rows: R indices `i32[]`, distinct; those outside 0..B-1 are ignored.
    fresh: the pytree with R rows; shared leaves are taken from it.
  """

  def of(axis, leaf, new):
    if axis is None:
      return new
    count = leaf.shape[axis]
    for i, row in enumerate(rows):
      at = jnp.clip(row, 0, count - 1)
      old = lax.dynamic_slice_in_dim(leaf, at, 1, axis)
      one = lax.slice_in_dim(new, i, i + 1, axis=axis)
      one = jnp.where((row >= 0) & (row < count), one, old)
      leaf = lax.dynamic_update_slice_in_dim(leaf, one, at, axis)
    return leaf

  return over_leaves(of, axes, tree, fresh)


def select(
  axes: Any,
  state: DecodeState,
  rows: tuple[Array, ...],
  *,
  in_place: bool,
  places: tuple[Array, ...] | None = None,
) -> DecodeState:
  """Takes a few rows out as a state of their own; see `merge`.

  Args:
    axes: the row axis of each leaf.
    state: of B rows.
    rows: R indices `i32[]`, in 0..B-1.
    in_place: whether the target's keys and values are used in place
      (`cache.RowsView`); otherwise everything is copied.
    places: R indices `i32[]`, distinct, the rows of those keys and values; by
      default `rows`.
  """

  def of(axis, leaf):
    if axis is None:
      return leaf
    each = [lax.dynamic_slice_in_dim(leaf, row, 1, axis) for row in rows]
    return jnp.concatenate(each, axis)

  if not in_place:
    return over_leaves(of, axes, state)
  cache = state.target_cache
  views = jax.tree.map(
    lambda x: cache_lib.RowsView(x, rows if places is None else places),
    (*cache.keys, *cache.values),
  )
  small = over_leaves(of, _without_buffers(axes), _without_buffers(state))
  return _with_buffers(small, views)


def take(
  axes: Any,
  state: DecodeState,
  row: Array | int,
  source: Array | int,
  keep: Array | int,
  *,
  in_place: bool,
) -> DecodeState:
  """Takes a row out as a state of its own, with the text of row `source`.

  Args:
    axes: the row axis of each leaf.
    state: of B rows.
    row: `i32[]`, the row to take; outside 0..B-1 it is on another device, and
      any row is taken.
    source: `i32[]`, the row whose text it gets.
    keep: `i32[]`, tokens of that text to copy, if it is another row's.
    in_place: as for `select`.
  """
  row, source, keep = (jnp.asarray(x, jnp.int32) for x in (row, source, keep))
  source = jnp.clip(source, 0, len(state.length) - 1)
  if in_place:
    cache = state.target_cache
    buffers, form = jax.tree.flatten((*cache.keys, *cache.values))
    copied = _copy_text(tuple(buffers), source, row, keep)
    state = _with_buffers(state, jax.tree.unflatten(form, copied))
  return select(axes, state, (source,), in_place=in_place, places=(row,))


def merge(
  axes: Any, state: DecodeState, rows: tuple[Array, ...], some: DecodeState
) -> DecodeState:
  """Merges rows from `select` or `take` back into a state; see `put`."""
  cache = some.target_cache
  is_view = lambda x: isinstance(x, cache_lib.RowsView)
  buffers, form = jax.tree.flatten((*cache.keys, *cache.values), is_view)
  if not any(map(is_view, buffers)):
    return put(axes, state, rows, some)
  small = put(
    _without_buffers(axes), _without_buffers(state), rows,
    _without_buffers(some),
  )  # fmt: skip
  whole = jax.tree.unflatten(form, [b.buffer for b in buffers])
  return _with_buffers(small, whole)


def _copy_text(
  buffers: tuple[Array, ...], source: Array, row: Array, count: Array
) -> tuple[Array, ...]:
  """Copies one row's first slots to another row, in blocks and in place.

  Args:
    buffers: `[B, K, S, C]` or `[L, B, K, S, C]`.
    source, row: `i32[]`, from which to which; nothing is copied to a row
      outside 0..B-1 or to the same row.
    count: `i32[]`, slots to copy, rounded up to blocks.
  """
  slots = buffers[0].shape[-2]
  size = min(_COPIED, slots)

  def block(i, buffers):
    at = jnp.minimum(i * size, slots - size)

    def copied(buffer):
      read = cache_lib.RowsView(buffer, (source,)).read(at, size)
      return cache_lib.RowsView(buffer, (row,)).write(read, at).buffer

    return tuple(map(copied, buffers))

  blocks = jnp.where(source == row, 0, -(-count // size))
  return lax.fori_loop(jnp.zeros_like(blocks), blocks, block, buffers)


def _without_buffers(state: DecodeState) -> DecodeState:
  return _with_buffers(state, ())


def _with_buffers(state: DecodeState, buffers: tuple[Any, ...]) -> DecodeState:
  half = len(buffers) // 2
  cache = state.target_cache.replace(keys=buffers[:half], values=buffers[half:])
  return dataclasses.replace(state, target_cache=cache)
