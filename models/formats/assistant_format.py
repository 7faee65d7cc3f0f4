"""Gemma 4's assistants, as transformers writes them (`gemma4_assistant`).

`config.json` has the settings of a small Gemma 4 in its `text_config`, all of
whose layers share keys and values, and beside them the width of the target
(`backbone_hidden_size`) and what is said of ordered embeddings. The tensors are
that model's, `pre_projection`, `post_projection`, and with ordered embeddings
`masked_embedding.centroids` and `.token_ordering`, a permutation of all tokens.
Tokens are embedded by the target's table; the assistant's own is its output
projection. Tensors of keys and values, which no layer has, are left out.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.formats import head_files, json_files, weights
from models.formats.families import FAMILIES
from models.formats.families.reading import get
from models.formats.huggingface_config import config_from_json
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadShape, Target
from models.networks.description import AttentionSpec, LayerSpec
from models.networks.gemma_assistant import (
  Assistant,
  AssistantConfig,
  ReadingLayers,
)
from models.networks.transformer import FINAL

_FAMILY = "gemma4_text"
_KNOWN = frozenset(
  """
  model_type text_config backbone_hidden_size use_ordered_embeddings
  num_centroids centroid_intermediate_top_k tie_word_embeddings

  architectures auto_map transformers_version torch_dtype dtype use_cache
  initializer_range bos_token_id eos_token_id pad_token_id boi_token_id
  eoi_token_id image_token_id boa_token_id eoa_token_id eoa_token_index
  audio_token_id video_token_id
  """.split()
)
# Of its text model, which has nothing of these.
_WITHOUT = {
  "hidden_size_per_layer_input": 0,
  "vocab_size_per_layer_input": 0,
  "enable_moe_block": False,
  "use_double_wide_mlp": False,
}
# Parameters whose tensors are no transformer's, and these.
_OWN = {
  "enter.weight": "pre_projection.weight",
  "leave.weight": "post_projection.weight",
  "final_norm.scale": "norm.weight",
  "centroids.weight": "masked_embedding.centroids.weight",
  "embed.embedding": "the target's embedding",
}
_ORDERING = "masked_embedding.token_ordering"
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_PREFIX = re.compile(r"^(?:(?:mtp|language_model|model)\.)+")
_UNUSED = re.compile(r"layers\.\d+\.self_attn\.[kv]_(?:proj|norm)\..+")


def is_one(config: Mapping[str, Any]) -> bool:
  """True if a configuration is of an assistant."""
  return config.get("model_type") == "gemma4_assistant"


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """Shape of the assistant of a configuration.

  Args:
    config: what `config.json` holds.
    target: the model that it drafts for, with its configuration.

  Raises:
    ValueError: for switches that are not known, or another target.
  """
  json_files.refuse_unknown(config, _KNOWN)
  text = _text(config)
  if text.vocab_size != target.vocab_size:
    raise ValueError(
      f"it was made for {text.vocab_size} tokens, and the target has "
      f"{target.vocab_size}"
    )
  width = get(config, "backbone_hidden_size", int, 1536)
  if width != target.embed_dim:
    raise ValueError(
      f"it was made for a target of width {width}, and this one has "
      f"{target.embed_dim}"
    )
  clusters = chosen = 0
  if get(config, "use_ordered_embeddings", bool, False):
    clusters = get(config, "num_centroids", int, 2048)
    chosen = get(config, "centroid_intermediate_top_k", int, 32)
  if target.config is None:
    raise ValueError("it reads a target's cache, and needs its configuration")
  layers = [_reading(text.layer(i), target) for i in range(text.num_layers)]
  return HeadShape(
    config=AssistantConfig(
      layers=ReadingLayers.of_layers(
        layers,
        vocab_size=text.vocab_size,
        embed_dim=text.embed_dim,
        max_positions=text.max_positions,
        norm=text.norm,
        norm_eps=text.norm_eps,
      ),
      num_features=width,
      embed_scale=target.config.embed_scale,
      num_clusters=clusters,
      num_chosen=chosen,
    ),
    features=(FINAL,),
  )


def _text(config: Mapping[str, Any]):
  """Its text model, as if every layer had keys and values of its own."""
  nested = config.get("text_config")
  if not isinstance(nested, Mapping):
    raise ValueError(f"text_config must be an object, got {nested!r:.80}")
  if nested.get("model_type", _FAMILY) != _FAMILY:
    raise ValueError(
      f"its text model must be a {_FAMILY}, got {nested['model_type']!r}"
    )
  for key, only in _WITHOUT.items():
    if nested.get(key, only) != only:
      raise ValueError(f"{key} must be {only!r}, got {nested[key]!r}")
  count = nested.get("num_hidden_layers")
  if nested.get("num_kv_shared_layers") not in (None, 0, count):
    raise ValueError(
      f"num_kv_shared_layers must be of all {count} layers, got "
      f"{nested['num_kv_shared_layers']!r}"
    )
  alone = {"model_type": _FAMILY, "num_kv_shared_layers": 0}
  return config_from_json({**nested, **_WITHOUT, **alone})


def _reading(layer: LayerSpec, target: Target) -> LayerSpec:
  """The layer on the target's last one of its kind that has keys and values.

  Raises:
    ValueError: if there is none, or its heads are others.
  """
  spec, theirs = layer.attention, target.config
  assert isinstance(spec, AttentionSpec)
  assert theirs is not None
  kind = "full" if spec.window is None else "sliding"
  alike = [
    place
    for place, i in enumerate(theirs.cached)
    if (theirs.window(i) is None) == (spec.window is None)
  ]
  if not alike:
    raise ValueError(f"it reads a {kind} layer, and the target has none")
  read = theirs.attentions[theirs.cached[alike[-1]]]
  ours, given = ((a.num_kv_heads, a.head_dim, a.latent) for a in (spec, read))
  if ours != given:
    raise ValueError(
      f"it reads {ours[0]} key/value heads of {ours[1]} channels in {kind} "
      f"layers, and the target's last has {given[0]} of {given[1]}"
    )
  return dataclasses.replace(
    layer, attention=dataclasses.replace(spec, source=alike[-1])
  )


def table(config: Mapping[str, Any]) -> dict[str, str]:
  """The tensor of the output projection, by the name of its parameter."""
  tied = get(config, "tie_word_embeddings", bool, True)
  return {"lm_head.weight": _EMBEDDING if tied else _OUTPUT}


def fill(
  shape: HeadShape,
  table: Mapping[str, str],
  tensors: Mapping[str, Tensor],
  target: Target,
  *,
  path: pathlib.Path,
  dtype,
) -> Assistant:
  """The network of an assistant's tensors.

  Args:
    shape: what `shape` said.
    table: of `table`.
    tensors: by their names.
    target: the model that it drafts for, with its arrays.
    path: of the directory, for messages.
    dtype: of the parameters.

  Raises:
    CheckpointError: if tensors are left over, missing or of another shape; if
      the ordering is no permutation, or an output projection no copy.
  """
  named = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
  named = {k: tensor for k, tensor in named.items() if not _UNUSED.fullmatch(k)}
  output = table["lm_head.weight"]
  make = lambda: shape.config.make(dtype=dtype, rngs=nnx.Rngs(0))
  module, used = head_files.filled(
    path, make, _names(make, output), named,
    {_OWN["embed.embedding"]: target.embedding}, dtype,
  )  # fmt: skip
  if output == _EMBEDDING and _OUTPUT in named:
    copy, of = (named[k].read(()) for k in (_OUTPUT, _EMBEDDING))
    if not np.array_equal(copy, of):
      raise CheckpointError(f"not a copy of the tied embedding: {_OUTPUT}")
  if module.config.num_clusters:
    if _ORDERING not in named:
      raise CheckpointError(f"missing: {_ORDERING}")
    order = named[_ORDERING].read(())
    if not np.array_equal(np.sort(order), np.arange(target.vocab_size)):
      raise CheckpointError(
        f"{_ORDERING} must be a permutation of all {target.vocab_size} tokens"
      )
    module.ordering = nnx.Variable(jnp.asarray(order, jnp.int32))
    used.add(_ORDERING)
  # Of a projection of its own the embedding is read by nobody.
  head_files.refuse_rest(path, named, used | {_EMBEDDING, _OUTPUT})
  return module


def _names(make, output: str) -> dict[str, str]:
  """Parameters and the names of their tensors.

  Args:
    make: makes the module.
    output: the tensor of the output projection.
  """
  names = {**_OWN, "lm_head.weight": output}
  for key, _ in nnx.to_flat_state(nnx.state(nnx.eval_shape(make), nnx.Param)):
    if key[0] == "layers":
      name, _ = weights.locate(key, FAMILIES[_FAMILY])
      names[".".join(map(str, key))] = name
  return names
