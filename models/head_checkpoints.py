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
import functools
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from flax import nnx

from models import eagle, heads, torch_file
from models.eagle import EagleConfig
from models.heads import MedusaConfig
from models.huggingface_config import config_from_json
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
    output: `f[D, V]`, the output projection.
  """

  num_layers: int
  embed_dim: int
  vocab_size: int
  embedding: Any
  output: Any


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
      names = set(_normal_names(_open(path, stack)))
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
    tensors = _normal_names(_open(path, stack))
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
  "lm_head.kernel": ("lm_head.weight", True),
  # EAGLE-3's own.
  "input_norm.scale": ("input_norm.weight", False),
  "embed_norm.scale": ("layers.0.input_layernorm.weight", False),
  "hidden_norm.scale": ("layers.0.hidden_norm.weight", False),
  "final_norm.scale": ("norm.weight", False),
  **{f"fc_norms.{i}.scale": (f"fc_norm.{i}.weight", False) for i in range(9)},
}
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
  third = kind == "eagle3" or "layers.0.hidden_norm.weight" in tensors
  layer_json = config
  if kind is not None:
    layer_json = config.get("transformer_layer_config")
    if not isinstance(layer_json, Mapping):
      raise ValueError("transformer_layer_config must be an object")
  layer = _layer(layer_json)
  if layer.vocab_size != target.vocab_size:
    raise ValueError(
      f"it was made for {layer.vocab_size} tokens, and the target has "
      f"{target.vocab_size}"
    )
  if third:
    config_of, features = _third(config, layer, target, tensors)
  else:
    config_of, features = _first(config, layer, target)
  module = eagle.make(config_of, dtype=dtype, rngs=nnx.Rngs(0))
  used = _fill(path, module, _EAGLE, tensors, target, dtype)
  if third and config_of.draft_vocab_size is not None:
    module.target_ids = nnx.Variable(
      jnp.asarray(_target_ids(tensors, layer.vocab_size), jnp.int32)
    )
  if third:  # of a whole vocabulary they say nothing
    used |= {"d2t", "t2d"}
  _refuse_rest(path, tensors, used)
  return Head(
    kind="eagle3" if third else "eagle", module=module, features=features
  )


def _layer(settings: Mapping[str, Any]):
  """The configuration of the head's layer.

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
  layer = dataclasses.replace(layer, tied_embeddings=False)
  if bias is not None:
    layer = dataclasses.replace(layer, qkv_bias=_flag("qkv_bias", bias))
  return layer


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
    not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids)
  ):
    raise ValueError(f"{name} must be a list of layers, got {ids!r}")
  found = tuple(i + shift for i in ids)
  if min(found) < 0 or max(found) > num_layers:
    raise ValueError(
      f"{name} {ids} are not layers of a target of {num_layers} layers"
    )
  return found


def _target_ids(tensors: Mapping[str, Tensor], vocab_size: int) -> np.ndarray:
  """Which token each of the draft vocabulary is, from offsets."""
  if "d2t" not in tensors:
    raise CheckpointError("missing: d2t, which token each drafted one is")
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
  module = heads.Medusa(shape, dtype=dtype, rngs=nnx.Rngs(0))
  table = {}
  for h in range(shape.num_heads):
    table[f"heads.{h}.lm_head.kernel"] = (f"heads.{h}.lm_head.weight", True)
    for b in range(shape.num_layers):
      name = f"heads.{h}.blocks.{b}"
      table[f"{name}.kernel"] = (f"{name}.weight", True)
      table[f"{name}.bias"] = (f"{name}.bias", False)
  used = _fill(path, module, table, tensors, target, dtype)
  _refuse_rest(path, tensors, used)
  return Head(kind="medusa", module=module, features=(FINAL,))


# ------------------------------------------------------------------- tensors

