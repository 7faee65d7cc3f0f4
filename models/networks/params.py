"""Splits modules into functions and parameters, and checks shapes."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def split(module: nnx.Module) -> tuple[Callable[[Any], Any], nnx.State]:
  """Splits a module into a pure function and its parameters.

  Returns:
    `params -> module`, which raises ValueError for parameters with other
    shapes, and the parameters.
  """
  graphdef, params = nnx.split(module)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
  )

  def merge(params):
    check_params(shapes, params)
    return nnx.merge(graphdef, params)

  return merge, params


class _OneKey:
  """Replaces `nnx.Rngs`, whose keys take most of the time of a trace."""

  def __init__(self):
    key = jax.random.key(0)
    self.params = lambda: key


def shapes_of(make: Callable[[Any], nnx.Module]) -> Any:
  """A module with shapes instead of parameters.

  On a mesh `nnx.eval_shape` would replace a quantized weight by one array.

  Args:
    make: `rngs -> module`; draws from `rngs.params` alone.
  """
  graphdef, state = jax.eval_shape(lambda: nnx.split(make(_OneKey())))
  return nnx.merge(graphdef, state)


def layerless(module: nnx.Module) -> nnx.State:
  """A model's parameters without those of its layers."""
  flat = nnx.to_flat_state(nnx.state(module))
  return nnx.from_flat_state([(k, v) for k, v in flat if k[0] != "layers"])


def check_params(expected: Any, params: Any) -> None:
  """Raises ValueError unless parameters have the expected shapes."""
  wanted = jax.tree_util.tree_leaves_with_path(expected)
  shapes = [tuple(x.shape) for x in jax.tree.leaves(params)]
  if len(shapes) != len(wanted):
    raise ValueError(
      f"expected the {len(wanted)} arrays of the model's parameters, got "
      f"{len(shapes)} (are target and draft swapped?)"
    )
  for (path, array), shape in zip(wanted, shapes, strict=True):
    if tuple(array.shape) != shape:
      raise ValueError(
        f"expected the model's parameters, of which {'.'.join(names(path))} is "
        f"{list(array.shape)}, got {list(shape)} (are target and draft "
        "swapped?)"
      )


def names(path) -> list[str]:
  """Names along a parameter's path, without that of the variable's value."""
  parts = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
  return parts[:-1] if parts[-1] == "value" else parts
