"""A training run, which goes on after a stop from its folder and config."""

import itertools
import pathlib
import signal
import sys
import time

import jax
import ml_collections
import numpy as np
import tqdm
from absl import flags, logging
from flax import nnx

from launch import processes
from launch.training import head, model, records, saving, settings, step, t5
from launch.training.records import say


class Run:
  """A training run, decided by a folder and a config.

  Args:
    config: see configs/train_embedded.py, train_head.py and train_t5.py.
    workdir: made if it is not there.

  Raises:
    ValueError: for a config that cannot be run, or is not the folder's.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config = config
    self.folder = pathlib.Path(workdir).absolute()
    self.chief = jax.process_index() == 0
    settings.check(config, self.folder)
    self.mesh = step.make_mesh(config)
    self.task = _task(config, self.mesh, self.folder)
    self.tokenizer, self.steps = self.task.tokenizer, self.task.steps
    _, self.schedule = step.make_optimizer(config)
    self.iterator = iter(self.task.batches("train", seed=config.data_seed))
    self.validation: list[dict[str, np.ndarray]] = []
    # An encoder-decoder's rows are the tokens of its answers.
    length = config.get("sequence_length") or config.output_length
    self.step_tokens = config.batch_size * length
    if config.validate_every:
      self.validation = _first_batches(
        self.task.batches("validation", seed=None), config.validation_batches
      )
      if not self.validation:
        raise ValueError(
          "the validation split is smaller than a batch: lower "
          "config.batch_size, or set config.validate_every=0"
        )

  def train(self) -> tuple[nnx.Module, bool]:
    """Runs, or goes on, to the end or until SIGTERM.

    Returns:
      The trained module, and whether the run is over.
    """
    if self.chief:
      self.folder.mkdir(parents=True, exist_ok=True)
      self.task.begin(self.folder)
    with saving.Checkpoints(
      self.folder / "checkpoints", every=self.config.checkpoint_every
    ) as saved:
      return self._train(saved)

  def _train(self, saved: saving.Checkpoints) -> tuple[nnx.Module, bool]:
    config = self.config
    done, state = saved.restore(
      self.steps.init(jax.random.key(config.seed)), self.iterator
    )
    if done and done >= config.num_steps:
      say(f"over: {done} steps done, config.num_steps is {config.num_steps}")
      return self.task.module(state.params), True
    if self.chief:
      settings.write(config, self.folder)
    written = records.Records(self.folder if self.chief else None, done=done)
    if done:
      say(f"resumed at step {done}")
    else:
      parameters = sum(x.size for x in jax.tree.leaves(state.params))
      say(f"{parameters:,} parameters on {dict(self.mesh.shape)}")
      if self.task.knows and self.validation:  # what there was to begin with
        written.metrics(0, self.validate(state.params))
    progress = tqdm.tqdm(
      total=config.num_steps, initial=done, unit="step",
      disable=not (self.chief and sys.stderr.isatty()),
    )  # fmt: skip
    stop, timed, start = Stop(), None, 0.0  # the first step is compiled
    with progress, stop:
      while done < config.num_steps:
        batch = step.place_batch(next(self.iterator), self.mesh)
        state, loss = self.steps.train(state, batch)
        done += 1
        progress.update()
        last = done == config.num_steps
        logs = due(config.log_every, done, last=last)
        validates = due(config.validate_every, done, last=last)
        if logs:
          metrics = self.progress(done, float(loss))
          if timed is not None and done > timed:
            rate = (done - timed) / (time.perf_counter() - start)
            metrics["tokens_per_second"] = rate * self.step_tokens
          written.metrics(done, metrics)
        if validates:
          written.metrics(done, self.validate(state.params))
        if timed is None or logs or validates:
          jax.block_until_ready(loss)
          timed, start = done, time.perf_counter()
        ends = stop.asked or saved.preempted(done)
        saved.save(done, state, self.iterator, force=ends or last)
        if ends and not last:
          say(f"stopped at step {done}; the same command goes on from there")
          break
    return self.task.module(state.params), done >= config.num_steps

  def progress(self, done: int, loss: float) -> dict[str, float]:
    """The metrics of a step."""
    return {
      "tokens": done * self.step_tokens,
      f"{self.config.objective}_loss": loss,
      "learning_rate": float(self.schedule(done - 1)),
    }

  def validate(self, params: nnx.State) -> dict[str, float]:
    """The task's metrics on the validation text."""
    sums: dict[str, float] = {}
    for batch in self.validation:
      placed = step.place_batch(batch, self.mesh)
      for name, value in self.steps.validate(params, placed).items():
        sums[name] = sums.get(name, 0.0) + float(value)
    return self.task.report(sums, self.validation)

  def export(self, module: nnx.Module, directory: str) -> None:
    """Writes the trained module in its published format."""
    self.task.export(module, directory)


def _task(config, mesh, folder: pathlib.Path) -> step.Task:
  """The task that a config is of, by the setting that only it has."""
  if "head" in config:
    return head.task(config, mesh, folder)
  return (t5 if "kind" in config else model).task(config, mesh)


def due(every: int, done: int, *, last: bool) -> bool:
  """True if an action of every `every` steps is due; 0 is never."""
  return every > 0 and (last or done % every == 0)


class Stop:
  """Notes SIGTERM and Ctrl-C while it is entered; a second Ctrl-C interrupts.

  Of several processes, jax notes SIGTERM.
  """

  asked = False

  def __enter__(self):
    self._before = {}
    if not processes.several():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *_):
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number, _):
    self.asked = True
    if number == signal.SIGINT:
      signal.signal(number, self._before[number])


def _first_batches(batches, limit: int) -> list[dict[str, np.ndarray]]:
  """At most `limit` batches (0: all), as many on every process."""
  first = list(itertools.islice(batches, limit or None))
  return first[: min(processes.gather(len(first)))]


def quiet() -> None:
  """Hides Orbax's log lines, unless --verbosity asks for them."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
