"""Losses and jitted steps for training T5s and block drafters.

A T5 learns the next token of the answer. SpecDec's drafter (Xia et al.,
Findings of EMNLP 2023) learns to say k tokens at once: the answer is cut at a
random place, k masks follow, and it is told some of what it got wrong there
before it is asked again (glancing, Qian et al., 2021).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import nnx
from jax import Array

from launch.training import step
from models import sharding
from models.networks.specdec import BlockDrafter
from models.networks.t5 import T5
from specjax.types import Inputs

# What a draft that reads the target's encoder takes of it (`encoder_from`).
TAKEN = ("embed", "encoder")


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["params", "optimizer", "key", "count"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """All that changes during a run, but for the place in the data.

  Attributes:
    params: parameters of the network.
    optimizer: optax's state.
    key: `u32[2]`, data of the key that all steps' keys come from.
    count: `i32[]`, steps done.
  """

  params: nnx.State
  optimizer: optax.OptState
  key: Array
  count: Array


def inputs_of(batch: dict[str, Array]) -> Inputs:
  """The encoder's inputs in a batch."""
  return Inputs(tokens=batch["inputs"], lengths=batch["input_lengths"])


def cross_entropy(logits: Array, targets: Array, smoothing: float) -> Array:
  """Nats of each target, with label smoothing over the vocabulary."""
  law = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(law, targets[..., None], axis=-1)[..., 0]
  return -((1 - smoothing) * chosen + smoothing * law.mean(-1))


def next_token(
  module: T5, batch: dict[str, Array], *, smoothing: float
) -> tuple[Array, Array]:
  """Nats of the answers' tokens: their sum, and how many they are."""
  tokens, lengths = batch["tokens"], batch["lengths"]
  output, _ = module(tokens[:, :-1], module.encode(inputs_of(batch)))
  nats = cross_entropy(output.logits, tokens[:, 1:], smoothing)
  told = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
  return jnp.sum(jnp.where(told, nats, 0)), jnp.sum(told)


def block(
  module: BlockDrafter,
  batch: dict[str, Array],
  key: Array,
  *,
  glance: Array | float,
  smoothing: float,
) -> tuple[Array, Array]:
  """Nats of a block of each answer: their sum, and how many tokens.

  Args:
    module: the drafter.
    batch: see `launch.training.t5_data.batches`.
    key: of cuts and of what is revealed.
    glance: share of the tokens it got wrong that it is told; 0 for none.
    smoothing: of labels.
  """
  tokens, lengths = batch["tokens"], batch["lengths"]
  rows, count = len(tokens), module.config.num_masks
  cut_key, show_key = jax.random.split(key)
  # At least the start token is known, and at least one token is not.
  share = jax.random.uniform(cut_key, (rows,))
  known = 1 + jnp.floor(share * jnp.maximum(lengths - 1, 1)).astype(jnp.int32)
  ahead = known[:, None] + jnp.arange(count)
  inside = ahead < lengths[:, None]
  place = jnp.minimum(ahead, tokens.shape[1] - 1)
  targets = jnp.take_along_axis(tokens, place, axis=1)
  memory = module.encode(inputs_of(batch))
  say = functools.partial(module, tokens, known, memory)
  said = jax.lax.stop_gradient(say())
  wrong = inside & (jnp.argmax(said, axis=-1) != targets)
  told = jnp.round(glance * wrong.sum(-1)).astype(jnp.int32)
  order = jax.random.uniform(show_key, inside.shape)
  order = jnp.where(
    inside, order, 2.0
  )  # any token may be revealed, none beyond
  rank = jnp.argsort(jnp.argsort(order, axis=1), axis=1)
  shown = (rank < told[:, None]) & inside
  nats = cross_entropy(say(revealed=targets, shown=shown), targets, smoothing)
  counted = inside & ~shown
  return jnp.sum(jnp.where(counted, nats, 0)), jnp.sum(counted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """The functions of a run, jitted.

  Attributes:
    init: `key -> TrainState`.
    train: `(state, batch) -> (state, loss f32[])`; the state is donated.
    validate: `(params, batch) -> (nats f32[], tokens i32[])`, without label
      smoothing and without glancing, cut where a fixed key says.
  """

  init: Callable
  train: Callable
  validate: Callable


def make_steps(
  config: ml_collections.ConfigDict, module: T5 | BlockDrafter
) -> Steps:
  """The steps of a config.

  Args:
    config: see configs/train_t5.py.
    module: the network, with its first parameters.
  """
  graphdef, first = nnx.split(module)
  optimizer, _ = step.make_optimizer(config)
  taken = {*TAKEN} if config.get("encoder_from", "") else set()

  def learned(path, change):  # a decay of weights is a change, too
    stays = taken & {*sharding.names(path)}
    return jnp.zeros_like(change) if stays else change

  def sums(params, batch, key, *, glance, smoothing):
    module = nnx.merge(graphdef, params)
    if isinstance(module, BlockDrafter):
      return block(module, batch, key, glance=glance, smoothing=smoothing)
    return next_token(module, batch, smoothing=smoothing)

  def init(key):
    return TrainState(
      params=jax.tree.map(jnp.copy, first),
      optimizer=optimizer.init(first),
      key=jax.random.key_data(key),
      count=jnp.zeros((), jnp.int32),
    )

  @functools.partial(jax.jit, donate_argnums=0)
  def train(state, batch):
    key = jax.random.wrap_key_data(state.key)
    key = jax.random.fold_in(key, state.count)
    most, least = config.glance
    glance = most + (least - most) * state.count / config.num_steps

    def loss(params):
      nats, tokens = sums(
        params, batch, key, glance=glance, smoothing=config.label_smoothing
      )
      return nats / jnp.maximum(tokens, 1)

    value, gradient = jax.value_and_grad(loss)(state.params)
    gradient = jax.tree_util.tree_map_with_path(learned, gradient)
    change, optimizer_state = optimizer.update(
      gradient, state.optimizer, state.params
    )
    change = jax.tree_util.tree_map_with_path(learned, change)
    return TrainState(
      params=optax.apply_updates(state.params, change),
      optimizer=optimizer_state,
      key=state.key,
      count=state.count + 1,
    ), value

  @jax.jit
  def validate(params, batch):
    return sums(params, batch, jax.random.key(0), glance=0.0, smoothing=0.0)

  return Steps(init=jax.jit(init), train=train, validate=validate)
