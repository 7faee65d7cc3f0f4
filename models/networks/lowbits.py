"""Weights in eight bits or four: quantisation, and products with them.

A weight is stored as whole numbers, or floats of eight bits, with a scale for
every output, or for every group of inputs of an output: `w = q s`. Rounding is
symmetric, `s = max |w| / M` and `q = round(w / s)`, with M the largest value of
the type (127, 7, or 448 for float8_e4m3fn), as LLM.int8() (Dettmers et al.,
2022, section 2.1) has it by rows. Activations keep their type. A row of a batch
depends on no other: no scale is of activations.

Letters in shapes: N outputs, D inputs, G groups of inputs, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.networks.description import TransformerConfig
from models.networks.linear import Linear, project
from models.networks.mixture import Mixture, MixtureMlp

# What is stored, by name, and M.
KINDS = {
  "int8": (jnp.int8, 127.0),
  "int4": (jnp.int4, 7.0),
  "fp8": (jnp.float8_e4m3fn, 448.0),
}
GROUPS = (32, 64, 128)
_EXPERTS = "experts of mixtures are not stored in few bits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
  """Storage format of a model's weights in few bits.

  Attributes:
    kind: "int8", "int4" or "fp8" (e4m3).
    group: inputs that share a scale, one of `GROUPS`; None for one scale an
      output.
    output: whether the output projection is stored so too, and with it an
      embedding that is tied to it.
    embedding: whether an embedding that is not tied is.

  Raises:
    ValueError: for another kind or group.
  """

  kind: str
  group: int | None = None
  output: bool = True
  embedding: bool = False

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"expected one of {sorted(KINDS)}, got {self.kind!r}")
    if self.group not in (None, *GROUPS):
      raise ValueError(f"group must be one of {GROUPS}, got {self.group!r}")

  @property
  def dtype(self):
    """Type of the stored values."""
    return KINDS[self.kind][0]

  def num_groups(self, inputs: int) -> int:
    """G of a weight of D inputs; ValueError if groups do not divide them."""
    if self.group is None:
      return 1
    if inputs % self.group:
      raise ValueError(
        f"groups of {self.group} do not divide the {inputs} inputs of a weight"
      )
    return inputs // self.group


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
  """Bytes of an array on an accelerator, where four bits are half of one."""
  info = jnp.iinfo if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo
  return math.prod(array.shape) * info(array.dtype).bits // 8


def quantize(weight: Array, form: Format) -> tuple[Array, Array]:
  """The nearest stored values of a weight.

  Args:
    weight: `f[..., N, D]`.
    form: how it is stored.

  Returns:
    Values `[..., N, D]` and scales `f32[..., N, G]`. A group of zeros has the
    scale 0.
  """
  dtype, most = KINDS[form.kind]
  *outer, inputs = weight.shape
  groups = weight.astype(jnp.float32).reshape(
    *outer, form.num_groups(inputs), -1
  )
  scales = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / most
  values = groups / jnp.where(scales == 0, 1, scales)
  if jnp.issubdtype(dtype, jnp.integer):
    values = jnp.round(values)
  return values.astype(dtype).reshape(weight.shape), scales[..., 0]


def dequantize(values: Array, scales: Array) -> Array:
  """The weights that stored values stand for, `f32[..., N, D]`."""
  groups = values.astype(jnp.float32).reshape(*scales.shape, -1)
  return (groups * scales[..., None]).reshape(values.shape)


def products(x: Array, values: Array, scales: Array) -> Array:
  """Products with stored weights, `[..., D], [N, D], [N, G] -> [..., N]`.

  With one scale an output that is applied to the products, where it costs
  nothing; values of eight bits are exact in bfloat16. Scales of groups are not,
  and small ones are nothing in float16: weights are rounded once multiplied.
  """
  if scales.shape[-1] > 1:
    return project(x, dequantize(values, scales).astype(x.dtype))
  wide = jnp.promote_types(x.dtype, jnp.float32)
  # Sums of values that are not scaled yet can be beyond float16's range.
  result = wide if x.dtype == jnp.float16 else None
  found = project(x, values.astype(x.dtype), result)
  return (found.astype(wide) * scales[:, 0]).astype(x.dtype)


class LowLinear(nnx.Module):
  """A `Linear` whose weight is stored in few bits.

  Args:
    linear: the projection.
    form: how its weight is stored.
  """

  def __init__(self, linear: Linear, form: Format):
    self.dtype = linear.dtype
    values, scales = quantize(linear.weight[...], form)
    self.weight, self.scales = nnx.Param(values), nnx.Param(scales)
    self.bias = linear.bias

  def __call__(self, x: Array) -> Array:
    """`[..., n_in] -> [..., n_out]`."""
    y = products(x.astype(self.dtype), self.weight[...], self.scales[...])
    return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class LowEmbed(nnx.Module):
  """An `nnx.Embed` whose table is stored in few bits; also for logits.

  Args:
    embed: the embedding, `[V, D]`.
    form: how it is stored.
  """

  def __init__(self, embed: nnx.Embed, form: Format):
    self.dtype = jnp.dtype(embed.dtype)
    values, scales = quantize(embed.embedding[...], form)
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
    return products(x.astype(self.dtype), self.embedding[...], self.scales[...])


def lower(module: nnx.Module, form: Format) -> None:
  """Stores the weights of a module's projections in few bits, in place.

  Args:
    module: a `models.networks.transformer.Transformer`, or one of its layers.
    form: how they are stored.

  Raises:
    ValueError: for a mixture of experts, whose weights are none of these.
  """
  nodes = [node for _, node in nnx.iter_modules(module)]
  if any(isinstance(node, MixtureMlp) for node in nodes):
    raise ValueError(_EXPERTS)
  tied = not hasattr(module, "lm_head")
  for node in nodes:
    for name, child in list(vars(node).items()):
      if name == "kv_b":  # of latents, whose halves queries and sums read
        continue
      if isinstance(child, Linear) and (form.output or name != "lm_head"):
        setattr(node, name, LowLinear(child, form))
      elif name == "embed" and isinstance(child, nnx.Embed):
        if form.output if tied else form.embedding:
          setattr(node, name, LowEmbed(child, form))


def check_weights(
  config: TransformerConfig, form: Format | None, *, on_mesh: bool
) -> None:
  """Raises ValueError for a model whose weights are not stored so.

  Args:
    config: of the model, decoder-only.
    form: how its weights are to be stored; None for its dtype.
    on_mesh: whether its layers are stacked.
  """
  if form is None:
    return
  layers = map(config.layer, range(config.num_layers))
  if any(isinstance(layer.feed_forward, Mixture) for layer in layers):
    raise ValueError(_EXPERTS)
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
  if config.layer(0).attention.latent is not None:
    raise ValueError("a cache of latents is not stored in eight bits")


def lowered(params: nnx.State, expected: nnx.State, form: Format) -> nnx.State:
  """Parameters of a module for the same module after `lower`.

  Args:
    params: of the module; those of stacked layers have a leading axis.
    expected: what the lowered module takes, or its shapes.
    form: how weights are stored.
  """
  flat = dict(nnx.to_flat_state(params))
  for path, _ in nnx.to_flat_state(expected):
    if path[-1] == "scales":
      name = "embedding" if path[-2] == "embed" else "weight"
      where = (*path[:-1], name)
      weight = flat[where][...]
      convert = jax.jit(
        lambda weight: quantize(weight, form),
        out_shardings=_places(weight, form),
      )
      flat[where], flat[path] = map(nnx.Param, convert(weight))
  return nnx.from_flat_state(list(flat.items()))


def _places(weight: Array, form: Format):
  """Shardings of a weight's values and scales; None without a mesh."""
  where = weight.sharding
  if not isinstance(where, NamedSharding):
    return None
  spec = (*where.spec, *[None] * (weight.ndim - len(where.spec)))
  last = None if form.group is None else spec[-1]
  return where, NamedSharding(where.mesh, P(*spec[:-1], last))


def whole_table(params: nnx.State, name: str, dtype) -> Array:
  """A module's parameter of that name, as it is or dequantised."""
  if "scales" not in params:
    return params[name][...]
  return dequantize(params[name][...], params["scales"][...]).astype(dtype)
