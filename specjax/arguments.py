"""Checks of the decoder's arguments, each refused in one line."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.state import DecodeState
from specjax.types import Params, Sampling


def check_params(params: Params) -> None:
  """Raises ValueError unless it is a pair's parameters, which come first."""
  if not isinstance(params, Params):
    raise ValueError(
      f"the first argument must be specjax.Params, got {type(params).__name__}"
    )


def check_rows(
  prompts: Array,
  lengths: Array,
  rng_key: Array,
  max_new_tokens: Array,
  sampling: Sampling | None,
) -> None:
  """Raises ValueError unless all are of the same rows; see `Decoder.init`."""
  if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
    raise ValueError(
      "prompts must be token ids i32[B, P], a row for each prompt, got "
      f"{_show(prompts)}"
    )
  rows = prompts.shape[0]
  if lengths.shape != (rows,):
    raise ValueError(
      f"lengths must be one number for each of {rows} prompts, got "
      f"{_show(lengths)}"
    )
  if max_new_tokens.shape not in ((), (rows,)):
    raise ValueError(
      f"max_new_tokens must be one number, or one for each of {rows} prompts, "
      f"got {_show(max_new_tokens)}"
    )
  dtype = getattr(rng_key, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      "rng_key must be a typed key (jax.random.key), got "
      f"{type(rng_key).__name__ if dtype is None else _show(rng_key)}"
    )
  if rng_key.shape not in ((), (rows,)):
    raise ValueError(
      f"rng_key must be one key, or one for each of {rows} prompts, got "
      f"{_show(rng_key)}"
    )
  if sampling is not None and sampling.temperature.shape != (rows,):
    raise ValueError(
      f"sampling must have {rows} rows, as the prompts have, got "
      f"{sampling.temperature.shape[0]}"
    )


def check_sizes(
  prompts: Array,
  lengths: Array,
  max_new_tokens: Array,
  *,
  buffer_length: int,
  vocab_size: int,
  max_positions: dict[str, int | None],
) -> None:
  """Raises ValueError for numbers that do not fit; see `Decoder.init`.

  Args:
    prompts, lengths, max_new_tokens: looked at if they are concrete.
    buffer_length: static.
    vocab_size: V.
    max_positions: of each model, by what it is.
  """
  width = prompts.shape[1]
  if isinstance(buffer_length, jax.core.Tracer):
    raise TypeError(
      "buffer_length must be static, as it is the size of arrays: "
      "jax.jit(decoder.init, static_argnames='buffer_length')"
    )
  if width > buffer_length:
    raise ValueError(
      f"prompts of {width} tokens do not fit into a buffer of {buffer_length}: "
      "buffer_length must hold prompt and new tokens"
    )
  for model, limit in max_positions.items():
    if limit is not None and buffer_length > limit:
      raise ValueError(
        f"the {model} model has {limit} positions, too few for prompt and new "
        f"tokens (buffer_length {buffer_length})"
      )
  if isinstance(lengths, jax.core.Tracer):
    return
  known = np.asarray(lengths)
  if known.min(initial=1) < 1 or known.max(initial=1) > width:
    raise ValueError(
      f"prompt lengths must be in 1..{width}, got {known.tolist()}"
    )
  if not isinstance(max_new_tokens, jax.core.Tracer):
    budgets = np.asarray(max_new_tokens, np.int64)
    need = (budgets + known).max(initial=0)
    if budgets.min(initial=0) < 0:
      raise ValueError(
        f"max_new_tokens must be 0 or more, got {budgets.tolist()}"
      )
    if need > buffer_length:
      raise ValueError(
        "prompt and new tokens must fit into buffer_length "
        f"({buffer_length}), so it must be {need} at least: got max_new_tokens "
        f"{budgets.tolist()} and prompt lengths {known.tolist()}"
      )
  if not isinstance(prompts, jax.core.Tracer):
    inside = np.arange(width) < known[:, None]
    ids = np.asarray(prompts)[inside]
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
      raise ValueError(
        f"prompt tokens must be in 0..{vocab_size - 1}, got "
        f"{ids.min()}..{ids.max()}"
      )


def check_extension(
  state: DecodeState,
  row: Array,
  tokens: Array,
  count: Array,
  max_new_tokens: Array,
  *,
  buffer_length: int,
  vocab_size: int,
) -> None:
  """Raises ValueError for what cannot be appended; see `Decoder.extend`.

  Args:
    state: whose row it is.
    row, tokens, count, max_new_tokens: looked at if they are concrete.
    buffer_length: static.
    vocab_size: V.
  """
  if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(
      f"tokens must be token ids i32[P], of one row, got {_show(tokens)}"
    )
  width, known = len(tokens), lambda x: not isinstance(x, jax.core.Tracer)
  if width >= buffer_length:
    raise ValueError(
      f"{width} more tokens do not fit into a buffer of {buffer_length}"
    )
  if known(row) and not 0 <= row < len(state.length):
    raise ValueError(f"row must be in 0..{len(state.length) - 1}, got {row}")
  if known(count) and not 1 <= count <= width:
    raise ValueError(f"count must be in 1..{width}, got {count}")
  if known(count) and known(tokens):
    ids = np.asarray(tokens)[: int(count)]
    if ids.min() < 0 or ids.max() >= vocab_size:
      raise ValueError(
        f"tokens must be in 0..{vocab_size - 1}, got {ids.min()}..{ids.max()}"
      )
  if known(row) and known(state.length) and known(count):
    text = int(state.length[row])
    if known(max_new_tokens) and not (
      0 <= max_new_tokens <= buffer_length - text - int(count)
    ):
      raise ValueError(
        f"text, appended and new tokens must fit into buffer_length "
        f"({buffer_length}), got {text}, {count} and {max_new_tokens}"
      )


def _show(array: Array) -> str:
  """Dtype and shape, as in "float32[3, 4]"."""
  return f"{array.dtype}{list(array.shape)}"
