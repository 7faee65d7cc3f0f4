"""llama.cpp on the same weights, prompts and threads, for comparison.

The package `llama_cpp` is in an environment of its own, whose Python is named,
and runs in a process of its own. Ours dequantises a GGUF file to float32 and
computes in float32, so llama.cpp is given the file of the same numbers in
float32, and keeps its cache in float32; what it computes from the quantised
file is another model, and faster.
"""

import logging
import os
import pathlib
import tempfile

import gguf
import jax
import numpy as np

from launch.json_process import JsonProcess
from models import checkpoints
from specjax.runtime.engine import Batch

_PROGRAM = pathlib.Path(__file__).with_name("llama_cpp_program.py")


def check(config) -> None:
  """Raises ValueError if llama.cpp is no comparison for a config: why."""
  if jax.default_backend() != "cpu":
    reason = f"runs on the CPU, and jax on {jax.default_backend()}"
  elif not checkpoints.is_file(config.target):
    reason = "reads a GGUF file, and config.target is none"
  elif config.dtype != "float32":
    reason = f"is given float32, and config.dtype is {config.dtype}"
  elif config.batch_size > 1:
    reason = f"takes one prompt at a time, and {config.batch_size=}"
  else:
    return
  raise ValueError(f"llama.cpp {reason}")


class LlamaCpp:
  """Decodes as an `Engine` of batches of one row does."""

  def __init__(self, python: str, config, *, stop_tokens, slots: int):
    """Starts the process and loads the config's target.

    Args:
      python: the interpreter of an environment that has `llama_cpp`.
      config: of the experiment, for which `check` raises nothing.
      stop_tokens: ids that end a completion.
      slots: the longest prompt with its completion, in tokens.

    Raises:
      ValueError: in one line, if there is no `llama_cpp`, or what it refuses.
      OSError: if there is no such interpreter.
    """
    threads = len(os.sched_getaffinity(0))
    self._request = {
      "most": config.max_new_tokens,
      "stops": list(stop_tokens),
      "sampling": {
        "temp": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
      },
    }
    self._process = JsonProcess(
      "llama.cpp",
      [python, str(_PROGRAM)],
      PYTHONSAFEPATH="1",  # this folder's files are no modules there
    )
    with tempfile.TemporaryDirectory() as folder:
      path = f"{folder}/float32.gguf"
      write_float32(config.target, path)
      options = {
        "model_path": path,
        "use_mmap": False,  # the file is gone once it is loaded
        "n_ctx": slots,
        "n_threads": threads,
        "n_threads_batch": threads,
        "type_k": int(gguf.GGMLQuantizationType.F32),
        "type_v": int(gguf.GGMLQuantizationType.F32),
        "seed": config.seed,
      }
      try:
        found = self._process.ask(options)
      except RuntimeError as error:
        found = {"error": str(error)}
    if "error" in found:
      self.close()
      raise ValueError(f"llama.cpp of {python}: {found['error']}")
    waits = os.environ.get("OMP_WAIT_POLICY")
    self.versions = {
      **found, "n_threads": threads, "n_ctx": slots, "omp_wait_policy": waits,
    }  # fmt: skip

  def run(self, batch: Batch) -> tuple[list[list[int]], float]:
    """Completes a batch: the emitted tokens of every prompt, and seconds."""
    found = [
      self._process.ask({"prompt": list(p.token_ids), **self._request})
      for p in batch.prompts
    ]
    seconds = sum(one["seconds"] for one in found)
    return [one["token_ids"] for one in found], seconds

  def close(self) -> None:
    """Ends the process."""
    self._process.close()


def write_float32(source: str, path: str) -> None:
  """Writes a GGUF file anew, with all tensors in float32.

  Args:
    source: a file that `models.formats.gguf` has read, and so found to be
      whole.
    path: where to write.
  """
  logging.getLogger("gguf").setLevel(logging.WARNING)
  reader = gguf.GGUFReader(source)
  of_writer = gguf.Keys.General.ARCHITECTURE
  writer = gguf.GGUFWriter(path, reader.fields[of_writer].contents())
  for name, field in reader.fields.items():
    if name != of_writer and not name.startswith("GGUF."):
      kind, *parts = field.types
      writer.add_key_value(
        name, field.contents(), kind, sub_type=parts[-1] if parts else None
      )
  for tensor in reader.tensors:
    shape, size = tensor.shape[::-1].tolist(), 4 * int(tensor.n_elements)
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for tensor in reader.tensors:  # one at a time is in memory
    writer.write_tensor_data(gguf.dequantize(tensor.data, tensor.tensor_type))
  writer.close()
