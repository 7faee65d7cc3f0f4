"""Logs of a training run: metrics, samples, and TensorBoard's files."""

import json
import pathlib
import sys
import time

import jax
import tqdm

from launch import results


class Records:
  """The files of a run, from the step on at which it begins or goes on.

  What a killed run wrote after its last checkpoint is taken back: those steps
  are done again. A run that begins has no records.

  Args:
    folder: WORKDIR, or None for a process that writes nothing.
    done: steps done.
    tokens_per_step: what a step reads.
  """

  def __init__(
    self, folder: pathlib.Path | None, *, done: int, tokens_per_step: int
  ):
    self._folder = folder
    self._tokens_per_step = tokens_per_step
    self._board = None
    if folder is None:
      return
    for name in ("metrics.jsonl", "samples.jsonl"):
      _keep(folder / name, up_to=done)
    try:
      import tensorboardX
    except ImportError:
      return
    self._board = tensorboardX.SummaryWriter(str(folder), purge_step=done + 1)

  def metrics(self, step: int, values: dict) -> None:
    """A line of metrics.jsonl, also on stderr."""
    if self._folder is None:
      return
    record = {"step": step, "tokens": step * self._tokens_per_step, **values}
    say(json.dumps(record))
    self._append("metrics.jsonl", record)
    if self._board:
      for name, value in values.items():
        if isinstance(value, float):
          self._board.add_scalar(name, value, step)
      self._board.flush()

  def sample(self, step: int, prompt: str, completion: str) -> None:
    """A line of samples.jsonl."""
    if self._folder is not None:
      self._append(
        "samples.jsonl",
        {"step": step, "prompt": prompt, "completion": completion},
      )

  def _append(self, name: str, record: dict) -> None:
    results.append(self._folder / name, record)


def _keep(path: pathlib.Path, *, up_to: int) -> None:
  """Drops the lines of later steps, and one that was not finished."""
  if not path.is_file():
    return
  steps = range(up_to + 1) if up_to else ()
  kept = [x for x in results.read_appended(path) if x.get("step") in steps]
  results.write(path, results.dumps(kept))


class Clock:
  """Steps per second, without what is not training; starts at `done` steps."""

  def __init__(self, done: int):
    self.restart(done)

  def restart(self, done: int) -> None:
    """Nothing before now counts."""
    self._start, self._from = time.perf_counter(), done

  def steps_per_second(self, done: int) -> float | None:
    """Since the last call or restart; None if no step was timed since."""
    steps, seconds = done - self._from, time.perf_counter() - self._start
    self.restart(done)
    return steps / seconds if steps else None


def say(text: str) -> None:
  """A line on stderr, above the progress bar, from one process."""
  if jax.process_index() == 0:
    tqdm.tqdm.write(text, file=sys.stderr)
