"""Draft heads as they are published: which they are, and their parameters.

A directory with a `config.json` and tensors tells by itself what it is:

- EAGLE-1 and 2 (`fc` over embedding and feature, a layer without a first norm);
- EAGLE-3, as its authors, SpecForge and NVIDIA save it (`midlayer`), and as the
  `speculators` library does (`layers.0`, `speculators_model_type`);
- Medusa, as its authors (`medusa_lm_head.pt`) and as vLLM name its tensors.

The formats differ in how layers are numbered whose features are read, in where
draft tokens' ids are offsets, and in switches; here they become one form. What
is not known is an error, and so is every tensor that is left over, missing or
of another shape. The formats were tested, on files made for it; no published
checkpoint was.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import eagle, head_files, heads
from models.eagle import EagleConfig
from models.heads import MedusaConfig
from models.huggingface_config import config_from_json
from models.layers import TransformerConfig
from models.transformer import FINAL, Features
from models.weights import CheckpointError, Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
  """A head that is loaded.

  Attributes:
    kind: "eagle", "eagle3" or "medusa".
    module: its network.
    features: what it reads of the target (`models.transformer.Features`).
  """

  kind: str
  module: eagle.Eagle | eagle.Eagle3 | heads.Medusa
  features: Features

  def functions(self) -> tuple[Any, Any]:
    """Pure functions and their parameters.

    Returns:
      A `FeatureModel`, or of Medusa a `specjax.drafters.heads.Marginals`.
    """
    if isinstance(self.module, heads.Medusa):
      return heads.as_marginals(self.module)
    return eagle.as_feature_model(self.module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What a head needs to know of its target.

  Attributes:
    num_layers: of the target.
    embed_dim: its width.
    vocab_size: rows of its embedding.
    embedding: `f[V, D]`.
    output: gives the output projection, `f[D, V]`; asked only if it is needed.
  """

  num_layers: int
  embed_dim: int
  vocab_size: int
  embedding: Any
  output: Callable[[], Any]

  def shared(self) -> dict[str, Callable[[], Any]]:
    """What is the target's where a head's file leaves it out."""
    return {
      "embed_tokens.weight": lambda: self.embedding,
      "lm_head.weight": self.output,
    }


def is_head(directory: str) -> bool:
  """Whether a directory holds a head, and not a model of its own."""
  path = pathlib.Path(directory)
  if (path / "medusa_lm_head.pt").is_file():
    return True
  file = path / "config.json"
  if not file.is_file():
    return False
  try:
    config = _read_json(file)
  except ValueError:
    return False
  if _says_head(config):
    return True
  try:
    with contextlib.ExitStack() as stack:
      names = set(head_files.normal_names(head_files.open_tensors(path, stack)))
  except (ValueError, FileNotFoundError):
    return False
  return "fc.weight" in names


def load(directory: str, target: Target, *, dtype=jnp.float32) -> Head:
  """Reads a head.

  Args:
    directory: where it is.
    target: the model that it drafts for.
    dtype: of parameters and activations, whatever the tensors' is.

  Returns:
    The `Head`. Embedding and output projection are the target's own arrays
    where the head has none.

  Raises:
    FileNotFoundError: if a file is not there.
    ValueError: for formats and switches that are not known, or a head that was
      made for another target.
    CheckpointError: (a ValueError) if tensors are left over, missing or of
      another shape than they should be; it lists them all.
  """
  path = pathlib.Path(directory)
  config_file = path / "config.json"
  with contextlib.ExitStack() as stack:
    tensors = head_files.normal_names(head_files.open_tensors(path, stack))
    config = _read_json(config_file) if config_file.is_file() else {}
    try:
      if "medusa_num_heads" in config or any(
        name.startswith("heads.") for name in tensors
      ):
        return _medusa(path, config, tensors, target, dtype)
      return _eagle(path, config, tensors, target, dtype)
    except CheckpointError:
      raise
    except ValueError as error:
      raise ValueError(f"cannot use the head in {path}: {error}") from error


# --------------------------------------------------------------------- EAGLE

