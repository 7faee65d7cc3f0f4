"""Opens the files of published heads and fills a network with their tensors.

Projects name the same tensor differently, and save it with safetensors or
torch. Here each tensor gets one name.
"""

import dataclasses
import pathlib
import re
from collections.abc import (
  Callable,
  Collection,
  Mapping,
  Sequence,
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import draft_vocabulary, head_shapes
from models import sharding as sharding_lib
from models.formats import json_files, safetensors_file, torch_file, weights
from models.formats.families.family import AS_IS, Layout
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadModule, HeadShape, Target
from models.networks.params import shapes_of
from models.networks.quantized_tensor import is_quantized
from models.sharding import Sharding

# Other names of the same tensor, replaced in this order.
_ALIASES = (
  (re.compile(r"^(model|eagle)\."), ""),
  (re.compile(r"^midlayer\."), "layers.0."),
  (re.compile(r"^draft_id_to_target_id$"), "d2t"),
  (re.compile(r"^fc_norms\."), "fc_norm."),
  (re.compile(r"_codebook\.weight$"), "_codebook"),
  # Medusa's own: head, block (the last is the projection).
  (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"blocks.\1.layers.\2."),
  (re.compile(r"^(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
)


def normal_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Renames tensors to the normal form.

  If Medusa heads were merged into their model, keeps only the heads' tensors.

  Raises:
    CheckpointError: if two tensors get the same name.
  """
  prefix = "medusa_head."
  merged = {n: t for n, t in tensors.items() if n.startswith(prefix)}
  renamed: dict[str, Tensor] = {}
  for name, tensor in (merged or tensors).items():
    name = name.removeprefix(prefix)
    for pattern, new in _ALIASES:
      name = pattern.sub(new, name)
    if name in renamed:
      raise CheckpointError(f"twice: {renamed[name].name} and {tensor.name}")
    renamed[name] = tensor
  return renamed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Mesh and sharding of a head's parameters.

  Attributes:
    mesh: all devices, over all processes.
    sharding: the head's sharding rules.
  """

  mesh: Mesh
  sharding: Sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFiles:
  """The opened files of a head.

  Attributes:
    shape: the head's shape.
    tensors: tensors by normalized name.
    locate: maps a parameter's path to its tensor's name and layout.
    also: names of tensors that hold no parameter.
    copies: pairs of tensors that must be equal; None for a missing one.
    ids: name and reader of the module's table of token ids, if it has one.
  """

  shape: HeadShape
  tensors: Mapping[str, Tensor]
  locate: Callable[[Sequence], tuple[str, Layout]]
  also: Collection[str] = ()
  copies: Sequence[tuple[Tensor, Tensor | None]] = ()
  ids: tuple[str, Callable[[], np.ndarray]] | None = None


def by_table(
  shape: HeadShape,
  tensors: Mapping[str, Tensor],
  table: Mapping[str, str],
  target: Target,
) -> HeadFiles:
  """Opens a head whose tensors have the layout of its parameters.

  Args:
    shape: the head's shape.
    tensors: tensors by normalized name.
    table: maps parameter names to tensor names, where these differ.
    target: the model that it drafts for.
  """

  def locate(path: Sequence) -> tuple[str, Layout]:
    name = ".".join(map(str, path))
    return table.get(name, name), AS_IS

  size = shape.config.draft_vocab_size
  read = lambda: draft_vocabulary.read(tensors, size, target.vocab_size)
  return HeadFiles(
    shape=shape,
    tensors=tensors,
    locate=locate,
    also=draft_vocabulary.NAMES,
    ids=None if size is None else ("target_ids", read),
  )


def fill(
  opened: HeadFiles, target: Target, *, dtype, place: Place | None = None
) -> HeadModule:
  """Builds a head's network and reads its parameters.

  Args:
    opened: the head's files.
    target: the model that it drafts for, with its arrays.
    dtype: dtype of the parameters.
    place: mesh and sharding; None for one device.

  Raises:
    CheckpointError: listing every tensor that is extra, missing or of the wrong
      shape or type.
    ValueError: for ids that are not a valid draft vocabulary.
  """
  tensors, config = opened.tensors, opened.shape.config
  make = lambda rngs: head_shapes.make(config, dtype=dtype, rngs=rngs)
  graphdef, params, rest = nnx.split(shapes_of(make), nnx.Param, ...)
  state = dict(nnx.to_flat_state(params))
  layers = getattr(config, "layers", None)
  shared = {"embed": target.embedding, "lm_head": target.output}
  expected, read = {}, {}
  for key, variable in state.items():
    name, layout = opened.locate(key)
    array = shared.get(key[0])
    if name in tensors or array is None or array.shape != variable.shape:
      expected[name] = layout.shape(variable.shape, layers)
      read[key] = name, layout
    else:
      if not is_quantized(array):
        array = jnp.asarray(array, dtype)
      state[key] = variable.replace(array)
  known = {n: t for n, t in tensors.items() if n not in opened.also}
  problems = weights.mismatches(known, expected)
  problems += [
    f"not a copy as it should be: {mine.name}"
    for mine, theirs in opened.copies
    if theirs is None or not weights.equal(mine, theirs)
  ]
  if problems:
    raise CheckpointError(
      "the tensors do not match the head in its config.json:\n  "
      + "\n  ".join(sorted(problems))
    )
  for key, (name, layout) in read.items():
    variable = state[key]
    take = lambda index, t=tensors[name], lies=layout, to=variable.dtype: (
      weights.read(t, lies, index, layers).astype(to)
    )
    array = laid_out([*map(str, key)], variable.shape, take, place)
    state[key] = variable.replace(array)
  module = nnx.merge(graphdef, nnx.from_flat_state(state), rest)
  if opened.ids is not None:
    name, ids = opened.ids[0], opened.ids[1]()
    array = laid_out([name], ids.shape, lambda index: ids[index], place)
    setattr(module, name, nnx.Variable(array))
  return module


def laid_out(
  parts: list[str],
  shape: tuple[int, ...],
  read: Callable[[tuple[slice, ...]], np.ndarray],
  place: Place | None,
) -> jax.Array:
  """A parameter; each process reads only its own shards."""
  if place is None:
    return jnp.asarray(read(()))
  spec = sharding_lib.param_spec(parts, place.sharding)
  return jax.make_array_from_callback(
    shape, NamedSharding(place.mesh, spec), read
  )


def open_tensors(path: pathlib.Path) -> dict[str, Tensor]:
  """Opens the tensors of a directory, under the names in its files.

  Some repositories keep Medusa's file beside the base model's; the former takes
  precedence. A head may be split over several files with an index.
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
      part = (safetensors_file if safe else torch_file).open_tensors(file)
      if twice := sorted({*opened} & {*part}):
        raise CheckpointError(f"twice in {path}: {', '.join(twice)}")
      opened |= part
    return opened
  raise FileNotFoundError(
    f"there are no head weights in {path}: expected one .safetensors file, "
    f"an index of several, or torch's .bin, got {others or 'none'}"
  )
