"""A head that predicts the acceptance of a drafted token (SpecDec++).

Huang et al. (COLM 2025) put residual blocks and an output on the last hidden
state of the draft at the token that is judged, which a further pass of the
draft has to make. This head is asked before that pass is paid for. It reads the
hidden state that the token's law was read of, one pass earlier, and what tells
the token from others of that law: the logarithms of its own and of the largest
probability, at temperature 1. A fourth input is the temperature that is sampled
at, since it decides what acceptance means. Two outputs and a softmax, as there,
are one output and a sigmoid.
"""

import contextlib
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.formats import head_files, head_saving, json_files
from models.networks.layers import Linear

MODEL_TYPE = "acceptance_head"
_BESIDE = 3  # inputs beside the hidden state
_LEAST = 1e-6  # a probability whose logarithm is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
  """Shapes of a head.

  Attributes:
    width: H, of the draft's hidden state.
    num_blocks: residual blocks.
  """

  width: int
  num_blocks: int = 3


class AcceptanceHead(nnx.Module):
  """Residual blocks `x + silu(W x + b)`, then one number.

  Blocks are zero at first. Everything is computed in float32.

  Args:
    config: shapes.
    rngs: for the initial weights of the output.
  """

  def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs):
    self.config = config
    size = config.width + _BESIDE
    block = lambda: Linear(size, size, True, jnp.float32, rngs, std=0)
    self.blocks = nnx.List([block() for _ in range(config.num_blocks)])
    self.out = Linear(size, 1, True, jnp.float32, rngs)

  def __call__(
    self, hidden: Array, top: Array, confidence: Array, temperature: Array
  ) -> Array:
    """The log-odds of being accepted, if all tokens before are.

    Args:
      hidden: `f[..., H]`, what the token's law was read of.
      top: `f32[...]`, the largest probability of that law, at temperature 1.
      confidence: `f32[...]`, the token's own.
      temperature: `f32[...]`, of the sampling.

    Returns:
      `f32[...]`.
    """
    beside = [_log(top), _log(confidence), temperature]
    x = jnp.concatenate(
      [hidden.astype(jnp.float32), jnp.stack(beside, axis=-1)], axis=-1
    )
    for block in self.blocks:
      x = x + jax.nn.silu(block(x))
    return self.out(x)[..., 0]


def _log(probability: Array) -> Array:
  return jnp.log(jnp.maximum(probability, _LEAST))


def read_config(directory: str) -> HeadConfig:
  """Shapes of the head in a directory; its weights are not read.

  Raises:
    FileNotFoundError: if there is no `config.json`.
    ValueError: if it is not that of such a head.
  """
  path = pathlib.Path(directory) / "config.json"
  settings = json_files.read_object(path)
  if settings.get("model_type") != MODEL_TYPE:
    raise ValueError(
      f"{path} must have model_type {MODEL_TYPE!r}, got "
      f"{settings.get('model_type')!r}"
    )
  sizes = {
    name: settings.get(name)
    for name in (field.name for field in dataclasses.fields(HeadConfig))
  }
  for name, size in sizes.items():
    if type(size) is not int or size < 1:
      raise ValueError(f"{path}: {name} must be an integer >= 1, got {size!r}")
  return HeadConfig(**sizes)  # type: ignore[arg-type]


def load(directory: str) -> AcceptanceHead:
  """Reads a head.

  Raises:
    FileNotFoundError, ValueError: as `read_config`, or without tensors.
    CheckpointError: listing every tensor that is missing or does not fit.
  """
  path, config = pathlib.Path(directory), read_config(directory)
  with contextlib.ExitStack() as stack:
    tensors = head_files.open_tensors(path, stack)
    module, used = head_files.filled(
      path,
      lambda: AcceptanceHead(config, rngs=nnx.Rngs(0)),
      {},
      tensors,
      {},
      jnp.float32,
    )
    head_files.refuse_rest(path, tensors, used)
  return module


def save(module: AcceptanceHead, directory: str, *, dtype=jnp.float32) -> None:
  """Writes a head, which `load` reads.

  Args:
    module: the head.
    directory: created if need be; files of the same names are replaced.
    dtype: of the file: float32, bfloat16 or float16.
  """
  head_saving.write(
    directory,
    {"model_type": MODEL_TYPE, **dataclasses.asdict(module.config)},
    head_saving.parameters(module),
    dtype=dtype,
  )
