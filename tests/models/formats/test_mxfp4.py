"""MXFP4: the numbers that transformers reads, and whole checkpoints of them."""

import jax.numpy as jnp
import numpy as np
import pytest
import references
import torch
from references import MODELS, TOKENS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.formats import huggingface, loading, mxfp4, published, weights
from models.networks import quantized
from models.networks.quantized import Quantization


def packed(rng, *shape):
  """Random blocks and scales, `u8[*shape, 16]` and `u8[*shape]`."""
  blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
  return blocks, rng.integers(117, 127, shape, np.uint8)


def theirs(blocks, scales):
  """`f32[E, D, N]`, as transformers has it."""
  return convert_moe_packed_tensors(
    torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
  ).numpy()


def test_dequantized_values_match_transformers():
  blocks, scales = packed(np.random.default_rng(0), 3, 6, 2)
  scales[0, 0] = 20, 230  # very small and very large ones
  blocks[1, 0, 0, :2], scales[1, 0, 0] = (0x7F, 0xA1), 128
  tensor = lambda name, x: weights.Tensor(
    name=name, shape=x.shape, kind="U8", read=x.__getitem__
  )
  made = mxfp4.join(
    {"x_blocks": tensor("x_blocks", blocks), "x_scales": tensor("x_s", scales)}
  )["x"]
  whole = made.read(())
  np.testing.assert_array_equal(whole, theirs(blocks, scales))
  # -6 and 6, then 0.5 and -1
  np.testing.assert_array_equal(whole[1, :4, 0], [-12, 12, 1, -2])
  part = (slice(1, 3), slice(5, 40), slice(2, None))
  np.testing.assert_array_equal(made.read(part), whole[part])


def test_released_gpt_oss_logits_match_dequantized_weights(tmp_path):
  family, settings, _ = MODELS["gpt-oss"]
  model = references.make(family, settings | dict(intermediate_size=32))
  model.save_pretrained(tmp_path)
  rng, stored = np.random.default_rng(1), {}
  with torch.no_grad():
    for i, layer in enumerate(model.model.layers):
      for name in ("gate_up_proj", "down_proj"):
        weight = getattr(layer.mlp.experts, name)
        count, inputs, outputs = weight.shape
        both = packed(rng, count, outputs, inputs // 32)
        weight.copy_(torch.tensor(theirs(*both)))
        stem = f"model.layers.{i}.mlp.experts.{name}"
        stored[stem] = dict(zip(("blocks", "scales"), both, strict=True))

  def edit(tensors):
    for stem, parts in stored.items():
      del tensors[stem]
      tensors |= {f"{stem}_{part}": x for part, x in parts.items()}

  references.edit_tensors(tmp_path, edit)
  how = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
  references.edit_config(tmp_path, quantization_config=how)
  expected = references.logits(model, TOKENS)
  form = Quantization(dtype="fp4", group=32, output=False, dense=False)
  source = huggingface.source(tmp_path)
  kept = published.keep(source)
  assert published.summary(source, kept) == (form, str(form))
  whole = loading.load(source)
  kept = loading.load(source, form=form, kept=published.keep(source, form))
  for ours, others in zip(kept.layers, whole.layers, strict=True):
    for name in quantized.EXPERTS:
      weight = getattr(ours.mlp.experts, name)[...]
      assert weight.values.dtype == jnp.float4_e2m1fn
      np.testing.assert_array_equal(
        weight.dequantized(), getattr(others.mlp.experts, name)[...]
      )
  for module in (whole, kept):
    actual = references.module_logits(module)
    assert references.relative_error(actual, expected) < 1e-5
  references.edit_config(tmp_path, quantization_config=how | {"bits": 3})
  with pytest.raises(ValueError, match="of mxfp4: bits"):
    loading.load(huggingface.source(tmp_path))
