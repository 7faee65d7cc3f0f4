"""Draft vocabularies: the tokens of a head, where fewer than the target's.

Files name them twice: `d2t` holds for each of them how far its id lies above
its place, and `t2d` marks them among all.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from models.formats.weights import CheckpointError, Tensor

NAMES = frozenset({"d2t", "t2d"})


def spread(logits: Array, ids: Array, vocab_size: int) -> Array:
  """Logits of the target's tokens, -inf for those that cannot be said.

  Args:
    logits: `f32[..., W]`.
    ids: `i32[W]`, which token each of them is.
    vocab_size: V.

  Returns:
    `f32[..., V]`.
  """
  nothing = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf)
  return nothing.at[..., ids].set(logits)


def tensors_of(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
  """The tensors `d2t` and `t2d` of a draft vocabulary.

  Args:
    ids: `int[W]`, rising.
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
    tensors: by the names of the normal form.
    size: W.
    vocab_size: V.

  Raises:
    CheckpointError: if there is no list of W of them.
    ValueError: if it does not name tokens of rising ids, or `t2d` others.
  """
  given = tensors.get("d2t")
  if given is None or given.shape != (size,):
    raise CheckpointError(f"missing: d2t, which token each of {size} is")
  ids = np.asarray(given.read(())).astype(np.int64) + np.arange(size)
  if (np.diff(ids) <= 0).any() or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      f"d2t must give {size} rising ids below {vocab_size} (are they ids "
      "already?)"
    )
  if "t2d" in tensors:
    marked = np.flatnonzero(np.asarray(tensors["t2d"].read(())))
    if not np.array_equal(marked, ids):
      raise ValueError("t2d does not mark the tokens that d2t names")
  return ids.astype(np.int32)
