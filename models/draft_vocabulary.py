"""Draft vocabularies: the tokens of a head, where fewer than the target's.

Files name them twice: `d2t` holds for each of them how far its id lies above
its place, and `t2d` marks them among all. vLLM's Medusa has `token_map` for
both, the ids themselves.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from models.formats.weights import CheckpointError, Tensor


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
    CheckpointError: if `d2t` is missing or is no list of W offsets.
    ValueError: if it names no tokens of rising ids, or `t2d` others.
  """
  if "token_map" in tensors:
    return _mapped(tensors["token_map"], size, vocab_size)
  if "d2t" not in tensors:
    raise CheckpointError(
      "missing: d2t or token_map, which token each drafted one is"
    )
  given = tensors["d2t"]
  if given.shape != (size,) or given.kind not in ("I64", "I32"):
    raise CheckpointError(
      f"wrong shape or type: d2t, expected {size} integers, got "
      f"{given.kind} of {given.shape}"
    )
  offsets = np.asarray(given.read(())).astype(np.int64)
  ids = np.arange(size) + offsets
  if (np.diff(ids) <= 0).any() or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      "d2t must hold offsets that make ids of rising order below "
      f"{vocab_size} (are they ids already?)"
    )
  if "t2d" in tensors:
    known = np.asarray(tensors["t2d"].read(())).astype(bool)
    expected = np.zeros(vocab_size, bool)
    expected[ids] = True
    if known.shape != expected.shape or (known != expected).any():
      raise ValueError("t2d does not mark the tokens that d2t names")
  return ids.astype(np.int32)


def _mapped(tensor: Tensor, size: int, vocab_size: int) -> np.ndarray:
  """As `read`, of the ids themselves, in any order."""
  if tensor.shape != (size,) or tensor.kind not in ("I64", "I32"):
    raise CheckpointError(
      f"wrong shape or type: token_map, expected {size} integers, got "
      f"{tensor.kind} of {tensor.shape}"
    )
  ids = np.asarray(tensor.read(())).astype(np.int64)
  if len({*ids.tolist()}) < size or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      f"token_map must hold {size} ids below {vocab_size}, each once"
    )
  return ids.astype(np.int32)
