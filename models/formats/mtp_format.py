"""MTP heads as they are published: in their target's own files, or alone.

Families whose files hold one, and the `speculators` library, call its tensors
by different names; `FORMS` has them. Embedding and output projection are the
target's, and files that hold them once more must hold copies.

MiMo's projection reads the hidden state before the embedding; its columns are
exchanged as they are read. Some servers replace the first embedding of a text
by zeros; here, as in transformers, it is what it is.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import head_shapes
from models.formats import experts, head_files, json_files, weights
from models.formats.families import FAMILIES
from models.formats.huggingface_config import config_from_json, of_text
from models.formats.weights import CheckpointError, Source, Tensor
from models.head_shapes import HeadShape, Target
from models.networks.description import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """Names of the tensors of a head in files.

  Attributes:
    names: a pattern of them; `number` is the head's layer, if it has one, and
      `rest` what follows.
    after_layers: layers are numbered after the target's.
    modules: the network's modules, and what `rest` calls them.
    layer: what `rest` begins with in tensors of the decoder layer.
    copies: what `rest` calls tensors that are the target's, and their names.
    hidden_first: the projection reads the hidden state first.
    several: there may be several layers, each with all modules, numbered.
  """

  names: re.Pattern[str]
  after_layers: bool = False
  modules: Mapping[str, str]
  layer: str = ""
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  hidden_first: bool = False
  several: bool = False


def _modules(*names: str) -> dict[str, str]:
  ours = ("fc", "embed_norm", "hidden_norm", "final_norm")
  return dict(zip(ours, names, strict=True))


QWEN = Form(
  names=re.compile(r"(?:model\.)?mtp\.(?P<rest>.+)"),
  modules=_modules("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
  layer="layers.0.",
)
DEEPSEEK = Form(
  names=re.compile(r"(?:model\.)?layers\.(?P<number>\d{1,9})\.(?P<rest>.+)"),
  after_layers=True,
  several=True,
  modules=_modules("eh_proj", "enorm", "hnorm", "shared_head.norm"),
  copies={
    "embed_tokens.weight": "embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
  },
)
SPECULATORS = Form(
  names=re.compile(r"mtp_layers\.(?P<number>\d{1,9})\.(?P<rest>.+)"),
  modules=_modules(
    "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"
  ),
)
MIMO = dataclasses.replace(
  SPECULATORS,
  names=re.compile(rf"(?:model\.)?{SPECULATORS.names.pattern}"),
  hidden_first=True,
  several=True,
)
# By the target's `model_type`.
FORMS = {
  "qwen3_next": QWEN,
  "qwen3_5_text": QWEN,
  "qwen3_5_moe_text": QWEN,
  "deepseek_v3": DEEPSEEK,
  "glm4_moe": DEEPSEEK,
  "glm4_moe_lite": DEEPSEEK,
  "mimo": MIMO,
}
# Whose layers a head of speculators' may have.
_LAYERS = ("llama", "qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_KNOWN = frozenset(
  """
  speculators_model_type transformer_layer_config num_nextn_predict_layers

  architectures speculators_version speculators_config auto_map model_type
  transformers_version torch_dtype dtype has_no_defaults_at_init
  tie_word_embeddings
  """.split()
)
_BUFFER = re.compile(r".+\.rotary_emb\.inv_freq")


def is_one(config: Mapping[str, Any]) -> bool:
  """True if a configuration is of a head alone, in speculators' form."""
  return config.get("speculators_model_type") == "mtp"


def shape(config: Mapping[str, Any], target: Target | None) -> HeadShape:
  """Shape of the head of a configuration.

  Args:
    config: what its `config.json` holds; of a head in its target's files, the
      target's.
    target: the model that a head alone drafts for.

  Raises:
    ValueError: for settings that are not known, or another target.
  """
  described = head_shapes.mtp_shape(
    config_from_json(_of_layer(config)), num_depths=num_depths(config)
  )
  layer = described.config.layer
  if is_one(config) and target is not None:
    ours = (layer.vocab_size, layer.embed_dim)
    theirs = (target.vocab_size, target.embed_dim)
    if ours != theirs:
      raise ValueError(
        f"it was made for {ours[0]} tokens and width {ours[1]}, and the target "
        f"has {theirs[0]} and {theirs[1]}"
      )
  return described


