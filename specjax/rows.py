"""Rows of a state: taken out, repeated, replaced.

Which axis of each leaf rows lie along is declared (`Drafter.row_axes`), never
guessed from shapes; None is a leaf that all rows share.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


def over_leaves(function: Callable[..., Any], axes: Any, tree: Any, *more: Any):
  """Maps a function over the leaves of pytrees and their row axes.

  Args:
    function: `(axis or None, leaf, ..) -> leaf`.
    axes: the row axis of each leaf.
    tree: a pytree of the same structure.
    *more: others of it.

  Returns:
    The pytree of what the function gave.
  """
  kind: Any = jax.tree.structure(tree)
  columns = [kind.flatten_up_to(x) for x in (axes, tree, *more)]
  return kind.unflatten(function(*x) for x in zip(*columns, strict=True))


def pick(axes: Any, tree: Any, rows: ArrayLike) -> Any:
  """Some rows, each as often as it is named.

  Args:
    axes: the row axis of each leaf.
    tree: the pytree.
    rows: `i32[n]`.

  Returns:
    The pytree with n rows.
  """

  def of(axis, leaf):
    if axis is None:
      return leaf
    if jnp.shape(rows) == (1,):  # XLA:CPU's gather goes number by number
      return lax.dynamic_slice_in_dim(leaf, jnp.asarray(rows)[0], 1, axis)
    return leaf[(slice(None),) * axis + (rows,)]

  return over_leaves(of, axes, tree)


def put(axes: Any, tree: Any, row: Array | int, fresh: Any) -> Any:
  """A pytree with one row replaced.

  Args:
    axes: the row axis of each leaf.
    tree: the pytree, B rows.
    row: `i32[]`; outside of 0..B-1 nothing is replaced but what is shared.
    fresh: the pytree with one row; what is shared is taken from it.

  Returns:
    The pytree.
  """

  def of(axis, leaf, new):
    if axis is None:
      return new
    rows = leaf.shape[axis]
    at = jnp.clip(row, 0, rows - 1)
    old = lax.dynamic_slice_in_dim(leaf, at, 1, axis)
    new = jnp.where((row >= 0) & (row < rows), new, old)
    return lax.dynamic_update_slice_in_dim(leaf, new, at, axis)

  return over_leaves(of, axes, tree, fresh)
