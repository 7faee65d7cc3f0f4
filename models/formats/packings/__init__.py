"""Published quantization formats, by `quant_method` of `quantization_config`.

Each file has a `PACKING`, which reads the `quantization_config`, rejects
unknown keys by name, and joins the parts of each weight into one
`models.formats.weights.Tensor`. MXFP4, which only gpt-oss uses, is in
`models.formats.mxfp4`.
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
from models.formats.packings.packing import Packing, Parsed

PACKINGS: dict[str, Packing] = {
  "awq": awq.PACKING,
  "compressed-tensors": compressed_tensors.PACKING,
  "fp8": block_fp8.PACKING,
  "gptq": gptq.PACKING,
}
# The tensors themselves show which weights are packed.
_HARMLESS = frozenset(
  "quant_method modules_to_not_convert ignored_layers dequantize".split()
)


def read(
  given: Mapping[str, Any], others: Set[str] = frozenset()
) -> Parsed | None:
  """Reads a `quantization_config`; None for the family's own method.

  Args:
    given: its contents.
    others: methods that the family handles itself (`Family.quantized`).

  Raises:
    ValueError: for an unsupported method, or a malformed, unsupported or
      unknown key.
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
  known = _HARMLESS | packing.harmless | {*packing.fixed} | settings.used
  json_files.refuse_unknown(
    given, known, f"settings of quantization_config of {method}"
  )
  return opened
