"""Trains a small transformer: from scratch, or as the draft of a target.

  python -m launch.train --config=configs/train_embedded.py:target \
    --workdir=/tmp/specjax/target --export=models/pretrained/target

`--workdir` alone decides where a run stands: started again it goes on from its
last checkpoint, to the same parameters, bit for bit, as a run that was never
stopped. SIGTERM saves a checkpoint and ends with exit code 0. At the end the
model is exported as Llama files. WORKDIR gets

  config.json      what was asked for
  metrics.jsonl    one object for every `log_every` steps: loss, tokens per
                   second, model FLOPs utilisation, and with every validation
                   bits per byte (TensorBoard files too, if tensorboardX is
                   installed)
  samples.jsonl    what the weights of the moment complete
  checkpoints/     the newest two
  tokenizer/       the one of the config

Checkpoints go onto any mesh: with another `--config.mesh`, or on other devices,
the same command goes on (only the number of processes must stay: each has its
place in the data). And WORKDIR is a model that the other commands take as a
target or a draft (`launch.training.trained`).
"""

import itertools
import json
import pathlib
import signal
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm
from absl import flags, logging
from flax import nnx

from launch import main, processes
from launch.decoding import networks, prompts
from launch.training import checkpoints, data, flops, memory, step, trained
from models import huggingface, tokenizers
from models.transformer import Transformer, TransformerConfig, as_language_model
from specjax import decode
from specjax.types import Params
from specjax.warp import make_sampling

flags.adopt_module_key_flags(main)  # so that --help lists them
_EXPORT = flags.DEFINE_string(
  "export", None, "Where to write the trained model (Llama files)."
)

_SAMPLE_PROMPTS, _SAMPLE_TOKENS = 3, 48


class Run:
  """One training run: everything that a folder and a config decide.

  Args:
    config: see configs/train_embedded.py.
    workdir: made if it is not there.

  Raises:
    ValueError: for a config that cannot be run.
  """

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config = config
    self.folder = pathlib.Path(workdir).absolute()
    self.chief = jax.process_index() == 0
    if self.chief:
      self.folder.mkdir(parents=True, exist_ok=True)
      (self.folder / "config.json").write_text(
        config.to_json_best_effort(indent=2) + "\n"
      )
    texts = {s: data.documents(config, s) for s in ("train", "validation")}
    self.tokenizer = _tokenizer(config, texts["train"], chief=self.chief)
    if self.chief:  # with it, the folder is a model that can decode
      tokenizers.save(self.tokenizer, trained.tokenizer_dir(workdir))
    self.mesh = step.make_mesh(config)
    self.student = _first(config)
    self.teacher = (
      networks.load_module(config.teacher) if config.teacher else None
    )
    self.steps = step.make_steps(config, self.student, self.teacher, self.mesh)
    self.definition = nnx.graphdef(self.student)
    common = dict(
      length=config.sequence_length + 1, batch_size=config.batch_size
    )
    self.iterator = iter(
      data.batches(
        texts["train"], self.tokenizer, seed=config.data_seed, **common
      )
    )
    self.validation = _first_batches(
      data.batches(texts["validation"], self.tokenizer, seed=None, **common),
      config.validation_batches,
    )
    self._writer = _tensorboard(self.folder) if self.chief else None
    self._sampler = None

  def train(self) -> tuple[Transformer, bool]:
    """Runs, or goes on, to the end or until SIGTERM.

    Returns:
      The trained module, and whether the run is over.
    """
    config = self.config
    stop = _Stop()
    saved = checkpoints.Checkpoints(
      self.folder / "checkpoints", every=config.checkpoint_every
    )
    done, state = saved.restore(
      self.steps.init(jax.random.key(config.seed)), self.iterator
    )
    if done:
      _say(f"resumed at step {done}")
    else:
      parameters = sum(x.size for x in jax.tree.leaves(state.params))
      _say(f"{parameters:,} parameters on {dict(self.mesh.shape)}")
      if config.init_from:  # what there was to begin with
        self._validate(0, state)
    progress = tqdm.tqdm(
      total=config.num_steps, initial=done, unit="step",
      disable=not (self.chief and sys.stderr.isatty()),
    )  # fmt: skip
    clock = _Clock(done)
    with progress, stop:
      while done < config.num_steps:
        batch = step.place_batch(next(self.iterator), self.mesh)
        state, loss = self.steps.train(state, batch)
        done += 1
        progress.update()
        last = done == config.num_steps
        if done % config.log_every == 0 or last:
          self._log(done, float(loss), clock)
        if done % config.validate_every == 0 or last:
          self._validate(done, state)
          clock.restart(done)
        if config.sample_every and (done % config.sample_every == 0 or last):
          self._sample(done, state)
          clock.restart(done)
        ends = stop.asked or saved.preempted(done)
        saved.save(done, state, self.iterator, force=ends or last)
        if ends and not last:
          _say(f"stopped at step {done}; the same command goes on from there")
          break
    saved.close()
    return nnx.merge(self.definition, state.params), done == config.num_steps

  def step_flops(self) -> float:
    """Floating point operations that a step needs."""
    teacher = self.teacher.config if self.teacher else None
    return flops.step_flops(self.config, teacher)

  def _log(self, done: int, loss: float, clock: "_Clock") -> None:
    config = self.config
    rate = clock.steps_per_second(done)
    peak, origin = flops.peak_flops()
    _, schedule = step.make_optimizer(config)
    self._write(
      done,
      {
        "loss": loss,
        "learning_rate": float(schedule(done - 1)),
        "tokens_per_second": rate * config.batch_size * config.sequence_length,
        "mfu": rate * self.step_flops() / peak,
        "peak_flops": origin,
      },
    )

  def _validate(self, done: int, state: step.TrainState) -> None:
    sums: dict[str, float] = {}
    size = 0
    for batch in self.validation:
      placed = step.place_batch(batch, self.mesh)
      for name, value in self.steps.validate(state.params, placed).items():
        sums[name] = sums.get(name, 0.0) + float(value)
      size += self._num_bytes(batch)
    size = int(_total(size))
    record = {
      "validation_loss": sums["nats"] / sums["tokens"],
      "validation_bits_per_byte": sums["nats"] / np.log(2) / size,
    }
    if "accepted" in sums:
      record["validation_acceptance"] = sums["accepted"] / sums["tokens"]
    self._write(done, record)

  def _num_bytes(self, batch: dict[str, np.ndarray]) -> int:
    """Bytes of the text that was foretold: end-of-text tokens have none."""
    tokens, segments = batch["tokens"], batch["segments"]
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    told = tokens[:, 1:][
      inside & (tokens[:, 1:] != self.tokenizer.eos_token_id)
    ]
    return int(self.tokenizer.token_bytes()[told].sum())

  def _sample(self, done: int, state: step.TrainState) -> None:
    """Greedy completions of built-in prompts by the weights of the moment."""
    texts = prompts.BUILT_IN[:_SAMPLE_PROMPTS]
    ids = [self.tokenizer.encode(text) for text in texts]
    width = max(map(len, ids))
    fed = np.array([row + [0] * (width - len(row)) for row in ids], np.int32)
    if self._sampler is None:
      model, _ = as_language_model(self.student)
      decoder = decode.make_decoder(model, vocab_size=self.tokenizer.vocab_size)

      @jax.jit
      def sampler(params):
        both = Params(target=params, draft=None)
        start = decoder.init(
          both, fed, jnp.array([len(row) for row in ids]), jax.random.key(0),
          buffer_length=width + _SAMPLE_TOKENS, max_new_tokens=_SAMPLE_TOKENS,
          sampling=make_sampling(len(ids), temperature=0.0),
          stop_tokens=(self.tokenizer.eos_token_id,),
        )  # fmt: skip
        return decoder.generate(both, start)

      self._sampler = sampler
    found = jax.device_get(self._sampler(state.params))
    if not self.chief:
      return
    with (self.folder / "samples.jsonl").open("a") as out:
      for row, text in enumerate(texts):
        new = found.tokens[row, len(ids[row]) : found.length[row]]
        completion = self.tokenizer.decode(new.tolist())
        line = {"step": done, "prompt": text, "completion": completion}
        out.write(json.dumps(line) + "\n")

  def _write(self, done: int, values: dict) -> None:
    per_step = self.config.batch_size * self.config.sequence_length
    record = {"step": done, "tokens": done * per_step, **values}
    if not self.chief:
      return
    _say(json.dumps(record))
    with (self.folder / "metrics.jsonl").open("a") as out:
      out.write(json.dumps(record) + "\n")
    if self._writer:
      for name, value in values.items():
        if isinstance(value, float):
          self._writer.add_scalar(name, value, done)
      self._writer.flush()


