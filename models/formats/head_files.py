"""Tensors of published heads: their files, and one name for each.

Projects call the same tensor by different names, and save it as safetensors or
as torch does. Here they get one name each, and fill a network's parameters.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import draft_vocabulary
from models import sharding as sharding_lib
from models.formats import json_files, safetensors_file, torch_file
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadModule, HeadShape, Target
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
  for name, tensor in _repeated(_of_head(tensors)).items():
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


_PROJECTION = re.compile(r"(\d{1,3})\.(\d{1,3})\.weight")


def _repeated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Medusa's blocks, each by its name, where a file has what they share once.

  All blocks of a head are one, run as often as the number of its projection
  says; safetensors keeps the first name of it.

  Raises:
    CheckpointError: if some are there, and others are not.
  """
  repeated = dict(tensors)
  for name in tensors:
    if not (parts := _PROJECTION.fullmatch(name)):
      continue
    head, count = parts[1], int(parts[2])
    block = lambda i, h=head: f"{h}.{i}.linear."
    has_layer = [
      any(n.startswith(block(i)) for n in tensors) for i in range(count)
    ]
    if all(has_layer) or not any(has_layer):
      continue
    if has_layer != [True] + [False] * (count - 1):
      missing = [
        f"{block(i)}weight" for i, yes in enumerate(has_layer) if not yes
      ]
      raise CheckpointError(f"missing: {', '.join(missing)}")
    first = [n for n in tensors if n.startswith(block(0))]
    for i in range(1, count):
      for n in first:
        repeated[block(i) + n.removeprefix(block(0))] = tensors[n]
  return repeated


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


def placed(
  array: np.ndarray, parts: list[str], place: Place | None
) -> jax.Array:
  """An array that every process has, where the parameter of that name lies."""
  return laid_out(parts, array.shape, lambda i: array[i], place)


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


def filled(
  path: pathlib.Path,
  make: Callable[[], Any],
  table: Mapping[str, str],
  tensors: Mapping[str, Tensor],
  shared: Mapping[str, Any],
  dtype,
  *,
  place: Place | None = None,
) -> tuple[Any, set[str]]:
  """A module of a file's tensors, and the names of those that it is made of.

  Args:
    path: of the directory, for messages.
    make: makes the module; it is asked for shapes alone.
    table: parameter to tensor, where their names are not the same.
    tensors: by the names of the normal form.
    shared: parameters by the names of tensors that a file may leave out.
    dtype: of the parameters.
    place: where they lie; None for one device.

  Raises:
    CheckpointError: listing every tensor that is missing or does not fit.
  """
  graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
  state = dict(nnx.to_flat_state(params))
  problems, used = [], set()
  for key, variable in state.items():
    parts = [str(part) for part in key]
    name = ".".join(parts)
    name, expected = table.get(name, name), variable.shape
    if name not in tensors:
      value = shared.get(name)
      if value is not None and value.shape == expected:
        state[key] = variable.replace(jnp.asarray(value, dtype))
      else:
        problems.append(f"missing: {name}, of shape {expected}")
      continue
    tensor = tensors[name]
    used.add(name)
    if tensor.shape != expected:
      problems.append(
        f"wrong shape: {tensor.name}, expected {expected}, got {tensor.shape}"
      )
    elif tensor.kind not in FLOATS:
      problems.append(
        f"wrong type: {tensor.name}, expected one of {FLOATS}, got "
        f"{tensor.kind}"
      )
    else:
      read = functools.partial(_part, tensor, variable.dtype)
      array = laid_out(parts, expected, read, place)
      state[key] = variable.replace(array)
  if problems:
    raise CheckpointError(
      f"the tensors in {path} are not those of the head in its config.json:\n  "
      + "\n  ".join(sorted(problems))
    )
  return nnx.merge(graphdef, nnx.from_flat_state(state), rest), used


def fill(
  shape: HeadShape,
  table: Mapping[str, str],
  tensors: Mapping[str, Tensor],
  target: Target,
  *,
  path: pathlib.Path,
  dtype,
  place: Place | None,
) -> HeadModule:
  """The network of a head's tensors.

  Args:
    shape: what the head is.
    table: as of `filled`.
    tensors: by the names of the normal form.
    target: the model that it drafts for, with its arrays.
    path, dtype, place: as of `filled`.

  Raises:
    CheckpointError: if tensors are left over, missing or of another shape.
    ValueError: for a draft vocabulary that is none.
  """
  module, used = filled(
    path,
    lambda: shape.config.make(dtype=dtype, rngs=nnx.Rngs(0)),
    table,
    tensors,
    target.shared(),
    dtype,
    place=place,
  )
  if shape.config.draft_vocab_size is not None:
    ids = draft_vocabulary.read(
      tensors, shape.config.draft_vocab_size, target.vocab_size
    )
    module.target_ids = nnx.Variable(placed(ids, ["target_ids"], place))
  if shape.config.draft_vocab_size is not None or shape.config.kind == "eagle3":
    used |= {"d2t", "t2d"}  # of a whole vocabulary they say nothing
  if shape.config.kind == "medusa":
    used |= {"token_map"}
  refuse_rest(path, tensors, used)
  return module


def _part(tensor: Tensor, dtype, index: tuple[slice, ...]) -> np.ndarray:
  """A part of a parameter; all of it at `()`."""
  return tensor.read(index).astype(dtype)


def refuse_rest(path, tensors: Mapping[str, Tensor], used: set[str]) -> None:
  """Raises CheckpointError for tensors that were not read."""
  rest = sorted(tensors[name].name for name in set(tensors) - used)
  if rest:
    raise CheckpointError(f"unexpected tensors in {path}: {', '.join(rest)}")


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
