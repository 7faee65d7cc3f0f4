"""Sharding of a model's weights, activations and cache over a mesh.

A mesh has the axes 'data' (rows of a batch; see `models.meshes`) and 'model'
(tensor parallelism), and 'draft' if the draft is split over fewer devices: then
the target is split over 'model' and 'draft', the draft over 'draft' alone.
`Sharding` names the axes; XLA's partitioner does the rest.
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
from models.networks.params import names
from models.networks.quantized import specs
from models.networks.quantized_tensor import is_quantized
from models.networks.t5_config import T5Config
from specjax.cache import row_major


@dataclasses.dataclass(frozen=True)
class Sharding:
  """How a model is split: heads, MLP and vocabulary (Megatron's layout).

  Rows are not named here: the whole loop is mapped over 'data'.

  Attributes:
    axes: mesh axes that split it; empty to replicate it.
    experts: how experts are split, "width" or "expert"; see
      `models.networks.mixture.cut_by`.
    unrolled: whether layers are unrolled, not stacked and scanned over.
  """

  axes: tuple[str, ...] = ("model",)
  experts: str = "width"
  unrolled: bool = False

  @property
  def cut(self) -> tuple[str, ...] | None:
    """The axes as an entry of a `PartitionSpec`."""
    return self.axes or None

  @property
  def cache_lbksc(self) -> P:
    """Spec of all layers' keys and values: layers, rows, heads, .. ."""
    return P(None, None, self.cut, None, None)


def constrain(x: Array, name: str, *, sharding: Sharding | None) -> Array:
  """Constrains an array's layout on the mesh in use, if there are rules.

  Args:
    x: the array.
    name: "cache_lbksc", keys or values of all layers (or of one, without the
      first axis), split by heads; "act_btd", activations between layers; or
      "logits_btv", which is not split: verification needs whole distributions.
    sharding: the model's rules.
  """
  if sharding is None or jax.sharding.get_abstract_mesh().empty:
    return x
  spec = P()
  if name == "cache_lbksc":
    spec = P(*sharding.cache_lbksc[5 - x.ndim :])
  x = jax.lax.with_sharding_constraint(x, spec)
  # By default XLA:TPU may put few tokens on the 128-lane axis, so arrays of
  # distributions take 25 times their size; or choose different layouts for
  # passes over one and two tokens, and copy the caches between them.
  return x if name == "act_btd" else row_major(x)


def param_specs(params, sharding: Sharding):
  """The `PartitionSpec` of every parameter.

  Args:
    params: parameters of `models.networks.stacked`, of a module or of a head,
      or their shapes.
    sharding: the model's rules.
  """

  def spec(path, weight):
    values = param_spec(names(path), sharding)
    return specs(values, weight) if is_quantized(weight) else values

  return jax.tree_util.tree_map_with_path(spec, params, is_leaf=is_quantized)


# Weights that every device stores in full.
REPLICATED = (
  "router", "q_a", "kv_a", "per_layer_gate", "per_layer_out",
  "per_layer_projection", "gate_proj", "joint_proj", "confidence_head",
  "kernel_projection", "hidden_projection",
)  # fmt: skip


def param_spec(parts: list[str], sharding: Sharding) -> P:
  """The `PartitionSpec` of a parameter, given the parts of its name."""
  module, kind = ["", *parts][-2:]
  stacked = parts[0] == "layers" and not parts[1].isdecimal()
  cut = sharding.cut
  if kind == "embedding":
    spec = P(cut, None) if module in ("embed", "per_layer_embed") else P()
  elif kind == "weight":
    spec = P(cut, None)
    if module in REPLICATED:
      spec = P()
    elif module in ("out", "down", "delta_out"):
      spec = P(None, cut)
  elif kind == "conv":
    spec = P(cut, None)
  elif kind in ("log_decay", "step_bias") or (
    kind == "bias" and module in ("q", "k", "v", "up", "gate")
  ):
    spec = P(cut)
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


def kv_heads_for(config, size: int):
  """The config with key/value heads that can be split into `size` parts.

  If there are fewer heads than parts, each is repeated for its own queries: the
  same function, with a larger cache. (T5 has as many as query heads.)

  Raises:
    ValueError: if heads, MLP or vocabulary cannot be split.
  """
  check_cut(config, size)
  if isinstance(config, T5Config):
    return config
  return config.with_attention(
    lambda a: dataclasses.replace(
      a, num_kv_heads=math.lcm(a.num_kv_heads, size)
    )
  )


def check_cut(config: TransformerConfig | T5Config, size: int) -> None:
  """Raises ValueError if heads, MLP or vocabulary cannot be split."""
  widths = []
  for layer in config.layers:
    of = layer.attention
    name = "num_heads" if hasattr(of, "num_heads") else "num_key_heads"
    widths.append((name, getattr(of, name)))
    for block in layer.blocks:
      if isinstance(block, mixture.Mixture):
        mixture.cut_by(block, size)
        widths.append(("shared_dim", block.shared_dim))
      else:
        widths.append(("mlp_dim", block.width))
  for name in ("vocab_size", "per_layer_vocab"):
    widths.append((name, getattr(config, name, 0)))
  for name, width in widths:
    if width % size:
      raise ValueError(
        f"{name} ({width}) cannot be cut over {size} devices: use "
        "fewer for the model"
      )


def for_experts(
  config: TransformerConfig | T5Config, sharding: Sharding, size: int
) -> Sharding:
  """A model's rules on some devices: how its experts are split.

  Raises:
    ValueError: if some layers' experts can only be split by width, and others'
      only by expert.
  """
  ways = {
    mixture.cut_by(block, size)
    for layer in config.layers
    for block in layer.blocks
    if isinstance(block, mixture.Mixture)
  }
  if len(ways) > 1:
    raise ValueError(f"layers need different expert splits: {sorted(ways)}")
  return dataclasses.replace(sharding, experts=ways.pop()) if ways else sharding


def of_kv_heads(config: TransformerConfig) -> tuple[str, ...]:
  """Modules whose parameters have channels of every key/value head."""
  if config.attention.qk_norm == "width":
    return "k", "v", "k_norm"
  return "k", "v"


def repeat_heads(x, head_dim: int, times: int, *, axis: int):
  """Repeats every head of an axis of K * C channels `times` in a row."""
  channels = np.arange(x.shape[axis]).reshape(-1, head_dim)
  return x.take(channels.repeat(times, axis=0).ravel(), axis=axis)


def num_parts(sharding: Sharding, mesh: Mesh) -> int:
  """Number of devices that each copy of a model is split over."""
  return math.prod(mesh.shape[axis] for axis in sharding.axes)
