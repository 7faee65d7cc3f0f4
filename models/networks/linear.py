"""Linear projections and embeddings, whose weights may be quantized.

Weights are `[outputs, inputs]`, as files have them. Letters in shapes: N
outputs, D inputs, G groups of inputs, V vocabulary.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from models.networks.quantized_tensor import QuantizedTensor

_FEW = 64  # rows of x
_ROUND = 128  # rows of x, of which a round has about as many
_CHUNK = 2**18  # numbers, which as float32 a core's cache holds


def project(x: Array, weight: Array | QuantizedTensor, *, result=None) -> Array:
  """Products of x and every row of a weight, `[..., D], [N, D] -> [..., N]`.

  One scale an output is applied to the products: values of eight bits are exact
  in bfloat16. With scales of groups the weight is dequantized and rounded once.
  A few rows have, on TPUs, products of every group, each scaled, as Qwix
  (Google) has them, and on CPUs, with int8 and one scale an output, products of
  integers: so no weight is written; with groups a few outputs of it at a time.
  `result` is the type in which products with an array are added up, by default
  x's.
  """
  if not isinstance(weight, QuantizedTensor):
    return _product(x, weight.astype(x.dtype), result)
  many = math.prod(x.shape[:-1]) > _ROUND
  if not weight.by_output:
    forms = {} if many else {"tpu": group_products}
    return lax.platform_dependent(
      x, weight, **forms, cpu=chunk_products, default=_dequantized
    )
  if many or weight.values.dtype != jnp.int8:
    return _scaled(x, weight)
  return lax.platform_dependent(
    x, weight, cpu=integer_products, default=_scaled
  )


def _product(x: Array, weight: Array, result=None) -> Array:
  """Products in a type, both contracted as they lie, over their last axes.

  On XLA:CPU a few rows of x are multiplied in fours from the right, with the
  weight as first operand and a barrier that keeps the simplifier from turning
  it round: that takes two thirds of the time, of hundreds of rows twice it.
  """
  last = lambda x: (((x.ndim - 1,), (1,)), ((), ()))

  def x_first(x, weight):
    return lax.dot_general(x, weight, last(x), preferred_element_type=result)

  def weight_first(x, weight):
    rows = x.reshape(-1, x.shape[-1])
    fours = jnp.pad(rows, ((0, -len(rows) % 4), (0, 0)))
    y = lax.optimization_barrier(x_first(weight, fours))
    return y.T[: len(rows)].reshape(*x.shape[:-1], len(weight))

  if not 1 < math.prod(x.shape[:-1]) <= _FEW:
    return x_first(x, weight)
  return lax.platform_dependent(x, weight, cpu=weight_first, default=x_first)


def _dequantized(x: Array, weight: QuantizedTensor) -> Array:
  """`project` of a weight that is written whole."""
  return _product(x, weight.dequantized().astype(x.dtype))


def chunk_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with scales of groups, of a few outputs at a time.

  What is dequantized stays in a core's cache. Without the barrier XLA would
  take that out of a loop that x changes in: a float32 copy of every weight, as
  long as a model decodes.
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
  """`project` with one scale an output, applied to the products."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  # Sums of values that are not scaled yet can be beyond float16's range.
  result = wide if x.dtype == jnp.float16 else None
  y = _product(x, weight.values.astype(x.dtype), result)
  return (y.astype(wide) * weight.scales[:, 0]).astype(x.dtype)


def integer_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with int8, of integers alone, one scale an output.

  A row of x is a sum of rows of int8 with a scale each, every one of what the
  ones before it leave, and sums of integers are exact. Three parts have x to
  1e-7 of its row's largest number, and two, which the shorter types have, to
  1.6e-5. XLA:CPU would convert the weights in every pass, ten times as long.
  """
  rest = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # XLA:CPU's reductions pass over NaNs; of inf all products are NaN.
  sizes = jnp.where(jnp.isnan(rest), jnp.inf, jnp.abs(rest))
  scale = jnp.max(sizes, axis=-1, keepdims=True) / 127
  rows, each = [], []
  for _ in range(3 if x.dtype.itemsize > 2 else 2):
    rows.append(jnp.round(rest / jnp.where(scale == 0, 1, scale)))
    each.append(scale)
    rest, scale = rest - rows[-1] * scale, scale / 254
  sums = lax.dot_general(
    jnp.stack(rows).astype(jnp.int8),
    weight.values,
    (((x.ndim,), (1,)), ((), ())),
    preferred_element_type=jnp.int32,
  )  # [parts, ..., N]
  whole = sum(
    part.astype(rest.dtype) * scale
    for part, scale in zip(sums[::-1], each[::-1], strict=True)
  )
  return (whole * weight.scales[:, 0]).astype(x.dtype)


def group_products(x: Array, weight: QuantizedTensor) -> Array:
  """`project` with scales of groups, summed over groups once scaled."""
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
  """A projection whose weight lies as files have it, a row for each output.

  Attributes:
    weight: `[n_out, n_in]`, an array or a `QuantizedTensor`, at first normal
      with a deviation of `std`; the other way round where `inputs_first`.
    bias: `[n_out]`, zero at first, or None.
    dtype: of parameters and result.
    inputs_first: see `turn`.
  """

  def __init__(
    self, n_in: int, n_out: int, bias: bool, dtype, rngs: nnx.Rngs, std=0.02
  ):
    self.dtype = jnp.dtype(dtype)
    init = nnx.initializers.normal(std)
    self.weight = nnx.Param(init(rngs.params(), (n_out, n_in), self.dtype))
    self.bias = nnx.Param(jnp.zeros(n_out, self.dtype)) if bias else None
    self.inputs_first = False

  def __call__(self, x: Array) -> Array:
    """`[..., n_in] -> [..., n_out]`."""
    x, weight = x.astype(self.dtype), self.weight[...]
    if self.inputs_first:
      y = x @ weight.astype(self.dtype)
    else:
      y = project(x, weight)
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def turn(module: nnx.Module) -> None:
  """Lays the weights of a module's projections inputs first, in place.

  For XLA:CPU: a round of SmolLM2, which multiplies several rows, takes 0.9 of
  the time that `project` does. Quantized weights stay as they are.
  """
  for _, child in projections(module):
    weight = child.weight[...]
    if not child.inputs_first and not isinstance(weight, QuantizedTensor):
      child.weight = nnx.Param(weight.T)
      child.inputs_first = True


def projections(module: nnx.Module) -> list[tuple[str, Linear]]:
  """A module's projections and their names.

  Without `kv_b` of latents, whose halves queries and sums read.
  """
  return [
    (name, child)
    for _, node in nnx.iter_modules(module)
    for name, child in vars(node).items()
    if isinstance(child, Linear) and name != "kv_b"
  ]


class Embed(nnx.Embed):
  """An embedding whose table may be quantized; also for logits, if tied."""

  def __call__(self, tokens: Array) -> Array:
    """`i32[...] -> [..., D]`."""
    table = self.embedding[...]
    if not isinstance(table, QuantizedTensor):
      return super().__call__(tokens)
    return table[tokens].dequantized().astype(self.dtype)

  def logits(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, V]`.

    `nnx.Embed.attend` would transpose the table first, and XLA:CPU then reads
    it in a loop that computes x's norm anew for every row, of one token.
    """
    return project(x.astype(self.dtype), self.embedding[...])