class _Clock:
  """Steps per second, without what is not training and the first step."""

  def __init__(self, done: int):
    self.restart(done)

  def restart(self, done: int) -> None:
    self._start, self._from = time.perf_counter(), done

  def steps_per_second(self, done: int) -> float:
    rate = (done - self._from) / (time.perf_counter() - self._start)
    self.restart(done)
    return rate


class _Stop:
  """Notes SIGTERM while it is entered; of several processes, jax does."""

  asked = False

  def __enter__(self):
    if not processes.several():
      self._before = signal.signal(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *_):
    if not processes.several():
      signal.signal(signal.SIGTERM, self._before)

  def _note(self, *_):
    self.asked = True


def _first(config) -> Transformer:
  """The model to begin with: random, or read from `config.init_from`."""
  wanted = TransformerConfig(**config.model)
  if not config.init_from:
    return Transformer(wanted, rngs=nnx.Rngs(config.seed))
  found = networks.load_module(config.init_from)
  if found.config != wanted:
    raise ValueError(
      f"config.init_from has another shape than config.model: "
      f"{config.init_from} is {found.config}, not {wanted}"
    )
  return found


def _tokenizer(config, texts, *, chief: bool) -> tokenizers.Tokenizer:
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
  if chief:
    return found
  try:
    return tokenizers.load(config.tokenizer)
  except FileNotFoundError:
    with tempfile.TemporaryDirectory() as folder:
      return load_or_train(folder)


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


def _say(text: str) -> None:
  """A line on stderr, above the progress bar, from one process."""
  if jax.process_index() == 0:
    tqdm.tqdm.write(text, file=sys.stderr)


def _total(value: int) -> int:
  """The sum over processes."""
  if jax.process_count() == 1:
    return value
  from jax.experimental import multihost_utils

  return multihost_utils.process_allgather(np.int64(value)).sum()


def _tensorboard(folder: pathlib.Path):
  """A writer, if tensorboardX is installed."""
  try:
    import tensorboardX
  except ImportError:
    return None
  return tensorboardX.SummaryWriter(str(folder))


def run(_) -> int:
  """The command."""
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax tells every rename
  memory.keep_freed()
  config = main.CONFIG.value
  module, finished = Run(config, main.WORKDIR.value).train()
  if _EXPORT.value and finished and jax.process_index() == 0:
    huggingface.save_llama(
      module,
      _EXPORT.value,
      tokenizer=tokenizers.load(config.tokenizer),
      dtype=jnp.dtype(config.export_dtype),
    )
    _say(f"exported to {_EXPORT.value}")
  return 0


if __name__ == "__main__":
  main.run(
    run, required=("config", "workdir"), several_processes=True,
    preemption_notice=True,
  )  # fmt: skip
