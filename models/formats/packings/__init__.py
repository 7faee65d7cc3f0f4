"""Published packings of weights: a `quantization_config` and its tensors.

A packing is one file with a `PACKING`, by the `quant_method` of its
`quantization_config`. It reads that, refuses what it does not know by name, and
makes one `models.formats.weights.Tensor` of the parts of each weight.
MXFP4, which gpt-oss alone has, is `models.formats.mxfp4`.
"""

from collections.abc import Mapping, Set
from typing import Any

from models.formats import json_files
from models.formats.families.family import Settings
from models.formats.packings import (
  awq,
  block_fp8,
  compressed_tensors,
  gptq,
)
from models.formats.packings.packing import Opened, Packing

PACKINGS: dict[str, Packing] = {
  "awq": awq.PACKING,
  "compressed-tensors": compressed_tensors.PACKING,
  "fp8": block_fp8.PACKING,
  "gptq": gptq.PACKING,
}
# Of `modules` and the like: which weights are packed, the tensors say.
_HARMLESS = frozenset(
  "quant_method modules_to_not_convert ignored_layers dequantize".split()
)


def read(
  given: Mapping[str, Any], others: Set[str] = frozenset()
) -> Opened | None:
  """A `quantization_config`, opened; None for a method of the family's own.

  Args:
    given: its contents.
    others: methods whose tensors the family reads (`Family.quantized`).

  Raises:
    ValueError: for a method that is not read, or a key that is malformed, not
      supported or not known.
  """
  method, known = given.get("quant_method"), sorted({*PACKINGS, *others})
  if method not in known:
    raise ValueError(
      f"quant_method of quantization_config must be one of {known}, got "
      f"{method!r:.80}"
    )
  if method in others:
    json_files.refuse_unknown(
      given, _HARMLESS, f"settings of quantization_config of {method}"
    )
    return None
  packing = PACKINGS[method]
  for key, values in packing.fixed.items():
    if given.get(key) is not None and given[key] not in values:
      expected = " or ".join(repr(value) for value in values) or "left out"
      raise ValueError(
        f"{key} of quantization_config must be {expected} for {method}, got "
        f"{given[key]!r:.80}"
      )
  settings = Settings(given, packing.defaults)
  try:
    opened = packing.open(settings)
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"quantization_config of {method}: {error} is missing or malformed"
    ) from error
  known = _HARMLESS | packing.harmless | {*packing.fixed} | settings.asked
  json_files.refuse_unknown(
    given, known, f"settings of quantization_config of {method}"
  )
  return opened
