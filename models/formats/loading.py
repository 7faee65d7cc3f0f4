"""Loads the parameters of a checkpoint, a few rows of a tensor at a time.

Rows are read, converted or quantized, and placed on the device: besides the
model, host memory holds about two tensors, or on a mesh one per layer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import sharding as sharding_lib
from models.formats import weights
from models.formats.families.family import AS_IS, SWAPPED
from models.formats.published import Weights
from models.formats.weights import Index, Source
from models.networks import stacked, t5
from models.networks.layers import TransformerConfig
from models.networks.quantized import Quantization
from models.networks.quantized_tensor import (
  DTYPES,
  QuantizedTensor,
  is_quantized,
)
from models.networks.t5 import T5
from models.networks.t5_config import T5Config
from models.networks.transformer import Transformer
from models.sharding import Sharding

_THREADS = 2
_NUMBERS = 2**22  # read at once
_ALIGNMENT = 64  # bytes


def load(
  source: Source,
  *,
  dtype=jnp.float32,
  form: Quantization | None = None,
  kept: Weights | None = None,
) -> Transformer | T5:
  """Loads a model on one device.

  Args:
    source: the checkpoint.
    dtype: dtype of parameters and activations, whatever the files have.
    form: how to quantize weights; None for `dtype`.
    kept: quantized weights to keep as they are
      (`models.formats.published.keep`).

  Raises:
    CheckpointError: like `models.formats.weights.check`.
  """
  module = weights.abstract(source.config, dtype, form)
  weights.check(source, module)
  graphdef, state = nnx.split(module)
  state = dict(nnx.to_flat_state(state))

  def array_of(parameter: tuple):
    like = _stored(state[parameter].get_value(), kept, parameter)
    read = _readers(source, parameter, source.config, like, form, kept)
    _, layout = weights.locate(parameter, source.table)
    return _read_all(read, like, in_rows=layout is AS_IS or layout is SWAPPED)

  # NumPy releases the GIL. Threads do not inherit our `jax.enable_x64`.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    for parameter, arrays in zip(state, pool.map(array_of, state), strict=True):
      arrays = jax.device_put(arrays)
      state[parameter] = state[parameter].replace(arrays)
  return nnx.merge(graphdef, nnx.from_flat_state(state))


def load_stacked(
  source: Source,
  *,
  mesh: Mesh,
  sharding: Sharding,
  dtype=jnp.bfloat16,
  form: Quantization | None = None,
  kept: Weights | None = None,
) -> tuple[TransformerConfig | T5Config, Any]:
  """Loads a model directly into its shards on a mesh.

  Every process reads only the parts of the files that its own devices hold. A
  tensor that a `Layout` rearranges is read whole, one layer at a time.

  Args:
    source: the checkpoint.
    mesh: all devices, over all processes.
    sharding: the model's sharding rules.
    dtype, form: as for `load`.
    kept: as for `load`; of the same form in all layers of a stack.

  Returns:
    The configuration, with key/value heads repeated if there are fewer than
    devices, and the parameters for `models.networks.stacked`, or for
    `models.networks.t5` if it is a T5.

  Raises:
    CheckpointError: like `load`.
    ValueError: for a model that cannot be sharded like this.
  """
  weights.check(source, weights.abstract(source.config, dtype))
  devices = sharding_lib.num_parts(sharding, mesh)
  config = sharding_lib.kv_heads_for(source.config, devices)
  if isinstance(config, T5Config):
    shapes: Any = nnx.state(t5.abstract(config, dtype=dtype))
    kinds: Mapping[str, Sequence[int]] = {}
  else:
    shapes = stacked.abstract_params(
      config, dtype=dtype, weights=form, unrolled=sharding.unrolled
    )
    kinds = stacked.kinds(config, unrolled=sharding.unrolled)

  def parameters(path) -> list[tuple]:
    """The parameters that are stacked at a path, or the one that is there."""
    parts = sharding_lib.names(path)
    names = [int(x) if x.isdecimal() else x for x in parts]
    if parts[0] != "layers" or parts[1] not in kinds:
      return [tuple(names[parts[0] == "frame" :])]
    return [("layers", i, *names[2:]) for i in kinds[parts[1]]]

  def place(path, like, spec):
    is_stack = sharding_lib.names(path)[0] == "layers"
    each = [
      _readers(source, parameter, config, like, form, kept)
      for parameter in parameters(path)
    ]

    def array(like, spec, *read):
      def of_layers(index):
        return np.stack([of(index[1:]) for of in read[index[0]]])

      return jax.make_array_from_callback(
        like.shape,
        NamedSharding(mesh, spec),
        of_layers if is_stack else read[0],
      )

    return jax.tree.map(array, like, spec, *each)

  each = functools.partial(
    jax.tree_util.tree_map_with_path, is_leaf=is_quantized
  )
  shapes = each(
    lambda path, like: _stored(like, kept, parameters(path)[0]), shapes
  )
  specs = sharding_lib.param_specs(shapes, sharding)
  return config, each(place, shapes, specs)


def _stored(like, kept: Weights | None, parameter: tuple):
  """The shapes of a parameter: `like`, or those of its quantized weight.

  On CPUs int4 is stored as int8: XLA uses a byte for it there anyway, and reads
  it 20 times slower.
  """
  weight = (kept or {}).get(parameter)
  if weight is None:
    return like
  shape = [*like.shape]
  shape[weight.inputs] = weight.num_groups
  scales = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
  dtype = DTYPES[weight.values.kind].dtype
  if dtype == jnp.int4 and jax.default_backend() == "cpu":
    dtype = jnp.int8
  return dataclasses.replace(
    weight,
    values=jax.ShapeDtypeStruct(like.shape, dtype),
    scales=scales,
    minima=None if weight.minima is None else scales,
  )


def _readers(
  source: Source,
  parameter: tuple,
  cut: TransformerConfig | T5Config,
  like,
  form: Quantization | None,
  kept: Weights | None,
):
  """Readers for parts of a parameter's array, or of each of its arrays."""

  def reader(like, tensor=None) -> Callable[[Index], np.ndarray]:
    return lambda index: weights.part(
      source, parameter, index, cut, tensor
    ).astype(like.dtype, copy=False)

  if not is_quantized(like):
    return reader(like)
  if (weight := (kept or {}).get(parameter)) is not None:
    return jax.tree.map(reader, like, weight)
  assert form is not None
  last: dict[str, QuantizedTensor] = {}

  def quantized(name: str, index: Index) -> np.ndarray:
    whole, rest = weights.split_at(index, like.inputs)  # all inputs of a scale
    if str(whole) not in last:
      last.clear()
      array = weights.part(source, parameter, whole, cut)
      array = array.astype(np.float32, copy=False)
      low = form.of(array, like.inputs)
      last[str(whole)] = jax.tree.map(np.asarray, low)
    return getattr(last[str(whole)], name)[rest]

  return dataclasses.replace(
    like,
    values=functools.partial(quantized, "values"),
    scales=functools.partial(quantized, "scales"),
  )


def _read_all(read, like, *, in_rows: bool):
  """A whole parameter in NumPy, read a few rows at a time if `in_rows`."""
  count = like.shape[0]
  step = max(1, _NUMBERS * count // math.prod(like.shape)) if in_rows else count
  arrays = jax.tree.map(_empty, like)
  step = min(step, count)
  for start in range(0, count, step):
    start = min(start, count - step)  # parts of one size: few compilations
    rows = slice(start, start + step)
    index = (rows, *[slice(None)] * (len(like.shape) - 1))
    for array, of in zip(*map(jax.tree.leaves, (arrays, read)), strict=True):
      array[rows] = of(index)
  return arrays


def _empty(like) -> np.ndarray:
  """An array that XLA:CPU takes over without a copy (4-bit types with one)."""
  dtype = np.dtype(like.dtype)
  size = math.prod(like.shape) * dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  aligned = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
  return aligned.view(dtype).reshape(like.shape)
