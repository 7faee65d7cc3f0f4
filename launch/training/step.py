"""The optimizer, and jitted training and validation steps on a mesh.

`jitted` makes the steps from parameters, a loss and metrics; a `Task` has
everything that the training loop needs. There is one per module:
`launch.training.model` (a transformer), `head` (on a target's features) and
`t5` (an encoder-decoder).
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.sharding import names
from models.tokenizers import Tokenizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """Everything that changes during a run, except the position in the data.

  Attributes:
    params: the student's parameters.
    optimizer: optax's state.
    key: `u32[2]`, data of the random key for the next step's samples.
  """

  params: nnx.State
  optimizer: optax.OptState
  key: Array


def make_optimizer(
  config: ml_collections.ConfigDict,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """AdamW with warm-up, constant and decaying rate; gradients clipped at 1.

  The rate falls linearly to a hundredth over the last `config.decay_share` of
  `config.num_steps` (warm-up, stable, decay: Hu et al., 2024, MiniCPM, section
  4), so a run may be extended or shortened until the decay begins.
  """
  rate = config.learning_rate
  decay = round(config.decay_share * config.num_steps)
  warmup = min(config.warmup_steps, config.num_steps - decay)
  schedule = optax.join_schedules(
    [
      optax.linear_schedule(0.0, rate, warmup),
      optax.constant_schedule(rate),
      optax.linear_schedule(rate, rate / 100, decay),
    ],
    [warmup, config.num_steps - decay],
  )
  matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      schedule, b2=0.98, weight_decay=config.weight_decay, mask=matrices
    ),
  )
  return optimizer, schedule


def make_mesh(config: ml_collections.ConfigDict) -> Mesh:
  """The mesh `config.mesh = (data, model)` of all devices, or ValueError."""
  data, model = config.mesh
  if data == -1:
    data = jax.device_count() // model
  if data * model != jax.device_count():
    raise ValueError(
      f"mesh {tuple(config.mesh)} needs {data * model} devices, but there are "
      f"{jax.device_count()}"
    )
  return jax.make_mesh(
    (data, model),
    ("data", "model"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )


def shardings(tree, mesh: Mesh):
  """Shards projection outputs and table channels over 'model' if divisible."""
  size = mesh.shape["model"]

  def of(path, leaf):
    # "output" is a target's output projection on its own.
    axis = 0 if names(path)[-1] in ("weight", "output") else 1
    spec = PartitionSpec()
    if leaf.ndim == 2 and leaf.shape[axis] % size == 0:
      spec = PartitionSpec(*(None,) * axis, "model")
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(of, tree)


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Array]:
  """Makes arrays with rows sharded over 'data' from this process's rows."""
  sharding = NamedSharding(mesh, PartitionSpec("data"))
  return {
    name: jax.make_array_from_process_local_data(sharding, rows)
    for name, rows in batch.items()
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """The functions of a run, jitted for its mesh.

  Attributes:
    init: `key -> TrainState`, laid out on the mesh.
    train: `(state, batch) -> (state, loss f32[])`; the state is donated.
    validate: `(params, batch) -> {name: sum f32[]}`.
  """

  init: Callable
  train: Callable
  validate: Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """Functions and modules that define a training task.

  Attributes:
    tokenizer: the text's tokenizer.
    first: the initial module.
    steps: the jitted functions.
    batches: `(split, seed=...) -> grain dataset`.
    module: makes the module to return and export from parameters.
    report: makes a line of metrics.jsonl from the sums of `steps.validate` over
      the validation batches, and these batches.
    export: `(module, directory)`, writes it in its published format.
    begin: `(folder)`, writes other files to keep in WORKDIR.
    validate_first: whether to validate the initial parameters.
  """

  tokenizer: Tokenizer
  first: nnx.Module
  steps: Steps
  batches: Callable[..., grain.IterDataset]
  module: Callable[[nnx.State], nnx.Module]
  report: Callable[
    [Mapping[str, float], Sequence[dict[str, np.ndarray]]], dict[str, float]
  ]
  export: Callable[[nnx.Module, str], None]
  begin: Callable[[pathlib.Path], None] = lambda folder: None
  validate_first: bool = False


def jitted(
  config: ml_collections.ConfigDict,
  mesh: Mesh,
  first: nnx.State,
  frozen: Any,
  *,
  loss: Callable,
  measure: Callable,
  complete: Callable | None = None,
) -> Steps:
  """Makes the steps of a task.

  Args:
    config: settings of `make_optimizer`.
    mesh: from `make_mesh`.
    first: the initial parameters.
    frozen: constant arrays for `loss` and `measure`.
    loss: `(params, frozen, batch) -> f32[]`.
    measure: `(params, frozen, batch) -> {name: sum f32[]}`.
    complete: `(state, frozen, batch, key) -> batch`, applied before training on
      a batch; or None.
  """
  optimizer, _ = make_optimizer(config)
  frozen = jax.device_put(frozen, shardings(frozen, mesh))

  def init(key):
    params = jax.tree.map(jnp.copy, first)
    return TrainState(
      params=params,
      optimizer=optimizer.init(params),
      key=jax.random.key_data(key),
    )

  layout = shardings(jax.eval_shape(init, jax.random.key(0)), mesh)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
  def update(state, frozen, batch, next_key):
    value, grads = jax.value_and_grad(loss)(state.params, frozen, batch)
    updates, opt = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params=params, optimizer=opt, key=next_key), value

  def train(state, batch):
    next_key, here = jax.random.split(jax.random.wrap_key_data(state.key))
    if complete is not None:
      batch = complete(state, frozen, batch, here)
    return update(state, frozen, batch, jax.random.key_data(next_key))

  measure = jax.jit(measure)
  return Steps(
    init=jax.jit(init, out_shardings=layout),
    train=train,
    validate=lambda params, batch: measure(params, frozen, batch),
  )


def log(text: str) -> None:
  """Prints a line on stderr, on the chief only."""
  if jax.process_index() == 0:
    print(text, file=sys.stderr, flush=True)