def num_depths(config: Mapping[str, Any]) -> int:
  """Layers of a head by a configuration as of `shape`; 1 if it says nothing.

  Raises:
    ValueError: as `shape`, or for a number that the head's form does not have.
  """
  settings, alone = _of_layer(config), is_one(config)
  names = ["num_nextn_predict_layers", "num_mtp_layers"]
  names += [] if alone else ["mtp_num_hidden_layers"]
  several = not alone and FORMS[settings["model_type"]].several
  counts = set()
  for given in (config, settings):
    for name in names:
      if (count := given.get(name)) is None:
        continue
      if type(count) is not int or count < 1 or (count > 1 and not several):
        raise ValueError(
          f"MTP heads of one layer{' or more' if several else ''} are read, "
          f"got {name} {count!r}"
        )
      counts.add(count)
  if len(counts) > 1:
    raise ValueError(f"{' and '.join(names)} must agree, got {sorted(counts)}")
  return counts.pop() if counts else 1


def _of_layer(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The settings of the model that a head's layer is like."""
  if not is_one(config):
    settings = of_text(config)
    if settings.get("model_type") not in FORMS:
      raise ValueError(
        f"MTP heads are read of targets of {[*FORMS]}, got "
        f"{settings.get('model_type')!r}"
      )
    # DeepSeek's and GLM's heads have a mixture, even if all of the target's
    # layers are dense: as of transformers' `PreTrainedConfig.get_mtp_config`.
    if settings["model_type"] == "glm4_moe_lite":
      kinds = ["sparse"] * settings["num_hidden_layers"]
      return {**settings, "mlp_layer_types": kinds}
    if FORMS[settings["model_type"]] is DEEPSEEK:
      return {**settings, "first_k_dense_replace": 0}
    return settings
  json_files.refuse_unknown(config, _KNOWN)
  settings = config.get("transformer_layer_config")
  if not isinstance(settings, Mapping):
    raise ValueError("transformer_layer_config must be an object")
  settings = of_text(settings)
  if settings.get("model_type") not in _LAYERS:
    raise ValueError(
      f"transformer_layer_config must be of {[*_LAYERS]}, got "
      f"{settings.get('model_type')!r}"
    )
  return settings


def parameters(
  path: pathlib.Path,
  config: Mapping[str, Any],
  tensors: Mapping[str, Tensor],
  *,
  compared: bool,
) -> dict[str, Tensor]:
  """The tensors of a head, as its network's parameters and by their names.

  Args:
    path: of the directory, for messages.
    config: as of `shape`.
    tensors: by the names that the files give them.
    compared: whether copies of the target's are read, and must be equal.

  Raises:
    ValueError: if there is no head.
    CheckpointError: (a ValueError) if its tensors are left over, missing or of
      another shape than they should be; it lists them all.
  """
  settings, described = _of_layer(config), shape(config, None)
  family, layer = settings["model_type"], described.config.layer
  alone = is_one(config)
  form = SPECULATORS if alone else FORMS[family]
  first = config_from_json(settings).num_layers if form.after_layers else 0
  shapes = _shapes(described)
  numbers = range(max(depth for depth, _ in shapes.values()) + 1)
  of_head = _own(form, tensors, first, len(numbers))
  if not any(of_head):
    raise ValueError(f"there is no MTP head: no tensor {form.names.pattern}")
  problems, made = [], {}
  for number in numbers:
    if compared:
      problems += _not_copies(form, of_head[number], tensors)
    source = _source(path, form, of_head[number], layer, family)
    expected = {}
    for key, (depth, size) in shapes.items():
      if depth != number:
        continue
      part = key[2:] if depth else key
      name, layout = _locate(form, part, family)
      expected[name] = size if layout is None else layout.shape(size, layer)
      made[".".join(map(str, key))] = Tensor(
        name=name,
        shape=size,
        kind=head_files.FLOATS[0],
        read=functools.partial(_read, form, source, part),
      )
    wrong = weights.mismatches(source, expected)
    problems += [
      f"{said} (layer {number})" if number else said for said in wrong
    ]
  if problems:
    raise CheckpointError(
      f"the tensors in {path} are not those of its MTP head:\n  "
      + "\n  ".join(sorted(problems))
    )
  rest = {n: t for n, t in tensors.items() if not form.names.fullmatch(n)}
  return made | (rest if alone else {})


def _source(
  path: pathlib.Path,
  form: Form,
  own: Mapping[str, Tensor],
  layer: TransformerConfig,
  family: str,
) -> Source:
  """The tensors of one of a head's layers, by names as `_own` has them."""
  named = {k: t for k, t in own.items() if k not in form.copies}
  if form.hidden_first and (joint := named.get(name := _named(form, "fc"))):
    read = functools.partial(_exchanged, joint)
    named[name] = dataclasses.replace(joint, read=read)
  return Source(
    path=str(path),
    says="config.json",
    config=layer,
    table=FAMILIES[family],
    tensors=experts.of_projections(experts.of_experts(named), FAMILIES[family]),
    kinds=head_files.FLOATS,
  )


def _own(
  form: Form, tensors: Mapping[str, Tensor], first: int, count: int
) -> list[dict[str, Tensor]]:
  """A head's tensors layer by layer, without what a form has before them.

  Those of its decoder layers begin with `layers.0.`; of a layer beyond `count`
  with its number and among the first one's, where nothing expects them.
  """
  named: list[dict[str, Tensor]] = [{} for _ in range(count)]
  for name, tensor in tensors.items():
    match = form.names.fullmatch(name)
    if not match or _BUFFER.fullmatch(name):
      continue
    parts = match.groupdict()
    number, rest = int(parts.get("number") or first) - first, parts["rest"]
    if number < 0:
      continue
    module = rest.rpartition(".")[0]
    if number >= count:
      number, rest = 0, f"layers.{number}.{rest}"
    elif not (
      form.layer or module in form.modules.values() or rest in form.copies
    ):
      rest = f"layers.0.{rest}"
    named[number][rest] = tensor
  return named


def _not_copies(
  form: Form, of_head: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> list[str]:
  """Names of tensors that should be copies of the target's, and are not."""
  wrong = []
  for name in {*form.copies} & {*of_head}:
    theirs = form.copies[name]
    of_target = next(
      (tensors[n] for n in (theirs, f"model.{theirs}") if n in tensors), None
    )
    if of_target is None and theirs == "lm_head.weight":  # tied
      of_target = tensors.get("model.embed_tokens.weight")
    if of_target is None or not _equal(of_head[name], of_target):
      wrong.append(f"not a copy of the target's {theirs}: {of_head[name].name}")
  return wrong


_ROWS = 8192  # compared at once


def _equal(one: Tensor, other: Tensor) -> bool:
  if one.shape != other.shape:
    return False
  count = one.shape[0]
  starts = range(0, count, _ROWS)
  parts = [(slice(i, min(i + _ROWS, count)), slice(None)) for i in starts]
  return all(np.array_equal(one.read(p), other.read(p)) for p in parts)


def _exchanged(joint: Tensor, index: tuple[slice, ...]) -> np.ndarray:
  """A part of a projection whose columns' halves change places."""
  hidden, embedding = np.split(joint.read(()), 2, axis=1)
  return np.concatenate([embedding, hidden], axis=1)[index]


def _shapes(described: HeadShape) -> dict[tuple, tuple[int, tuple[int, ...]]]:
  """Of the head's own parameters, by their paths, with the layer's number."""
  make = lambda: described.config.make(dtype=jnp.float32, rngs=nnx.Rngs(0))
  module = nnx.eval_shape(make)
  state = nnx.state(module, head_shapes.is_own(module))
  number = lambda key: int(key[1]) + 1 if key[0] == "later" else 0
  return {key: (number(key), x.shape) for key, x in nnx.to_flat_state(state)}


def _named(form: Form, module: str) -> str:
  return f"{form.modules[module]}.weight"


def _locate(form: Form, key: tuple, family: str):
  """The tensor of a parameter, and how it holds it; None: as it is."""
  if key[0] in form.modules:
    return _named(form, key[0]), None
  return weights.locate(_in_model(key), FAMILIES[family])


def _in_model(key: tuple) -> tuple:
  """A parameter's path in a model of one layer."""
  return ("layers", 0, *key[1:])


def _read(
  form: Form, source: Source, key: tuple, index: tuple[slice, ...]
) -> np.ndarray:
  """A part of a parameter; all of it at `()`."""
  if key[0] in form.modules:
    return source.tensors[_named(form, key[0])].read(index)
  return weights.part(source, _in_model(key), index, source.config)
