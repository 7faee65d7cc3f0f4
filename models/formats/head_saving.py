"""Writes heads in published formats, for this and other projects.

EAGLE-1 and EAGLE-3 heads are written in their authors' format, or in
`speculators`' if they have switches, windows or several layers, as P-EAGLE
heads always are; Medusa heads in vLLM's; DFlash and DSpark heads in their
authors', or `speculators`' if they have a draft vocabulary or that library's
windows; MTP heads in `speculators`'. Embedding and output projection are left
out if they are the target's and every reader takes them from there.
models/pretrained/README.md says which program reads what.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import draft_vocabulary
from models.formats import (
  dflash_format,
  dspark_format,
  eagle_format,
  json_files,
  medusa_format,
  mtp_format,
  safetensors_file,
)
from models.head_shapes import HeadModule, Target
from models.networks.dflash import ParallelConfig
from models.networks.heads import HeadConfig
from models.networks.transformer import Features

_SPECULATED = 3  # draft tokens that the files of other heads suggest to servers
# Each module has `settings` and `names`.
_FORMATS: dict[str, Any] = {
  "eagle": eagle_format,
  "eagle3": eagle_format,
  "p_eagle": eagle_format,
  "medusa": medusa_format,
  "dflash": dflash_format,
  "dflash2": dflash_format,
  "dspark": dspark_format,
  "mtp": mtp_format,
}


def save(
  module: HeadModule,
  directory: str,
  *,
  features: Features = (),
  dtype=jnp.bfloat16,
  target: Target | None = None,
  verifier: str | None = None,
) -> None:
  """Writes a head that `models.formats.head_checkpoints.load` reads back.

  Args:
    module: the head.
    directory: created if need be; files of the same names are replaced.
    features: the target layers whose inputs an EAGLE-3 or DFlash head reads.
    dtype: dtype of the file: float32, bfloat16 or float16.
    target: the target with its arrays; an embedding or output projection that
      differs from its is written too. None if the head shares both.
    verifier: the target's folder or Hub name; `speculators`' format needs it.

  Raises:
    ValueError: if the format cannot express the head, if verifier is missing,
      or for another dtype.
  """
  config: Any = module.config
  format_ = _format(config)
  settings = format_.settings(config, features, jnp.dtype(dtype).name)
  speculators = "speculators_model_type" in settings
  if speculators:
    settings["speculators_config"] = {
      "algorithm": settings["speculators_model_type"]
    } | _speculators_config(config, verifier)
  if (
    target is not None
    and isinstance(config, ParallelConfig)
    and not (speculators)
  ):
    settings["num_target_layers"] = target.num_layers
  arrays = {
    ".".join(map(str, path)): np.asarray(variable[...])
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
  }
  names, left = format_.names(config), set()
  for name, theirs in (
    ("embed.embedding", target and target.embedding),
    ("lm_head.weight", target and target.output),
  ):
    if name.partition(".")[0] in config.shared and (
      theirs is None or np.array_equal(arrays[name], np.asarray(theirs))
    ):
      left.add(name)
  if speculators and config.kind == "eagle3":
    left.discard("embed.embedding")  # readers take it from the head's file
  tensors = {
    names.get(name, name): array
    for name, array in arrays.items()
    if name not in left
  }
  if config.kind == "eagle3" and not speculators:
    midlayer = lambda name: name.replace("layers.0.", "midlayer.")
    tensors = {midlayer(name): array for name, array in tensors.items()}
  tensors |= _missing_biases(config, tensors)
  if config.draft_vocab_size is not None:
    ids = np.asarray(module.target_ids[...])  # type: ignore[union-attr]
    tensors |= draft_vocabulary.tensors_of(ids, config.layers.vocab_size)
  safetensors_file.save(directory, settings, tensors, dtype=dtype)


def check(config: HeadConfig) -> None:
  """Raises ValueError if no published format can express the head."""
  _format(config).settings(config, (), "float32")


def _format(config: HeadConfig):
  if config.kind not in _FORMATS:
    raise ValueError(f"{config.kind} heads have no format to be saved in")
  return _FORMATS[config.kind]


def _missing_biases(
  config: Any, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Zero biases that the format requires (see `layers_json`)."""
  return {
    other: np.zeros(config.layers.embed_dim, array.dtype)
    for name, array in tensors.items()
    if name.endswith("q_proj.bias")
    and (other := name.replace("q_proj", "o_proj")) not in tensors
  }


def _speculators_config(
  config: HeadConfig, verifier: str | None
) -> dict[str, Any]:
  """The `speculators_config` of any head; servers need all of it."""
  if not verifier:
    raise ValueError(
      "this head is saved in speculators' format, which names its target: "
      "verifier is missing"
    )
  file = pathlib.Path(verifier) / "config.json"
  theirs = json_files.read_object(file) if file.is_file() else {}
  drafted = config.num_predicted or _SPECULATED
  return {
    "default_proposal_method": "greedy",
    "proposal_methods": [
      {"proposal_type": "greedy", "speculative_tokens": drafted}
    ],
    "verifier": {
      "name_or_path": verifier,
      "architectures": theirs.get("architectures") or [],
    },
  }
