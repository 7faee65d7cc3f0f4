"""Linear projections and embeddings with optionally quantized weights.

Weights are `[outputs, inputs]`, as files have them. Letters in shapes: N
outputs, D inputs, G groups of inputs, V vocabulary.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from models.networks.quantized_tensor import QuantizedTensor

_FEW = 64  # rows of x
_ROUND = 128  # rows of x, about as many as a round has
_CHUNK = 2**18  # numbers that fit a core's cache as float32
_LANES = 16  # inputs that XLA:CPU multiplies at once


def project(x: Array, weight: Array | QuantizedTensor, *, result=None) -> Array:
  """Multiplies x with every row of a weight, `[..., D], [N, D] -> [..., N]`.

  One scale per output is applied to the products: 8-bit values are exact in
  bfloat16. With group scales the weight is dequantized, and not written to
  memory whole: TPUs multiply each group and scale the products, like Qwix
  (Google), for a few rows of x; CPUs multiply integers (int8 with one scale
  per output), dequantize a few outputs at a time (groups) or, for one or two
  rows, convert int8 weights where they sum (groups, and without AVX-512 all).
  So a row's products depend on the number of rows by rounding. `result` is the
  accumulation dtype for arrays, by default x's.
  """
  if not isinstance(weight, QuantizedTensor):
    return _product(x, weight.astype(x.dtype), result)
  rows = math.prod(x.shape[:-1])
  is_int8 = weight.values.dtype == jnp.int8
  fused = is_int8 and rows in (1, 2) and _terms(x.shape[-1], rows) >= 8
  if not weight.by_output:
    cpu = fused_products if fused else chunk_products
    forms = {} if rows > _ROUND else {"tpu": group_products}
    return lax.platform_dependent(
      x, weight, **forms, cpu=cpu, default=_dequantized
    )
  if not is_int8:
    return _scaled(x, weight)
  cpu = integer_products if _has_avx512() or not fused else fused_products
  return lax.platform_dependent(x, weight, cpu=cpu, default=_scaled)


def _product(x: Array, weight: Array, result=None) -> Array:
  """Matrix product in one dtype, contracting the last axes of both.

  On XLA:CPU a few rows of x are multiplied four or eight at a time, with the
  weight as first operand and a barrier against the simplifier swapping them:
  this takes half the time (with hundreds of rows, twice the time). With AVX-512
  it is also no slower in float32 over up to 256 rows, and 0.7 to 0.9 of the
  time over 128, unless the weight is in the cache.
  """
  last = lambda x: (((x.ndim - 1,), (1,)), ((), ()))

  def x_first(x, weight):
    return lax.dot_general(x, weight, last(x), preferred_element_type=result)

  def weight_first(x, weight):
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % (4 if len(rows) <= 4 else 8)
    padded = jnp.pad(rows, ((0, missing), (0, 0)))
    y = lax.optimization_barrier(x_first(weight, padded))
    return y.T[: len(rows)].reshape(*x.shape[:-1], len(weight))

  large = weight.size > _CHUNK and weight.dtype == jnp.float32
  few = 4 * _FEW if large and _has_avx512() else _FEW
  if not 1 < math.prod(x.shape[:-1]) <= few:
    return x_first(x, weight)
  return lax.platform_dependent(x, weight, cpu=weight_first, default=x_first)


def _dequantized(x: Array, weight: QuantizedTensor) -> Array:
  """`project` by dequantizing the whole weight."""
  return _product(x, weight.dequantized().astype(x.dtype))


def chunk_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with group scales, dequantizing a few outputs at a time.

  The dequantized part stays in a core's cache. Without the barrier XLA would
  hoist it out of a loop over x, and keep a float32 copy of every weight during
  decoding.
  """
  outputs, inputs = weight.shape
  most = min(outputs, max(1, _CHUNK // inputs))
  size = max(n for n in range(1, most + 1) if outputs % n == 0)
  if 8 * size < most:
    size = outputs
  chunks = jax.tree.map(lambda a: a.reshape(-1, size, a.shape[-1]), weight)
  y = lax.map(
    lambda part: _dequantized(*lax.optimization_barrier((x, part))), chunks
  )
  return jnp.moveaxis(y, 0, -2).reshape(*x.shape[:-1], outputs)


def _scaled(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with one scale per output, applied to the products."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  # Unscaled sums can exceed float16's range.
  result = wide if x.dtype == jnp.float16 else None
  y = _product(x, weight.values.astype(x.dtype), result)
  return (y.astype(wide) * weight.scales[:, 0]).astype(x.dtype)


def integer_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with int8 and one scale per output, by integer products.

  A row of x becomes the sum of two scaled int8 rows, the second of which is the
  residual of the first: x to 1.6e-5 of its row's largest number, a hundredth of
  bfloat16's rounding of that number. Integer sums are exact. Otherwise XLA:CPU
  converts the weights in every pass, which takes ten times as long; so it does
  for a single row.
  """
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # XLA:CPU's reductions ignore NaN; with inf all products are NaN.
  sizes = jnp.where(jnp.isnan(wide), jnp.inf, jnp.abs(wide))
  scale = jnp.max(sizes, axis=-1, keepdims=True) / 127
  scale = jnp.where(scale == 0, 1, scale)
  high = jnp.round(wide / scale)
  low = jnp.round((wide - high * scale) / (scale / 254))
  sums = lax.dot_general(
    jnp.stack([high, low]).astype(jnp.int8),
    weight.values,
    (((x.ndim,), (1,)), ((), ())),
    preferred_element_type=jnp.int32,
  )  # [2, ..., N]
  whole = (sums[0] + sums[1].astype(wide.dtype) / 254) * scale
  return (whole * weight.scales[:, 0]).astype(x.dtype)


@functools.cache
def _has_avx512() -> bool:
  """Whether this machine's CPU has AVX-512, with other fastest products."""
  about = pathlib.Path("/proc/cpuinfo")
  return about.is_file() and " avx512bw " in about.read_text()


def _terms(inputs: int, rows: int) -> int:
  """How many products `fused_products` adds in registers; 0 if it can't."""
  blocks, rest = divmod(inputs * rows, 2 * _LANES)
  return 0 if rest else max(n for n in range(1, 17) if blocks % n == 0)


def fused_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` of one or two rows, converting weights where they are summed.

  XLA:CPU does that, and with vectors, if it reduces two arrays at once over
  few numbers (`_terms`) with others next to them in memory: the products of
  two rows, or of two parts of one. (Sums of one array go to YNNPACK, after the
  converted weights were written.) XLA does not inline the call, or it would
  repeat what computes x for every output. One token through a model in int8
  takes half as long as by `chunk_products`, and on AVX2 0.8 times as long as
  by `integer_products` (on AVX-512, 1.4 times).
  """
  with set_xla_metadata(inlineable="false"):
    return _fused(x, weight)


@jax.jit
def _fused(x: Array, weight: QuantizedTensor) -> Array:
  outputs, inputs = weight.shape
  rows = x.reshape(-1, inputs).astype(jnp.float32)
  parts = 3 - len(rows)
  shape = (-1, parts, _terms(inputs, len(rows)), _LANES)
  scaled = dataclasses.replace(weight, minima=None)  # else without vectors
  values = weight.values if weight.by_output else scaled.dequantized()
  values = values.reshape(outputs, *shape).astype(jnp.float32)
  products = [
    values[:, :, part] * row.reshape(shape)[:, part]
    for row in rows
    for part in range(parts)
  ]
  add = lambda a, b: [a[0] + b[0], a[1] + b[1]]
  sums = lax.reduce(products, [np.float32(0)] * 2, add, (2,))
  first, second = lax.optimization_barrier(sums)  # [N, blocks, lanes]
  sums = [first + second] if parts == 2 else [first, second]
  y = jnp.stack([jnp.sum(lanes, axis=(1, 2)) for lanes in sums])
  if weight.by_output:
    y *= weight.scales[:, 0]
  if weight.minima is not None:
    of_x = rows.reshape(len(rows), weight.num_groups, -1).sum(axis=-1)
    y += jnp.matmul(of_x, weight.minima.T, precision="highest")
  return y.astype(x.dtype).reshape(*x.shape[:-1], outputs)


def group_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with group scales: products by group, scaled, then summed."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  count = weight.num_groups
  groups = lambda a: a.reshape(
    math.prod(a.shape[:-1]), count, a.shape[-1] // count
  )
  sums = lax.dot_general(
    groups(x),
    groups(weight.values).astype(x.dtype),
    (((2,), (2,)), ((1,), (1,))),
    preferred_element_type=wide,
  )  # [G, rows, N]
  y = jnp.sum(sums * weight.scales.T[:, None], axis=0)
  if weight.minima is not None:
    of_x = jnp.sum(groups(x).astype(wide), axis=-1)
    y += jnp.matmul(of_x, weight.minima.T, precision="highest")
  return y.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


class Linear(nnx.Module):
  """A projection with its weight in the files' layout, a row per output.

  Attributes:
    weight: `[n_out, n_in]`, an array or a `QuantizedTensor`, initialized from a
      normal distribution with standard deviation `std`.
    bias: `[n_out]`, initially zero, or None.
    dtype: dtype of parameters and result.
  """

  def __init__(
    self, n_in: int, n_out: int, bias: bool, dtype, rngs: nnx.Rngs, std=0.02
  ):
    self.dtype = jnp.dtype(dtype)
    init = nnx.initializers.normal(std)
    self.weight = nnx.Param(init(rngs.params(), (n_out, n_in), self.dtype))
    self.bias = nnx.Param(jnp.zeros(n_out, self.dtype)) if bias else None

  def __call__(self, x: Array) -> Array:
    """`[..., n_in] -> [..., n_out]`."""
    y = project(x.astype(self.dtype), self.weight[...])
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class Fused(Linear):
  """Several projections of one input as one product; see `fuse`.

  Attributes:
    ends: where the outputs of each part but the last end.
  """

  def __init__(self, parts: Sequence[Linear]):
    def joined(*params):
      arrays = [param[...] for param in params]
      return nnx.Param(jax.tree.map(lambda *x: jnp.concatenate(x), *arrays))

    self.dtype = parts[0].dtype
    self.weight = joined(*(part.weight for part in parts))
    has_bias = parts[0].bias is not None
    self.bias = joined(*(part.bias for part in parts)) if has_bias else None
    sizes = [part.weight[...].shape[0] for part in parts]
    self.ends = tuple(itertools.accumulate(sizes[:-1]))

  def each(self, x: Array) -> list[Array]:
    """`[..., n_in]` to the outputs of each, `[..., n_out]`."""
    return jnp.split(self(x), self.ends, axis=-1)


def outputs(module: Any, names: Sequence[str], x: Array) -> list[Array]:
  """Outputs of several projections of one input, fused or not."""
  fused: Fused | None = getattr(module, "fused", None)
  if fused is not None:
    return fused.each(x)
  return [getattr(module, name)(x) for name in names]


def fuse(module: Any, names: Sequence[str]) -> None:
  """Replaces several projections of one input by `module.fused`.

  Does nothing if they differ in form: in bias, or in how they are quantized.
  """
  parts = [getattr(module, name) for name in names]

  def form(part: Linear):
    leaves, structure = jax.tree.flatten(part.weight[...])
    return (
      structure,
      [(x.shape[1:], x.dtype) for x in leaves],
      part.bias is None,
    )

  if len(parts) > 1 and all(form(part) == form(parts[0]) for part in parts):
    module.fused = Fused(parts)
    for name in names:
      delattr(module, name)


def projections(module: nnx.Module) -> list[tuple[str, Linear]]:
  """A module's projections and their names.

  Leaves out `kv_b` of latent attention, whose halves are used separately.
  """
  return [
    (name, child)
    for _, node in nnx.iter_modules(module)
    for name, child in vars(node).items()
    if isinstance(child, Linear) and name != "kv_b"
  ]


class Embed(nnx.Embed):
  """An embedding, optionally quantized; also computes logits if tied."""

  def __call__(self, tokens: Array) -> Array:
    """`i32[...] -> [..., D]`."""
    table = self.embedding[...]
    if not isinstance(table, QuantizedTensor):
      return super().__call__(tokens)
    return table[tokens].dequantized().astype(self.dtype)

  def logits(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, V]`.

    `nnx.Embed.attend` would transpose the table first, and for one token
    XLA:CPU then recomputes x's norm for every row of it.
    """
    return project(x.astype(self.dtype), self.embedding[...])
