"""Quantized checkpoints of every packing, by the definitions of their formats.

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
  references.edit_config(path, quantization_config=how)
  return expected


# ----------------------------------------------- what is published, and how

_bind = functools.partial


def gptq_config(bits=4, group=32, **more):
  return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


def compressed(form, **way):
  """A configuration of compressed-tensors, as llm-compressor writes it."""
  usual = dict(
    num_bits=8, type="int", symmetric=True, strategy="channel", group_size=None,
    dynamic=False, observer="minmax", observer_kwargs={}, actorder=None,
    block_structure=None,
  )  # fmt: skip
  group = {
    "weights": usual | way, "targets": ["Linear"], "input_activations": None,
    "output_activations": None,
  }  # fmt: skip
  return {
    "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
    "quantization_status": "compressed", "kv_cache_scheme": None,
    "global_compression_ratio": None, "config_groups": {"group_0": group},
  }  # fmt: skip


def fp8_config(**more):
  return {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"],
  } | more  # fmt: skip


AWQ = dict(
  quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm",
  modules_to_not_convert=None,
)  # fmt: skip
_GROUPS = dict(num_bits=4, strategy="group", group_size=32)
# What packs a weight, the configuration, and the format that holds it.
PUBLISHED = {
  "gptq": (gptq, gptq_config(), "int4(output=False)"),
  "gptq-eight-bits": (
    _bind(gptq, bits=8, group=None),
    gptq_config(bits=8, group=-1, checkpoint_format="gptq"),
    "int8(output=False)",
  ),
  # As some files are that call themselves gptq.
  "gptq-symmetric-as-v2": (
    _bind(gptq, v2=True),
    gptq_config(sym=True, desc_act=False),
    "int4(output=False)",
  ),
  "gptq-zero-points": (
    _bind(gptq, sym=False),
    gptq_config(sym=False),
    "int8(group=32, output=False)",
  ),
  "gptq-v2": (
    _bind(gptq, sym=False, v2=True),
    gptq_config(sym=False, checkpoint_format="gptq_v2"),
    "int8(group=32, output=False)",
  ),
  "gptq-by-activations": (
    _bind(gptq, order=True),
    gptq_config(desc_act=True),
    None,
  ),
  "awq": (awq, AWQ, "int8(group=32, output=False)"),
  "packed": (
    pack_quantized,
    compressed("pack-quantized", **_GROUPS),
    "int4(output=False)",
  ),
  "packed-zero-points": (
    _bind(pack_quantized, sym=False),
    compressed("pack-quantized", **_GROUPS, symmetric=False),
    "int8(group=32, output=False)",
  ),
  "packed-eight-bits": (
    _bind(pack_quantized, bits=8, group=None),
    compressed("pack-quantized"),
    "int8(output=False)",
  ),
  "packed-edges": (  # no format has a last group of another size
    _bind(pack_quantized, group=40),
    compressed("pack-quantized", **_GROUPS | dict(group_size=40))
    | dict(quantization_status="frozen", sparsity_config={"format": "dense"}),
    None,
  ),
  "int": (
    int_quantized, compressed("int-quantized"), "int8(output=False)",
  ),
  "float": (
    float_quantized, compressed("float-quantized", type="float"), "fp8",
  ),
  "float-one-scale": (
    _bind(float_quantized, one=True),
    compressed("float-quantized", type="float", strategy="tensor"),
    "fp8",
  ),
  "float-blocks": (
    _bind(blocks, name="weight_scale", kind=np.float32),
    compressed(
      "float-quantized", type="float", strategy="block",
      block_structure=[32, 32],
    ),
    "fp8(group=32)",
  ),
  "fp8": (blocks, fp8_config(), "fp8(group=32)"),
  "fp8-exponents": (
    _bind(blocks, kind=np.uint8),
    fp8_config(scale_fmt="ue8m0"),
    "fp8(group=32)",
  ),
  "fp8-one-scale": (
    _bind(float_quantized, one=True),
    fp8_config(weight_block_size=None, activation_scheme="static"),
    "fp8",
  ),
}  # fmt: skip
# Those whose output projection is packed too.
WITH_HEAD = ("float", "fp8")
