"""Weights by name, from wherever they lie, to the parameters of a model.

A `Source` is an open checkpoint, whatever its format: a configuration, and
tensors under the names that Hugging Face gives them, each of which can be read
in parts. The file reads top to bottom: which tensor is which parameter (of
decoder-only models `models.formats.families` says it), `load` and
`load_stacked`, and the comparison of the tensors with the configuration.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import sharding as sharding_lib
from models.formats.families import FAMILIES
from models.formats.families.family import (
  AS_IS,
  TRANSPOSED,
  TURNED,
  Layout,
)
from models.networks import stacked, t5, t5_stacked
from models.networks.layers import TransformerConfig
from models.networks.t5 import T5
from models.networks.t5_config import T5Config
from models.networks.transformer import Transformer
from models.sharding import Sharding


class CheckpointError(ValueError):
  """The tensors of a checkpoint are not those of its configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """A tensor of a file, not yet read.

  Attributes:
    name: as the file calls it.
    shape: what reading all of it gives.
    kind: its type, as the file calls it.
    read: the part at some slices, one an axis; all of it at `()`.
  """

  name: str
  shape: tuple[int, ...]
  kind: str
  read: Callable[[tuple[slice, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """An open checkpoint.

  Attributes:
    path: of the directory or the file, for messages.
    says: what in it holds the configuration, for messages.
    config: of the model.
    family: of the model: a `model_type` of `config.json`.
    tensors: by the names of Hugging Face, without the model's prefix.
    kinds: the types of tensors that can be read.
    problems: what is wrong with the tensors already.
  """

  path: str
  says: str
  config: TransformerConfig | T5Config
  family: str
  tensors: Mapping[str, Tensor]
  kinds: tuple[str, ...]
  problems: tuple[str, ...] = ()


# ------------------------------------------------------------------- tensors


def _t5() -> dict[str, str]:
  """T5: two stacks, whose sub-layers are numbered."""
  table = {"embed": "shared", "lm_head": "lm_head"}
  kinds = {
    "encoder": {"attention": "SelfAttention"},
    "decoder": {"attention": "SelfAttention", "cross": "EncDecAttention"},
  }
  for stack, attentions in kinds.items():
    ours, theirs = f"{stack}.layers.#.", f"{stack}.block.#.layer."
    table[f"{stack}.final_norm"] = f"{stack}.final_layer_norm"
    table[f"{stack}.position_bias"] = (
      f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    )
    for place, (name, kind) in enumerate(attentions.items()):
      table[f"{ours}{name}_norm"] = f"{theirs}{place}.layer_norm"
      for part, letter in zip(("q", "k", "v", "out"), "qkvo", strict=True):
        table[f"{ours}{name}.{part}"] = f"{theirs}{place}.{kind}.{letter}"
    last = f"{theirs}{len(attentions)}"
    table[f"{ours}mlp_norm"] = f"{last}.layer_norm"
    for part, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
      table[f"{ours}mlp.{part}"] = f"{last}.DenseReluDense.{name}"
  return table


_T5 = _t5()
# T5 1.0, which has no gate.
_T5_PLAIN = {key: name.replace("wi_1", "wi") for key, name in _T5.items()}
_TABLES = {
  "t5 1.1": _T5,
  "t5 1.0": _T5_PLAIN,
  **{name: family.tensors for name, family in FAMILIES.items()},
}
_LAYOUTS = {name: family.layouts for name, family in FAMILIES.items()}


def in_gguf(family: str) -> str:
  """The family as tensors of GGUF files have it, for `locate`."""
  own = f"{family} of GGUF"
  return own if own in _TABLES else family


for _name, _family in FAMILIES.items():
  if _family.gguf is not None and _family.gguf.tensors:
    _own = f"{_name} of GGUF"
    _TABLES[_own] = {**_family.tensors, **_family.gguf.tensors}
    _LAYOUTS[_own] = {**_family.layouts, **_family.gguf.layouts}

_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,9})\.(.+)")
_LAYER = re.compile(r"(?:(encoder|decoder)\.block|h|layers)\.(\d{1,9})\.")


def locate(path: Iterable[str | int], family: str) -> tuple[str, Layout]:
  """The checkpoint's name, without prefix, and the layout of a parameter.

  Args:
    path: of the parameter in a `Transformer` or a `T5`.
    family: of the model.
  """
  *module, parameter = path
  number = next((str(p) for p in module if isinstance(p, int)), "")
  key = ".".join("#" if isinstance(p, int) else p for p in module)
  if (whole := f"{key}.{parameter}") in _TABLES[family]:
    layout = _LAYOUTS.get(family, {}).get(whole, AS_IS)
    return _TABLES[family][whole].replace("#", number), layout
  name = _TABLES[family][key]
  layout = _LAYOUTS.get(family, {}).get(key, AS_IS)
  suffix = "bias" if parameter == "bias" else "weight"
  return f"{name.replace('#', number)}.{suffix}", layout


def modules(family: str) -> list[str]:
  """The checkpoint's names of modules; `#` is a layer's number."""
  return sorted({*_TABLES[family].values()})


def of_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors of which those of all experts are one, named with a * for them.

  Experts that are not numbered from 0 on, or are not alike, stay apart.
  """
  found: dict[str, dict[int, Tensor]] = {}
  rest = {}
  for name, tensor in tensors.items():
    if parts := _EXPERT.fullmatch(name):
      each = found.setdefault(f"{parts[1]}.*.{parts[3]}", {})
      each[int(parts[2])] = tensor
    else:
      rest[name] = tensor
  for name, each in found.items():
    experts = [each[i] for i in sorted(each)]
    alike = {(tensor.shape, tensor.kind) for tensor in experts}
    if sorted(each) != [*range(len(each))] or len(alike) > 1:
      rest |= {name.replace("*", str(i)): t for i, t in each.items()}
      continue
    rest[name] = Tensor(
      name=name,
      shape=(len(experts), *experts[0].shape),
      kind=experts[0].kind,
      read=functools.partial(_read_experts, experts),
    )
  return rest


def _read_experts(
  experts: Sequence[Tensor], index: tuple[slice, ...]
) -> np.ndarray:
  chosen = experts[index[0]] if index else experts
  return np.stack([tensor.read(index[1:]) for tensor in chosen])


_FUSED = re.compile(r"((?:.+\.)?mlp\.experts)\.(gate_up|down)_proj")


def of_projections(
  tensors: Mapping[str, Tensor], family: str
) -> dict[str, Tensor]:
  """As if experts that are one tensor were many, where the family's are many.

  Args:
    tensors: by name. `experts.gate_up_proj` is `[E, 2 I, D]`, gates before the
      rest, and `experts.down_proj` `[E, D, I]`.
    family: of the model.

  Returns:
    The tensors, named as by `of_experts`; what has another shape, or is there
    under the other name too, stays as it is.
  """
  found = dict(tensors)
  if "layers.#.mlp.experts.*.gate_proj.weight" not in modules(family):
    return found
  for name, tensor in tensors.items():
    if not (parts := _FUSED.fullmatch(name)) or len(tensor.shape) != 3:
      continue
    experts, rows, width = tensor.shape
    halves = ["gate", "up"] if parts[2] == "gate_up" else ["down"]
    new = {f"{parts[1]}.*.{x}_proj.weight": x for x in halves}
    if rows % len(new) or {*new} & {*tensors}:
      continue
    del found[name]
    count = rows // len(new)
    for i, key in enumerate(new):
      found[key] = dataclasses.replace(
        tensor,
        shape=(experts, count, width),
        read=functools.partial(_read_rows, tensor, i * count, count),
      )
  return found


def _read_rows(
  tensor: Tensor, first: int, count: int, index: tuple[slice, ...]
) -> np.ndarray:
  experts, rows, *rest = index or (slice(None), slice(None))
  start, stop, step = rows.indices(count)
  return tensor.read((experts, slice(first + start, first + stop, step), *rest))


# ---------------------------------------------------------------------- load


def load(source: Source, *, dtype=jnp.float32) -> Transformer | T5:
  """Reads a model to one device, a tensor at a time.

  Args:
    source: the checkpoint.
    dtype: of the parameters and activations, whatever the tensors' is (of a
      float16 T5 some parameters are float32).

  Returns:
    The module.

  Raises:
    CheckpointError: if tensors are left over, missing or of another shape or
      type than they should be; it lists them all.
  """
  _check(source)
  config = source.config
  graphdef, state = nnx.split(_abstract(config, dtype))
  state = dict(nnx.to_flat_state(state))
  wanted: dict[str, list] = {}  # tensor -> the parameters that it holds
  for parameter in state:
    name, layout = locate(parameter, source.family)
    wanted.setdefault(name, []).append((parameter, layout))
  for name, parameters in wanted.items():
    tensor = source.tensors[name].read(())
    for parameter, layout in parameters:
      array = layout.take(tensor, config).astype(state[parameter].dtype)
      state[parameter] = state[parameter].replace(jnp.array(array))
  return nnx.merge(graphdef, nnx.from_flat_state(state))


def _abstract(config: TransformerConfig | T5Config, dtype) -> Transformer | T5:
  """The module of a configuration, with shapes for parameters."""
  if isinstance(config, T5Config):
    return t5.abstract(config, dtype=dtype)
  return nnx.eval_shape(
    lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0))
  )


def load_t5(
  source: Source, *, mesh: Mesh, sharding: Sharding, dtype=jnp.bfloat16
) -> tuple[T5Config, t5_stacked.StackedParams]:
  """`load_stacked` of a T5, for `models.networks.t5_stacked`."""
  _check(source)
  config = source.config
  sharding_lib.check_cut(config, sharding_lib.num_parts(sharding, mesh))
  shapes = t5_stacked.abstract_params(config, dtype=dtype)
  params = _read_stacked(
    source, shapes, config, mesh=mesh, sharding=sharding,
    layer=lambda number, stack, *names: (stack, "layers", number, *names),
  )  # fmt: skip
  return config, params


def load_stacked(
  source: Source, *, mesh: Mesh, sharding: Sharding, dtype=jnp.bfloat16
) -> tuple[TransformerConfig, stacked.StackedParams]:
  """Reads a model straight to where its parameters lie on a mesh.

  Every process reads the parts of the files that its own devices hold, and no
  more; nothing is held twice. (The queries, keys and values of GPT-2 and
  GPT-NeoX share tensors, which are read whole, one layer's at a time.)

  Args:
    source: the checkpoint.
    mesh: all devices, over all processes.
    sharding: the model's rules on it.
    dtype: of the parameters, whatever the tensors' is.

  Returns:
    The configuration, whose key/value heads are repeated if they are fewer than
    the devices they are cut over, and the parameters for
    `models.networks.stacked`.

  Raises:
    CheckpointError: as `load`.
    ValueError: for a model that cannot be cut so.
  """
  _check(source)
  config = sharding_lib.kv_heads_for(
    source.config, sharding_lib.num_parts(sharding, mesh)
  )
  params = _read_stacked(
    source, stacked.abstract_params(config, dtype=dtype), config,
    mesh=mesh, sharding=sharding,
    layer=lambda number, *names: ("layers", number, *names),
  )  # fmt: skip
  return config, params


def _read_stacked(
  source: Source,
  shapes,
  config: TransformerConfig | T5Config,
  *,
  mesh: Mesh,
  sharding: Sharding,
  layer: Callable[..., tuple],
):
  """Parameters with stacked layers, read to where they lie.

  Args:
    source: the checkpoint.
    shapes: `{"frame": .., "layers": ..}`, of the parameters.
    config: of the model as it is cut.
    mesh, sharding: as of `load_stacked`.
    layer: `(number, *names)` of a stacked parameter's one layer, as the path of
      a parameter in the model that is not stacked.
  """
  of_kind = {} if isinstance(config, T5Config) else stacked.kinds(config)

  def place(path, shape, spec):
    frame_or_layers, *names = sharding_lib.names(path)
    numbers: Sequence[int] = range(shape.shape[0])
    if frame_or_layers == "layers" and names[0] in of_kind:
      numbers = of_kind[names.pop(0)]

    def read(index):
      if frame_or_layers == "frame":
        return part(source, tuple(names), index, config).astype(shape.dtype)
      layers = numbers[index[0]]
      return np.stack(
        [part(source, layer(i, *names), index[1:], config) for i in layers]
      ).astype(shape.dtype)

    where = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(shape.shape, where, read)

  specs = sharding_lib.param_specs(shapes, sharding)
  return jax.tree_util.tree_map_with_path(place, shapes, specs)


def part(
  source: Source,
  parameter: tuple,
  index: tuple[slice, ...],
  cut: TransformerConfig | T5Config,
) -> np.ndarray:
  """A part of a parameter of a model with `cut`'s key/value heads."""
  name, layout = locate(parameter, source.family)
  tensor, config = source.tensors[name], source.config
  if (
    isinstance(config, TransformerConfig)
    and isinstance(cut, TransformerConfig)
    and parameter[0] == "layers"
    and parameter[-2] in sharding_lib.of_kv_heads(config)
  ):
    own, wanted = (c.attentions[parameter[1]] for c in (config, cut))
    times = wanted.num_kv_heads // own.num_kv_heads
    if times > 1:
      whole = layout.take(tensor.read(()), config)
      rows = sharding_lib.repeat_heads(whole, own.head_dim, times, axis=0)
      return rows[index]
  if layout is AS_IS:
    return tensor.read(index)
  if layout is TRANSPOSED:
    return tensor.read(index[::-1]).T
  if layout is TURNED and index:
    experts, *rest = index
    return tensor.read((experts, *rest[::-1])).swapaxes(1, 2)
  return layout.take(tensor.read(()), config)[index]


# -------------------------------------------------------------------- checks


def _check(source: Source) -> None:
  """Compares the tensors of a checkpoint with its configuration."""
  config, family, tensors = source.config, source.family, source.tensors
  found = [n for t in tensors if (n := _LAYER.match(t))]
  for stack, layers in _layers(config).items():
    numbers = [int(n[2]) for n in found if n[1] == stack]
    if layers > 1 + max(numbers, default=0):
      of = f" in its {stack}" if stack else ""
      raise CheckpointError(
        f"{source.says} in {source.path} is of {layers} layers{of}, and the "
        f"tensors beside it are of {1 + max(numbers, default=-1)}"
      )
  state = nnx.state(_abstract(config, jnp.float32))
  shapes: dict[str, tuple[int, ...]] = {}
  for parameter, variable in nnx.to_flat_state(state):
    name, layout = locate(parameter, family)
    shapes[name] = layout.shape(variable.shape)
    if layout.rows is not None:
      shapes[name] = (layout.rows(config), *shapes[name][1:])
  problems = [*source.problems, *mismatches(source, shapes)]
  if problems:
    raise CheckpointError(
      f"the tensors in {source.path} are not those of the {family} model in "
      f"its {source.says}:\n  " + "\n  ".join(sorted(problems))
    )


def _layers(config: TransformerConfig | T5Config) -> dict[str | None, int]:
  """Layers of each stack, by what its tensors' names begin with."""
  if isinstance(config, T5Config):
    return {"encoder": config.num_encoder_layers, "decoder": config.num_layers}
  return {None: config.num_layers}


def _copies(source: Source) -> dict[str, str]:
  """Tensors that may be in the files only as copies of another."""
  embedding = locate(("embed", "embedding"), source.family)[0]
  names = ["lm_head.weight"] if source.config.tied_embeddings else []
  if isinstance(source.config, T5Config):
    names += [
      f"{stack}.embed_tokens.weight" for stack in _layers(source.config)
    ]
  return dict.fromkeys(names, embedding)


def mismatches(
  source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
  """What is wrong with a checkpoint's tensors, given the expected shapes.

  An embedding that is the output projection too may be in the files a second
  time, but only as a copy.
  """
  tensors, copies = source.tensors, _copies(source)
  problems = [
    f"missing: {name}, of shape {shapes[name]}"
    for name in set(shapes) - set(tensors)
  ]
  for name, tensor in tensors.items():
    shape, tied = tensor.shape, copies.get(name)
    if name not in shapes and tied is None:
      problems.append(f"unexpected: {tensor.name}, of shape {shape}")
    elif (expected := shapes[name if name in shapes else tied]) != shape:
      problems.append(
        f"wrong shape: {tensor.name}, expected {expected}, got {shape}"
      )
    elif tensor.kind not in source.kinds:
      problems.append(
        f"wrong type: {tensor.name}, expected one of {source.kinds}, got "
        f"{tensor.kind}"
      )
    elif name not in shapes and tied in tensors:
      if not np.array_equal(tensor.read(()), tensors[tied].read(())):
        problems.append(f"not a copy of the tied embedding: {tensor.name}")
  return problems
