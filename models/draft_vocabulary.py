"""Draft vocabularies: heads that predict fewer tokens than the target.

Files list the tokens twice: `d2t` has each token's id minus its index, and
`t2d` marks them among all tokens.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from models.formats.weights import CheckpointError, Tensor

NAMES = frozenset({"d2t", "t2d"})


def spread(logits: Array, ids: Array, vocab_size: int) -> Array:
  """Scatters draft logits to the target's vocabulary, -inf for other tokens.

  Args:
    logits: `f32[..., W]`.
    ids: `i32[W]`, the token that each is for.
    vocab_size: V.

  Returns:
    `f32[..., V]`.
  """
  nothing = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf)
  return nothing.at[..., ids].set(logits)


def tensors_of(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
  """The tensors `d2t` and `t2d` of a draft vocabulary.

  Args:
    ids: `int[W]`, ascending.
    vocab_size: V.
  """
  ids = np.asarray(ids).astype(np.int64)
  return {
    "d2t": ids - np.arange(len(ids)),
    "t2d": np.isin(np.arange(vocab_size), ids),
  }


def read(
  tensors: Mapping[str, Tensor], size: int, vocab_size: int
) -> np.ndarray:
  """Reads the ids of a draft vocabulary from a file's tensors, `i32[W]`.

  Args:
    tensors: tensors by normalized name.
    size: W.
    vocab_size: V.

  Raises:
    CheckpointError: if there is no list of W ids.
    ValueError: if the ids are not ascending tokens, or `t2d` differs.
  """
  given = tensors.get("d2t")
  if given is None or given.shape != (size,):
    raise CheckpointError(f"missing: d2t, the tokens of {size} draft ids")
  ids = np.asarray(given.read(())).astype(np.int64) + np.arange(size)
  if (np.diff(ids) <= 0).any() or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      f"d2t must give {size} ascending ids below {vocab_size} (does it hold "
      "ids instead of offsets?)"
    )
  if "t2d" in tensors:
    marked = np.flatnonzero(np.asarray(tensors["t2d"].read(())))
    if not np.array_equal(marked, ids):
      raise ValueError("t2d does not mark the tokens that d2t names")
  return ids.astype(np.int32)
