"""Weights in eight bits or four: quantisation, and products with them.

A weight is stored as whole numbers, or floats of eight bits, with a scale for
every output, or for every group of inputs of an output: `w = q s`. Rounding is
symmetric, `s = max |w| / M` and `q = round(w / s)`, with M the largest value of
the type (127, 7, 448 for float8_e4m3fn, 6 for float4_e2m1fn), as LLM.int8()
(Dettmers et al., 2022, section 2.1) has it by rows. Activations keep their
type, but on a CPU (`integer_products`). A row of a batch depends on no other.

Letters in shapes: N outputs, D inputs, G groups of inputs, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.networks.description import TransformerConfig
from models.networks.linear import Linear, project
from models.networks.mixture import Experts


class Kind(NamedTuple):
  """A type that weights are stored as.

  Attributes:
    dtype: of the values.
    most: M.
    group: inputs that share a scale by default; None for all of an output.
  """

  dtype: Any
  most: float
  group: int | None


KINDS = {
  "int8": Kind(jnp.int8, 127.0, None),
  "int4": Kind(jnp.int4, 7.0, 32),
  "fp8": Kind(jnp.float8_e4m3fn, 448.0, None),
  "fp4": Kind(jnp.float4_e2m1fn, 6.0, 32),
}
DTYPES = tuple(jnp.dtype(kind.dtype) for kind in KINDS.values())
GROUPS = (32, 64, 128)
_FEW = 128  # rows of x, of which a round has about as many
EXPERTS = ("gate", "up", "down")  # of `models.networks.mixture.Experts`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
  """Storage format of a model's weights in few bits.

  Attributes:
    dtype: "int8", "int4", "fp8" (e4m3) or "fp4" (e2m1, as MXFP4 has it).
    group: inputs that share a scale, one of `GROUPS`; None for one scale an
      output.
    output: whether the output projection is stored so too, and with it an
      embedding that is tied to it.
    embedding: whether an embedding that is not tied is.
    dense: whether all projections of layers are; else those of experts alone.

  Raises:
    ValueError: for another kind or group.
  """

  dtype: str
  group: int | None = None
  output: bool = True
  embedding: bool = False
  dense: bool = True

  def __post_init__(self):
    if self.dtype not in KINDS:
      raise ValueError(f"expected one of {sorted(KINDS)}, got {self.dtype!r}")
    if self.group not in (None, *GROUPS):
      raise ValueError(f"group must be one of {GROUPS}, got {self.group!r}")

  def __str__(self) -> str:
    """As it is written (`launch.assembly.precision`)."""
    usual = KINDS[self.dtype].group
    inside = [] if self.group == usual else [f"group={self.group}"]
    inside += [] if self.output else ["output=False"]
    inside += ["embedding=True"] if self.embedding else []
    inside += [] if self.dense else ["dense=False"]
    return f"{self.dtype}({', '.join(inside)})" if inside else self.dtype

  def num_groups(self, inputs: int) -> int:
    """G of a weight of D inputs; ValueError if groups do not divide them."""
    if self.group is None:
      return 1
    if inputs % self.group:
      raise ValueError(
        f"groups of {self.group} do not divide the {inputs} inputs of a weight"
      )
    return inputs // self.group


def below(form: Quantization, weights: Quantization) -> Quantization:
  """The format of a copy, of all that a model stores in few bits already.

  Args:
    form: that the copy has of weights in their dtype.
    weights: of the model.

  Raises:
    ValueError: unless the copy has fewer bits.
  """
  if _bits(KINDS[form.dtype].dtype) >= _bits(KINDS[weights.dtype].dtype):
    raise ValueError(
      f"a copy in few bits of weights that are {weights} must have fewer, got "
      f"{form}"
    )
  return dataclasses.replace(
    form,
    output=weights.output,
    embedding=weights.embedding,
    dense=weights.dense,
  )


def _bits(dtype) -> int:
  """Bits of a number."""
  info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
  return info(dtype).bits


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
  """Bytes of an array on an accelerator, where four bits are half of one."""
  return math.prod(array.shape) * _bits(array.dtype) // 8


def quantize(weight: Array, form: Quantization) -> tuple[Array, Array]:
  """The nearest stored values of a weight.

  Args:
    weight: `f[..., N, D]`.
    form: how it is stored.

  Returns:
    Values `[..., N, D]` and scales `f32[..., N, G]`. A group of zeros has the
    scale 0.
  """
  dtype, most, _ = KINDS[form.dtype]
  *outer, inputs = weight.shape
  groups = weight.astype(jnp.float32).reshape(
    *outer, form.num_groups(inputs), -1
  )
  scales = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / most
  values = groups / jnp.where(scales == 0, 1, scales)
  if jnp.issubdtype(dtype, jnp.integer):
    values = jnp.round(values)
  elif form.dtype == "fp4":  # XLA:CPU rounds to another type in between
    size = jnp.abs(values)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1, 2))
    values = jnp.round(values / step) * step
  return values.astype(dtype).reshape(weight.shape), scales[..., 0]


def dequantize(values: Array, scales: Array) -> Array:
  """The weights that stored values stand for, `f32[..., N, D]`."""
  groups = values.astype(jnp.float32).reshape(*scales.shape, -1)
  return (groups * scales[..., None]).reshape(values.shape)


def products(
  x: Array, values: Array, scales: Array, *, parts: int | None = None
) -> Array:
  """Products with stored weights, `[..., D], [N, D], [N, G] -> [..., N]`.

  With one scale an output that is applied to the products, where it costs
  nothing; values of eight bits are exact in bfloat16. Scales of groups are not,
  and small ones are nothing in float16: weights are rounded once multiplied.
  A few rows have, on TPUs, products of every group, each scaled, as Qwix
  (Google) has them, and on CPUs, with int8, products of whole numbers: so XLA
  reads values as they are stored, and no weight is written.

  Args:
    x: what is multiplied.
    values, scales: of `quantize`.
    parts: of `integer_products`; by default what its type's bits need.
  """
  many = math.prod(x.shape[:-1]) > _FEW
  if scales.shape[-1] > 1:
    whole = lambda x, *stored: project(x, dequantize(*stored).astype(x.dtype))
    if many:
      return whole(x, values, scales)
    return lax.platform_dependent(
      x, values, scales, tpu=group_products, default=whole
    )
  if many or values.dtype != jnp.int8:
    return _scaled(x, values, scales)
  parts = parts or (3 if x.dtype.itemsize > 2 else 2)
  return lax.platform_dependent(
    x, values, scales, default=_scaled,
    cpu=functools.partial(integer_products, parts=parts),
  )  # fmt: skip


def _scaled(x: Array, values: Array, scales: Array) -> Array:
  """`products` with one scale an output, applied to them."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  # Sums of values that are not scaled yet can be beyond float16's range.
  result = wide if x.dtype == jnp.float16 else None
  multiplied = project(x, values.astype(x.dtype), result)
  return (multiplied.astype(wide) * scales[:, 0]).astype(x.dtype)


