"""The head of a depth policy, trained on rounds that a pair decodes.

Text gives prompts, and the pair decodes some rounds after each, with drafts as
long as can be. Of every drafted token there is then what a policy sees of it
and `min(1, q / p)`, how likely it was to be accepted: a soft label, of whatever
was drawn. A token counts for the survival of those before it, which is the
chance that the round comes to it. The released SpecDec++ mixes random tokens
into its data, so that contexts are not all the target's; here they are the
rounds' own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from launch.assembly import pair, registry
from launch.assembly.pair import Pair
from launch.training import data, flops, step
from launch.training.step import Task
from models.formats.head_checkpoints import Head
from models.networks import acceptance_head
from models.networks.acceptance_head import AcceptanceHead, HeadConfig
from specjax.adaptive.estimates import Finished
from specjax.structs import struct
from specjax.types import Params
from specjax.warp import make_sampling

_ROUNDING = 1e-6  # of a variance of float32 sums


@struct
class Rounds:
  """Drafted tokens of some rounds.

  Attributes:
    hidden: `f32[M, B, G, H]`, see `AcceptanceHead`; likewise the next two.
    top: `f32[M, B, G]`.
    confidence: `f32[M, B, G]`.
    temperature: `f32[M, B, G]`.
    accept: `f32[M, B, G]`, how likely each was accepted.
    weight: `f32[M, B, G]`, how likely the round came to it.
  """

  hidden: Array
  top: Array
  confidence: Array
  temperature: Array
  accept: Array
  weight: Array


def task(config, mesh: Mesh) -> Task:
  """The task of configs/train_depth.py: a depth policy's head.

  Args:
    config: the config.
    mesh: from `launch.training.step.make_mesh`.

  Raises:
    ValueError: for a config that cannot be run.
  """
  _check(config)
  models = pair.load(config.pair)
  width = _width(config.pair, models)
  asked = registry.of(config.pair)
  deepest = registry.recording(asked, asked.tree.max_depth, width=width)
  made = pair.assemble(config.pair, models, drafting=deepest)
  module = AcceptanceHead(
    HeadConfig(width=width, num_blocks=config.num_blocks),
    rngs=nnx.Rngs(config.seed),
  )
  definition, first = nnx.split(module)
  decode = jax.jit(functools.partial(decoded, config, made))

  def loss(params, frozen, batch):
    del frozen
    head = nnx.merge(definition, params)
    return mean_loss(head, batch, config.rejection_weight)

  def measure(params, frozen, batch):
    key = jax.random.key(config.data_seed)
    rounds = decode(frozen, batch["tokens"], key)
    return sums(nnx.merge(definition, params), rounds, config.rejection_weight)

  return Task(
    tokenizer=made.tokenizer,
    first=module,
    steps=step.jitted(
      config,
      mesh,
      first,
      made.params,
      loss=loss,
      measure=measure,
      complete=lambda state, frozen, batch, key: decode(
        frozen, batch["tokens"], key
      ),
    ),
    module=lambda params: nnx.merge(definition, params),
    step_flops=_step_flops(config, models, first),
    report=lambda counts, batches: report(counts),
    export=lambda module, directory: acceptance_head.save(
      module, directory, dtype=jnp.dtype(config.export_dtype)
    ),
    batches=data.batches_of(config, made.tokenizer),
  )


def _check(config) -> None:
  """Raises ValueError for settings that can be judged without the models."""
  for name in ("num_blocks", "rounds"):
    if config[name] < 1:
      raise ValueError(f"{name} must be >= 1, got {config[name]}")
  if not config.rejection_weight > 0:
    raise ValueError(
      f"rejection_weight must be > 0, got {config.rejection_weight}"
    )
  if not config.temperatures or min(config.temperatures) < 0:
    raise ValueError(
      f"temperatures must be >= 0, got {tuple(config.temperatures)}"
    )
  if config.pair.mesh:
    raise ValueError("the pair drafts on the run's own mesh: no pair.mesh")


def _width(config, models: pair.Models) -> int:
  """H, of the hidden states that the draft's logits are read of."""
  if isinstance(models.draft, Head):
    return models.draft.shape.config.layer.embed_dim
  if models.draft is None:  # the target's own, of fewer layers
    return models.target.config.embed_dim
  return models.draft.config.embed_dim


