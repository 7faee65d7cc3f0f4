"""Metrics of a training run, in metrics.jsonl and TensorBoard's files."""

import json
import pathlib
import sys

import jax
import tqdm

from launch import results


class Records:
  """The metrics of a run, from the step on at which it begins or goes on.

  What a killed run wrote after its last checkpoint is taken back: those steps
  are done again.

  Args:
    folder: WORKDIR, or None for a process that writes nothing.
    done: steps done.
  """

  def __init__(self, folder: pathlib.Path | None, *, done: int):
    self._path = self._board = None
    if folder is None:
      return
    self._path = folder / "metrics.jsonl"
    lines = self._path.read_text().splitlines() if done else ()
    kept = [
      x for x in lines if x.endswith("}") and json.loads(x)["step"] <= done
    ]
    results.write(self._path, "".join(f"{line}\n" for line in kept))
    try:
      import tensorboardX
    except ImportError:
      return
    self._board = tensorboardX.SummaryWriter(str(folder), purge_step=done + 1)

  def metrics(self, step: int, values: dict[str, float]) -> None:
    """A line of metrics.jsonl, also on stderr."""
    if self._path is None:
      return
    line = json.dumps({"step": step, **values})
    say(line)
    with self._path.open("a") as file:
      file.write(f"{line}\n")
    if self._board:
      for name, value in values.items():
        self._board.add_scalar(name, value, step)
      self._board.flush()


def say(text: str) -> None:
  """A line on stderr, above the progress bar, from one process."""
  if jax.process_index() == 0:
    tqdm.tqdm.write(text, file=sys.stderr)
