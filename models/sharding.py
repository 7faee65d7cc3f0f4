"""Sharding of a model's weights, activations and cache over a mesh.

A mesh has the axes 'data' (rows of a batch; see `models.meshes`) and
'model' (tensor parallelism), and, if the draft has an axis size of its own,
'draft': then the target is cut over 'model' and 'draft' together, the draft
over 'draft' alone. `Sharding` says what is cut over which; XLA's partitioner
does the rest.

Letters: V vocabulary, D model width, N the outputs of a projection (heads times
channels, or the MLP's), L layers, B rows, T tokens, K key/value heads, S slots,
C channels.
"""

import dataclasses
import math

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.networks import mixture
from models.networks.description import TransformerConfig
from models.networks.quantized import scales_spec
from models.networks.quantized_tensor import is_quantized
from specjax.cache import row_major


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
  """The rules of one model; a spec for everything that is large.

  Rows are not named here: over 'data' the whole loop is mapped.

  Attributes:
    embed_vd: the embedding table, and the output projection.
    column_nd: weights whose outputs are cut: queries, keys, values, MLP up.
    row_dn: weights whose inputs are cut: attention out, MLP down.
    bias_n: biases of cut outputs.
    cache_lbksc: keys and values of all layers.
    act_btd: activations between layers.
    logits_btv: what the model returns; whole, for rules read whole
      distributions.
    experts: how experts are cut, "width" or "expert"; see
      `models.networks.mixture.cut_by`.
  """

  embed_vd: P
  column_nd: P
  row_dn: P
  bias_n: P
  cache_lbksc: P
  act_btd: P
  logits_btv: P
  experts: str = "width"

  @property
  def axes(self) -> tuple[str, ...]:
    """Mesh axes that the model is cut over."""
    axes = self.column_nd[0] or ()
    return (axes,) if isinstance(axes, str) else axes


def replicated() -> Sharding:
  """The whole model on every device."""
  return tensor_parallel(())


def tensor_parallel(axes: tuple[str, ...] = ("model",)) -> Sharding:
  """Heads, MLP and vocabulary cut over mesh axes (Megatron's layout)."""
  cut = axes or None
  return Sharding(
    embed_vd=P(cut, None),
    column_nd=P(cut, None),
    row_dn=P(None, cut),
    bias_n=P(cut),
    cache_lbksc=P(None, None, cut, None, None),
    act_btd=P(),
    logits_btv=P(),
  )


def constrain(x: Array, name: str, *, sharding: Sharding | None) -> Array:
  """`x` laid out as a rule says; as it is without rules or without a mesh."""
  if sharding is None or jax.sharding.get_abstract_mesh().empty:
    return x
  x = jax.lax.with_sharding_constraint(x, getattr(sharding, name))
  if name in ("logits_btv", "cache_lbksc"):
    # Left alone, XLA:TPU may put a few tokens where 128 lanes are, and every
    # array of distributions takes 25 times its size; or give passes over one
    # token and over two each their own layout, and copy the caches between
    # them.
    x = row_major(x)
  return x


def param_specs(params, sharding: Sharding):
  """The `PartitionSpec` of every parameter.

  Args:
    params: parameters of `models.networks.stacked`,
      `models.networks.t5_stacked`, `models.networks.transformer` or a head, or
      their shapes.
    sharding: the model's rules.
  """

  def spec(path, weight):
    values = param_spec(names(path), sharding)
    if not is_quantized(weight):
      return values
    scales = scales_spec(values, weight)
    return dataclasses.replace(weight, values=values, scales=scales)

  return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_quantized)


_PER_LAYER = ("per_layer_gate", "per_layer_out", "per_layer_projection")


def param_spec(parts: list[str], sharding: Sharding) -> P:
  """The `PartitionSpec` of the parameter of that name, given in its parts."""
  module, kind = ["", *parts][-2:]
  stacked = parts[0] == "layers" and not parts[1].isdecimal()
  if kind == "embedding":
    cut = module in ("embed", "per_layer_embed")
    spec = sharding.embed_vd if cut else P()
  elif kind == "weight":
    spec = (
      P()
      if module in ("router", "q_a", "kv_a") or module in _PER_LAYER
      else sharding.embed_vd
      if module == "lm_head"
      else sharding.row_dn
      if module in ("out", "down", "delta_out")
      else sharding.column_nd
    )
  elif kind == "bias" and module in ("q", "k", "v", "up", "gate"):
    spec = sharding.bias_n
  elif kind == "conv":
    spec = sharding.column_nd
  elif kind in ("log_decay", "step_bias"):
    spec = sharding.bias_n
  else:
    of_experts = mixture.partition_specs(sharding.experts, sharding.axes)
    spec = of_experts.get(f"{module}.{kind}", P())
  return P(None, *spec) if stacked else spec


