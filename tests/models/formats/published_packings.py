"""Checkpoints as they are published in few bits: one of every packing."""

import functools

import numpy as np
import packing

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
  "gptq": (packing.gptq, gptq_config(), "int4(output=False)"),
  "gptq-eight-bits": (
    _bind(packing.gptq, bits=8, group=None),
    gptq_config(bits=8, group=-1, checkpoint_format="gptq"),
    "int8(output=False)",
  ),
  # As some files are that call themselves gptq.
  "gptq-symmetric-as-v2": (
    _bind(packing.gptq, v2=True),
    gptq_config(sym=True, desc_act=False),
    "int4(output=False)",
  ),
  "gptq-zero-points": (
    _bind(packing.gptq, sym=False),
    gptq_config(sym=False),
    "int8(group=32, output=False)",
  ),
  "gptq-v2": (
    _bind(packing.gptq, sym=False, v2=True),
    gptq_config(sym=False, checkpoint_format="gptq_v2"),
    "int8(group=32, output=False)",
  ),
  "gptq-by-activations": (
    _bind(packing.gptq, order=True),
    gptq_config(desc_act=True),
    None,
  ),
  "awq": (packing.awq, AWQ, "int8(group=32, output=False)"),
  "packed": (
    packing.pack_quantized,
    compressed("pack-quantized", **_GROUPS),
    "int4(output=False)",
  ),
  "packed-zero-points": (
    _bind(packing.pack_quantized, sym=False),
    compressed("pack-quantized", **_GROUPS, symmetric=False),
    "int8(group=32, output=False)",
  ),
  "packed-eight-bits": (
    _bind(packing.pack_quantized, bits=8, group=None),
    compressed("pack-quantized"),
    "int8(output=False)",
  ),
  "packed-edges": (  # no format has a last group of another size
    _bind(packing.pack_quantized, group=40),
    compressed("pack-quantized", **_GROUPS | dict(group_size=40))
    | dict(quantization_status="frozen", sparsity_config={"format": "dense"}),
    None,
  ),
  "int": (
    packing.int_quantized, compressed("int-quantized"), "int8(output=False)",
  ),
  "float": (
    packing.float_quantized, compressed("float-quantized", type="float"), "fp8",
  ),
  "float-one-scale": (
    _bind(packing.float_quantized, one=True),
    compressed("float-quantized", type="float", strategy="tensor"),
    "fp8",
  ),
  "float-blocks": (
    _bind(packing.blocks, name="weight_scale", kind=np.float32),
    compressed(
      "float-quantized", type="float", strategy="block",
      block_structure=[32, 32],
    ),
    "fp8(group=32)",
  ),
  "fp8": (packing.blocks, fp8_config(), "fp8(group=32)"),
  "fp8-exponents": (
    _bind(packing.blocks, kind=np.uint8),
    fp8_config(scale_fmt="ue8m0"),
    "fp8(group=32)",
  ),
  "fp8-one-scale": (
    _bind(packing.float_quantized, one=True),
    fp8_config(weight_block_size=None, activation_scheme="static"),
    "fp8",
  ),
}  # fmt: skip
# Those whose output projection is packed too.
WITH_HEAD = ("float", "fp8")
