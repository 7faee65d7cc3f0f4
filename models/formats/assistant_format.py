"""Gemma 4's assistants, as transformers writes them (`gemma4_assistant`).

`text_config` in `config.json` describes a small Gemma 4 whose layers all read
the target's KV cache; alongside it are the target's width
(`backbone_hidden_size`) and the settings of ordered embeddings. The tensors are
that model's, `pre_projection`, `post_projection`, and for ordered embeddings
`masked_embedding.centroids` and `.token_ordering`, a permutation of all tokens.
Tokens are embedded with the target's table; the assistant's own table is its
output projection. Tensors for keys and values are ignored.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.formats import head_files, json_files, weights
from models.formats.families import FAMILIES
from models.formats.families.family import AS_IS, Layout
from models.formats.families.reading import get
from models.formats.huggingface_config import config_from_json
from models.formats.weights import CheckpointError, Tensor
from models.head_shapes import HeadShape, Target
from models.networks.description import LayerSpec, TransformerConfig
from models.networks.gemma_assistant import AssistantConfig
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
# Features that its text model must not have.
_WITHOUT = {
  "hidden_size_per_layer_input": 0,
  "vocab_size_per_layer_input": 0,
  "enable_moe_block": False,
  "use_double_wide_mlp": False,
}
# The assistant's own modules, and their tensors.
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


def matches(config: Mapping[str, Any]) -> bool:
  """True if a configuration describes an assistant."""
  return config.get("model_type") == "gemma4_assistant"


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """The shape of the assistant that a configuration describes.

  Args:
    config: the contents of `config.json`.
    target: the model that it drafts for, with its configuration.

  Raises:
    ValueError: for unknown switches, or an assistant for another target.
  """
  json_files.refuse_unknown(config, _KNOWN)
  text = _text(config)
  width = get(config, "backbone_hidden_size", int, 1536)
  for name, mine, theirs in (
    ("vocabulary", text.vocab_size, target.vocab_size),
    ("backbone_hidden_size", width, target.embed_dim),
  ):
    if mine != theirs:
      raise ValueError(f"its {name} is {mine}, but the target's is {theirs}")
  clusters = chosen = 0
  if get(config, "use_ordered_embeddings", bool, False):
    clusters = get(config, "num_centroids", int, 2048)
    chosen = get(config, "centroid_intermediate_top_k", int, 32)
  if target.config is None:
    raise ValueError("it reads the target's cache and needs its configuration")
  layers = tuple(_reading(layer, target.config) for layer in text.layers)
  return HeadShape(
    config=AssistantConfig(
      layers=dataclasses.replace(text, layers=layers),
      target_dim=width,
      embed_scale=target.config.embed_scale,
      num_clusters=clusters,
      num_chosen=chosen,
    ),
    features=(FINAL,),
  )


def _text(config: Mapping[str, Any]) -> TransformerConfig:
  """Its text model, as if every layer had its own keys and values."""
  nested = config.get("text_config") or {}
  alone = _WITHOUT | {"model_type": _FAMILY}
  for key, only in alone.items():
    if nested.get(key, only) != only:
      raise ValueError(f"{key} must be {only!r}, got {nested[key]!r}")
  return config_from_json({**nested, **alone, "num_kv_shared_layers": 0})


def _reading(layer: LayerSpec, target: TransformerConfig) -> LayerSpec:
  """Lets a layer read the KV cache of the target's last layer of its kind.

  Raises:
    ValueError: if there is none, or its heads differ.
  """
  spec: Any = layer.attention
  alike = {
    place: target.attentions[i]
    for place, i in enumerate(target.cached)
    if (target.windows[i] is None) == (spec.window is None)
  }
  source, read = next(reversed(alike.items()), (0, None))
  heads = lambda a: a and (a.num_kv_heads, a.head_dim, a.latent)
  if heads(read) != heads(spec):
    kind = "full" if spec.window is None else "sliding"
    raise ValueError(
      f"it reads {spec.num_kv_heads} key/value heads of {spec.head_dim} "
      f"channels in {kind} layers, which the target does not have"
    )
  return dataclasses.replace(
    layer, attention=dataclasses.replace(spec, source=source)
  )


def open_head(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target
) -> head_files.HeadFiles:
  """Opens an assistant.

  Args:
    config, target: as for `shape`.
    tensors: tensors by normalized name.

  Raises:
    ValueError: like `shape`.
  """
  described = shape(config, target)
  named = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
  named = {k: tensor for k, tensor in named.items() if not _UNUSED.fullmatch(k)}
  tied = get(config, "tie_word_embeddings", bool, True)

  def locate(path: Sequence) -> tuple[str, Layout]:
    if path[0] == "layers":
      return weights.locate(path, FAMILIES[_FAMILY])
    if path[0] == "lm_head":
      return _EMBEDDING if tied else _OUTPUT, AS_IS
    return _OWN[path[0]], AS_IS

  def ordering():
    ids, count = named[_ORDERING].read(()), target.vocab_size
    if not np.array_equal(np.sort(ids), np.arange(count)):
      raise CheckpointError(f"{_ORDERING} must be a permutation of all tokens")
    return ids.astype(np.int32)

  return head_files.HeadFiles(
    shape=described,
    tensors=named,
    locate=locate,
    # With an output projection of its own, the embedding is not used.
    also={_ORDERING, _OUTPUT if tied else _EMBEDDING},
    copies=(
      [(named[_OUTPUT], named.get(_EMBEDDING))]
      if tied and _OUTPUT in named
      else ()
    ),
    ids=("ordering", ordering) if described.config.num_clusters else None,
  )
