"""Training of a transformer, from scratch or as the draft of a target."""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from launch import processes
from launch.training import contexts, data, step
from launch.training.step import Steps, Task
from models import checkpoints, tokenizers
from models.formats import huggingface, trained
from models.networks.layers import TransformerConfig
from models.networks.transformer import Transformer, as_language_model
from models.tokenizers import Tokenizer
from specjax.training import losses


def task(config, mesh: Mesh) -> Task:
  """The task of a config like configs/train_embedded.py.

  Args:
    config: the config.
    mesh: from `launch.training.step.make_mesh`.

  Raises:
    ValueError: for a config that cannot be run.
  """
  student = _first(config)
  tokenizer = data.tokenizer_of(
    config, lambda: map(data.text_of, data.documents(config, "train"))
  )
  teacher = _teacher(config, tokenizer)
  definition = nnx.graphdef(student)

  def export(module: Transformer, directory: str) -> None:
    huggingface.save_llama(
      module,
      directory,
      tokenizer=tokenizer,
      dtype=jnp.dtype(config.export_dtype),
    )

  def begin(folder):
    tokenizers.save_if_missing(tokenizer, config.tokenizer)
    # With it, the folder is a model that can decode.
    tokenizers.save(tokenizer, trained.tokenizer_dir(str(folder)))

  return Task(
    tokenizer=tokenizer,
    first=student,
    steps=make_steps(config, student, teacher, mesh),
    module=lambda params: nnx.merge(definition, params),
    report=lambda sums, batches: _report(sums, batches, tokenizer),
    export=export,
    begin=begin,
    knows=bool(config.init_from),
    batches=data.batches_of(config, tokenizer),
  )


def _report(sums, batches, tokenizer: Tokenizer) -> dict[str, float]:
  """Nats a token and bits per byte of the validation text.

  With a teacher also the acceptance along it: one minus the total variation.
  """
  size = sum(_num_bytes(batch, tokenizer) for batch in batches)
  size = sum(processes.gather(size))
  record = {
    "validation_next_token_loss": sums["nats"] / sums["tokens"],
    "validation_bits_per_byte": sums["nats"] / np.log(2) / size,
  }
  if "accepted" in sums:
    record["validation_acceptance"] = sums["accepted"] / sums["tokens"]
  return record


def _num_bytes(batch: dict[str, np.ndarray], tokenizer: Tokenizer) -> int:
  """Bytes of the text that was predicted: end-of-text tokens have none."""
  tokens, segments = batch["tokens"], batch["segments"]
  inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
  told = tokens[:, 1:][inside & (tokens[:, 1:] != tokenizer.eos_token_id)]
  return int(tokenizer.token_bytes()[told].sum())


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
    The `Steps`. `validate` sums `tokens`, `nats` of the text, and with a
    teacher `accepted`: one minus the total variation.

  Raises:
    ValueError: for an objective or contexts that need a teacher without one, or
      unknown ones, or a prompt that leaves nothing to sample.
  """
  objective = losses.get(config.objective, block=config.acceptance_block)
  judged = losses.needs_teacher(config.objective)
  if teacher is None and (judged or config.contexts == "target"):
    raise ValueError(
      f"objective {config.objective!r} on contexts of {config.contexts!r} "
      "needs a teacher: give config.teacher"
    )
  contexts.check(config, contexts.SOURCES)
  student_model, first = as_language_model(student)
  definition = nnx.graphdef(student)
  teacher_definition, teacher_params, complete = None, None, None
  if teacher is not None:
    teacher_definition, teacher_params = nnx.split(teacher)
  if config.contexts != "data":
    samples_itself = config.contexts == "draft"
    sample = contexts.completer(
      student_model if samples_itself else as_language_model(teacher)[0],
      prompt_length=config.prompt_length,
    )
    complete = lambda state, frozen, batch, key: sample(
      state.params if samples_itself else frozen, batch, key
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

  def measure(params, teacher_params, batch):
    labels, weights = targets(batch)
    student_logits = logits(definition, params, batch)
    total = jnp.sum(weights)
    sums = {
      "tokens": total,
      "nats": total * losses.next_token(student_logits, None, labels, weights),
    }
    if teacher_definition is not None:
      taught = logits(teacher_definition, teacher_params, batch)
      away = losses.total_variation(student_logits, taught, labels, weights)
      sums["accepted"] = total * (1 - away)
    return sums

  return step.jitted(
    config, mesh, first, teacher_params, loss=loss_fn, measure=measure,
    complete=complete,
  )  # fmt: skip


def _first(config) -> Transformer:
  """The model to begin with: random, or read from `config.init_from`."""
  wanted = TransformerConfig(**config.model)
  if not config.init_from:
    return Transformer(wanted, rngs=nnx.Rngs(config.seed))
  module = checkpoints.load_module(config.init_from)
  if module.config != wanted:
    raise ValueError(
      f"config.init_from ({config.init_from}) has another shape than "
      f"config.model: {module.config}, not {wanted}"
    )
  return module


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
  module = checkpoints.load_module(config.teacher)
  if module.config.vocab_size != config.model.vocab_size:
    raise ValueError(
      f"config.model.vocab_size ({config.model.vocab_size}) must be that of "
      f"config.teacher ({module.config.vocab_size})"
    )
  return module
