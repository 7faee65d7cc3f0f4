"""What a training run writes: checkpoints (with Orbax), metrics, messages."""

import json
import pathlib
import sys

import grain
import jax
import orbax.checkpoint as ocp

from launch import results


class Checkpoints:
  """The checkpoints in a folder, of which the newest two are kept.

  Each has the state and the place in the data; an unfinished one is not seen.
  Entered as a context, it waits at its end for what is being saved.

  Args:
    folder: made if it is not there.
    every: steps between checkpoints; 0 for those that are forced only.
  """

  def __init__(self, folder: pathlib.Path, *, every: int):
    self._every = every
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True
      ),
    )

  def save(self, step: int, state, iterator, *, force: bool = False) -> None:
    """Saves if it is time, in the background; `force` saves and waits."""
    if force or (self._every > 0 and step % self._every == 0):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          data=grain.checkpoint.CheckpointSave(iterator),
        ),
        force=True,  # this class decides when
      )
    if force:
      self._manager.wait_until_finished()

  def restore(self, state, iterator):
    """The newest checkpoint."""
    step = self._manager.latest_step()
    if step is None:
      return 0, state
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract),
        data=grain.checkpoint.CheckpointRestore(iterator),
      ),
    )
    return step, restored.state

  def preempted(self, step: int) -> bool:
    """True if preemption was announced, agreed among all processes."""
    return jax.process_count() > 1 and self._manager.reached_preemption(step)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._manager.close()


class Metrics:
  """The metrics of a run, in metrics.jsonl.

  What a killed run wrote after its last checkpoint is taken back: those steps
  are done again.

  Args:
    folder: WORKDIR, or None for a process that writes nothing.
    done: steps done.
  """

  def __init__(self, folder: pathlib.Path | None, *, done: int):
    self._path = None
    if folder is None:
      return
    self._path = folder / "metrics.jsonl"
    lines: list[dict] = []
    if done and self._path.exists():
      # The last line of a killed run may be half a line.
      *whole, _ = self._path.read_text("utf-8").split("\n")
      lines = [json.loads(line) for line in whole]
    results.write(
      self._path, results.dumps(x for x in lines if x["step"] <= done)
    )

  def write(self, step: int, values: dict[str, float]) -> None:
    """A line of metrics.jsonl, also on stderr."""
    if self._path is None:
      return
    line = {"step": step, **values}
    say(json.dumps(line))
    with open(self._path, "a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")


def say(text: str) -> None:
  """A line on stderr, from one process."""
  if jax.process_index() == 0:
    print(text, file=sys.stderr, flush=True)
