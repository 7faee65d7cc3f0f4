"""A training run of a T5 or of a block drafter; see `launch.train`.

As `launch.training.run`: a folder decides where a run stands, and what is
killed goes on to the same parameters. One process, on one device.
"""

import itertools
import pathlib

import jax
import ml_collections
import numpy as np
from flax import nnx

from launch import results
from launch.training import records, saving, settings, step, t5_data, t5_step
from launch.training.records import say
from launch.training.run import Stop, due
from models import tokenizers
from models.formats import huggingface
from models.networks import specdec
from models.networks.specdec import BlockConfig, BlockDrafter
from models.networks.t5 import T5
from models.networks.t5_config import T5Config

KINDS = ("t5", "t5_block")


def is_of(config: ml_collections.ConfigDict) -> bool:
  """True for the config of an encoder-decoder."""
  return config.get("kind") in KINDS


class Run:
  """A training run, decided by a folder and a config.

  Args:
    config: see configs/train_t5.py.
    workdir: made if it is not there.

  Raises:
    ValueError: for a config that cannot be run, or is not the folder's.
  """

  chief = True

  def __init__(self, config: ml_collections.ConfigDict, workdir: str):
    self.config = config
    self.folder = pathlib.Path(workdir).absolute()
    settings.check(config, self.folder)
    texts = t5_data.pairs(config, "train")
    self.tokenizer = t5_data.tokenizer_of(config, texts)
    self.module = _module(config)
    self.steps = t5_step.make_steps(config, self.module)
    shape = self.module.config
    shape = shape.t5 if isinstance(shape, BlockConfig) else shape
    make = lambda texts, seed: iter(
      t5_data.batches(
        texts, self.tokenizer, start_token=shape.start_token,
        input_length=config.input_length, output_length=config.output_length,
        batch_size=config.batch_size, seed=seed,
      )
    )  # fmt: skip
    self.iterator = make(texts, config.data_seed)
    held_out = make(t5_data.pairs(config, "validation"), None)
    self.validation = list(
      itertools.islice(held_out, config.validation_batches or None)
    )
    if not self.validation:
      raise ValueError(
        f"{config.validation} is smaller than a batch: lower config.batch_size"
      )

  def train(self) -> tuple[T5 | BlockDrafter, bool]:
    """Runs, or goes on, to the end or until SIGTERM.

    Returns:
      The trained module, and whether the run is over.

    Raises:
      ValueError: if the folder has checkpoints, and none can be read; or if
        another process trains in it.
      OSError: if the disk is full. The run can go on once it is not.
    """
    self.folder.mkdir(parents=True, exist_ok=True)
    with results.lock(self.folder / "lock", what=str(self.folder)):
      tokenizers.save_if_missing(self.tokenizer, self.config.tokenizer)
      with saving.Checkpoints(
        self.folder / "checkpoints", every=self.config.checkpoint_every
      ) as saved:
        return self._train(saved)

  def _train(self, saved) -> tuple[T5 | BlockDrafter, bool]:
    config, stop = self.config, Stop()
    done, state = saved.restore(
      self.steps.init(jax.random.key(config.seed)), self.iterator
    )
    settings.write(config, self.folder)
    written = records.Records(
      self.folder, done=done,
      tokens_per_step=config.batch_size * config.output_length,
    )  # fmt: skip
    if done:
      say(f"resumed at step {done}")
    else:
      sizes = [x.size for x in jax.tree.leaves(state.params)]
      say(f"{sum(sizes):,} parameters")
    _, schedule = step.make_optimizer(config)
    clock = None
    with stop:
      while done < config.num_steps:
        state, loss = self.steps.train(state, next(self.iterator))
        done += 1
        if clock is None:  # the first step is compiled
          jax.block_until_ready(loss)
          clock = records.Clock(done)
        last = done == config.num_steps
        if due(config.log_every, done, last=last):
          metrics = {
            "loss": float(loss), "learning_rate": float(schedule(done - 1))
          }  # fmt: skip
          rate = clock.steps_per_second(done)
          written.metrics(
            done, metrics | ({"steps_per_second": rate} if rate else {})
          )
        if due(config.validate_every, done, last=last):
          written.metrics(done, self.validate(state.params))
          clock.restart(done)
        saved.save(done, state, self.iterator, force=stop.asked or last)
        if stop.asked and not last:
          say(f"stopped at step {done}; the same command goes on from there")
          break
    nnx.update(self.module, state.params)
    return self.module, done >= config.num_steps

  def validate(self, params: nnx.State) -> dict[str, float]:
    """Nats a token of the validation pairs."""
    sums = [
      jax.device_get(self.steps.validate(params, batch))
      for batch in self.validation
    ]
    nats, tokens = np.sum(sums, axis=0)
    return {"validation_nats_per_token": float(nats / tokens)}

  def export(self, module: T5 | BlockDrafter, directory: str) -> None:
    """Writes a trained network, with the run's tokenizer."""
    save = huggingface.save_t5
    if isinstance(module, BlockDrafter):
      save = specdec.save
    save(
      module, directory, tokenizer=self.tokenizer,
      dtype=jax.numpy.dtype(self.config.export_dtype),
    )  # fmt: skip


def _module(config) -> T5 | BlockDrafter:
  """The network with its first parameters."""
  shape, rngs = T5Config(**config.model), nnx.Rngs(config.seed)
  if config.kind == "t5":
    module = network = T5(shape, rngs=rngs)
  else:
    block = BlockConfig(t5=shape, num_masks=config.num_masks)
    module = BlockDrafter(block, rngs=rngs)
    network = module.t5
  if config.get("encoder_from", ""):
    _take_encoder(network, config.encoder_from)
  return module


def _take_encoder(network: T5, directory: str) -> None:
  """Gives a T5 the table and the encoder of another one.

  Raises:
    FileNotFoundError, ValueError: if there is none, or one of other shapes.
  """
  other = huggingface.load(directory)
  for name in t5_step.TAKEN:
    given = nnx.state(getattr(other, name)) if isinstance(other, T5) else {}
    wanted = nnx.state(getattr(network, name))
    shapes = lambda state: [
      (path, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]
    if shapes(given) != shapes(wanted):
      raise ValueError(
        f"config.encoder_from ({directory}) must be a T5 with the {name} that "
        "config.model asks for"
      )
    nnx.update(getattr(network, name), given)