def decoded(
  config, made: Pair, params: Params, tokens: Array, key: Array
) -> Rounds:
  """The rounds that follow some prompts.

  Args:
    config: with `sequence_length`, `rounds` and `temperatures`.
    made: the pair, under `policies.recorded`.
    params: its parameters.
    tokens: `i32[B, T]`, whose first tokens are prompts.
    key: what is drawn.
  """
  rows, length = len(tokens), config.sequence_length
  depth = made.decoder.drafter.tree.max_depth
  most = config.rounds * (depth + 1)  # no row ends before
  warmth = jnp.asarray(config.temperatures, jnp.float32)
  warmth = warmth[jnp.arange(rows) % len(config.temperatures)]
  state = made.decoder.init(
    params,
    tokens[:, :length],
    jnp.full((rows,), length, jnp.int32),
    key,
    buffer_length=length + most,
    max_new_tokens=most,
    sampling=dataclasses.replace(make_sampling(rows), temperature=warmth),
  )

  def one(state, _):
    state, _ = made.decoder.step(params, state)
    return state, state.drafter_state.memory

  _, finished = jax.lax.scan(one, state, length=config.rounds)
  return seen(finished, warmth)


def seen(finished: Finished, temperature: Array) -> Rounds:
  """The training data in finished rounds, `[M, B, ...]`, at a temperature."""
  accept = finished.accept
  one = jnp.ones_like(accept[..., :1])
  reached = jnp.cumprod(
    jnp.concatenate([one, accept[..., :-1]], axis=-1), axis=-1
  )
  return Rounds(
    hidden=finished.hidden,
    top=finished.top,
    confidence=finished.confidence,
    temperature=jnp.broadcast_to(temperature[:, None], accept.shape),
    accept=accept,
    weight=jnp.where(finished.active[..., None], reached, 0),
  )


def _logits(head: AcceptanceHead, rounds: Rounds) -> Array:
  return head(rounds.hidden, rounds.top, rounds.confidence, rounds.temperature)


def cross_entropy(
  logits: Array, accept: Array, rejection_weight: float
) -> Array:
  """Cross-entropy of each token, with rejections weighted (SpecDec++)."""
  kept, lost = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return -(accept * kept + rejection_weight * (1 - accept) * lost)


def mean_loss(
  head: AcceptanceHead, rounds: Rounds, rejection_weight: float
) -> Array:
  """The loss of a batch, over the tokens that rounds came to, `f32[]`."""
  each = cross_entropy(_logits(head, rounds), rounds.accept, rejection_weight)
  return jnp.sum(rounds.weight * each) / jnp.sum(rounds.weight)


def sums(
  head: AcceptanceHead, rounds: Rounds, rejection_weight: float
) -> dict[str, Array]:
  """Weighted sums over a batch, from which `report` makes means."""
  logits, weight, accept = _logits(head, rounds), rounds.weight, rounds.accept
  # Of the weighed loss the best answer is a / (a + w (1 - a)).
  fair = jax.nn.sigmoid(logits + jnp.log(rejection_weight))
  each = {
    "loss": cross_entropy(logits, accept, rejection_weight),
    "acceptance": accept,
    "predicted": fair,
    "squared_acceptance": accept**2,
    "squared_error": (fair - accept) ** 2,
  }
  totals = {name: jnp.sum(weight * value) for name, value in each.items()}
  return totals | {"tokens": jnp.sum(weight)}


def report(totals) -> dict[str, float]:
  """The line of metrics.jsonl, of sums over all batches.

  `validation_explained` is the share of the variance of acceptances that the
  head's estimate explains, the weight of rejections taken out of it; it is left
  out where they do not vary, as where all tokens are accepted.
  """
  mean = {
    name: value / totals["tokens"]
    for name, value in totals.items()
    if name != "tokens"
  }
  record = {
    "validation_loss": mean["loss"],
    "validation_acceptance": mean["acceptance"],
    "validation_predicted": mean["predicted"],
  }
  variance = mean["squared_acceptance"] - mean["acceptance"] ** 2
  if variance > _ROUNDING:
    record["validation_explained"] = 1 - mean["squared_error"] / variance
  return record


def _step_flops(config, models: pair.Models, head: nnx.State) -> float:
  """Operations of a step: the rounds' passes, and the head's three."""
  asked, length = registry.of(config.pair), config.sequence_length
  depth = asked.tree.max_depth
  drafted = config.batch_size * config.rounds * depth
  total = flops.forward_flops(models.target.config, length) * (
    config.batch_size * (config.rounds * (depth + 1) + length)
  )
  if asked.reads == "model":
    total += flops.forward_flops(models.draft.config, length) * drafted
  weights = sum(x.size for x in jax.tree.leaves(head) if x.ndim == 2)
  return total + 6 * weights * drafted
