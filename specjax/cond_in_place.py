"""Conditional updates of large arrays, without a copy of them."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

_T = TypeVar("_T")


def only_if(wanted: Array, function: Callable[[_T], _T], carry: _T) -> _T:
  """`function(carry)` if it is wanted, else the carry unchanged.

  A `lax.while_loop` of one iteration or none, and not a `lax.cond`: XLA:CPU
  copies the operands of a conditional in both of its branches, and updates a
  loop's carry in place.

  Args:
    wanted: `bool[]`.
    function: from the carry to another one of the same types.
    carry: any pytree, caches among it.
  """
  turns = wanted.astype(jnp.int32)
  return lax.fori_loop(0, turns, lambda _, now: function(now), carry)
