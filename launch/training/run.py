"""A training run, which goes on after a stop from its folder and config."""

import itertools
import pathlib
import signal
import sys

import jax
import ml_collections
import numpy as np
import tqdm
from absl import flags, logging
from flax import nnx

from launch import processes, results
from launch.training import (
  data,
  depth,
  flops,
  head,
  memory,
  model,
  records,
  saving,
  settings,
  step,
)
from launch.training.records import say


class Run:
  """A training run, decided by a folder and a config.

  Args:
    config: see configs/train_embedded.py and configs/train_head.py.
    workdir: made if it is not there.

  Raises:
    ValueError: for a config that cannot be run, or is not the folder's.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config = config
    self.folder = pathlib.Path(workdir).absolute()
    self.chief = jax.process_index() == 0
    settings.check(config, self.folder)
    texts = data.documents(config, "train")
    self.mesh = step.make_mesh(config)
    if "head" in config:
      self.task = head.task(config, texts, self.mesh, self.folder)
    elif "pair" in config:
      self.task = depth.task(config, self.mesh)
    else:
      self.task = model.task(config, texts, self.mesh)
    self.tokenizer, self.steps = self.task.tokenizer, self.task.steps
    self.sampler = self.task.sampler() if config.sample_every else None
    self.iterator = iter(self._batches("train", texts, config.data_seed))
    self.validation: list[dict[str, np.ndarray]] = []
    if config.validate_every:
      texts = data.documents(config, "validation")
      self.validation = _first_batches(
        self._batches("validation", texts, None), config.validation_batches
      )
      of_text = self.task.batches is None and "pair" not in config
      if not self.validation and of_text:
        self.validation = [self._incomplete_batch(texts)]
      if not self.validation:
        raise ValueError(
          "the validation split is smaller than a batch: lower "
          "config.batch_size or config.sequence_length"
        )

  def _batches(self, split: str, texts, seed: int | None):
    """Batches of a split's text, or of its stored features."""
    if self.task.batches is not None:
      return self.task.batches(split, seed=seed)
    config = self.config
    return data.batches(
      texts,
      self.tokenizer,
      length=config.sequence_length + 1,
      batch_size=config.batch_size,
      seed=seed,
    )

  def _incomplete_batch(self, texts) -> dict[str, np.ndarray]:
    """A validation text that does not fill a batch, rows of nothing below."""
    config, count = self.config, jax.process_count()
    rows = list(
      data.batches(
        texts, self.tokenizer, length=config.sequence_length + 1,
        batch_size=count, seed=None,
      )
    )[: config.batch_size // count]  # fmt: skip
    if not any(processes.gather(len(rows))):
      raise ValueError("the validation split has no tokens")
    size = config.batch_size // count - len(rows)
    empty = np.zeros((size, config.sequence_length + 1), np.int32)
    return {
      name: np.concatenate([*(row[name] for row in rows), empty])
      for name in ("tokens", "segments", "positions")
    }

  def train(self) -> tuple[nnx.Module, bool]:
    """Runs, or goes on, to the end or until SIGTERM.

    Returns:
      The trained module, and whether the run is over.

    Raises:
      ValueError: if the folder has checkpoints, and none can be read; or if
        another process trains in it.
      OSError: if the disk is full. The run can go on once it is not.
    """
    if self.chief:
      self.folder.mkdir(parents=True, exist_ok=True)
    with results.lock(self.folder / "lock", what=str(self.folder)):
      if self.chief:
        self.task.begin(self.folder)
      with saving.Checkpoints(
        self.folder / "checkpoints", every=self.config.checkpoint_every
      ) as saved:
        return self._train(saved)

  def _train(self, saved: saving.Checkpoints) -> tuple[nnx.Module, bool]:
    config = self.config
    stop = Stop()
    done, state = saved.restore(
      self.steps.init(jax.random.key(config.seed)), self.iterator
    )
    if done and done >= config.num_steps:
      say(f"is over: {done} steps done, config.num_steps is {config.num_steps}")
      return self.task.module(state.params), True
    if self.chief:
      settings.write(config, self.folder)
    written = records.Records(
      self.folder if self.chief else None,
      done=done,
      tokens_per_step=config.batch_size * config.sequence_length,
    )
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
    clock = None
    with progress, stop:
      while done < config.num_steps:
        batch = step.place_batch(next(self.iterator), self.mesh)
        state, loss = self.steps.train(state, batch)
        done += 1
        progress.update()
        if clock is None:  # the first step is compiled
          jax.block_until_ready(loss)
          clock = records.Clock(done)
        last = done == config.num_steps
        if due(config.log_every, done, last=last):
          written.metrics(done, self.progress(done, float(loss), clock))
        if due(config.validate_every, done, last=last):
          written.metrics(done, self.validate(state.params))
          clock.restart(done)
        if due(config.sample_every, done, last=last):
          for prompt, completion in self.sampler(state.params):
            written.sample(done, prompt, completion)
          clock.restart(done)
        ends = stop.asked or saved.preempted(done)
        saved.save(done, state, self.iterator, force=ends or last)
        if ends and not last:
          say(f"stopped at step {done}; the same command goes on from there")
          break
    return self.task.module(state.params), done >= config.num_steps

  def step_flops(self) -> float:
    """Floating point operations that a step needs."""
    return self.task.step_flops

  def progress(self, done: int, loss: float, clock: records.Clock) -> dict:
    """The metrics of a step; no rate before a second step."""
    config = self.config
    _, schedule = step.make_optimizer(config)
    metrics = {
      f"{config.objective}_loss": loss,
      "learning_rate": float(schedule(done - 1)),
    }
    rate = clock.steps_per_second(done)
    if rate is not None:
      peak, origin = flops.peak_flops()
      metrics |= {
        "tokens_per_second": rate * config.batch_size * config.sequence_length,
        "mfu": rate * self.step_flops() / peak,
        "peak_flops": origin,
      }
    return metrics

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
  """Set-up of a training process: fewer log lines, and freed memory kept."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax tells every rename
  memory.keep_freed()
