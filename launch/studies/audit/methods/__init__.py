"""Audited methods, a short file each: laws, source, claim and finding."""

from launch.studies.audit.methods import (
  assisted,
  constructions,
  eagle,
  hsd,
  medusa,
  openvino,
  recurrent_drafter,
  self_speculative,
  sglang,
  spectr_gbv,
  xllm,
)

METHODS = (
  *hsd.METHODS,
  *spectr_gbv.METHODS,
  *assisted.METHODS,
  *self_speculative.METHODS,
  *openvino.METHODS,
  *xllm.METHODS,
  *sglang.METHODS,
  *eagle.METHODS,
  *constructions.METHODS,
  *recurrent_drafter.METHODS,
  *medusa.METHODS,
)
