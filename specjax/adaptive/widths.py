"""Target passes no wider than the drafted tokens need.

Shapes are static, so the target is fed all F tokens of a draft's form, masked
ones too. With several widths, each round takes the narrowest pass that holds
every unmasked node of the running rows: a round without drafted tokens costs a
plain step. Passes differ only in rounding. SmartSpec (Liu et al., 2024) and
AdaSpec (Huang et al., 2025) choose such widths on the host.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.cache import Cache
from specjax.cond_in_place import cond_in_place
from specjax.tree import Form, Topology, Tree
from specjax.types import ModelOutput


def check(widths: Sequence[int], tree: Tree) -> None:
  """Raises ValueError unless a tree supports these widths."""
  if not widths:
    return
  if tree.form is Form.FIXED or tree.lanes:
    problem = "lanes" if tree.lanes else "a fixed form"
    raise ValueError(
      f"widths are for drafts whose nodes may be masked, got a tree with "
      f"{problem}, which is always fed whole"
    )
  rising = all(a < b for a, b in itertools.pairwise(widths))
  if not (rising and 1 <= widths[0] and widths[-1] < tree.num_fed):
    raise ValueError(
      f"widths must increase within 1..{tree.num_fed - 1} (a draft feeds "
      f"{tree.num_fed} tokens at most), got {tuple(widths)}"
    )


def within(widths: Sequence[int], tree: Tree) -> tuple[int, ...]:
  """The given widths that a tree supports."""
  if tree.form is Form.FIXED or tree.lanes:
    return ()
  return tuple(sorted({w for w in widths if 1 <= w < tree.num_fed}))


def choose(
  widths: tuple[int, ...], topology: Topology, done: Array
) -> tuple[Array, Array]:
  """The narrowest pass that holds every drafted node.

  Drafts of rows that are `done`, `bool[B]`, do not count.

  Returns:
    The pass's index, `i32[]`, the whole one last; and how many tokens it feeds.
  """
  present = topology.present & ~done[:, None]
  all_widths = np.asarray([*widths, present.shape[1]], np.int32)
  needed = jnp.max(jnp.where(present, np.arange(1, all_widths[-1] + 1), 1))
  index = jnp.sum(needed > all_widths[:-1], dtype=jnp.int32)
  return index, jnp.asarray(all_widths)[index]


def apply(
  model: Callable[..., tuple[ModelOutput, Cache]],
  widths: tuple[int, ...],
  index: Array | None,
  params: Any,
  tokens: Array,
  cache: Cache,
  *,
  positions: Array,
  mask: Array | np.ndarray | None,
) -> tuple[ModelOutput, Cache]:
  """Runs one of several passes of a model, by index.

  Args:
    model: `LanguageModel.apply`; `params`, `tokens` and the others are its
      arguments.
    widths: widths of the narrower passes, increasing.
    index: from `choose`; None for the whole pass.

  Returns:
    The output at all F tokens, 0 where none was fed, and the cache.
  """
  width = tokens.shape[1]

  def over(fed: int, carry: tuple[Any, Cache]) -> tuple[ModelOutput, Cache]:
    output, cache = model(
      params,
      tokens[:, :fed],
      carry[1],
      positions=positions[:, :fed],
      mask=None if mask is None else mask[..., :fed, :fed],
    )
    if fed == width:
      return output, cache
    unfed = ((0, 0), (0, width - fed), (0, 0))
    features = output.features
    whole = dataclasses.replace(
      output,
      logits=jnp.pad(output.logits, unfed),
      features=None if features is None else jnp.pad(features, unfed),
    )
    return whole, cache

  if index is None:
    return over(width, (None, cache))
  shapes, _ = jax.eval_shape(functools.partial(over, width), (None, cache))
  unknown = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  carry = unknown, cache
  for which, fed in enumerate((*widths, width)):
    carry = cond_in_place(index == which, functools.partial(over, fed), carry)
  return carry
