"""Tells libtpu that a machine has no TPU, before it looks for one.

Otherwise libtpu complains about missing hosts, writes logs, and lets only one
process per machine load it. This module does not import jax.
"""

import glob
import os

ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any known one
  "TPU_LOG_DIR": "disabled",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def has_tpu() -> bool:
  """True if this machine has a TPU, as far as device files tell."""
  return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def set_environment() -> None:
  """Tells libtpu that there is no TPU, if there is none.

  Call it before jax looks for devices. What is already set is kept.
  """
  if has_tpu():
    return
  for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
