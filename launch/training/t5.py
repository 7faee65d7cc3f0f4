"""Trains encoder-decoders and block drafters.

A T5 learns the next token of the answer. SpecDec's drafter (Xia et al.,
Findings of EMNLP 2023) learns to predict k tokens at once: the answer is cut at
a random position and followed by k masks, and some of its errors are revealed
before a second try (glancing, Qian et al., 2021).

`config.dataset` is a file of lines {"input": "...", "output": "..."}. With
`config.answers`, `launch.decode`'s output for that file, answers are replaced
by decoded ones: sequence-level distillation (Kim and Rush, 2016). Pairs whose
answer is missing or was cut by its budget are left out.
"""

import functools
import itertools
import json
from collections.abc import Sequence

import grain
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from launch import results
from launch.training import data, step
from launch.training.step import Task
from models import tokenizers
from models.formats import huggingface
from models.networks import specdec
from models.networks.specdec import BlockConfig, BlockDrafter
from models.networks.t5 import T5
from models.networks.t5_config import T5Config
from models.tokenizers import Tokenizer
from specjax.types import Inputs


def task(config: ml_collections.ConfigDict, mesh: Mesh) -> Task:
  """The task of a config like configs/train_t5.py; ValueError for a bad one."""
  texts = lambda: itertools.chain.from_iterable(pairs(config, "train"))
  tokenizer = data.tokenizer_of(config, texts, tokenizers.train_encoder)
  module = _module(config)
  definition, first = nnx.split(module)

  def sums(params, batch, smoothing):
    module = nnx.merge(definition, params)
    if not isinstance(module, BlockDrafter):
      return next_token(module, batch, smoothing=smoothing)
    key = jax.random.wrap_key_data(batch["key"])
    return block(
      module, batch, key, glance=batch["glance"], smoothing=smoothing
    )

  def loss(params, frozen, batch):
    del frozen
    nats, tokens = sums(params, batch, config.label_smoothing)
    return nats / jnp.maximum(tokens, 1)

  def measure(params, frozen, batch):  # cuts are drawn from a fixed key
    del frozen
    drawn = {"key": jax.random.key_data(jax.random.key(0)), "glance": 0.0}
    nats, tokens = sums(params, batch | drawn, 0.0)
    return {"nats": nats, "tokens": tokens}

  @jax.jit
  def drawn(done, key):
    most, least = config.glance
    glance = most + (least - most) * done / config.num_steps
    return {"key": jax.random.key_data(key), "glance": glance}

  def complete(state, frozen, batch, key):
    del frozen
    counts = optax.tree_utils.tree_get_all_with_path(state.optimizer, "count")
    return batch | drawn(counts[0][1], key)

  save = specdec.save if config.kind == "t5_block" else huggingface.save_t5
  return Task(
    tokenizer=tokenizer,
    first=module,
    steps=step.jitted(
      config, mesh, first, {}, loss=loss, measure=measure, complete=complete
    ),
    module=lambda params: nnx.merge(definition, params),
    report=lambda sums, batches: {
      "validation_nats_per_token": sums["nats"] / sums["tokens"]
    },
    export=functools.partial(
      save, tokenizer=tokenizer, dtype=jnp.dtype(config.export_dtype)
    ),
    begin=lambda folder: tokenizers.save_if_missing(
      tokenizer, config.tokenizer
    ),
    batches=functools.partial(batches, config, tokenizer),
  )


def _module(config) -> T5 | BlockDrafter:
  """The network with its initial parameters."""
  shape, rngs = T5Config(**config.model), nnx.Rngs(config.seed)
  if config.kind == "t5":
    return T5(shape, rngs=rngs)
  block = BlockConfig(t5=shape, num_masks=config.num_masks)
  return BlockDrafter(block, rngs=rngs)


def _memory(module, batch: dict[str, Array]):
  """Encodes a batch's inputs."""
  inputs = Inputs(tokens=batch["inputs"], lengths=batch["input_lengths"])
  return module.encode(inputs)


def cross_entropy(logits: Array, targets: Array, smoothing: float) -> Array:
  """Cross-entropy of each target in nats, with label smoothing."""
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
  return -((1 - smoothing) * chosen + smoothing * log_probs.mean(-1))


