"""One training run: what a folder and a config decide, killed or not."""

import dataclasses
import itertools
import pathlib
import signal
import sys
import tempfile

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm
from absl import flags, logging
from flax import nnx

from launch import locks, processes
from launch.training import (
  data,
  flops,
  memory,
  records,
  samples,
  saving,
  settings,
  step,
)
from launch.training.records import say
from models import checkpoints, huggingface, tokenizers, trained
from models.layers import TransformerConfig
from models.tokenizers import Tokenizer
from models.transformer import Transformer


class Run:
  """One training run: everything that a folder and a config decide.

  Args:
    config: see configs/train_embedded.py.
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
    self.tokenizer = _tokenizer(config, texts, chief=self.chief)
    self.mesh = step.make_mesh(config)
    self.student = _first(config)
    self.teacher = _teacher(config, self.tokenizer)
    self.steps = step.make_steps(config, self.student, self.teacher, self.mesh)
    self.definition = nnx.graphdef(self.student)
    common = dict(
      length=config.sequence_length + 1, batch_size=config.batch_size
    )
    self.iterator = iter(
      data.batches(texts, self.tokenizer, seed=config.data_seed, **common)
    )
    self.validation: list[dict[str, np.ndarray]] = []
    if config.validate_every:
      texts = data.documents(config, "validation")
      self.validation = _first_batches(
        data.batches(texts, self.tokenizer, seed=None, **common),
        config.validation_batches,
      )

  def train(self) -> tuple[Transformer, bool]:
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
    with locks.Lock(self.folder / "lock", what=str(self.folder)):
      if self.chief:  # With it, the folder is a model that can decode.
        tokenizers.save(self.tokenizer, trained.tokenizer_dir(str(self.folder)))
      with saving.Checkpoints(
        self.folder / "checkpoints", every=self.config.checkpoint_every
      ) as saved:
        return self._train(saved)

  def _train(self, saved: saving.Checkpoints) -> tuple[Transformer, bool]:
    config = self.config
    stop = Stop()
    done, state = saved.restore(
      self.steps.init(jax.random.key(config.seed)), self.iterator
    )
    if done and done >= config.num_steps:
      say(f"is over: {done} steps done, config.num_steps is {config.num_steps}")
      return nnx.merge(self.definition, state.params), True
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
      if config.init_from and self.validation:  # what there was to begin with
        written.metrics(0, self.validate(state.params))
    progress = tqdm.tqdm(
      total=config.num_steps, initial=done, unit="step",
      disable=not (self.chief and sys.stderr.isatty()),
    )  # fmt: skip
    sampler = samples.Sampler(
      self.student, self.tokenizer, tuple(config.sample_prompts)
    )
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
          for prompt, completion in sampler(state.params):
            written.sample(done, prompt, completion)
          clock.restart(done)
        ends = stop.asked or saved.preempted(done)
        saved.save(done, state, self.iterator, force=ends or last)
        if ends and not last:
          say(f"stopped at step {done}; the same command goes on from there")
          break
    return nnx.merge(self.definition, state.params), done >= config.num_steps

  def step_flops(self) -> float:
    """Floating point operations that a step needs."""
    teacher = self.teacher.config if self.teacher else None
    return flops.step_flops(self.config, teacher)

  def progress(self, done: int, loss: float, clock: records.Clock) -> dict:
    """What is logged of training; no rate before a second step."""
    config = self.config
    _, schedule = step.make_optimizer(config)
    found = {
      f"{config.objective}_loss": loss,
      "learning_rate": float(schedule(done - 1)),
    }
    rate = clock.steps_per_second(done)
    if rate is not None:
      peak, origin = flops.peak_flops()
      found |= {
        "tokens_per_second": rate * config.batch_size * config.sequence_length,
        "mfu": rate * self.step_flops() / peak,
        "peak_flops": origin,
      }
    return found

  def validate(self, params: nnx.State) -> dict[str, float]:
    """Loss of the validation text, nats a token, and bits per byte.

    With a teacher also the probability that a token drafted along that text
    would be accepted: one minus the mean total variation.
    """
    sums: dict[str, float] = {}
    size = 0
    for batch in self.validation:
      placed = step.place_batch(batch, self.mesh)
      for name, value in self.steps.validate(params, placed).items():
        sums[name] = sums.get(name, 0.0) + float(value)
      size += self._num_bytes(batch)
    size = sum(processes.gather(size))
    record = {
      "validation_next_token_loss": sums["nats"] / sums["tokens"],
      "validation_bits_per_byte": sums["nats"] / np.log(2) / size,
    }
    if "accepted" in sums:
      record["validation_acceptance"] = sums["accepted"] / sums["tokens"]
    return record

  def _num_bytes(self, batch: dict[str, np.ndarray]) -> int:
    """Bytes of the text that was foretold: end-of-text tokens have none."""
    tokens, segments = batch["tokens"], batch["segments"]
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    told = tokens[:, 1:][
      inside & (tokens[:, 1:] != self.tokenizer.eos_token_id)
    ]
    return int(self.tokenizer.token_bytes()[told].sum())

  def export(self, module: Transformer, directory: str) -> None:
    """Writes a trained module as Llama files, with the run's tokenizer."""
    huggingface.save_llama(
      module,
      directory,
      tokenizer=self.tokenizer,
      dtype=jnp.dtype(self.config.export_dtype),
    )