def integer_products(
  x: Array, values: Array, scales: Array, *, parts: int
) -> Array:
  """`products` with int8, of whole numbers alone, one scale an output.

  A row of x is a sum of rows of int8 with a scale each, every one of what the
  ones before it leave, and sums of whole numbers are exact. Two parts have x to
  1.6e-5 of its row's largest number, three to 1e-7, as close as float32's own
  sums. XLA:CPU multiplies a row by SmolLM2's weights so in two thirds of
  float32's time, and eight in as much; a row of int8 alone it would multiply in
  some ten times as much, without vector instructions.
  """
  rest = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # XLA:CPU's reductions pass over NaNs; of inf all products are NaN.
  sizes = jnp.where(jnp.isnan(rest), jnp.inf, jnp.abs(rest))
  scale = jnp.max(sizes, axis=-1, keepdims=True) / 127
  rows, each = [], []
  for _ in range(parts):
    rows.append(jnp.round(rest / jnp.where(scale == 0, 1, scale)))
    each.append(scale)
    rest, scale = rest - rows[-1] * scale, scale / 254
  sums = lax.dot_general(
    jnp.stack(rows).astype(jnp.int8),
    values,
    (((x.ndim,), (1,)), ((), ())),
    preferred_element_type=jnp.int32,
  )  # [parts, ..., N]
  whole = sum(
    part.astype(rest.dtype) * scale
    for part, scale in zip(sums[::-1], each[::-1], strict=True)
  )
  return (whole * scales[:, 0]).astype(x.dtype)