def named(mesh: Mesh, specs):
  """`NamedSharding`s of a tree of specs."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), specs,
    is_leaf=lambda x: isinstance(x, P),
  )  # fmt: skip


def kv_heads_for(config: TransformerConfig, size: int) -> TransformerConfig:
  """The config whose key/value heads can be cut in `size` parts.

  Fewer heads than parts are repeated, each for its own queries: the same
  function, with a larger cache.

  Raises:
    ValueError: if heads, MLP or vocabulary cannot be cut so.
  """
  check_cut(config, size)
  return config.with_kv_heads(size)


def check_cut(config, size: int) -> None:
  """Raises ValueError if heads, MLP or vocabulary cannot be cut in parts."""
  widths = []
  for layer in getattr(config, "layers", ()):
    of = layer.attention
    name = "num_heads" if hasattr(of, "num_heads") else "num_key_heads"
    widths.append((name, getattr(of, name)))
  for block in _blocks(config):
    if isinstance(block, mixture.Mixture):
      mixture.cut_by(block, size)
      widths.append(("shared_dim", block.shared_dim))
    else:
      widths.append(("mlp_dim", block.width))
  # T5's sizes, which describes no layers, and those of tables.
  for name in ("num_heads", "mlp_dim", "vocab_size", "per_layer_vocab"):
    widths.append((name, getattr(config, name, 0)))
  for name, width in widths:
    if width % size:
      raise ValueError(
        f"{name} ({width}) cannot be cut over {size} devices: cut the model "
        "over fewer"
      )


def for_experts(config, sharding: Sharding, size: int) -> Sharding:
  """The rules of a model on so many devices: how its experts are cut.

  Raises:
    ValueError: if experts of some layers can be cut by width alone, and those
      of others by expert alone.
  """
  ways = {
    mixture.cut_by(block, size)
    for block in _blocks(config)
    if isinstance(block, mixture.Mixture)
  }
  if len(ways) > 1:
    raise ValueError(f"experts of different layers are cut by {sorted(ways)}")
  return dataclasses.replace(sharding, experts=ways.pop()) if ways else sharding


def _blocks(config) -> list:
  """Feed-forward blocks of a model's layers; T5 has no description of them."""
  layers = getattr(config, "layers", ())
  every = [block for x in layers for block in (x.feed_forward, x.beside)]
  return [block for block in every if block is not None]


def repeat_kv_heads(params, old: TransformerConfig, new: TransformerConfig):
  """Parameters of `models.networks.stacked` for a config of `kv_heads_for`.

  Args:
    params: of `old`; arrays of numpy or jax.
    old: the model as it was trained.
    new: the same with more key/value heads.

  Returns:
    The parameters; keys' and values' weights and biases are larger.

  Raises:
    ValueError: for layers that differ in their heads.
  """
  if len({a.num_kv_heads for a in old.attentions.values()}) > 1:
    raise ValueError(
      "layers that differ in their heads are cut as they are read"
    )
  times = new.attention.num_kv_heads // old.attention.num_kv_heads
  if times == 1:
    return params

  def repeat(path, x):
    if names(path)[-2] not in of_kv_heads(old):
      return x
    return repeat_heads(x, old.attention.head_dim, times, axis=1)

  return jax.tree_util.tree_map_with_path(repeat, params)


def of_kv_heads(config: TransformerConfig) -> tuple[str, ...]:
  """Modules whose parameters have channels for every key/value head."""
  if config.attention.qk_norm == "width":
    return "k", "v", "k_norm"
  return "k", "v"


def repeat_heads(x, head_dim: int, times: int, *, axis: int):
  """Every head of an axis of K * C channels so many times in a row."""
  channels = np.arange(x.shape[axis]).reshape(-1, head_dim)
  return x.take(channels.repeat(times, axis=0).ravel(), axis=axis)


def num_parts(sharding: Sharding, mesh: Mesh) -> int:
  """Devices that each copy of a model is cut over."""
  return math.prod(mesh.shape[axis] for axis in sharding.axes)


def names(path) -> list[str]:
  """Names along a parameter's path, that of the variable's value left out."""
  parts = [str(getattr(k, "key", getattr(k, "name", k))) for k in path]
  return parts[:-1] if parts[-1] == "value" else parts
