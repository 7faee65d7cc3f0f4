"""Reads checkpoints in Hugging Face's format, and writes Llama's.

Neither torch nor transformers is needed: `config.json` is read as JSON, weights
from safetensors. The file reads top to bottom: the tables that say which tensor
of a checkpoint is which parameter, `load`, `save_llama`. What `config.json`
says is translated in huggingface_config.py.

Whatever would change the logits and is not understood is an error; so is every
tensor that is left over, missing or of another shape.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from models import sharding as sharding_lib
from models import stacked, tokenizers
from models.huggingface_config import config_from_json, llama_json
from models.sharding import Sharding
from models.transformer import Transformer, TransformerConfig


class CheckpointError(ValueError):
  """The tensors of a checkpoint are not those of its configuration."""


# ------------------------------------------------------------------- tensors


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How a tensor of a checkpoint holds a parameter.

  Attributes:
    shape: of the tensor, given the parameter's.
    take: the parameter, given the tensor and the model's configuration.
  """

  shape: Callable[[tuple[int, ...]], tuple[int, ...]]
  take: Callable[[np.ndarray, TransformerConfig], np.ndarray]


# Both are their own inverse, and leave vectors as they are.
_AS_IS = _Layout(lambda s: s, lambda x, c: x)
_TRANSPOSED = _Layout(lambda s: s[::-1], lambda x, c: x.T)


def _qkv_columns(part: int) -> _Layout:
  """GPT-2: queries, keys and values side by side in the last axis."""
  return _Layout(
    lambda s: (*s[:-1], 3 * s[-1]),
    lambda x, c: np.split(x, 3, axis=-1)[part],
  )


def _qkv_per_head(part: int) -> _Layout:
  """GPT-NeoX: rows run over heads, then queries, keys, values, channels."""

  def take(x, c):
    x = x.reshape(c.num_heads, 3, c.head_dim, *x.shape[1:])
    return x[:, part].reshape(-1, *x.shape[3:]).T

  return _Layout(lambda s: (3 * s[-1], *s[:-1]), take)


# Module -> the checkpoint's name for it, and its layout; # is a layer's number.
_GPT2 = {
  "embed": ("wte", _AS_IS),
  "position_embed": ("wpe", _AS_IS),
  "final_norm": ("ln_f", _AS_IS),
  "lm_head": ("lm_head", _TRANSPOSED),
  "layers.#.attention_norm": ("h.#.ln_1", _AS_IS),
  "layers.#.attention.q": ("h.#.attn.c_attn", _qkv_columns(0)),
  "layers.#.attention.k": ("h.#.attn.c_attn", _qkv_columns(1)),
  "layers.#.attention.v": ("h.#.attn.c_attn", _qkv_columns(2)),
  "layers.#.attention.out": ("h.#.attn.c_proj", _AS_IS),
  "layers.#.mlp_norm": ("h.#.ln_2", _AS_IS),
  "layers.#.mlp.up": ("h.#.mlp.c_fc", _AS_IS),
  "layers.#.mlp.down": ("h.#.mlp.c_proj", _AS_IS),
}
_NEOX_QKV = "layers.#.attention.query_key_value"
_GPT_NEOX = {
  "embed": ("embed_in", _AS_IS),
  "final_norm": ("final_layer_norm", _AS_IS),
  "lm_head": ("lm_head", _TRANSPOSED),
  "layers.#.attention_norm": ("layers.#.input_layernorm", _AS_IS),
  "layers.#.attention.q": (_NEOX_QKV, _qkv_per_head(0)),
  "layers.#.attention.k": (_NEOX_QKV, _qkv_per_head(1)),
  "layers.#.attention.v": (_NEOX_QKV, _qkv_per_head(2)),
  "layers.#.attention.out": ("layers.#.attention.dense", _TRANSPOSED),
  "layers.#.mlp_norm": ("layers.#.post_attention_layernorm", _AS_IS),
  "layers.#.mlp.up": ("layers.#.mlp.dense_h_to_4h", _TRANSPOSED),
  "layers.#.mlp.down": ("layers.#.mlp.dense_4h_to_h", _TRANSPOSED),
}
_LLAMA = {
  "embed": ("embed_tokens", _AS_IS),
  "final_norm": ("norm", _AS_IS),
  "lm_head": ("lm_head", _TRANSPOSED),
  "layers.#.attention_norm": ("layers.#.input_layernorm", _AS_IS),
  "layers.#.attention.q": ("layers.#.self_attn.q_proj", _TRANSPOSED),
  "layers.#.attention.k": ("layers.#.self_attn.k_proj", _TRANSPOSED),
  "layers.#.attention.v": ("layers.#.self_attn.v_proj", _TRANSPOSED),
  "layers.#.attention.out": ("layers.#.self_attn.o_proj", _TRANSPOSED),
  "layers.#.attention.q_norm": ("layers.#.self_attn.q_norm", _AS_IS),
  "layers.#.attention.k_norm": ("layers.#.self_attn.k_norm", _AS_IS),
  "layers.#.mlp_norm": ("layers.#.post_attention_layernorm", _AS_IS),
  "layers.#.mlp.gate": ("layers.#.mlp.gate_proj", _TRANSPOSED),
  "layers.#.mlp.up": ("layers.#.mlp.up_proj", _TRANSPOSED),
  "layers.#.mlp.down": ("layers.#.mlp.down_proj", _TRANSPOSED),
}
_TABLES = {"gpt2": _GPT2, "gpt_neox": _GPT_NEOX}  # all others: _LLAMA

