"""Published MTP heads, in their target's files or in files of their own.

`FORMS` has the tensor names of each family and of the `speculators` library.
Embedding and output projection are the target's; if the files repeat them,
they must be equal.

MiMo's projection takes the hidden state before the embedding, so its columns
are swapped on read. Some servers zero the embedding of a text's first token;
here, as in transformers, it is kept.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models import head_shapes
from models.formats import (
  experts,
  head_files,
  head_settings,
  json_files,
  weights,
)
from models.formats.families import FAMILIES, llama
from models.formats.families.family import AS_IS, Layout
from models.formats.families.reading import get
from models.formats.huggingface_config import config_from_json, of_text
from models.formats.weights import Tensor
from models.head_shapes import HeadShape, Target
from models.networks.description import TransformerConfig
from models.networks.mtp import MtpConfig
from models.networks.transformer import Features


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
  """Naming scheme of a head's tensors.

  Attributes:
    names: pattern of normalized names; the groups are `number`, the head's
      layer (optional), and `rest`.
    after_layers: whether layer numbers continue the target's.
    modules: maps the network's modules to their names in `rest`.
    layer: prefix of `rest` for tensors of the decoder layer.
    copies: maps names in `rest` of the target's tensors to the target's names.
    hidden_first: whether the projection takes the hidden state first.
    several: whether there may be several layers, each with all modules.
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
  names=re.compile(r"mtp\.(?P<rest>.+)"),
  modules=_modules("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
  layer="layers.0.",
)
DEEPSEEK = Form(
  names=re.compile(r"layers\.(?P<number>\d{1,9})\.(?P<rest>.+)"),
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
MIMO = dataclasses.replace(SPECULATORS, hidden_first=True, several=True)
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
_DEPTHS = (
  "num_nextn_predict_layers",
  "num_mtp_layers",
  "mtp_num_hidden_layers",
)
_BUFFER = re.compile(r".+\.rotary_emb\.inv_freq")


def matches(config: Mapping[str, Any]) -> bool:
  """True if a configuration is of a separate head in speculators' format."""
  return config.get("speculators_model_type") == "mtp"


def shape(config: Mapping[str, Any], target: Target) -> HeadShape:
  """The shape of the head that a configuration describes.

  Args:
    config: the contents of `config.json`, the target's if the head is in its
      files.
    target: the model that a separate head drafts for.

  Raises:
    ValueError: for unknown settings, or a head for another target.
  """
  described = head_shapes.mtp_shape(
    config_from_json(_of_layer(config)),
    num_depths=_num_depths(config, _form(config)),
  )
  if matches(config):
    head_settings.refuse_other_target(described.config.layers, target)
  return described


def _num_depths(config: Mapping[str, Any], form: Form) -> int:
  """The number of layers of the head that a configuration gives; default 1."""
  given = {**_of_layer(config)} | {
    k: v for k, v in config.items() if v is not None
  }
  values = {name: get(given, name, int, None) for name in _DEPTHS}
  count = json_files.agreed(values) or 1
  if count > 1 and not form.several:
    raise ValueError(f"the MTP head must have one layer, got {count}")
  return count


def _form(config: Mapping[str, Any]) -> Form:
  """The naming scheme of a checked configuration's files."""
  separate = matches(config)
  return SPECULATORS if separate else FORMS[of_text(config)["model_type"]]


def _of_layer(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """Settings of a model whose layers are like the head's."""
  if not matches(config):
    settings = of_text(config)
    if settings.get("model_type") not in FORMS:
      raise ValueError(
        f"model_type of a target with an MTP head must be one of {[*FORMS]}, "
        f"got {settings.get('model_type')!r}"
      )
    # DeepSeek's and GLM's heads have a mixture even if all of the target's
    # layers are dense, as in transformers' `PreTrainedConfig.get_mtp_config`.
    if settings["model_type"] == "glm4_moe_lite":
      kinds = ["sparse"] * settings["num_hidden_layers"]
      return {**settings, "mlp_layer_types": kinds}
    if FORMS[settings["model_type"]] is DEEPSEEK:
      return {**settings, "first_k_dense_replace": 0}
    return settings
  known = {"num_nextn_predict_layers"}
  return of_text(head_settings.speculators_layers(config, known, None))


def open_head(
  config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target
) -> head_files.HeadFiles:
  """Opens a head.

  Args:
    config, target: as for `shape`.
    tensors: the tensors of all its files, by normalized name.

  Raises:
    ValueError: like `shape`, or if there is no head.
  """
  described, settings = shape(config, target), _of_layer(config)
  family, form = settings["model_type"], _form(config)
  first = config_from_json(settings).num_layers if form.after_layers else 0
  named = _named(form, tensors, first)
  if not named:
    raise ValueError(f"there is no MTP head: no tensor {form.names.pattern}")
  rest = {n: t for n, t in tensors.items() if not form.names.fullmatch(n)}
  # A tied target's output projection is its embedding.
  embedding = rest.get("embed_tokens.weight")
  copies = {
    name: (tensor, rest.get(form.copies[part], embedding))
    for name, tensor in named.items()
    if (part := name.partition(".")[2]) in form.copies
  }
  own = experts.of_projections(experts.of_experts(named), FAMILIES[family])
  return head_files.HeadFiles(
    shape=described,
    tensors={**(rest if matches(config) else {}), **own},
    locate=functools.partial(_locate, form, family),
    also=copies,
    copies=[*copies.values()],
  )


def names(config: Any) -> dict[str, str]:
  """Tensor names of the parameters of a separate head."""
  del config
  return {
    "embed.embedding": "embed_tokens.weight",
    **llama.layer_tensors("layer.", "mtp_layers.0."),
    **{
      f"{ours}.{'weight' if ours == 'fc' else 'scale'}": (
        f"mtp_layers.0.{theirs}.weight"
      )
      for ours, theirs in SPECULATORS.modules.items()
    },
  }


def settings(
  config: MtpConfig, features: Features, dtype: str
) -> dict[str, Any]:
  """The `config.json` of a separate head, in speculators' format.

  Raises:
    ValueError: if it cannot express the head.
  """
  del features
  if config.num_depths > 1:
    raise ValueError("only MTP heads with one layer can be saved")
  return {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    head_settings.NESTED: head_settings.layers_json(config.layers, dtype),
    "num_nextn_predict_layers": 1,
  }


def _named(
  form: Form, tensors: Mapping[str, Tensor], first: int
) -> dict[str, Tensor]:
  """A head's tensors, renamed to start with their layer's number.

  Tensors of decoder layers get a model's names, "layers.0. ...".

  Args:
    form: naming scheme of the files.
    tensors: the tensors of all files.
    first: number of the head's first layer in the files.
  """
  named = {}
  for name, tensor in tensors.items():
    match = form.names.fullmatch(name)
    if not match or _BUFFER.fullmatch(name):
      continue
    rest = match["rest"]
    number = int(match.groupdict().get("number") or first) - first
    if number < 0:
      continue
    module = rest.rpartition(".")[0]
    if module in form.modules.values() or rest in form.copies:
      rest = f"{number}.{rest}"
    elif not form.layer:
      rest = f"layers.{number}.{rest}"
    named[rest] = tensor
  return named


def _exchanged(x: np.ndarray, config: TransformerConfig) -> np.ndarray:
  """Swaps the two halves of a projection's columns."""
  del config
  hidden, embedding = np.split(x, 2, axis=1)
  return np.concatenate([embedding, hidden], axis=1)


_HIDDEN_FIRST = Layout(_exchanged)
_SHARED = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def _locate(form: Form, family: str, path: Sequence) -> tuple[str, Layout]:
  """`HeadFiles.locate`."""
  number = 0
  if path[0] == "later":
    number, path = path[1] + 1, path[2:]
  if path[0] == "layer":
    return weights.locate(("layers", number, *path[1:]), FAMILIES[family])
  if path[0] in _SHARED:
    return _SHARED[path[0]], AS_IS
  turned = form.hidden_first and path[0] == "fc"
  name = f"{number}.{form.modules[path[0]]}.weight"
  return name, _HIDDEN_FIRST if turned else AS_IS
