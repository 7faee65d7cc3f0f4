"""The optimiser, and the jitted training and validation steps on a mesh."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch.training import contexts
from models.transformer import Transformer, as_language_model
from specjax import losses


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["params", "optimizer", "key"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """All that changes during a run, but for the place in the data.

  Attributes:
    params: the student's parameters.
    optimizer: optax's state.
    key: `u32[2]`, data of the key of the next step's samples.
  """

  params: nnx.State
  optimizer: optax.OptState
  key: Array


def make_optimizer(
  config: ml_collections.ConfigDict,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """AdamW at a warmed-up, constant, then decaying rate; gradients clipped at 1.

  The rate falls linearly to a hundredth over the last `config.decay_share` of
  `config.num_steps` (warm-up, stable, decay: Hu et al., 2024, MiniCPM, section
  4), so a run may be made longer or shorter until that begins.

  Raises:
    ValueError: if `config.decay_share` is not in [0, 1].
  """
  if not 0 <= config.decay_share <= 1:
    raise ValueError(f"decay_share must be in [0, 1], got {config.decay_share}")
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
  """The mesh `config.mesh = (data, model)` over all devices.

  Raises:
    ValueError: if it does not take as many devices as there are.
  """
  data, model = config.mesh
  if data == -1:
    data = jax.device_count() // model
  if data * model != jax.device_count():
    raise ValueError(
      f"mesh {tuple(config.mesh)} takes {data * model} devices, there are "
      f"{jax.device_count()}"
    )
  return jax.make_mesh(
    (data, model),
    ("data", "model"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )


def shardings(tree, mesh: Mesh):
  """Matrices cut along their last axis over 'model', if it divides that."""
  size = mesh.shape["model"]

  def of(leaf):
    cut = leaf.ndim == 2 and leaf.shape[-1] % size == 0
    return NamedSharding(
      mesh, PartitionSpec(None, "model") if cut else PartitionSpec()
    )

  return jax.tree.map(of, tree)


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Array]:
  """This process's rows, as its part of arrays whose rows lie over 'data'."""
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
    validate: `(params, batch) -> {name: sum f32[]}` with `tokens`, `nats` of
      the text, and with a teacher `accepted`: one minus the total variation.
  """

  init: Callable
  train: Callable
  validate: Callable


def make_steps(
  config: ml_collections.ConfigDict,
  student: Transformer,
  teacher: Transformer | None,
  mesh: Mesh,
) -> Steps:
  """Builds the steps.

  Args:
    config: see configs/train_embedded.py.
    student: its definition and first weights.
    teacher: the target to distil from, or None.
    mesh: from `make_mesh`.

  Returns:
    The `Steps`.

  Raises:
    ValueError: for an objective or contexts that need a teacher without one, or
      unknown ones; for a prompt that leaves nothing to sample, or a block that
      is longer than a row.
  """
  block = config.acceptance_block
  objective = losses.get(config.objective, block=block)
  if config.objective == "acceptance" and block > config.sequence_length:
    raise ValueError(
      f"acceptance_block ({block}) is longer than sequence_length "
      f"({config.sequence_length})"
    )
  if config.contexts not in contexts.SOURCES:
    raise ValueError(
      f"contexts must be one of {contexts.SOURCES}, got {config.contexts!r}"
    )
  judged = losses.needs_teacher(config.objective)
  if teacher is None and (judged or config.contexts == "target"):
    raise ValueError(
      f"objective {config.objective!r} on contexts of {config.contexts!r} "
      "needs a teacher: give config.teacher"
    )
  if config.contexts != "data" and not (
    0 < config.prompt_length < config.sequence_length
  ):
    raise ValueError(
      f"prompt_length must be in [1, sequence_length), here "
      f"[1, {config.sequence_length}), got {config.prompt_length}"
    )
  optimizer, _ = make_optimizer(config)
  student_model, first = as_language_model(student)
  definition = nnx.graphdef(student)
  teacher_definition, teacher_params = None, None
  complete = None
  if teacher is not None:
    teacher_definition, teacher_params = nnx.split(teacher)
    teacher_params = jax.device_put(
      teacher_params, shardings(teacher_params, mesh)
    )
  if config.contexts != "data":
    complete = contexts.completer(
      student_model
      if config.contexts == "draft"
      else as_language_model(teacher)[0],
      prompt_length=config.prompt_length,
    )

  def logits(graphdef, params, batch):
    output, _ = nnx.merge(graphdef, params)(
      batch["tokens"][:, :-1],
      positions=batch["positions"][:, :-1],
      segments=batch["segments"][:, :-1],
    )
    return output.logits

  def targets(batch):
    """The tokens to predict; the first of a document is not foretold."""
    segments = batch["segments"]
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return batch["tokens"][:, 1:], inside.astype(jnp.float32)

  def loss_fn(params, teacher_params, batch):
    taught = None
    if judged:
      taught = jax.lax.stop_gradient(
        logits(teacher_definition, teacher_params, batch)
      )
    labels, weights = targets(batch)
    if complete is not None:  # only what was sampled
      place = jnp.arange(labels.shape[1]) + 1
      weights = weights * (place >= config.prompt_length)
    return objective(logits(definition, params, batch), taught, labels, weights)

  def init(key):
    params = jax.tree.map(jnp.copy, first)
    return TrainState(
      params=params,
      optimizer=optimizer.init(params),
      key=jax.random.key_data(key),
    )

  layout = shardings(jax.eval_shape(init, jax.random.key(0)), mesh)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
  def update(state, teacher_params, batch, next_key):
    loss, grads = jax.value_and_grad(loss_fn)(
      state.params, teacher_params, batch
    )
    updates, opt = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params=params, optimizer=opt, key=next_key), loss

  def train(state, batch):
    next_key, here = jax.random.split(jax.random.wrap_key_data(state.key))
    if complete is not None:
      author = teacher_params if config.contexts == "target" else state.params
      batch = complete(author, batch, here)
    return update(state, teacher_params, batch, jax.random.key_data(next_key))

  @jax.jit
  def measure(params, teacher_params, batch):
    labels, weights = targets(batch)
    found = logits(definition, params, batch)
    total = jnp.sum(weights)
    sums = {
      "tokens": total,
      "nats": total * losses.next_token(found, None, labels, weights),
    }
    if teacher_definition is not None:
      taught = logits(teacher_definition, teacher_params, batch)
      away = losses.total_variation(found, taught, labels, weights)
      sums["accepted"] = total * (1 - away)
    return sums

  return Steps(
    init=jax.jit(init, out_shardings=layout),
    train=train,
    validate=lambda params, batch: measure(params, teacher_params, batch),
  )
