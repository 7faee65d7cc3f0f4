"""Arrays that two models have, and a planned program is given once.

What drafts has some of the target's arrays: a head its tables, a copy in few
bits all that is not rounded. Given twice, the compiler would count them twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from specjax.types import Drafter, Params


def reading(drafter: Drafter, whole: Callable[[Params], Params]) -> Drafter:
  """The drafter on parameters that `whole` adds the target's arrays to."""
  return dataclasses.replace(
    drafter,
    init=lambda params, *more: drafter.init(whole(params), *more),
    prefill=lambda params, *more: drafter.prefill(whole(params), *more),
    propose=lambda params, *more: drafter.propose(whole(params), *more),
    commit=lambda params, *more: drafter.commit(whole(params), *more),
  )


def _leaves(params: Any) -> dict[str, Any]:
  """Arrays by their places."""
  return {
    jax.tree_util.keystr(at): x
    for at, x in jax.tree_util.tree_leaves_with_path(params)
  }


def rounded(copy: Any, unrounded: Any) -> dict[str, Any]:
  """The arrays of a copy in few bits that are not the model's, by their places.

  Args:
    copy: its parameters, or their shapes.
    unrounded: shapes of the model's in its dtype.
  """
  originals = _leaves(unrounded)
  return {
    at: x
    for at, x in _leaves(copy).items()
    if at not in originals or originals[at].dtype != x.dtype
  }


def with_shared(copy: Any) -> Callable[[Params], Params]:
  """Adds the target's arrays to those of `rounded`.

  Args:
    copy: shapes of the whole copy.
  """

  def whole(params: Params) -> Params:
    arrays = _leaves(params.target) | params.draft
    draft = jax.tree_util.tree_map_with_path(
      lambda at, _: arrays[jax.tree_util.keystr(at)], copy
    )
    return dataclasses.replace(params, draft=draft)

  return whole