def group_products(x: Array, values: Array, scales: Array) -> Array:
  """`products` with scales of groups, summed over groups once scaled."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  count = scales.shape[-1]
  groups = lambda a: a.reshape(
    math.prod(a.shape[:-1]), count, a.shape[-1] // count
  )
  sums = lax.dot_general(
    groups(x),
    groups(values).astype(x.dtype),
    (((2,), (2,)), ((1,), (1,))),
    preferred_element_type=wide,
  )  # [G, rows, N]
  multiplied = jnp.sum(sums * scales.T[:, None], axis=0).astype(x.dtype)
  return multiplied.reshape(*x.shape[:-1], len(values))


class QuantizedLinear(nnx.Module):
  """A `Linear` whose weight is stored in few bits.

  Args:
    values, scales: of the weight.
    dtype: of the result.
    bias: of the projection, if it has one.

  Attributes:
    parts: of `products`.
  """

  parts: int | None = None

  def __init__(
    self, values: Array, scales: Array, dtype, bias: nnx.Param | None = None
  ):
    self.dtype = jnp.dtype(dtype)
    self.weight, self.scales = nnx.Param(values), nnx.Param(scales)
    self.bias = bias

  def __call__(self, x: Array) -> Array:
    """`[..., n_in] -> [..., n_out]`."""
    stored = self.weight[...], self.scales[...]
    y = products(x.astype(self.dtype), *stored, parts=self.parts)
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class QuantizedEmbed(nnx.Module):
  """An `nnx.Embed` whose table is stored in few bits; also for logits.

  Args:
    values, scales: of the table, `[V, D]`.
    dtype: of the result.

  Attributes:
    parts: of `products`.
  """

  parts: int | None = None

  def __init__(self, values: Array, scales: Array, dtype):
    self.dtype = jnp.dtype(dtype)
    self.embedding, self.scales = nnx.Param(values), nnx.Param(scales)

  def __call__(self, tokens: Array) -> Array:
    """`i32[B, T] -> [B, T, D]`."""
    values, scales = (
      jnp.take(x, tokens, axis=0)
      for x in (self.embedding[...], self.scales[...])
    )
    return dequantize(values, scales).astype(self.dtype)

  def logits(self, x: Array) -> Array:
    """`[B, T, D] -> [B, T, V]`, of a tied embedding."""
    stored = self.embedding[...], self.scales[...]
    return products(x.astype(self.dtype), *stored, parts=self.parts)


def lower(module: nnx.Module, form: Quantization) -> None:
  """Stores the weights of a module's projections in few bits, in place.

  Of a mixture those of its experts, but of the one that all tokens are given.
  What is in few bits already is dequantised, and rounded again.

  Args:
    module: a `models.networks.transformer.Transformer`, one of its layers, or
      a draft head.
    form: how they are stored.
  """
  nodes = [node for _, node in nnx.iter_modules(module)]
  tied = not hasattr(module, "lm_head")
  again = functools.partial(_again, form)
  for node in nodes:
    if isinstance(node, Experts):
      for name in EXPERTS:
        stored = [getattr(node, name)[...]]
        if hasattr(node, f"{name}_scales"):
          stored.append(getattr(node, f"{name}_scales")[...])
        values, scales = _turned(again)(*stored)
        setattr(node, name, nnx.Param(values))
        setattr(node, f"{name}_scales", nnx.Param(scales))
    for name, child in list(vars(node).items()):
      if name == "kv_b":  # of latents, whose halves queries and sums read
        continue
      if isinstance(child, Linear | QuantizedLinear):
        if form.output if name == "lm_head" else form.dense:
          if isinstance(child, Linear):
            stored = again(child.rows)
          else:
            stored = again(*_of(child, child.weight))
          setattr(node, name, QuantizedLinear(*stored, child.dtype, child.bias))
      elif name == "embed" and isinstance(child, nnx.Embed | QuantizedEmbed):
        if form.output if tied else form.embedding:
          stored = again(*_of(child, child.embedding))
          setattr(node, name, QuantizedEmbed(*stored, child.dtype))


def hasten(module: nnx.Module) -> None:
  """Makes products with what `lower` stored fast on a CPU, in place.

  For a copy that drafts: with int8 they are less exact. All else but experts is
  dequantised, with scales of 1, where XLA writes it anew in every pass.
  """
  for _, node in list(nnx.iter_modules(module)):
    if isinstance(node, QuantizedLinear | QuantizedEmbed):
      name = "weight" if isinstance(node, QuantizedLinear) else "embedding"
      values, scales = getattr(node, name)[...], node.scales[...]
      if values.dtype == jnp.int8 and scales.shape[-1] == 1:
        node.parts = 2
        continue
      whole = dequantize(values, scales)
      setattr(node, name, nnx.Param(whole.astype(node.dtype)))
      node.scales = nnx.Param(jnp.ones((len(whole), 1), jnp.float32))


def _of(child: nnx.Module, weight: nnx.Param) -> list[Array]:
  """A weight, and its scales if it is in few bits."""
  return [
    weight[...],
    *([child.scales[...]] if hasattr(child, "scales") else []),
  ]


def _again(
  form: Quantization, weight: Array, *scales: Array
) -> tuple[Array, Array]:
  """The nearest stored values of a weight, or of one that is stored so."""
  return quantize(dequantize(weight, *scales) if scales else weight, form)


def check_weights(
  config: TransformerConfig, form: Quantization | None, *, on_mesh: bool
) -> None:
  """Raises ValueError for a model whose weights are not stored so.

  Args:
    config: of the model, decoder-only.
    form: how its weights are to be stored; None for its dtype.
    on_mesh: whether its layers are stacked.
  """
  if form is None:
    return
  if config.deltas and on_mesh:
    raise ValueError("recurrent layers on a mesh are not stored in few bits")
  if form.embedding and config.tied_embeddings:
    raise ValueError(
      "embedding=True is of an embedding of its own, and this model's is tied "
      "to its output projection: both are as output says"
    )


def check_cache(config: TransformerConfig, stored: str | None) -> None:
  """Raises ValueError for a cache that is not stored in eight bits.

  Values that are read of the same slots as keys would not be finite where a key
  is not (`specjax.cache.contain`).
  """
  if stored is None:
    return
  if config.deltas:
    raise ValueError("a cache with recurrent states is not in eight bits")
  if config.attention.latent is not None:
    raise ValueError("a cache of latents is not stored in eight bits")


def lowered(
  params: nnx.State, expected: nnx.State, form: Quantization
) -> nnx.State:
  """Parameters of a module for the same module after `lower`.

  Args:
    params: of the module, in few bits or not; those of stacked layers have a
      leading axis.
    expected: what the lowered module takes, or its shapes.
    form: how weights are stored.
  """
  flat = dict(nnx.to_flat_state(params))
  for path, _ in nnx.to_flat_state(expected):
    if (where := weight_of(path)) is not None:
      of_experts = path[-1] != "scales"
      stored = [flat[x][...] for x in (where, path) if x in flat]
      again = functools.partial(_again, form)
      convert = jax.jit(
        _turned(again) if of_experts else again,
        out_shardings=_places(stored[0], form, inputs=-2 if of_experts else -1),
      )
      flat[where], flat[path] = map(nnx.Param, convert(*stored))
  return nnx.from_flat_state(list(flat.items()))


def weight_of(path: tuple) -> tuple | None:
  """The parameter that another has the scales of; None if it has none."""
  *outer, last = path
  if last == "scales":
    return (*outer, "embedding" if outer[-1] == "embed" else "weight")
  name = str(last).removesuffix("_scales")
  return (*outer, name) if name != str(last) else None


def _turned(function):
  """A function of `[.., N, D]` that gives such, of experts' `[.., D, N]`."""
  turn = lambda x: jnp.swapaxes(x, -1, -2)
  return lambda *arrays: tuple(map(turn, function(*map(turn, arrays))))