def due(every: int, done: int, *, last: bool) -> bool:
  """Whether it is time, after `done` steps; 0 for never."""
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


def _first(config) -> Transformer:
  """The model to begin with: random, or read from `config.init_from`."""
  wanted = TransformerConfig(**config.model)
  if not config.init_from:
    return Transformer(wanted, rngs=nnx.Rngs(config.seed))
  found = checkpoints.load_module(config.init_from)
  if found.config != wanted:
    raise ValueError(
      f"config.init_from ({config.init_from}) has another shape than "
      f"config.model: {_differences(found.config, wanted)}"
    )
  return found


def _differences(found: TransformerConfig, wanted: TransformerConfig) -> str:
  pairs = dataclasses.asdict(found).items(), dataclasses.asdict(wanted).items()
  return ", ".join(
    f"{name} is {a}, not {b}"
    for (name, a), (_, b) in zip(*pairs, strict=True)
    if a != b
  )


def _teacher(config, tokenizer: Tokenizer) -> Transformer | None:
  """The target of `config.teacher`; it must speak of the same tokens."""
  if not config.teacher:
    return None
  theirs = checkpoints.load_tokenizer(config.teacher)
  if theirs.fingerprint() != tokenizer.fingerprint():
    raise ValueError(
      f"config.teacher ({config.teacher}) has another tokenizer than "
      f"config.tokenizer ({config.tokenizer})"
    )
  found = checkpoints.load_module(config.teacher)
  if found.config.vocab_size != config.model.vocab_size:
    raise ValueError(
      f"config.model.vocab_size ({config.model.vocab_size}) must be that of "
      f"config.teacher ({found.config.vocab_size})"
    )
  return found


def _tokenizer(config, texts, *, chief: bool) -> Tokenizer:
  """The one of the config, trained on `texts` if it is not there.

  The chief writes it. A process that does not see the chief's files trains the
  same one for itself, in a folder that is then deleted.
  """

  def load_or_train(folder):
    return tokenizers.load_or_train(
      folder, vocab_size=config.model.vocab_size, texts=lambda: iter(texts)
    )

  found = load_or_train(config.tokenizer) if chief else None
  processes.gather(None)  # the chief is through
  if not chief:
    try:
      found = tokenizers.load(config.tokenizer)
    except FileNotFoundError:
      with tempfile.TemporaryDirectory() as folder:
        found = load_or_train(folder)
  if found.vocab_size > config.model.vocab_size:
    raise ValueError(
      f"config.model.vocab_size ({config.model.vocab_size}) is less than the "
      f"{found.vocab_size} tokens of config.tokenizer ({config.tokenizer})"
    )
  return found


def _first_batches(batches, limit: int) -> list[dict[str, np.ndarray]]:
  """At most `limit` batches (0: all), as many on every process."""
  found = list(itertools.islice(batches, limit or None))
  count = min(processes.gather(len(found)))
  if not count:
    raise ValueError(
      "the validation split is smaller than a batch: lower config.batch_size "
      "or config.sequence_length"
    )
  return found[:count]


def quiet() -> None:
  """What a process that trains sets first: few log lines, memory kept."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax tells every rename
  memory.keep_freed()
