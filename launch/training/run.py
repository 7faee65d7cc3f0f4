"""A training run, which resumes from its folder and config.

Checkpoints are Orbax's, metrics are JSON lines.
"""

import itertools
import json
import pathlib
import shutil
import signal
import time

import grain
import jax
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
from absl import flags, logging
from flax import nnx

from launch import processes, results
from launch.training import head, model, step, t5
from launch.training.step import log

# Settings that may change within a run; changing others makes it another run.
_MAY_CHANGE = {
  "num_steps", "learning_rate", "warmup_steps", "decay_share", "weight_decay",
  "mesh", "log_every", "validate_every", "validation_batches",
  "checkpoint_every", "export_dtype",
}  # fmt: skip


def read_config(workdir: str) -> ml_collections.ConfigDict:
  """The config of the run in a folder; ValueError if there is none."""
  path = pathlib.Path(workdir) / "config.json"
  if not path.is_file():
    raise ValueError(f"no run to resume in {workdir}: give --config")
  config = ml_collections.ConfigDict(json.loads(path.read_text("utf-8")))
  config.lock()
  return config


def check(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
  """Raises ValueError if the run in a folder has other settings."""
  names = ("checkpoints", "config.json")  # a run killed early has one of them
  if not all((folder / name).exists() for name in names):
    return
  saved = json.loads((folder / "config.json").read_text("utf-8"))
  given = json.loads(config.to_json_best_effort())
  for name in sorted((saved.keys() | given.keys()) - _MAY_CHANGE):
    if saved.get(name) != given.get(name):
      raise ValueError(
        f"the run in {folder} has config.{name} = {saved.get(name)!r}, not "
        f"{given.get(name)!r}: give another --workdir, or --overwrite"
      )


def discard_other(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Deletes a folder's checkpoints if their run had other settings."""
  folder = pathlib.Path(workdir)
  if processes.is_chief():
    try:
      check(config, folder)
    except ValueError:
      shutil.rmtree(folder / "checkpoints")
      (folder / "vocabulary.json").unlink(missing_ok=True)
  processes.gather(None)


class Run:
  """A training run in a folder, with a config.

  For configs see configs/train_embedded.py, train_head.py and train_t5.py.
  Raises ValueError if the config is invalid or does not match the folder.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config = config
    self.folder = pathlib.Path(workdir).absolute()
    self.chief = processes.is_chief()
    check(config, self.folder)
    self.mesh = step.make_mesh(config)
    if "head" in config:
      self.task = head.task(config, self.mesh, self.folder)
    else:
      self.task = (t5 if "kind" in config else model).task(config, self.mesh)
    self.tokenizer, self.steps = self.task.tokenizer, self.task.steps
    _, self.schedule = step.make_optimizer(config)
    self.iterator = iter(self.task.batches("train", seed=config.data_seed))
    self.validation: list[dict[str, np.ndarray]] = []
    # An encoder-decoder's rows are the tokens of its answers.
    length = config.get("sequence_length") or config.output_length
    self.step_tokens = config.batch_size * length
    if config.validate_every:
      batches = self.task.batches("validation", seed=None)
      first = itertools.islice(batches, config.validation_batches or None)
      self.validation = list(first)
      # The same number on every process.
      del self.validation[min(processes.gather(len(self.validation))) :]
      if not self.validation:
        raise ValueError(
          "the validation split is smaller than a batch: lower "
          "config.batch_size, or set config.validate_every=0"
        )

  def train(self) -> tuple[nnx.Module, bool]:
    """Runs or resumes, to the end or until SIGTERM."""
    if self.chief:
      self.folder.mkdir(parents=True, exist_ok=True)
      self.task.begin(self.folder)
    with (
      Checkpoints(
        self.folder / "checkpoints", every=self.config.checkpoint_every
      ) as saved,
      Stop() as stop,
    ):
      return self._train(saved, stop)

  def _train(
    self, saved: "Checkpoints", stop: "Stop"
  ) -> tuple[nnx.Module, bool]:
    config = self.config
    done, state = saved.restore(
      self.steps.init(jax.random.key(config.seed)), self.iterator
    )
    if done and done >= config.num_steps:
      log(f"finished: {done} steps, config.num_steps is {config.num_steps}")
      return self.task.module(state.params), True
    if self.chief:
      text = config.to_json_best_effort(indent=2)
      results.write(self.folder / "config.json", text + "\n")
    metrics = Metrics(self.folder if self.chief else None, done=done)
    if done:
      log(f"resumed at step {done}")
    else:
      parameters = sum(x.size for x in jax.tree.leaves(state.params))
      log(f"{parameters:,} parameters on {dict(self.mesh.shape)}")
      if self.task.validate_first and self.validation:
        metrics.write(0, self.validate(state.params))
    timed, start = None, 0.0  # the first step compiles
    while done < config.num_steps:
      batch = step.place_batch(next(self.iterator), self.mesh)
      state, loss = self.steps.train(state, batch)
      done += 1
      last = done == config.num_steps
      logs, validates = (
        every > 0 and (last or done % every == 0)  # 0 means never
        for every in (config.log_every, config.validate_every)
      )
      if logs:
        values = {
          "tokens": done * self.step_tokens,
          f"{config.objective}_loss": float(loss),
          "learning_rate": float(self.schedule(done - 1)),
        }
        if timed is not None and done > timed:
          rate = (done - timed) / (time.perf_counter() - start)
          values["tokens_per_second"] = rate * self.step_tokens
        metrics.write(done, values)
      if validates:
        metrics.write(done, self.validate(state.params))
      if timed is None or logs or validates:
        jax.block_until_ready(loss)
        timed, start = done, time.perf_counter()
      ends = stop.requested or saved.preempted(done)
      saved.save(done, state, self.iterator, force=ends or last)
      if ends and not last:
        log(f"stopped at step {done}; the same command continues")
        break
    return self.task.module(state.params), done >= config.num_steps

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


class Checkpoints:
  """The newest two checkpoints in a folder.

  Each has the state and the position in the data. They are saved `every` steps
  (0: only when forced); unfinished ones are ignored. As a context, it ends by
  waiting until everything is saved.
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
    """Saves in the background if it is time; `force` saves and waits."""
    if force or (self._every > 0 and step % self._every == 0):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          data=grain.checkpoint.CheckpointSave(iterator),
        ),
        force=True,  # this class decides when to save
      )
    if force:
      self._manager.wait_until_finished()

  def restore(self, state, iterator):
    """Restores the newest checkpoint."""
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
    """True if preemption was announced, the same on all processes."""
    return jax.process_count() > 1 and self._manager.reached_preemption(step)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._manager.close()


