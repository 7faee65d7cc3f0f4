"""Tensors of published heads: their files, and one name for each.

Projects call the same tensor by different names, and save it as safetensors or
as torch does. Here they get one name each, and fill a network's parameters.
"""

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import draft_vocabulary
from models import sharding as sharding_lib
from models.formats import json_files, safetensors_file, torch_file, weights
from models.formats.families.family import AS_IS, Layout
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadModule, HeadShape, Target
from models.networks.description import TransformerConfig
from models.networks.quantized_tensor import is_quantized
from models.sharding import Sharding

# Other names of the same, in order.
_ALIASES = (
  (re.compile(r"^(model|eagle)\."), ""),
  (re.compile(r"^midlayer\."), "layers.0."),
  (re.compile(r"^draft_id_to_target_id$"), "d2t"),
  (re.compile(r"^fc_norms\."), "fc_norm."),
  # Medusa's own: head, block (the last one is the projection); and vLLM's.
  (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"heads.\1.blocks.\2."),
  (re.compile(r"^(\d+)\.\d+\.weight$"), r"heads.\1.lm_head.weight"),
  (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\."), r"heads.\1.blocks.\2."),
  (re.compile(r"^lm_heads\.(\d+)\."), r"heads.\1.lm_head."),
)  # fmt: skip
FLOATS = ("F16", "BF16", "F32", "F64")


def normal_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors by the names of the normal form.

  Raises:
    CheckpointError: if two have one name.
  """
  renamed: dict[str, Tensor] = {}
  for name, tensor in _of_head(tensors).items():
    for pattern, new in _ALIASES:
      name = pattern.sub(new, name)
    if name in renamed:
      raise CheckpointError(f"twice: {renamed[name].name} and {tensor.name}")
    renamed[name] = tensor
  return renamed


def _of_head(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
  """Medusa's heads without the model that they were merged with."""
  prefix = "medusa_head."
  merged = {n: t for n, t in tensors.items() if n.startswith(prefix)}
  return {n.removeprefix(prefix): t for n, t in merged.items()} or tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Mesh and sharding of a head's parameters.

  Attributes:
    mesh: all devices, over all processes.
    sharding: the head's rules on it.
  """

  mesh: Mesh
  sharding: Sharding

  def check(self, sizes: Iterable[int]) -> None:
    """Raises ValueError unless the devices divide all sizes."""
    count = sharding_lib.num_parts(self.sharding, self.mesh)
    if uneven := sorted({size for size in sizes if size % count}):
      raise ValueError(
        f"a head with sizes {uneven} cannot be cut over {count} devices: give "
        "config.draft_devices"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
  """A head's files, opened.

  Attributes:
    shape: the head.
    tensors: by the names of the normal form.
    locate: the name of a parameter's tensor, and how it lies there.
    also: tensors that hold no parameter.
    lent: modules that are the target's where the files have no tensor of them.
    layers: the layers' configuration, for layouts that depend on it.
  """

  shape: HeadShape
  tensors: Mapping[str, Tensor]
  locate: Callable[[Sequence], tuple[str, Layout]]
  also: frozenset[str] = frozenset()
  lent: frozenset[str] = frozenset({"embed", "lm_head"})
  layers: TransformerConfig | None = None


def by_table(table: Mapping[str, str]) -> Callable[[Sequence], tuple]:
  """`Opened.locate` of tensors that are parameters as they are.

  Args:
    table: parameter to tensor, where their names are not the same.
  """

  def locate(path: Sequence) -> tuple[str, Layout]:
    name = ".".join(map(str, path))
    return table.get(name, name), AS_IS

  return locate


def fill(
  opened: Opened, target: Target, *, dtype, place: Place | None = None
) -> HeadModule:
  """The network of a head's tensors.

  Args:
    opened: the head's files.
    target: the model that it drafts for, with its arrays.
    dtype: of the parameters.
    place: where they lie; None for one device.

  Raises:
    CheckpointError: listing every tensor that is left over, missing or of
      another shape or type.
    ValueError: for ids that are no draft vocabulary.
  """
  tensors, config = opened.tensors, opened.shape.config
  make = lambda: config.make(dtype=dtype, rngs=nnx.Rngs(0))
  graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
  state = dict(nnx.to_flat_state(params))
  lent = {"embed": target.embedding, "lm_head": target.output}
  expected = {}
  for key, variable in state.items():
    name, layout = opened.locate(key)
    array = lent[key[0]] if key[0] in opened.lent else None
    if name in tensors or array is None or array.shape != variable.shape:
      expected[name] = layout.shape(variable.shape, opened.layers)
    else:
      if not is_quantized(array):
        array = jnp.asarray(array, dtype)
      state[key] = variable.replace(array)
  known = {n: t for n, t in tensors.items() if n not in opened.also}
  if problems := weights.mismatches(known, expected, FLOATS):
    raise CheckpointError(
      "the tensors are not those of the head in its config.json:\n  "
      + "\n  ".join(sorted(problems))
    )
  for key, variable in state.items():
    name, layout = opened.locate(key)
    if name in tensors:
      read = lambda index, t=tensors[name], lies=layout, to=variable.dtype: (
        weights.read(t, lies, index, opened.layers).astype(to)
      )
      array = laid_out([*map(str, key)], variable.shape, read, place)
      state[key] = variable.replace(array)
  module = nnx.merge(graphdef, nnx.from_flat_state(state), rest)
  if config.draft_vocab_size is not None:
    ids = draft_vocabulary.read(
      tensors, config.draft_vocab_size, target.vocab_size
    )
    array = laid_out(["target_ids"], ids.shape, lambda i: ids[i], place)
    module.target_ids = nnx.Variable(array)
  return module


def laid_out(
  parts: list[str],
  shape: tuple[int, ...],
  read: Callable[[tuple[slice, ...]], np.ndarray],
  place: Place | None,
) -> jax.Array:
  """A parameter whose parts are read by those who hold them."""
  if place is None:
    return jnp.asarray(read(()))
  spec = sharding_lib.param_spec(parts, place.sharding)
  return jax.make_array_from_callback(
    shape, NamedSharding(place.mesh, spec), read
  )


def open_tensors(
  path: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Tensor]:
  """The tensors of a directory by the names that the files give them.

  Medusa's file lies beside its base model's in some repositories, and counts.
  A head may lie in several files that an index names.
  """
  if not path.is_dir():
    raise FileNotFoundError(f"there is no directory {str(path)!r}")
  others = sorted(f.name for f in path.glob("*.safetensors"))
  for name in (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    *(others if len(others) == 1 else ()),
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
  ):
    if not (path / name).is_file():
      continue
    index = name.endswith(".index.json")
    files = json_files.indexed_files(path / name) if index else [path / name]
    opened: dict[str, Tensor] = {}
    for file in files:
      safe = file.suffix == ".safetensors"
      part = (safetensors_file if safe else torch_file).open_tensors(
        file, stack
      )
      if twice := sorted({*opened} & {*part}):
        raise CheckpointError(f"twice in {path}: {', '.join(twice)}")
      opened |= part
    return opened
  raise FileNotFoundError(
    f"there are no weights of a head in {path}: expected one .safetensors "
    "file, an index of several, medusa_lm_head.pt or pytorch_model.bin, got "
    f"{others or 'none'}"
  )
