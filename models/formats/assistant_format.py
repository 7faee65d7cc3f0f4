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
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.formats import head_files, json_files, weights
from models.formats.families import FAMILIES
from models.formats.families.family import AS_IS, Layout
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
# Modules that are no transformer's, and their tensors.
_OWN = {
  "enter": "pre_projection.weight",
  "leave": "post_projection.weight",
  "final_norm": "norm.weight",
  "centroids": "masked_embedding.centroids.weight",
  "embed": "the target's embedding",
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
  layers = tuple(_reading(layer, target) for layer in text.layers)
  return HeadShape(
    config=AssistantConfig(
      layers=ReadingLayers(
        layers=layers,
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
    if (theirs.windows[i] is None) == (spec.window is None)
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


def opened(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target
) -> head_files.Opened:
  """An assistant, opened.

  Args:
    config, target: as of `shape`.
    tensors: by the names of the normal form.

  Raises:
    ValueError: as `shape`.
    CheckpointError: (a ValueError) for an output projection beside a tied
      embedding that is no copy of it.
  """
  named = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
  named = {k: tensor for k, tensor in named.items() if not _UNUSED.fullmatch(k)}
  tied = get(config, "tie_word_embeddings", bool, True)
  if tied and _OUTPUT in named:
    copy, of = (named[k].read(()) for k in (_OUTPUT, _EMBEDDING))
    if not np.array_equal(copy, of):
      raise CheckpointError(f"not a copy of the tied embedding: {_OUTPUT}")

  def locate(path: Sequence) -> tuple[str, Layout]:
    if path[0] == "layers":
      return weights.locate(path, FAMILIES[_FAMILY])
    if path[0] == "lm_head":
      return _EMBEDDING if tied else _OUTPUT, AS_IS
    return _OWN[path[0]], AS_IS

  return head_files.Opened(
    shape=shape(config, target),
    tensors=named,
    locate=locate,
    # Of a projection of its own the embedding is read by nobody.
    also=frozenset({_ORDERING, _OUTPUT if tied else _EMBEDDING}),
    lent=frozenset({"embed"}),
  )


def order(module: Assistant, tensors: Mapping[str, Tensor]) -> None:
  """Reads the ordering of an assistant's embeddings, if they are ordered.

  Raises:
    CheckpointError: if it is missing, or no permutation.
  """
  if not module.config.num_clusters:
    return
  if _ORDERING not in tensors:
    raise CheckpointError(f"missing: {_ORDERING}")
  ids, count = tensors[_ORDERING].read(()), module.config.layers.vocab_size
  if not np.array_equal(np.sort(ids), np.arange(count)):
    raise CheckpointError(
      f"{_ORDERING} must be a permutation of all {count} tokens"
    )
  module.ordering = nnx.Variable(jnp.asarray(ids, jnp.int32))