# Other names of the same, in order.
_ALIASES = (
  (re.compile(r"^(model|medusa_head|eagle)\."), ""),
  (re.compile(r"^midlayer\."), "layers.0."),
  (re.compile(r"^draft_id_to_target_id$"), "d2t"),
  (re.compile(r"^fc_norms\."), "fc_norm."),
  # Medusa's own: head, block (the last one is the projection); and vLLM's.
  (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"heads.\1.blocks.\2."),
  (re.compile(r"^(\d+)\.\d+\.weight$"), r"heads.\1.lm_head.weight"),
  (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\."), r"heads.\1.blocks.\2."),
  (re.compile(r"^lm_heads\.(\d+)\."), r"heads.\1.lm_head."),
)  # fmt: skip
# What need not be in a file: then it is the target's.
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_FLOATS = ("F16", "BF16", "F32", "F64")


def _normal_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """Tensors by the names of the normal form.

  Raises:
    CheckpointError: if two have one name.
  """
  found: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    for pattern, new in _ALIASES:
      name = pattern.sub(new, name)
    if name in found:
      raise CheckpointError(f"twice: {found[name].name} and {tensor.name}")
    found[name] = tensor
  return found


def _fill(path, module, table, tensors, target: Target, dtype) -> set[str]:
  """Sets a module's parameters; returns the names of the tensors they are of.

  Raises:
    CheckpointError: listing every tensor that is missing or does not fit.
  """
  state = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
  shared = {
    "embed_tokens.weight": target.embedding, "lm_head.weight": target.output,
  }  # fmt: skip
  problems, used = [], set()
  for key, variable in state.items():
    name, turned = table[".".join(map(str, key))]
    expected = variable.shape[::-1] if turned else variable.shape
    if name not in tensors:
      if name in shared and shared[name].shape == variable.shape:
        state[key] = variable.replace(jnp.asarray(shared[name], dtype))
      else:
        problems.append(f"missing: {name}, of shape {expected}")
      continue
    tensor = tensors[name]
    used.add(name)
    if tensor.shape != expected:
      problems.append(
        f"wrong shape: {tensor.name}, expected {expected}, got {tensor.shape}"
      )
    elif tensor.kind not in _FLOATS:
      problems.append(
        f"wrong type: {tensor.name}, expected one of {_FLOATS}, got "
        f"{tensor.kind}"
      )
    else:
      array = tensor.read(())
      array = array.T if turned else array
      state[key] = variable.replace(jnp.asarray(array.astype(dtype)))
  if problems:
    raise CheckpointError(
      f"the tensors in {path} are not those of the head in its config.json:\n  "
      + "\n  ".join(sorted(problems))
    )
  nnx.update(module, nnx.from_flat_state(state))
  return used


def _refuse_rest(path, tensors: Mapping[str, Tensor], used: set[str]) -> None:
  """Raises CheckpointError for tensors that nobody read."""
  rest = sorted(tensors[name].name for name in set(tensors) - used)
  if rest:
    raise CheckpointError(f"unexpected tensors in {path}: {', '.join(rest)}")


def _open(path: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
  """The tensors of a directory by the names that the files give them."""
  if not path.is_dir():
    raise FileNotFoundError(f"there is no directory {str(path)!r}")
  for file in sorted(path.glob("*.safetensors")):
    try:
      opened = stack.enter_context(safetensors.safe_open(file, "numpy"))
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(f"cannot read {file} as safetensors: {error}") from error
    return {
      name: Tensor(
        name=name,
        shape=tuple(opened.get_slice(name).get_shape()),
        kind=opened.get_slice(name).get_dtype(),
        read=functools.partial(_read, opened, name),
      )
      for name in opened.keys()
    }
  for name in ("medusa_lm_head.pt", "pytorch_model.bin"):
    if (path / name).is_file():
      return torch_file.open_tensors(path / name, stack)
  raise FileNotFoundError(
    f"there are no weights in {path}: expected a .safetensors file, "
    "medusa_lm_head.pt or pytorch_model.bin"
  )


def _read(file: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
  return file.get_tensor(name)[index]


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
