"""`Task`: the interface between the training loop and what it trains."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import grain
import numpy as np
from flax import nnx

from launch.training.step import Steps
from models.tokenizers import Tokenizer


def _no_samples() -> Callable[[nnx.State], Iterable[tuple[str, str]]]:
  """No samples, of modules that complete no text by themselves."""
  return lambda params: ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """Functions and modules that define a training task.

  Attributes:
    tokenizer: of the text.
    first: the module to begin with.
    steps: the jitted functions.
    module: parameters to the module that is returned and exported.
    step_flops: floating point operations that a step needs.
    report: `(sums, validation batches) -> record`: what `steps.validate`
      summed over the batches, as a line of metrics.jsonl.
    export: `(module, directory)`, writes it in its published format.
    begin: `folder`, writes what WORKDIR is to keep beside checkpoints.
    sampler: gives what makes prompts and completions of parameters.
    knows: whether the first parameters are worth validating.
    batches: `(split, seed=...) -> grain dataset`, what is read in place of the
      text; see `launch.training.features.batches`.
  """

  tokenizer: Tokenizer
  first: nnx.Module
  steps: Steps
  module: Callable[[nnx.State], nnx.Module]
  step_flops: float
  report: Callable[
    [Mapping[str, float], Sequence[dict[str, np.ndarray]]], dict[str, float]
  ]
  export: Callable[[nnx.Module, str], None]
  begin: Callable[[pathlib.Path], None]
  sampler: Callable[[], Callable[[nnx.State], Iterable[tuple[str, str]]]] = (
    _no_samples
  )
  knows: bool = False
  batches: Callable[..., grain.IterDataset] | None = None
