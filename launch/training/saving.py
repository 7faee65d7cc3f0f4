"""Checkpoints of a training run, with Orbax: state and place in the data.

A checkpoint that was not finished is never seen; one that cannot be read, or
whose files are not those that were written, is reported and put aside, and the
run goes on from the one before.
"""

import contextlib
import errno
import os
import pathlib
import shutil
import sys

import grain
import jax
import orbax.checkpoint as ocp
from absl import logging

from launch import processes
from models.formats import checksums

_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
  """The checkpoints in a folder; saved while it is entered.

  Args:
    folder: made if it is not there.
    every: steps between checkpoints; 0 for those that are forced only.
    keep: how many of the newest stay.
  """

  def __init__(self, folder: pathlib.Path, *, every: int, keep: int = 2):
    self._folder = folder
    self._every = every
    self._saving: int | None = None
    self._quiet = _Quiet()
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,  # of a run that a full disk ended
        async_options=ocp.AsyncOptions(
          post_finalization_callback=self._add_checksums
        ),
      ),
    )

  def _add_checksums(self) -> None:
    """Called, on the chief, when all is written and before it is renamed."""
    checksums.write(self._folder / f"{self._saving}{_UNFINISHED}")

  def save(self, step: int, state, iterator, *, force: bool = False) -> None:
    """Saves if it is time, in the background; `force` saves and waits.

    Args:
      step: steps done.
      state: a pytree of arrays.
      iterator: grain's, as it stands after that step's batch.
      force: whatever the step.

    Raises:
      OSError: if the disk is full, perhaps at an earlier save.
    """
    with _full_disk_is_an_os_error(self._folder):
      if force or (self._every > 0 and step % self._every == 0):
        if step != self._manager.latest_step():
          self._manager.wait_until_finished()  # of the save before
          self._saving = step
          self._manager.save(
            step,
            args=ocp.args.Composite(
              state=ocp.args.StandardSave(state),
              data=grain.checkpoint.CheckpointSave(iterator),
            ),
          )
      if force:
        self._manager.wait_until_finished()

  def restore(self, state, iterator):
    """The newest checkpoint that can be read.

    Args:
      state: arrays, or their shapes, dtypes and shardings, which need not be
        those that were saved.
      iterator: is set to the checkpoint's place in the data.

    Returns:
      Steps done and the state; 0 and the given state if there is nothing.

    Raises:
      ValueError: if another number of processes saved it: each has its place in
        the data; or if there are checkpoints, and none can be read.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    broken: list[int] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      self._check_processes(step)
      try:
        check_sound(self._folder / str(step))
        restored = self._manager.restore(
          step,
          args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract),
            data=grain.checkpoint.CheckpointRestore(iterator),
          ),
        )
      except Exception as error:  # what damage raises depends on the damage
        broken.append(step)
        logging.warning(
          "the checkpoint of step %d cannot be read (%s: %s)", step,
          type(error).__name__, " ".join(str(error).split())[:200],
        )  # fmt: skip
        continue
      for other in broken:
        self._put_aside(other)
      if broken:
        logging.warning("going back to the checkpoint of step %d", step)
      return step, restored.state
    if broken:
      raise ValueError(
        f"none of the checkpoints in {self._folder} can be read (of steps "
        f"{', '.join(map(str, broken))}); without that folder the run begins "
        "anew"
      )
    return 0, state

  def _check_processes(self, step: int) -> None:
    places = (self._folder / str(step) / "data").glob("process_*-of-*.json")
    counts = {int(path.stem.rpartition("-")[2]) for path in places}
    if counts and jax.process_count() not in counts:
      raise ValueError(
        f"the checkpoint of step {step} in {self._folder} is of "
        f"{max(counts)} processes, each with its place in the data; go on with "
        f"as many (on any mesh), not with {jax.process_count()}"
      )

  def _put_aside(self, step: int) -> None:
    """Renames a broken checkpoint, so that its step can be saved again."""
    if jax.process_index() == 0:
      source = self._folder / str(step)
      target = self._folder.parent / f"broken-{self._folder.name}-{step}"
      shutil.rmtree(target, ignore_errors=True)
      source.rename(target)
    if jax.process_count() > 1:
      ocp.multihost.sync_global_processes(f"specjax:broken:{step}")
    self._manager.reload()

  def preempted(self, step: int) -> bool:
    """True if preemption was announced, agreed among all processes."""
    return jax.process_count() > 1 and self._manager.reached_preemption(step)

  def __enter__(self):
    self._quiet.__enter__()
    return self

  def __exit__(self, kind, *_):
    """Waits for what is being saved; raises as `save`, if nothing else did."""
    try:
      with _full_disk_is_an_os_error(self._folder):
        self._manager.wait_until_finished()
        self._manager.close()
    except Exception:
      if kind is None:
        raise
    finally:
      self._quiet.__exit__()


def check_sound(folder: pathlib.Path) -> None:
  """Raises ValueError, on every process, if a checkpoint is damaged.

  The chief looks.
  """
  wrong = None
  if processes.is_chief():
    try:
      checksums.check(folder)
    except (ValueError, OSError) as error:
      wrong = str(error)
  (wrong, *_) = processes.gather(wrong)
  if wrong:
    raise ValueError(wrong)


@contextlib.contextmanager
def _full_disk_is_an_os_error(folder: pathlib.Path):
  """Turns all that Orbax may raise where there is no space left into OSError.

  Raises:
    OSError: then, of ENOSPC or EDQUOT.
  """
  try:
    yield
  except Exception as error:
    if number := _full_disk(error):
      raise OSError(number, os.strerror(number), str(folder)) from None
    raise


def _full_disk(error: BaseException | None) -> int | None:
  """The error number, if a full disk is what an exception comes from."""
  text = ""
  while error is not None:
    text += f"{error} "
    error = error.__cause__ or error.__context__
  numbers = (errno.ENOSPC, errno.EDQUOT)
  return next((n for n in numbers if os.strerror(n) in text), None)


class _Quiet(logging.logging.Filter):
  """Silences Orbax's threads on a full disk while entered: `save` raises.

  Each of them logs it with its traceback, and tensorstore then calls loops that
  are closed.
  """

  def __enter__(self):
    self._hook, sys.excepthook = sys.excepthook, self._excepthook
    logging.get_absl_logger().addFilter(self)
    return self

  def __exit__(self, *_):
    sys.excepthook = self._hook
    logging.get_absl_logger().removeFilter(self)

  def filter(self, record) -> bool:
    """True unless the record tells of a full disk."""
    raised = record.exc_info[1] if record.exc_info else None
    told = Exception(record.getMessage())
    return not (_full_disk(told) or _full_disk(raised))

  def _excepthook(self, kind, error, trace):
    if str(error) != "Event loop is closed":
      self._hook(kind, error, trace)