class Metrics:
  """The metrics of a run, in metrics.jsonl.

  Lines that a killed run wrote after its last checkpoint are removed, since
  those steps are repeated. Without a folder nothing is written.
  """

  def __init__(self, folder: pathlib.Path | None, *, done: int):
    self._path = None
    if folder is None:
      return
    self._path = folder / "metrics.jsonl"
    lines: list[dict] = []
    if done and self._path.exists():
      # The last line of a killed run may be incomplete.
      *complete, _ = self._path.read_text("utf-8").split("\n")
      lines = [json.loads(line) for line in complete]
    results.write(
      self._path, results.dumps(x for x in lines if x["step"] <= done)
    )

  def write(self, step: int, values: dict[str, float]) -> None:
    """Writes a line to metrics.jsonl and stderr."""
    if self._path is None:
      return
    line = {"step": step, **values}
    log(json.dumps(line))
    with open(self._path, "a", encoding="utf-8") as file:
      file.write(json.dumps(line) + "\n")


class Stop:
  """Catches SIGTERM and Ctrl-C as a context; a second Ctrl-C interrupts.

  With several processes, jax catches SIGTERM.
  """

  requested = False

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
    self.requested = True
    if number == signal.SIGINT:
      signal.signal(number, self._before[number])


def quiet() -> None:
  """Hides Orbax's log lines, unless --verbosity asks for them."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)
