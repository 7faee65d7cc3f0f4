"""Trains a transformer, from scratch or as the draft of a target.

`config.contexts` selects the training text: the data, or samples of the target
or of the draft itself. DistillSpec (Zhou et al., ICLR 2024) distills on
samples, as does the offline phase of online speculative decoding (Liu et al.,
ICML 2024). The first tokens of a row are then a prompt, which a model completes
in every batch. Samples depend only on the step's key and weights, so a resumed
run sees the same text.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from launch import processes
from launch.training import data, step
from launch.training.step import Steps, Task
from models import checkpoints, tokenizers
from models.formats import huggingface
from models.networks.description import llama_config
from models.networks.transformer import Transformer, as_language_model
from models.tokenizers import Tokenizer
from specjax import decode
from specjax.training import losses
from specjax.types import LanguageModel, Params
from specjax.warp import make_sampling


def task(config, mesh: Mesh) -> Task:
  """The task of a config like configs/train_embedded.py."""
  student = _first(config)
  tokenizer = data.tokenizer_of(
    config, lambda: map(data.text_of, data.documents(config, "train"))
  )
  teacher = _teacher(config, tokenizer)
  definition = nnx.graphdef(student)
  return Task(
    tokenizer=tokenizer,
    first=student,
    steps=_steps(config, student, teacher, mesh),
    module=lambda params: nnx.merge(definition, params),
    report=lambda sums, batches: _report(sums, batches, tokenizer),
    export=functools.partial(
      huggingface.save_llama,
      tokenizer=tokenizer,
      dtype=jnp.dtype(config.export_dtype),
    ),
    begin=lambda folder: tokenizers.save_if_missing(
      tokenizer, config.tokenizer
    ),
    validate_first=bool(config.init_from),
    batches=data.batches_of(config, tokenizer),
  )


def _first(config) -> Transformer:
  """The initial model: random, or loaded from `config.init_from`."""
  wanted = llama_config(**config.model)
  if not config.init_from:
    return Transformer(wanted, rngs=nnx.Rngs(config.seed))
  module = checkpoints.load_module(config.init_from)
  if module.config != wanted:
    raise ValueError(
      f"config.init_from ({config.init_from}) does not match config.model: "
      f"{module.config}, not {wanted}"
    )
  return module


def _teacher(config, tokenizer: Tokenizer) -> Transformer | None:
  """The target of `config.teacher`, which must share the tokenizer."""
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
      f"config.model.vocab_size ({config.model.vocab_size}) must equal "
      f"config.teacher's ({module.config.vocab_size})"
    )
  return module


def _report(sums, batches, tokenizer: Tokenizer) -> dict[str, float]:
  """Nats per token and bits per byte of the validation text.

  With a teacher, also the acceptance: one minus the total variation.
  """
  size = 0
  for batch in batches:
    tokens = batch["tokens"][:, 1:][_inside(batch["segments"])]
    tokens = tokens[tokens != tokenizer.eos_token_id]  # it has no bytes
    size += int(tokenizer.token_bytes()[tokens].sum())
  size = sum(processes.gather(size))
  record = {
    "validation_next_token_loss": sums["nats"] / sums["tokens"],
    "validation_bits_per_byte": sums["nats"] / np.log(2) / size,
  }
  if "accepted" in sums:
    record["validation_acceptance"] = sums["accepted"] / sums["tokens"]
  return record


def _inside(segments):
  """Positions whose next token is in the same document."""
  return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)


def _steps(
  config: ml_collections.ConfigDict,
  student: Transformer,
  teacher: Transformer | None,
  mesh: Mesh,
) -> Steps:
  """Makes the steps; `validate` sums tokens, their nats and acceptances."""
  objective = losses.get(config.objective, block=config.acceptance_block)
  judged = losses.needs_teacher(config.objective)
  if teacher is None and (judged or config.contexts == "target"):
    raise ValueError(
      f"objective {config.objective!r} on contexts of {config.contexts!r} "
      "needs a teacher: give config.teacher"
    )
  check_contexts(config, ("data", "target", "draft"))
  student_model, first = as_language_model(student)
  definition = nnx.graphdef(student)
  teacher_definition, teacher_params, complete = None, None, None
  if teacher is not None:
    teacher_definition, teacher_params = nnx.split(teacher)
  if config.contexts != "data":
    samples_itself = config.contexts == "draft"
    sample = completer(
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
    weights = _inside(batch["segments"]).astype(jnp.float32)
    return batch["tokens"][:, 1:], weights

  def loss_fn(params, teacher_params, batch):
    taught = None
    if judged:
      taught = jax.lax.stop_gradient(
        logits(teacher_definition, teacher_params, batch)
      )
    labels, weights = targets(batch)
    if complete is not None:  # train on samples only
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


# ----------------------------------------------------------- sampled contexts


def check_contexts(config, sources: tuple[str, ...]) -> None:
  """Raises ValueError unless a config's contexts are some of these sources."""
  if config.contexts not in sources:
    raise ValueError(
      f"contexts must be one of {sources}, got {config.contexts!r}"
    )
  if config.contexts != "data" and not (
    0 < config.prompt_length < config.sequence_length
  ):
    raise ValueError(
      "prompt_length must be in [1, sequence_length), got "
      f"{config.prompt_length}"
    )


def completer(
  model: LanguageModel, *, prompt_length: int
) -> Callable[..., dict[str, Array]]:
  """Makes a jitted function that replaces the ends of rows by samples.

  Returns:
    `(params, batch, key) -> batch`, with `{"tokens", "segments", "positions"}`,
    `i32[B, T]` each. A prompt counts as one document, and no token stops a
    sample.
  """
  decoder = decode.make_decoder(model)

  @jax.jit
  def complete(params, batch, key):
    tokens = batch["tokens"]
    rows, length = tokens.shape
    both = Params(target=params, draft=None)
    state = decoder.init(
      both,
      tokens[:, :prompt_length],
      jnp.full((rows,), prompt_length, jnp.int32),
      key,
      buffer_length=length,
      max_new_tokens=length - prompt_length,
      sampling=make_sampling(rows),
    )
    sampled = decoder.generate(both, state).tokens[:, :length]
    return {
      "tokens": sampled,
      "segments": jnp.ones_like(tokens),
      "positions": jnp.broadcast_to(jnp.arange(length), tokens.shape),
    }

  return complete
