"""Conditional updates of large arrays without a copy."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

_T = TypeVar("_T")


def cond_in_place(wanted: Array, function: Callable[[_T], _T], carry: _T) -> _T:
  """`function(carry)` if `wanted`, else the carry unchanged.

  A `lax.while_loop` of at most one iteration, not a `lax.cond`: XLA:CPU copies
  the operands of a conditional in both branches, but updates a loop's carry in
  place.

  XLA hoists loop invariants (here, whatever does not read the carry) and would
  compute them even if not wanted. So everything that the function reads,
  closures included, passes through one optimization barrier together with the
  loop's counter.

  Args:
    wanted: `bool[]`.
    function: maps the carry to one of the same structure and types. It may
      close over traced arrays.
    carry: any pytree, possibly with caches.

  Raises:
    TypeError: if the function returns another structure or other types.
  """
  leaves, kind = jax.tree.flatten(carry)
  closed, after = jax.make_jaxpr(function, return_shape=True)(carry)
  if jax.tree.structure(after) != kind:  # type: ignore[operator]
    raise TypeError(
      f"the carry is {kind}, and the function returns "
      f"{jax.tree.structure(after)}"
    )

  def body(state):
    (left, leaves), consts = lax.optimization_barrier((state, closed.consts))
    return left - 1, jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

  _, leaves = lax.while_loop(
    lambda state: state[0] > 0, body, (wanted.astype(jnp.int32), leaves)
  )
  return jax.tree.unflatten(kind, leaves)