# Some files have this prefix, some not; the head has two names in GPT-NeoX.
_PREFIX = re.compile(r"^(transformer|gpt_neox|model)\.")
_OLD_HEAD = re.compile(r"^embed_out\.")
# Causal masks and rotary frequencies, which follow from the configuration.
_BUFFER = re.compile(
  r"rotary_emb\.inv_freq|(h|layers)\.\d+\.(attn|attention|self_attn)\."
  r"(bias|masked_bias|rotary_emb\.inv_freq)"
)
_LAYER = re.compile(r"(?:h|layers)\.(\d{1,9})\.")
_DTYPES = ("F16", "BF16", "F32", "F64")


def _locate(path: Iterable[str | int], family: str) -> tuple[str, _Layout]:
  """The checkpoint's name, without prefix, and the layout of a parameter."""
  *module, parameter = path
  number = next((str(p) for p in module if isinstance(p, int)), "")
  key = ".".join("#" if isinstance(p, int) else p for p in module)
  name, layout = _TABLES.get(family, _LLAMA)[key]
  suffix = "bias" if parameter == "bias" else "weight"
  return f"{name.replace('#', number)}.{suffix}", layout


# ---------------------------------------------------------------------- load


def load(directory: str, *, dtype=jnp.float32) -> Transformer:
  """Reads a checkpoint directory.

  Args:
    directory: holds `config.json` and either `model.safetensors` or
      `model.safetensors.index.json` with the files it names. Nothing is fetched
      from a hub.
    dtype: of the parameters and activations, whatever the files' is.

  Returns:
    The module.

  Raises:
    FileNotFoundError: if the directory or a file is missing.
    ValueError: if a file cannot be read, or the model is not supported.
    CheckpointError: (a ValueError) if tensors are left over, missing or of
      another shape or type than they should be; it lists them all.
  """
  with contextlib.ExitStack() as stack:
    checkpoint = _checked(directory, stack)
    config = checkpoint.config
    graphdef, state = nnx.split(
      nnx.eval_shape(lambda: Transformer(config, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    state = dict(nnx.to_flat_state(state))
    wanted: dict[str, list] = {}  # tensor -> the parameters that it holds
    for parameter in state:
      name, layout = _locate(parameter, checkpoint.family)
      wanted.setdefault(name, []).append((parameter, layout))
    for name, parameters in wanted.items():
      tensor = _read(checkpoint.tensors[name])
      for parameter, layout in parameters:
        array = layout.take(tensor, config).astype(jnp.dtype(dtype))
        state[parameter] = state[parameter].replace(jnp.array(array))
  return nnx.merge(graphdef, nnx.from_flat_state(state))


def load_stacked(
  directory: str, *, mesh: Mesh, sharding: Sharding, dtype=jnp.bfloat16
) -> tuple[TransformerConfig, stacked.StackedParams]:
  """Reads a checkpoint straight to where its parameters lie on a mesh.

  Every process reads the parts of the files that its own devices hold, and no
  more; nothing is held twice. (The queries, keys and values of GPT-2 and
  GPT-NeoX share tensors, which are read whole, one layer's at a time.)

  Args:
    directory: as of `load`.
    mesh: all devices, over all processes.
    sharding: the model's rules on it.
    dtype: of the parameters, whatever the files' is.

  Returns:
    The configuration, whose key/value heads are repeated if they are fewer than
    the devices they are cut over, and the parameters for `models.stacked`.

  Raises:
    FileNotFoundError, ValueError, CheckpointError: as `load`; ValueError also
      for a model that cannot be cut so.
  """
  with contextlib.ExitStack() as stack:
    checkpoint = _checked(directory, stack)
    config = sharding_lib.kv_heads_for(
      checkpoint.config, sharding_lib.num_parts(sharding, mesh)
    )
    shapes = stacked.abstract_params(config, dtype=dtype)

    def place(path, shape, spec):
      part, *names = sharding_lib.names(path)

      def read(index):
        if part == "frame":
          return checkpoint.part(tuple(names), index, config).astype(dtype)
        layers = range(config.num_layers)[index[0]]
        return np.stack(
          [
            checkpoint.part(("layers", i, *names), index[1:], config)
            for i in layers
          ]
        ).astype(dtype)

      where = NamedSharding(mesh, spec)
      return jax.make_array_from_callback(shape.shape, where, read)

    params = jax.tree_util.tree_map_with_path(
      place, shapes, sharding_lib.param_specs(shapes, sharding)
    )
  return config, params


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
  """An open checkpoint whose tensors are those of its configuration."""

  config: TransformerConfig
  family: str
  tensors: Mapping[str, tuple[Any, str]]

  def part(
    self, parameter: tuple, index: tuple[slice, ...], cut: TransformerConfig
  ) -> np.ndarray:
    """A part of a parameter of a model with `cut`'s key/value heads."""
    name, layout = _locate(parameter, self.family)
    file, full_name = self.tensors[name]
    times = cut.num_kv_heads // self.config.num_kv_heads
    if times > 1 and parameter[-2] in ("k", "v"):
      whole = layout.take(_read(self.tensors[name]), self.config)
      return sharding_lib.repeat_heads(whole, self.config.head_dim, times)[
        index
      ]
    if layout is _AS_IS:
      return file.get_slice(full_name)[index]
    if layout is _TRANSPOSED:
      return file.get_slice(full_name)[index[::-1]].T
    return layout.take(_read(self.tensors[name]), self.config)[index]


def read_config(directory: str) -> TransformerConfig:
  """The configuration of a checkpoint directory; raises as `load`."""
  return _configuration(pathlib.Path(directory))[0]


def _configuration(path: pathlib.Path) -> tuple[TransformerConfig, str]:
  """The configuration and the family's name."""
  if not path.is_dir():
    raise FileNotFoundError(
      f"there is no directory {str(path)!r}: only local checkpoint "
      "directories are read, nothing is fetched from a hub"
    )
  settings = _read_json(path / "config.json")
  try:
    return config_from_json(settings), settings["model_type"]
  except ValueError as error:
    raise ValueError(f"cannot use {path / 'config.json'}: {error}") from error


def _checked(directory: str, stack: contextlib.ExitStack) -> _Checkpoint:
  """Opens a checkpoint and compares its tensors with its configuration."""
  path = pathlib.Path(directory)
  config, family = _configuration(path)
  tensors, problems = _open(_weight_files(path), stack)
  numbers = [int(n[1]) for t in tensors if (n := _LAYER.match(t))]
  if config.num_layers > 1 + max(numbers, default=0):
    raise CheckpointError(
      f"config.json in {path} is of {config.num_layers} layers, and the "
      f"tensors beside it are of {1 + max(numbers, default=-1)}"
    )
  state = nnx.state(
    nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  )
  shapes: dict[str, tuple[int, ...]] = {}
  for parameter, variable in nnx.to_flat_state(state):
    name, layout = _locate(parameter, family)
    shapes[name] = layout.shape(variable.shape)
  tied = _locate(("embed", "embedding"), family)[0]
  problems += _mismatches(
    tensors, shapes, tied if config.tied_embeddings else None
  )
  if problems:
    raise CheckpointError(
      f"the tensors in {path} are not those of the {family} model in its "
      "config.json:\n  " + "\n  ".join(sorted(problems))
    )
  return _Checkpoint(config, family, tensors)


def eos_token_ids(directory: str) -> tuple[int, ...]:
  """Ids that end a text according to the model's configuration files.

  Args:
    directory: a checkpoint; `generation_config.json` counts before
      `config.json`.

  Returns:
    The ids, which may be none.

  Raises:
    ValueError: if a file cannot be read or holds something else.
  """
  for name in ("generation_config.json", "config.json"):
    path = pathlib.Path(directory) / name
    ids = _read_json(path).get("eos_token_id") if path.is_file() else None
    if ids is None:
      continue
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and abs(i) < 2**31 for i in ids):
      raise ValueError(
        f"eos_token_id in {path} must be 32-bit integers, got {ids!r:.80}"
      )
    return tuple(ids)
  return ()


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
  if not path.is_file():
    raise FileNotFoundError(
      f"there is no {path.name} in {path.parent}: expected a checkpoint in "
      "Hugging Face's format"
    )
  try:
    contents = json.loads(path.read_text("utf-8"))
  except (ValueError, RecursionError) as error:  # of bad UTF-8, too deep
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(contents, Mapping):
    raise ValueError(f"{path} must hold a JSON object, got {contents!r:.40}")
  return contents


def _weight_files(path: pathlib.Path) -> list[pathlib.Path]:
  whole, index = (
    path / f"model.safetensors{suffix}" for suffix in ("", ".index.json")
  )
  if whole.is_file():
    return [whole]
  if not index.is_file():
    raise FileNotFoundError(
      f"there are no weights in {path}: expected {whole.name}, or {index.name} "
      "with the files it names (no other format is read)"
    )
  names = _read_json(index).get("weight_map")
  if not isinstance(names, Mapping) or not all(
    isinstance(n, str) and n == pathlib.PurePath(n).name for n in names.values()
  ):
    raise ValueError(f"weight_map in {index} must map tensors to file names")
  files = [path / name for name in sorted(set(names.values()))]
  if missing := [file.name for file in files if not file.is_file()]:
    raise FileNotFoundError(f"{index} names {missing}, which are not there")
  return files


def _open(
  files: Iterable[pathlib.Path], stack: contextlib.ExitStack
) -> tuple[dict[str, tuple[Any, str]], list[str]]:
  """The open file and full name of every tensor; the tensors found twice."""
  tensors: dict[str, tuple[Any, str]] = {}
  problems = []
  for path in files:
    try:
      file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(f"cannot read {path} as safetensors: {error}") from error
    for full_name in file.keys():
      name = _OLD_HEAD.sub("lm_head.", _PREFIX.sub("", full_name))
      if name in tensors:
        problems.append(f"twice: {tensors[name][1]} and {full_name}")
      elif not _BUFFER.fullmatch(name):
        tensors[name] = file, full_name
  return tensors, problems


def _read(tensor: tuple[Any, str]) -> np.ndarray:
  file, full_name = tensor
  return file.get_tensor(full_name)


def _mismatches(
  tensors: Mapping[str, tuple[Any, str]],
  shapes: Mapping[str, tuple[int, ...]],
  tied: str | None,
) -> list[str]:
  """What is wrong with a checkpoint's tensors, given the expected shapes.

  `tied` names the embedding if it is the output projection too; that may then
  be in the files, but only as a copy.
  """
  problems = [
    f"missing: {name}, of shape {shapes[name]}"
    for name in set(shapes) - set(tensors)
  ]
  for name, (file, full_name) in tensors.items():
    piece = file.get_slice(full_name)
    shape, kind = tuple(piece.get_shape()), piece.get_dtype()
    if name not in shapes and (name != "lm_head.weight" or tied is None):
      problems.append(f"unexpected: {full_name}, of shape {shape}")
    elif (expected := shapes.get(name, shapes[tied or name])) != shape:
      problems.append(
        f"wrong shape: {full_name}, expected {expected}, got {shape}"
      )
    elif kind not in _DTYPES:
      problems.append(
        f"wrong type: {full_name}, expected one of {_DTYPES}, got {kind}"
      )
    elif name not in shapes and tied in tensors:
      if not np.array_equal(_read(tensors[name]), _read(tensors[tied])):
        problems.append(f"not a copy of the tied embedding: {full_name}")
  return problems


# ---------------------------------------------------------------------- save


def save_llama(
  module: Transformer,
  directory: str,
  *,
  tokenizer: tokenizers.Tokenizer | None = None,
  dtype=jnp.bfloat16,
) -> None:
  """Writes a Llama checkpoint that `load` and transformers read.

  Files are written elsewhere first and then renamed, `config.json` last: a
  directory without one is incomplete.

  Args:
    module: what Llama's format can express: RMS norms, a gated SiLU MLP, full
      rotary positions, the same bias switch for all attention projections.
    directory: created if need be; files of the same names are replaced.
    tokenizer: saved too, unless the directory already holds the same one. Its
      end-of-text token becomes the model's `bos_token_id` and `eos_token_id`.
    dtype: of the file: float32, bfloat16 or float16.

  Raises:
    ValueError: if Llama's format cannot express the module, the tokenizer has
      more tokens than the module, or the dtype is another one.
  """
  config, dtype = module.config, jnp.dtype(dtype)
  if dtype.name not in ("float32", "bfloat16", "float16"):
    raise ValueError(
      f"dtype must be float32, bfloat16 or float16, got {dtype.name}"
    )
  if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"the tokenizer must have at most {config.vocab_size} tokens, as the "
      f"module has, got {tokenizer.vocab_size}"
    )
  end = None if tokenizer is None else tokenizer.eos_token_id
  settings = llama_json(config, dtype.name, end)
  tensors = {}
  for parameter, variable in nnx.to_flat_state(nnx.state(module)):
    name, layout = _locate(parameter, "llama")
    array = layout.take(np.asarray(variable[...]), config).astype(dtype)
    prefix = "" if name.startswith("lm_head.") else "model."
    tensors[prefix + name] = np.ascontiguousarray(array)
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as temporary:
    new = pathlib.Path(temporary)
    safetensors.numpy.save_file(
      tensors, new / "model.safetensors", metadata={"format": "pt"}
    )
    if tokenizer is not None and not _holds(path, tokenizer):
      tokenizers.save(tokenizer, temporary)
    (new / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "config.json").unlink(missing_ok=True)
    for file in sorted(new.iterdir(), key=lambda f: f.name == "config.json"):
      file.chmod(0o644)
      file.replace(path / file.name)


def _holds(path: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> bool:
  """Whether a directory holds this very tokenizer."""
  try:
    found = tokenizers.load(path)
  except (FileNotFoundError, ValueError):
    return False
  same_end = found.eos_token_id == tokenizer.eos_token_id
  return same_end and found.fingerprint() == tokenizer.fingerprint()
