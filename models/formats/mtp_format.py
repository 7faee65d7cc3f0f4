"""MTP heads in their target's own files, as Qwen3-Next and Qwen3.5 have them.

Tensors are named `mtp.*`: `fc`, `pre_fc_norm_embedding`, `pre_fc_norm_hidden`,
`norm`, and one layer as the target's. Embedding and output projection are the
target's.
"""

import contextlib
import functools
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import head_shapes, sharding
from models.formats import experts, head_files, json_files, weights
from models.formats.head_checkpoints import Head
from models.formats.head_files import Place
from models.formats.huggingface_config import config_from_json, of_text
from models.formats.weights import CheckpointError, Source
from models.head_shapes import HeadShape, Target
from models.networks import mixture
from models.networks.mixture import Mixture

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_NAME = re.compile(r"(?:model\.)?mtp\.(.+)")
_OWN = {
  ("fc", "weight"): "fc.weight",
  ("embed_norm", "scale"): "pre_fc_norm_embedding.weight",
  ("hidden_norm", "scale"): "pre_fc_norm_hidden.weight",
  ("final_norm", "scale"): "norm.weight",
}


def describe(directory: str) -> HeadShape:
  """The head of the target in a directory; none of its numbers is read.

  Raises:
    FileNotFoundError, ValueError: as `load`.
  """
  with contextlib.ExitStack() as stack:
    return _opened(pathlib.Path(directory), stack)[0]


def load(
  directory: str,
  target: Target,
  *,
  dtype=jnp.float32,
  place: Place | None = None,
) -> Head:
  """Reads the head of a target.

  Args:
    directory: of the target.
    target: with its arrays.
    dtype, place: as of `models.formats.head_checkpoints.load`.

  Raises:
    FileNotFoundError: if a file is not there.
    ValueError: for a target that comes with no head, or one of a family whose
      heads are not known; for experts that cannot be cut over the devices.
    CheckpointError: (a ValueError) if tensors of the head are left over,
      missing or of another shape than they should be; it lists them all.
  """
  path = pathlib.Path(directory)
  with contextlib.ExitStack() as stack:
    shape, source = _opened(path, stack)
    if place is not None:
      place.check(shape.even_sizes())
      _check_experts(shape, sharding.num_parts(place.sharding, place.mesh))
    make = lambda: shape.make(dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(nnx.eval_shape(make))
    state = dict(nnx.to_flat_state(state))
    shared = {
      ("embed", "embedding"): target.embedding,
      ("lm_head", "weight"): target.output,
    }
    _check(source, {k: x.shape for k, x in state.items() if k not in shared})
    for key, variable in state.items():
      if key in shared:
        array = jnp.asarray(shared[key], dtype)
      else:
        read = functools.partial(_read, source, key, variable.dtype)
        parts = [str(part) for part in key]
        array = head_files.laid_out(parts, variable.shape, read, place)
      state[key] = variable.replace(array)
    module = nnx.merge(graphdef, nnx.from_flat_state(state))
  return Head(shape=shape, module=module, sharding=place and place.sharding)


def _opened(
  path: pathlib.Path, stack: contextlib.ExitStack
) -> tuple[HeadShape, Source]:
  """What the head is, and its tensors, by names without their prefix."""
  settings = of_text(json_files.read_object(path / "config.json"))
  family = settings.get("model_type")
  if family not in FAMILIES:
    raise ValueError(
      f"MTP heads are read of targets of {[*FAMILIES]}, and {path} is of "
      f"{family!r}"
    )
  shape = head_shapes.mtp_shape(config_from_json(settings))
  tensors = {
    found[1]: tensor
    for name, tensor in head_files.open_tensors(path, stack).items()
    if (found := _NAME.fullmatch(name))
  }
  if not tensors:
    raise ValueError(f"the target in {path} comes without an MTP head (mtp.*)")
  source = Source(
    path=str(path),
    says="config.json",
    config=shape.config.layer,
    family=family,
    tensors=experts.of_projections(experts.of_experts(tensors), family),
    kinds=head_files.FLOATS,
  )
  return shape, source


def _check_experts(shape: HeadShape, devices: int) -> None:
  """Raises ValueError for experts that devices could only have whole.

  The rules of what drafts cut each by its width.
  """
  block = shape.config.layer.layer(0).feed_forward
  if not isinstance(block, Mixture):
    return
  if mixture.cut_by(block, devices) == "expert":
    raise ValueError(
      f"an MTP head's experts of width {block.expert_dim} cannot be cut over "
      f"{devices} devices: give config.draft_devices"
    )


def _of_layer(key: tuple[Any, ...]) -> tuple[Any, ...]:
  """A parameter's path in a model of one layer."""
  return ("layers", 0, *key[1:])


def _check(source: Source, shapes: dict[tuple, tuple[int, ...]]) -> None:
  """Raises CheckpointError unless the tensors are those of the parameters."""
  expected = {}
  for key, shape in shapes.items():
    if key in _OWN:
      expected[_OWN[key]] = shape
    else:
      name, layout = weights.locate(_of_layer(key), source.family)
      expected[name] = layout.shape(shape)
  problems = weights.mismatches(source, expected)
  if problems:
    raise CheckpointError(
      f"the tensors in {source.path} are not those of its MTP head:\n  "
      + "\n  ".join(sorted(problems))
    )


def _read(
  source: Source, key: tuple, dtype, index: tuple[slice, ...]
) -> np.ndarray:
  """A part of a parameter; all of it at `()`."""
  if key in _OWN:
    return source.tensors[_OWN[key]].read(index).astype(dtype)
  found = weights.part(source, _of_layer(key), index, source.config)
  return np.asarray(found).astype(dtype)
