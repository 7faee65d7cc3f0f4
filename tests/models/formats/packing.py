"""Checkpoints in few bits, packed here by the definitions of their formats.

Numbers and scales are drawn first; the weight that they stand for is
`(q - z) s`, in NumPy, and what the files hold is made of them one number at a
time.
"""

import functools
import json
import math
import struct

import ml_dtypes
import numpy as np
import references
from safetensors.numpy import load_file

SETTINGS = dict(
  vocab_size=references.VOCAB, hidden_size=64, intermediate_size=96,
  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
  max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GROUP = 32
_KINDS = {
  "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32",
  "int64": "I64", "int8": "I8", "uint8": "U8", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip


def save(tensors, path):
  """A file of tensors; safetensors writes no floats of eight bits for NumPy."""
  header, at = {}, 0
  for name, x in tensors.items():
    where = [at, at := at + x.nbytes]
    header[name] = {
      "dtype": _KINDS[x.dtype.name], "shape": [*x.shape], "data_offsets": where,
    }  # fmt: skip
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  parts = [struct.pack("<Q", len(text)), text]
  parts += [np.ascontiguousarray(x).tobytes() for x in tensors.values()]
  path.write_bytes(b"".join(parts))


EXPERTS = SETTINGS | dict(
  moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=16
)


@functools.cache
def model(family="llama"):
  """The model that all others have the rest of; Qwen2's has biases."""
  settings = EXPERTS if family == "qwen3_moe" else SETTINGS
  return references.make(family, settings)


def words(numbers, bits):
  """`[..., n] -> i32[..., ceil(n bits / 32)]`, the lowest bits first."""
  count = 32 // bits
  short = -numbers.shape[-1] % count
  wide = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, short)])
  packed = np.zeros((*wide.shape[:-1], wide.shape[-1] // count), np.uint32)
  for i in range(wide.shape[-1]):
    packed[..., i // count] |= wide[..., i].astype(np.uint32) << (
      bits * (i % count)
    )
  return packed.view(np.int32)


def draw(rng, shape, *, bits, group, zeros=None, dtype=np.float16):
  """Numbers, zero points and scales of a weight: `[N, D], [N, G], [N, G]`.

  Zero points are `zeros`, or drawn; numbers lie around the middle.
  """
  groups = 1 if group is None else math.ceil(shape[1] / group)
  numbers = rng.integers(0, 2**bits, shape)
  zero = rng.integers(1, 2**bits - 1, (shape[0], groups))
  zero = zero if zeros is None else np.full_like(zero, zeros)
  scales = (rng.uniform(0.5, 1.5, zero.shape) / 2**bits / 4).astype(dtype)
  return numbers, zero, scales


def stands_for(numbers, zeros, scales, group_of=None):
  """The weight by definition, `f32[N, D]`."""
  inputs, groups = numbers.shape[1], scales.shape[1]
  if group_of is None:
    group_of = np.arange(inputs) // math.ceil(inputs / groups)
  whole = numbers.astype(np.float32) - zeros[:, group_of].astype(np.float32)
  return whole * scales[:, group_of].astype(np.float32)


def gptq(rng, shape, *, bits=4, group=GROUP, sym=True, v2=False, order=False):
  """Parts of a weight, and the weight."""
  middle = 2 ** (bits - 1)
  numbers, zeros, scales = draw(
    rng, shape, bits=bits, group=group, zeros=middle if sym else None
  )
  group_of = in_turn(shape, group)
  if order:
    group_of = rng.permutation(group_of)
  return {
    "qweight": words(numbers, bits).T,
    "qzeros": words((zeros - (0 if v2 else 1)).T, bits),
    "scales": scales.T,
    "g_idx": group_of.astype(np.int32),
  }, stands_for(numbers, zeros, scales, group_of)


def awq(rng, shape, *, group=GROUP):
  """Likewise."""
  numbers, zeros, scales = draw(rng, shape, bits=4, group=group)
  of_word = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the lowest bits first
  order = (8 * np.arange(shape[0] // 8)[:, None] + of_word).reshape(-1)
  return {
    "qweight": words(numbers.T[:, order], 4),
    "qzeros": words(zeros.T[:, order], 4),
    "scales": scales.T,
  }, stands_for(numbers, zeros, scales, in_turn(shape, group))


def in_turn(shape, group):
  """The group of each input."""
  return np.arange(shape[1]) // (group or shape[1])


def pack_quantized(rng, shape, *, bits=4, group=GROUP, sym=True):
  """Likewise, of compressed-tensors: numbers and zero points have a sign."""
  middle = 2 ** (bits - 1)
  numbers, zeros, scales = draw(
    rng, shape, bits=bits, group=group, zeros=middle if sym else None,
    dtype=ml_dtypes.bfloat16,
  )  # fmt: skip
  parts = {
    "weight_packed": words(numbers, bits),
    "weight_scale": scales,
    "weight_shape": np.array(shape, np.int64),
  }
  if not sym:
    parts["weight_zero_point"] = words(zeros.T, bits).T
  return parts, stands_for(numbers, zeros, scales, in_turn(shape, group))


def int_quantized(rng, shape):
  numbers, zeros, scales = draw(
    rng, shape, bits=8, group=None, zeros=128, dtype=np.float32
  )
  parts = {"weight": (numbers - 128).astype(np.int8), "weight_scale": scales}
  return parts, stands_for(numbers, zeros, scales)


def floats(rng, shape):
  return (rng.standard_normal(shape) * 40).astype(ml_dtypes.float8_e4m3fn)


def float_quantized(rng, shape, *, one=False):
  numbers = floats(rng, shape)
  scales = rng.uniform(1e-3, 2e-3, (shape[0], 1)).astype(np.float32)
  if one:
    scales[:] = scales[0]
  given = scales[0, 0].reshape(()) if one else scales
  parts = {"weight": numbers, "weight_scale": given}
  if one:
    parts["input_scale"] = np.ones(1, np.float32)
  return parts, stands_for(numbers, np.zeros_like(scales), scales)


def blocks(rng, shape, *, name="weight_scale_inv", kind=ml_dtypes.bfloat16):
  """Floats with a scale for a block of 32 x 32."""
  numbers, size = floats(rng, shape), GROUP
  grid = [math.ceil(n / size) for n in shape]
  if kind == np.uint8:
    given = rng.integers(115, 119, grid).astype(np.uint8)
    scales = np.exp2(given.astype(np.float32) - 127)
  else:
    given = rng.uniform(1e-3, 2e-3, grid).astype(kind)
    scales = given.astype(np.float32)
  each = np.repeat(np.repeat(scales, size, axis=0), size, axis=1)
  whole = numbers.astype(np.float32) * each[: shape[0], : shape[1]]
  return {"weight": numbers, name: given}, whole


def write(path, pack, how, *, head=False, family="llama", kept=()):
  """A checkpoint whose projections are packed.

  Args:
    path: its folder.
    pack: `(rng, shape)` gives the parts of a weight, and the weight.
    how: its `quantization_config`.
    head: whether the output projection is packed too.
    family: of the model.
    kept: parts of the names of projections that are not packed.

  Returns:
    The weights by the names of the files, all that are not packed too.
  """
  model(family).save_pretrained(path)
  return rewrite(path, pack, how, head=head, kept=kept)


def rewrite(path, pack, how, *, head=False, kept=(), names=("_proj.weight",)):
  """`write`, of a checkpoint of one file that is there.

  `names` are parts of the names of projections.
  """
  tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(0)
  expected, saved = {}, {}
  for name, x in tensors.items():
    packed = any(part in name for part in names)
    packed |= head and name == "lm_head.weight"
    packed = packed and not any(part in name for part in kept)
    parts, whole = pack(rng, x.shape) if packed else ({name: x}, x)
    expected[name] = whole
    stem = name.removesuffix("weight") if packed else ""
    saved |= {f"{stem}{part}": value for part, value in parts.items()}
  save(saved, path / "model.safetensors")
  configure(path, how)
  return expected


def configure(path, how):
  """Gives a checkpoint a `quantization_config`."""
  file = path / "config.json"
  said = json.loads(file.read_text()) | {"quantization_config": how}
  file.write_text(json.dumps(said))
