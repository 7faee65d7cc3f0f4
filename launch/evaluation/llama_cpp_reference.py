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

from launch.evaluation.hf_reference import Generated
from launch.evaluation.json_process import JsonProcess
from models import checkpoints
from specjax.runtime.requests import Batch

_PROGRAM = pathlib.Path(__file__).with_name("llama_cpp_program.py")


def check(config) -> None:
  """Raises ValueError if llama.cpp is no comparison for a config: why."""
  if jax.default_backend() != "cpu":
    reason = f"runs on the CPU, and jax on {jax.default_backend()}"
  elif not checkpoints.is_file(config.target):
    reason = "reads a GGUF file, and config.target is none"
  elif config.dtype != "float32":
    reason = f"is given float32, and config.dtype is {config.dtype}"
  else:
    return
  raise ValueError(f"llama.cpp {reason}")


class LlamaCpp:
  """Decodes batches of one row."""

  def __init__(self, python: str, config, *, stop_tokens):
    """Starts the process and loads the config's target.

    Args:
      python: the interpreter of an environment that has `llama_cpp`.
      config: of the experiment, for which `check` raises nothing; prompts with
        their completions have at most `config.max_length` tokens.
      stop_tokens: ids that end a completion.

    Raises:
      ValueError: in one line, if there is no `llama_cpp`, or what it refuses.
      OSError: if there is no such interpreter.
    """
    threads = len(os.sched_getaffinity(0))
    self._request = {
      "most": config.max_new_tokens,
      "stops": list(stop_tokens),
      "sampling": {
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
        "n_ctx": config.max_length,
        "n_threads": threads,
        "n_threads_batch": threads,
        "type_k": int(gguf.GGMLQuantizationType.F32),
        "type_v": int(gguf.GGMLQuantizationType.F32),
        "seed": config.seed,
      }
      try:
        answer = self._process.ask(options)
      except RuntimeError as error:
        answer = {"error": str(error)}
    if "error" in answer:
      self.close()
      raise ValueError(f"llama.cpp of {python}: {answer['error']}")
    waits = os.environ.get("OMP_WAIT_POLICY")
    self.versions = {
      **answer, "n_threads": threads, "n_ctx": config.max_length,
      "omp_wait_policy": waits,
    }  # fmt: skip

  def run(self, batch: Batch, *, temperature: float) -> Generated:
    """Completes a batch of one prompt; RuntimeError if the process broke."""
    (prompt,) = batch.prompts
    sampling = {**self._request["sampling"], "temp": temperature}
    answer = self._process.ask(
      {**self._request, "prompt": list(prompt.token_ids), "sampling": sampling}
    )
    tokens = answer["token_ids"]
    return Generated(
      token_ids=[tokens],
      seconds=answer["seconds"],
      first_seconds=answer["first_seconds"],
      num_target_calls=len(tokens),
    )

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