def _places(weight: Array, form: Quantization, *, inputs: int):
  """Shardings of a weight's values and scales; None without a mesh.

  Args:
    weight: of the mesh.
    form: how it is stored.
    inputs: the axis that its inputs are on.
  """
  where = weight.sharding
  if not isinstance(where, NamedSharding):
    return None
  spec = [*where.spec, *[None] * (weight.ndim - len(where.spec))]
  scales = list(spec)
  if form.group is None:
    scales[inputs] = None
  return where, NamedSharding(where.mesh, P(*scales))


def is_lent(
  module: nnx.Module, name: str, array: Array, params: nnx.State
) -> bool:
  """Whether a head has no table of its own, and the target's is in few bits.

  It is to `borrow` that, in place of the one that was dequantised for it.

  Args:
    module: of the head.
    name: "embed" or "lm_head".
    array: what was dequantised, in its place if it has none of its own.
    params: of the target's embedding or output projection.
  """
  child = getattr(module, name, None)
  if child is None or "scales" not in params:
    return False
  variable = child.embedding if name == "embed" else child.weight
  return variable[...] is array


def borrow(module: nnx.Module, name: str, params: nnx.State) -> None:
  """Gives a head a table in few bits, in place.

  Args:
    module: of the head.
    name: "embed" or "lm_head".
    params: of a target's embedding or output projection, or their shapes.
  """
  child = getattr(module, name)
  weight = params["embedding" if "embedding" in params else "weight"]
  stored = weight.get_value(), params["scales"].get_value()
  low = (
    QuantizedEmbed(*stored, child.dtype)
    if name == "embed"
    else QuantizedLinear(*stored, child.dtype, child.bias)
  )
  setattr(module, name, low)


def whole_table(params: nnx.State, name: str, dtype) -> Array:
  """A module's parameter of that name, as it is or dequantised."""
  if "scales" not in params:
    return params[name][...]
  return dequantize(params[name][...], params["scales"][...]).astype(dtype)
