"""Formats that hold weights as they are published, without rounding them again.

`models.networks.quantized` stores whole numbers, or floats of eight bits, with
scales, and so do others: where the numbers of every weight that a format stores
are those of the file, they are read as they are.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from models.formats.packed import Parts
from models.formats.weights import Source, abstract, locate
from models.networks import quantized
from models.networks.quantized import Quantization
from models.networks.t5_config import T5Config

_EMBEDDING = ("embed", "embedding")


def holds(source: Source, form: Quantization) -> bool:
  """True if a format holds all weights that it stores as they are published.

  Args:
    source: the checkpoint, of a model that can be stored so.
    form: the format.
  """
  every = _stored(source, form).values()
  return all(packed is not None and packed.fits(form) for packed in every)


def published(
  source: Source, *, on_mesh: bool
) -> tuple[Quantization | None, str]:
  """The format that holds a checkpoint's weights as they are published.

  Output projection and embedding are of it if they fit, else as its dtype.

  Args:
    source: the checkpoint.
    on_mesh: whether its layers are stacked.

  Returns:
    The format, or None and the reason why there is none.
  """
  config = source.config
  if isinstance(config, T5Config):
    return None, "encoder-decoders are not stored in few bits"
  try:
    quantized.check_weights(config, Quantization(dtype="int8"), on_mesh=on_mesh)
  except ValueError as error:
    return None, str(error)
  tied = config.tied_embeddings
  every = _stored(source, Quantization(dtype="int8", embedding=not tied))
  layers = {path: x for path, x in every.items() if path[0] == "layers"}
  experts = {path: x for path, x in layers.items() if path[-2] == "experts"}
  dense = any(layers[path] is not None for path in {*layers} - {*experts})
  layers = layers if dense else experts
  kinds, groups = set(), set()
  for path, packed in layers.items():
    if packed is None or packed.kind is None or packed.group is None:
      name, _ = locate(path, source.table)
      return None, f"{name} has no numbers that a format holds"
    kinds.add(packed.kind)
    if packed.num_groups > 1:
      groups.add(packed.group)
  if len(groups) > 1 or (len(kinds) > 1 and kinds != {"int4", "int8"}):
    return None, "its layers are in several formats"
  if not layers:
    return None, "its layers are not in few bits"
  # MXFP4 has groups, also where inputs are no more than one.
  group = max(groups, default=32 if "fp4" in kinds else None)
  if group not in (None, *quantized.GROUPS):
    return None, f"groups are of {group}, not of {quantized.GROUPS}"
  form = Quantization(
    dtype="int8" if "int8" in kinds else min(kinds),
    group=group,
    output=False,
    dense=dense,
  )

  def fits(path: tuple) -> bool:
    packed = every.get(path)
    return packed is not None and packed.fits(form)

  if not all(map(fits, layers)):
    return None, "some layers have one group, others several"
  apart = {_EMBEDDING, ("lm_head", "weight")}
  for path in every if dense else ():
    if path[0] != "layers" and path not in apart and not fits(path):
      name, _ = locate(path, source.table)
      return None, f"{name} is in another format than its layers"
  return dataclasses.replace(
    form,
    output=fits(_EMBEDDING if tied else ("lm_head", "weight")),
    embedding=not tied and fits(_EMBEDDING),
  ), ""


def _stored(source: Source, form: Quantization) -> dict[tuple, Parts | None]:
  """The parts of the weights that a format stores, by their paths.

  None where a weight is not published in few bits, or lies in another way.
  """
  state = nnx.state(abstract(source.config, jnp.float32, form))
  stored = {}
  for path, _ in nnx.to_flat_state(state):
    if (weight := quantized.weight_of(path)) is not None:
      name, layout = locate(weight, source.table)
      tensor = source.tensors.get(name)
      alike = tensor is not None and layout.of_parts
      stored[weight] = tensor.packed if alike else None
  return stored