_MOST_FUSED = 64  # layers whose features are fused; published heads fuse 3
# Parameter -> the tensor's name in the normal form, and whether it lies turned.
_EAGLE = {
  "embed.embedding": ("embed_tokens.weight", False),
  "fc.kernel": ("fc.weight", True),
  "fc.bias": ("fc.bias", False),
  "attention.q.kernel": ("layers.0.self_attn.q_proj.weight", True),
  "attention.k.kernel": ("layers.0.self_attn.k_proj.weight", True),
  "attention.v.kernel": ("layers.0.self_attn.v_proj.weight", True),
  "attention.out.kernel": ("layers.0.self_attn.o_proj.weight", True),
  "attention.q.bias": ("layers.0.self_attn.q_proj.bias", False),
  "attention.k.bias": ("layers.0.self_attn.k_proj.bias", False),
  "attention.v.bias": ("layers.0.self_attn.v_proj.bias", False),
  "attention.out.bias": ("layers.0.self_attn.o_proj.bias", False),
  "attention.q_norm.scale": ("layers.0.self_attn.q_norm.weight", False),
  "attention.k_norm.scale": ("layers.0.self_attn.k_norm.weight", False),
  "mlp_norm.scale": ("layers.0.post_attention_layernorm.weight", False),
  "mlp.gate.kernel": ("layers.0.mlp.gate_proj.weight", True),
  "mlp.up.kernel": ("layers.0.mlp.up_proj.weight", True),
  "mlp.down.kernel": ("layers.0.mlp.down_proj.weight", True),
  "mlp.gate.bias": ("layers.0.mlp.gate_proj.bias", False),
  "mlp.up.bias": ("layers.0.mlp.up_proj.bias", False),
  "mlp.down.bias": ("layers.0.mlp.down_proj.bias", False),
  "lm_head.kernel": ("lm_head.weight", True),
  # EAGLE-3's own.
  "input_norm.scale": ("input_norm.weight", False),
  "embed_norm.scale": ("layers.0.input_layernorm.weight", False),
  "hidden_norm.scale": ("layers.0.hidden_norm.weight", False),
  "final_norm.scale": ("norm.weight", False),
  **{f"fc_norms.{i}.scale": (f"fc_norm.{i}.weight", False) for i in range(64)},
}
# What a head's configuration may say: of its layer, of the head, and what
# changes nothing. Anything else might change its logits, and is refused.
_KNOWN = frozenset(
  """
  vocab_size hidden_size intermediate_size num_hidden_layers head_dim
  num_attention_heads num_key_value_heads hidden_act rms_norm_eps
  max_position_embeddings rope_theta rope_scaling rope_parameters
  attention_bias mlp_bias tie_word_embeddings sliding_window
  use_sliding_window max_window_layers layer_types model_type rope_interleaved

  bias qkv_bias draft_vocab_size target_hidden_size eagle_config
  eagle_aux_hidden_state_layer_ids norm_before_residual norm_before_fc fc_norm
  norm_output add_para_norm layernorms truncated_vocab_size
  speculators_model_type transformer_layer_config embed_requires_grad

  architectures speculators_version speculators_config auto_map
  transformers_version torch_dtype dtype use_cache initializer_range
  pretraining_tp attention_dropout bos_token_id eos_token_id pad_token_id
  _name_or_path target_model_type num_local_experts num_experts_per_tok
  output_router_logits router_aux_loss_coef
  """.split()
)
# Settings of a head that are no setting of its layer.
_SWITCHES = (
  "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip
_OTHER_KINDS = ("peagle", "dflash", "dspark", "mtp", "mlp", "eagle", "medusa")


def _eagle(path, config, tensors, target: Target, dtype) -> Head:
  kind = config.get("speculators_model_type")
  if kind is not None and kind != "eagle3":
    known = "another head" if kind in _OTHER_KINDS else "unknown"
    raise ValueError(
      f"speculators_model_type must be 'eagle3', got {kind!r} ({known})"
    )
  if unknown := sorted(set(config) - _KNOWN):
    raise ValueError(f"settings that are not known: {', '.join(unknown)}")
  third = kind == "eagle3" or "layers.0.hidden_norm.weight" in tensors
  layer_json = config
  if kind is not None:
    layer_json = config.get("transformer_layer_config")
    if not isinstance(layer_json, Mapping):
      raise ValueError("transformer_layer_config must be an object")
  layer, tied = _layer(layer_json)
  if tied and "embed_tokens.weight" in tensors:
    # Its own embedding is its output projection too.
    tensors = {"lm_head.weight": tensors["embed_tokens.weight"], **tensors}
  if layer.vocab_size != target.vocab_size:
    raise ValueError(
      f"it was made for {layer.vocab_size} tokens, and the target has "
      f"{target.vocab_size}"
    )
  if third:
    config_of, features = _third(config, layer, target, tensors)
  else:
    config_of, features = _first(config, layer, target)
  module, used = head_files.filled(
    path,
    lambda: eagle.make(config_of, dtype=dtype, rngs=nnx.Rngs(0)),
    _EAGLE,
    tensors,
    target.shared(),
    dtype,
  )
  if third and config_of.draft_vocab_size is not None:
    ids = _target_ids(tensors, config_of.draft_vocab_size, layer.vocab_size)
    module.target_ids = nnx.Variable(jnp.asarray(ids, jnp.int32))
  if third:  # of a whole vocabulary they say nothing
    used |= {"d2t", "t2d"}
  head_files.refuse_rest(path, tensors, used)
  return Head(
    kind="eagle3" if third else "eagle", module=module, features=features
  )


def _layer(settings: Mapping[str, Any]) -> tuple[TransformerConfig, bool]:
  """The configuration of the head's layer, and whether embeddings are tied.

  A head may say `qkv_bias`; a missing base of the rotary frequencies is 10,000
  whatever the target's is.
  """
  settings = dict(settings)
  if settings.get("model_type") not in ("llama", "qwen2", "qwen3"):
    settings["model_type"] = "llama"  # as "mixtral", whose heads are dense
  bias = settings.pop("qkv_bias", None)
  settings["num_hidden_layers"] = _one(settings.get("num_hidden_layers", 1))
  settings.setdefault("max_position_embeddings", 2048)
  settings.pop("layer_types", None)
  layer = config_from_json({**settings, "use_sliding_window": False})
  tied = layer.tied_embeddings
  layer = dataclasses.replace(layer, tied_embeddings=False)
  if bias is not None:
    layer = dataclasses.replace(layer, qkv_bias=_flag("qkv_bias", bias))
  return layer, tied


def _one(value: Any) -> int:
  if value != 1:
    raise ValueError(f"num_hidden_layers must be 1 in a head, got {value!r}")
  return 1


def _flag(name: str, value: Any) -> bool:
  if not isinstance(value, bool):
    raise ValueError(f"{name} must be true or false, got {value!r}")
  return value


def _first(config, layer, target: Target) -> tuple[EagleConfig, Features]:
  """EAGLE-1 and 2: one layer over the target's final hidden state."""
  if layer.embed_dim != target.embed_dim:
    raise ValueError(
      f"its width is {layer.embed_dim}, and the target's {target.embed_dim}"
    )
  for switch in ("add_para_norm", "layernorms", "truncated_vocab_size"):
    if config.get(switch):
      raise ValueError(f"{switch} is not supported, got {config[switch]!r}")
  found = EagleConfig(
    layer=layer,
    generation=1,
    num_features=target.embed_dim,
    # Files that do not say have one.
    fc_bias=_flag("bias", config.get("bias", True)),
  )
  return found, (FINAL,)


def _third(
  config, layer, target: Target, tensors: Mapping[str, Tensor]
) -> tuple[EagleConfig, Features]:
  """EAGLE-3 and its descendants."""
  switches = {s: _flag(s, config.get(s, False)) for s in _SWITCHES}
  if config.get("speculators_model_type") is None and "norm_output" in config:
    # The same key means another thing in SpecForge: whether logits are normed.
    if config["norm_output"] is not True:
      raise ValueError("norm_output must be true in this format")
    switches["norm_output"] = False
    if switches["fc_norm"]:
      raise ValueError(
        "whether EAGLE-3.1 feeds back normed states in this format is not known"
      )
  layers = _fused_layers(config, target.num_layers)
  width = config.get("target_hidden_size") or target.embed_dim
  if width != target.embed_dim:
    raise ValueError(
      f"it reads features of {width} channels, the target has "
      f"{target.embed_dim}"
    )
  draft_vocab = config.get("draft_vocab_size")
  if draft_vocab is None or draft_vocab == layer.vocab_size:
    draft_vocab = None
  elif type(draft_vocab) is not int:
    raise ValueError(
      f"draft_vocab_size must be an integer, got {draft_vocab!r}"
    )
  found = EagleConfig(
    layer=layer,
    generation=3,
    num_features=len(layers) * width,
    num_fused=len(layers),
    draft_vocab_size=draft_vocab,
    fc_bias="fc.bias" in tensors,
    **switches,
  )
  return found, layers


def _fused_layers(config, num_layers: int) -> tuple[int, ...]:
  """The layers whose *inputs* are fused, in our numbers (0 is the embedding).

  Three conventions: `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge,
  SGLang, NVIDIA) are outputs of layers, `eagle_aux_hidden_state_layer_ids` at
  the top (speculators) are inputs, and where no file says, the paper's code
  reads the inputs of layers 2, N / 2 and N - 3.
  """
  name = "eagle_aux_hidden_state_layer_ids"
  nested = config.get("eagle_config") or {}
  if not isinstance(nested, Mapping):
    raise ValueError("eagle_config must be an object")
  if nested.get("use_aux_hidden_state", True) is not True:
    raise ValueError("eagle_config.use_aux_hidden_state must be true")
  if nested.get(name) is not None:
    ids, shift = nested[name], 1
  elif config.get(name) is not None:
    ids, shift = config[name], 0
  else:
    ids, shift = [2, num_layers // 2, num_layers - 3], 0
  if (
    not isinstance(ids, list)
    or not 0 < len(ids) <= _MOST_FUSED
    or any(type(i) is not int for i in ids)
  ):
    raise ValueError(f"{name} must be a list of layers, got {ids!r}")
  found = tuple(i + shift for i in ids)
  # What comes after the last layer may be meant with its norm or without.
  if min(found) < 0 or max(found) >= num_layers:
    raise ValueError(
      f"{name} {ids} are not layers of a target of {num_layers} layers"
    )
  return found


def _target_ids(
  tensors: Mapping[str, Tensor], draft_vocab_size: int, vocab_size: int
) -> np.ndarray:
  """Which token each of the draft vocabulary is, from offsets."""
  if "d2t" not in tensors:
    raise CheckpointError("missing: d2t, which token each drafted one is")
  found = tensors["d2t"]
  if found.shape != (draft_vocab_size,) or found.kind not in ("I64", "I32"):
    raise CheckpointError(
      f"wrong shape or type: d2t, expected {draft_vocab_size} integers, got "
      f"{found.kind} of {found.shape}"
    )
  offsets = np.asarray(tensors["d2t"].read(())).astype(np.int64)
  ids = np.arange(len(offsets)) + offsets
  if (np.diff(ids) <= 0).any() or ids.min() < 0 or ids.max() >= vocab_size:
    raise ValueError(
      "d2t must hold offsets that make ids of rising order below "
      f"{vocab_size} (are they ids already?)"
    )
  if "t2d" in tensors:
    known = np.asarray(tensors["t2d"].read(())).astype(bool)
    expected = np.zeros(vocab_size, bool)
    expected[ids] = True
    if known.shape != expected.shape or (known != expected).any():
      raise ValueError("t2d does not mark the tokens that d2t names")
  return ids


# -------------------------------------------------------------------- Medusa


def _medusa(path, config, tensors, target: Target, dtype) -> Head:
  pattern = re.compile(r"heads\.(\d{1,3})\.(blocks\.(\d{1,3})|lm_head)\.")
  found = [pattern.match(name) for name in tensors]
  numbers = [int(m[1]) for m in found if m]
  blocks = [int(m[3]) for m in found if m and m[3] is not None]
  if not numbers:
    raise CheckpointError(f"there are no heads among the tensors in {path}")
  for what, some in (("heads", numbers), ("blocks", blocks)):
    if set(some) != set(range(len(set(some)))):
      raise CheckpointError(f"{what} in {path} are not numbered from 0 on")
  # Published files hold more heads than their configuration says.
  shape = MedusaConfig(
    num_heads=1 + max(numbers),
    num_layers=1 + max(blocks, default=-1),
    embed_dim=target.embed_dim,
    vocab_size=target.vocab_size,
    bias="heads.0.blocks.0.bias" in tensors or not blocks,
  )
  for switch in ("truncated_vocab_size", "original_lm_head"):
    given = config.get(switch)
    if given and given != target.vocab_size:
      raise ValueError(f"{switch} is not supported, got {given!r}")
  table = {}
  for h in range(shape.num_heads):
    table[f"heads.{h}.lm_head.kernel"] = (f"heads.{h}.lm_head.weight", True)
    for b in range(shape.num_layers):
      name = f"heads.{h}.blocks.{b}"
      table[f"{name}.kernel"] = (f"{name}.weight", True)
      table[f"{name}.bias"] = (f"{name}.bias", False)
  module, used = head_files.filled(
    path,
    lambda: heads.Medusa(shape, dtype=dtype, rngs=nnx.Rngs(0)),
    table,
    tensors,
    target.shared(),
    dtype,
  )
  head_files.refuse_rest(path, tensors, used)
  return Head(kind="medusa", module=module, features=(FINAL,))


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    found = json.loads(path.read_text("utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from None
  if not isinstance(found, Mapping):
    raise ValueError(f"{path} must hold a JSON object")
  return found


def _says_head(config: Mapping[str, Any]) -> bool:
  """Whether a configuration is a head's by its own words."""
  names = config.get("architectures")
  names = names if isinstance(names, list) else []
  return (
    "speculators_model_type" in config
    or "medusa_num_heads" in config
    or "eagle_config" in config
    or any(
      "eagle" in str(n).lower() or "medusa" in str(n).lower() for n in names
    )
    or config.get("model_type") in ("medusa", "eagle")
  )