def next_token(
  module: T5, batch: dict[str, Array], *, smoothing: float
) -> tuple[Array, Array]:
  """Nats of the answers' tokens: the sum, and the number of tokens."""
  tokens, lengths = batch["tokens"], batch["lengths"]
  output, _ = module(tokens[:, :-1], _memory(module, batch))
  nats = cross_entropy(output.logits, tokens[:, 1:], smoothing)
  valid = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
  return jnp.sum(jnp.where(valid, nats, 0)), jnp.sum(valid)


def block(
  module: BlockDrafter,
  batch: dict[str, Array],
  key: Array,
  *,
  glance: Array | float,
  smoothing: float,
) -> tuple[Array, Array]:
  """Nats of a block of each answer: the sum, and the number of tokens.

  The key draws cuts and revealed tokens; `glance` is the share of wrong tokens
  that is revealed.
  """
  tokens, lengths = batch["tokens"], batch["lengths"]
  rows, count = len(tokens), module.config.num_masks
  cut_key, show_key = jax.random.split(key)
  # At least the start token is known, and at least one token is unknown.
  share = jax.random.uniform(cut_key, (rows,))
  known = 1 + jnp.floor(share * jnp.maximum(lengths - 1, 1)).astype(jnp.int32)
  ahead = known[:, None] + jnp.arange(count)
  inside = ahead < lengths[:, None]
  place = jnp.minimum(ahead, tokens.shape[1] - 1)
  targets = jnp.take_along_axis(tokens, place, axis=1)
  memory = _memory(module, batch)
  predict = functools.partial(module, tokens, known, memory)
  guess = jax.lax.stop_gradient(predict())
  wrong = inside & (jnp.argmax(guess, axis=-1) != targets)
  num_shown = jnp.round(glance * wrong.sum(-1)).astype(jnp.int32)
  order = jax.random.uniform(show_key, inside.shape)
  order = jnp.where(inside, order, 2.0)  # any may be revealed, none beyond
  rank = jnp.argsort(jnp.argsort(order, axis=1), axis=1)
  shown = (rank < num_shown[:, None]) & inside
  nats = cross_entropy(
    predict(revealed=targets, shown=shown), targets, smoothing
  )
  counted = inside & ~shown
  return jnp.sum(jnp.where(counted, nats, 0)), jnp.sum(counted)


# ------------------------------------------------------------------------ data


def pairs(
  config: ml_collections.ConfigDict, split: str
) -> Sequence[tuple[str, str]]:
  """The pairs of input and answer in "train" or "validation"."""
  name = config.dataset if split == "train" else config.validation
  answers = None
  if config.answers and split == "train":
    answers = {
      json.dumps(record.get("id")): record.get("completion")
      for _, record in results.read_jsonl(config.answers)
      if record.get("stop_reason") != "length"
    }
  texts = []
  for number, record in results.read_jsonl(name):
    pair = record.get("input"), record.get("output")
    if answers is not None:
      pair = pair[0], answers.get(json.dumps(record.get("id", number)))
      if pair[1] is None:
        continue
    if not all(isinstance(text, str) for text in pair):
      raise ValueError(
        f'{name}:{number}: expected {{"input": "...", "output": "..."}}'
      )
    texts.append(pair)
  if not texts:
    raise ValueError(f"no pairs in {name} have an answer")
  return texts


def batches(
  config: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  split: str,
  *,
  seed: int | None,
) -> grain.IterDataset:
  """Batches of a split's pairs, padded or cut to the rows' lengths.

  Returns:
    Batches of `{"inputs" i32[B, W], "input_lengths" i32[B], "tokens"
    i32[B, T + 1], "lengths" i32[B]}`: tokens include the start token, as do
    `lengths`. W and T are in `config`; for seeds see
    `launch.training.data.shared`.
  """
  input_length, output_length = config.input_length, config.output_length
  start_token = T5Config(**config.model).start_token

  def row(pair: tuple[str, str]) -> dict[str, np.ndarray]:
    inputs = tokenizer.encode(pair[0])[:input_length]
    answer = [start_token, *tokenizer.encode(pair[1])][: output_length + 1]
    pad = lambda ids, width: np.asarray(
      [*ids, *[0] * (width - len(ids))], np.int32
    )
    return {
      "inputs": pad(inputs, input_length),
      "input_lengths": np.int32(len(inputs)),
      "tokens": pad(answer, output_length + 1),
      "lengths": np.int32(len(answer)),
    }

  rows, count = data.shared(pairs(config, split), config.batch_size, seed)
  return (
    rows.map(row)
    .batch(count, drop_remainder=True)
    .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
  )
