"""Packings that are not read: each is refused, and says by what."""

import numpy as np
import packing
import pytest
from published_packings import (
  AWQ,
  PUBLISHED,
  compressed,
  fp8_config,
  gptq_config,
)

from models.formats import huggingface


@pytest.mark.parametrize(
  ("how", "message"),
  [
    (dict(quant_method="bitsandbytes", load_in_4bit=True), "got 'bitsandbytes"),
    (dict(bits=4), "quant_method of quantization_config must be one of"),
    (gptq_config(bits=3), "bits of .* must be 4 or 8 for gptq, got 3"),
    (gptq_config(dynamic={"-:lm_head": {}}), "dynamic of .* must be {}"),
    (gptq_config(rotation="hadamard"), "rotation of .* must be left out"),
    (gptq_config(zeros=1, sizes=2), "of gptq that are not known: sizes, zeros"),
    (AWQ | dict(version="gemv"), "the version of awq must be 'gemm', got 'gem"),
    (AWQ | dict(zero_point=False), "zero_point of .* must be True"),
    (fp8_config(fmt="e5m2"), "fmt of .* must be 'e4m3' for fp8"),
    (compressed("nvfp4-pack-quantized"), "got 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", num_bits=3), "weights are not read of"),
    (compressed("int-quantized") | dict(kv_cache_scheme={"num_bits": 8}),
     "kv_cache_scheme of .* must be left out"),
    (compressed("int-quantized") | dict(transform_config={"config_groups": {}}),
     "transform_config of .* must be {}"),
  ],
)  # fmt: skip
def test_a_setting_that_is_not_known_is_refused_by_name(how, message):
  settings = packing.model().config.to_dict() | {"quantization_config": how}
  with pytest.raises(ValueError, match=message):
    huggingface.translate(settings)


def broken(tmp_path, pack, how, edit):
  """A checkpoint of which some parts are others."""

  def packed(rng, shape):
    parts, whole = pack(rng, shape)
    edit(parts)
    return {name: x for name, x in parts.items() if x is not None}, whole

  packing.write(tmp_path, packed, how)
  return str(tmp_path)


@pytest.mark.parametrize(
  ("name", "edit", "message"),
  [
    ("gptq", lambda p: p.update(scales=p["scales"][:1].T), "scales must be"),
    ("awq", lambda p: p.update(bits=np.ones(1, np.int32)), "unexpected: "),
    ("packed", lambda p: p.update(weight_scale=p["weight_scale"][:3]),
     "none of config_groups has"),
    ("packed-zero-points",
     lambda p: p.update(weight_zero_point=p["weight_zero_point"][:3]),
     "weight_zero_point must be"),
    ("fp8", lambda p: p.update(weight_scale_inv=None), "expected one of"),
  ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused(
  name, edit, message, tmp_path
):
  pack, how, _ = PUBLISHED[name]
  path = broken(tmp_path, pack, how, edit)
  with pytest.raises(ValueError, match=message):
    huggingface.load(path)
