"""Work on large arrays that is done or not, without a copy of them."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

_T = TypeVar("_T")


def only_if(wanted: Array, function: Callable[[_T], _T], carry: _T) -> _T:
  """`function(carry)` if it is wanted, else the carry as it is.

  It stands in a loop of one turn or none, and not in a `lax.cond`: XLA:CPU
  copies what a conditional is given in both of its branches, and a loop's carry
  stays where it is.

  Args:
    wanted: `bool[]`.
    function: from the carry to another one of the same types.
    carry: any pytree, caches among it.
  """
  turns = wanted.astype(jnp.int32)
  return lax.fori_loop(0, turns, lambda _, now: function(now), carry)
