"""transformers and llama.cpp as systems, in processes of their own.

transformers' process is this file, run as a program. It reads a line of JSON
for each batch, and answers with one; the end of its input ends it, and so does
the end of the process that started it.
"""

import dataclasses
import json
import os
import sys
from typing import IO, Any

import jax
import ml_collections

from launch import processes
from launch.assembly import registry
from launch.evaluation import hf_reference, llama_cpp_reference
from launch.evaluation.json_process import JsonProcess
from launch.evaluation.systems import System
from specjax.runtime.requests import Batch


def check(system: System) -> None:
  """Raises ValueError if it cannot be measured here, saying why."""
  reference = system.reference
  assert reference is not None
  if reference.python:
    llama_cpp_reference.check(system.config)
    return
  paths = filter(None, (system.config.target, reference.draft))
  if processes.several():
    reason = "runs beside one process, and there are several"
  elif jax.default_backend() != "cpu":
    reason = f"runs on the CPU, and jax on {jax.default_backend()}"
  elif reference.kind == "hf_assisted" and not reference.draft:
    reason = 'needs a draft model: hf_assisted("DIR")'
  elif reference.draft and not registry.holds_model(reference.draft):
    reason = f"needs a draft model, and {reference.draft} is none"
  elif not hf_reference.is_available(*paths):
    reason = "needs torch, transformers, and checkpoints in their format"
  else:
    return
  raise ValueError(f"system {system.name!r} {reason}")


class Process:
  """The other processes, each started when it is first asked."""

  def __init__(self, *, stop_tokens: tuple[int, ...], vocab_size: int):
    """Starts nothing yet.

    Args:
      stop_tokens: ids that end a completion, those of the other systems.
      vocab_size: V, the number of real tokens.
    """
    self._begin = {"stop_tokens": stop_tokens, "vocab_size": vocab_size}
    self._llama_cpp: dict[str, llama_cpp_reference.LlamaCpp] = {}
    self._process: JsonProcess | None = None
    self.versions: dict[str, Any] = {}

  def run(
    self, system: System, batch: Batch, *, temperature: float, seed: int
  ) -> hf_reference.Generated:
    """Decodes a batch.

    Args:
      system: one of another library.
      batch: the prompts.
      temperature: of the target's law.
      seed: of what is drawn.

    Raises:
      ValueError: for what that library refuses, in its words.
      RuntimeError: if the process broke; its own words are on stderr.
    """
    assert system.reference is not None
    if python := system.reference.python:
      if python not in self._llama_cpp:
        begun = self._llama_cpp[python] = llama_cpp_reference.LlamaCpp(
          python, system.config, stop_tokens=self._begin["stop_tokens"]
        )
        begun.run(batch, temperature=temperature)  # is slower
        self.versions |= begun.versions
      return self._llama_cpp[python].run(batch, temperature=temperature)
    config = json.loads(system.config.to_json_best_effort())
    config["temperature"] = temperature
    if self._process is None:
      self._process = JsonProcess(
        "transformers",
        [sys.executable, "-m", "launch.evaluation.reference"],
        JAX_PLATFORMS="cpu",
      )
      self._process.send(self._begin)
    answer = self._process.ask(
      {
        "how": dataclasses.asdict(system.reference),
        "config": config,
        "prompts": [list(p.token_ids) for p in batch.prompts],
        "rows": batch.rows,  # as many as the other systems decode
        "seed": seed,
      }
    )
    if "error" in answer:
      raise ValueError(f"system {system.name!r}: {answer['error']}")
    self.versions |= answer.pop("versions")
    return hf_reference.Generated(**answer)

  def close(self) -> None:
    """Ends the processes, if there are any."""
    for process in self._llama_cpp.values():
      process.close()
    self._llama_cpp.clear()
    if self._process is not None:
      self._process.close()
      self._process = None


@dataclasses.dataclass(frozen=True)
class _Prompt:
  """A prompt as `Reference` reads it."""

  token_ids: list[int]
  stream: int = 0


def serve(lines: IO[str], answers: IO[str]) -> None:
  """Answers requests until there are no more.

  A model is kept for as long as requests agree on it and on how is sampled:
  those of one temperature come one after the other. What transformers refuses
  is an answer too.
  """
  begin = json.loads(lines.readline())
  begin["stop_tokens"] = tuple(begin["stop_tokens"])
  held: dict[str, hf_reference.Reference] = {}
  sampled: Any = None
  for line in lines:
    request = json.loads(line)
    if sampled != request["config"]["temperature"]:
      sampled = request["config"]["temperature"]
      held.clear()
    try:
      answer = _answer(request, held, begin)
    except Exception as error:  # a library's, of whatever kind
      reason = " ".join(str(error).split()) or type(error).__name__
      answer = {"error": f"transformers: {reason}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(
  request: dict, held: dict[str, hf_reference.Reference], begin: dict
) -> dict:
  """The answer to a request: completions of its prompts.

  Args:
    request: as `Process.run` makes it.
    held: models that are loaded, of which one may be added.
    begin: arguments of `Reference` that all share.
  """
  config = ml_collections.ConfigDict(request["config"])
  settings = request["how"]
  assisted = settings["kind"] == "hf_assisted"
  key = json.dumps([settings["draft"], settings["tokens"]] if assisted else [])
  batch = Batch(tuple(map(_Prompt, request["prompts"])), request["rows"], 0)
  options: dict[str, Any] = {"assisted": assisted}
  if settings["kind"] == "hf_prompt_lookup":
    options["prompt_lookup"] = (settings["tokens"], settings["max_ngram"])
  if not assisted and held:  # any of them has the target
    key = next(iter(held))
  fresh = key not in held
  if fresh:
    draft = (
      dict(draft=settings["draft"], tokens=settings["tokens"])
      if assisted
      else {}
    )
    held[key] = hf_reference.Reference(config, **draft, **begin)
  if assisted and not held[key].can_assist:
    raise ValueError("the draft's embeddings are padded otherwise")
  if fresh:  # its first run is slower
    held[key].generate(batch, **options)
  import torch

  torch.manual_seed(request["seed"])
  generated = held[key].generate(batch, **options)
  return {**vars(generated), "versions": held[key].versions}


def main() -> None:
  """Serves stdin and stdout; what libraries print goes to stderr."""
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)
  serve(sys.stdin, answers)


if __name__ == "__main__":
  main()
