"""Floating point operations of training, and the share of the peak they reach.

Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B): operations
that the model needs, nothing recomputed counted, over what the chips could do.
"""

import functools

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from launch import hardware
from models import head_shapes
from models.networks.description import (
  TransformerConfig,
  attention_weights,
  mlp_weights,
)
from models.networks.dflash import Parallel
from models.networks.eagle import Eagle, Eagle3
from models.networks.mtp import Mtp
from models.networks.transformer import Transformer
from specjax.runtime import timing
from specjax.training import losses


def forward_flops(config: TransformerConfig, length: int) -> float:
  """Operations of a forward pass, per token of a sequence of `length`.

  Two for each weight of a matrix product (the embedding is a lookup, the output
  projection is not), and the causal half of the attention's products.
  """
  c = config
  heads = c.num_heads * c.head_dim
  weights = c.embed_dim * c.vocab_size + sum(
    attention_weights(layer, c.embed_dim) + mlp_weights(layer, c.embed_dim)
    for layer in map(c.layer, range(c.num_layers))
  )
  return 2 * weights + 2 * c.num_layers * heads * length


def training_flops(
  student: TransformerConfig,
  teacher: TransformerConfig | None,
  length: int,
  *,
  objective: str = "next_token",
  contexts: str = "data",
) -> float:
  """Operations of a training step per token.

  Three passes of the student, one of a teacher whose laws the objective asks
  for, and one of the model whose samples are the contexts (a prompt's share of
  it is not taken off).
  """
  passes = {"data": 0.0, "draft": forward_flops(student, length)}
  if teacher is not None:
    passes["target"] = forward_flops(teacher, length)
  total = 3 * forward_flops(student, length) + passes[contexts]
  if teacher is not None and losses.needs_teacher(objective):
    total += forward_flops(teacher, length)
  return total


def step_flops(
  config: ml_collections.ConfigDict, teacher: TransformerConfig | None
) -> float:
  """Operations of a training step of a config (configs/train_embedded.py)."""
  per_token = training_flops(
    TransformerConfig(**config.model),
    teacher,
    config.sequence_length,
    objective=config.objective,
    contexts=config.contexts,
  )
  return per_token * config.batch_size * config.sequence_length


def head_step_flops(
  config,
  target: Transformer,
  module: nnx.Module,
  trained: nnx.State,
  *,
  num_words: int,
  stored: bool = False,
) -> float:
  """Operations of a step: the target's pass, its law, and the head's passes.

  Counted as a model's are, so that a head and a draft model can be trained at
  equal compute. The target's pass, of which features and laws are read, is
  counted like that of a teacher; where its features are stored, its law alone.

  Three passes of each matrix of the head for every time that it is read; of a
  projection that is the target's, two.

  Args:
    config: configs/train_head.py.
    target: whose features are read.
    module: the head.
    trained: its parameters that change.
    num_words: tokens that it can say. Of a draft of some of the vocabulary the
      target's law is made of those alone.
    stored: whether features are read from a file, with no pass of the target.
  """
  c, depth = target.config, config.head.depth
  length = config.sequence_length
  law, whole = c.embed_dim * num_words, c.embed_dim * c.vocab_size
  blocks = config.head.get("anchors", 0) / length
  per_token = 2.0 * law
  if not stored:
    per_token += forward_flops(c, length) - 2 * whole
  for path, value in nnx.to_flat_state(trained):
    if value.ndim == 2:
      per_token += 6 * value.size * _times(module, path, depth, blocks)
  if head_shapes.says_by_target(module):
    of_blocks = isinstance(module, Parallel)
    times = _times(module, ("lm_head",), depth, blocks) if of_blocks else depth
    per_token += 4 * whole * times
  per_token += 3 * _attention(module, length, depth, blocks)
  return per_token * config.batch_size * length


def _times(module, path: tuple, depth: int, blocks: float) -> float:
  """Number of times a matrix of a head is read, per token of the text.

  EAGLE and MTP read their layer at every depth. Of blocks every token reads the
  layers; keys and values are also of all features.

  Args:
    module: the head.
    path: of the parameter.
    depth: tokens of a draft.
    blocks: for each token of the text.
  """
  if path[0] == "fc" and not isinstance(module, Eagle | Mtp):
    return 1
  if isinstance(module, Eagle | Eagle3 | Mtp):
    return depth
  if not isinstance(module, Parallel):
    return 1
  if path[0] == "lm_head":
    return depth * blocks
  return (depth + 1) * blocks + (path[-2] in ("k", "v"))


def _attention(module, length: int, depth: int, blocks: float) -> float:
  """Operations of a pass of attention's products, for each token of the text.

  A step of EAGLE's draft sees the text so far, half of the row in the mean; so
  does each token of a block, and the whole block.
  """
  if isinstance(module, Eagle | Eagle3 | Mtp):
    layer = module.config.layer
    width = layer.num_layers * layer.num_heads * layer.head_dim
    return depth * 2 * width * length
  if isinstance(module, Parallel):
    c, size = module.config.layers, depth + 1
    seen = length / 2 + size
    heads = c.num_layers * c.num_heads * c.head_dim
    return blocks * size * 4 * heads * seen
  return 0.0


@functools.cache
def peak_flops() -> tuple[float, str]:
  """Operations per second that all devices together can do.

  Returns:
    The number, and where it comes from: "data sheet", or "measured": the best
    of some float32 products of 1024 x 1024 matrices on one device, as often as
    there are devices.
  """
  device = jax.devices()[0]
  known = hardware.peak_flops_of(device.device_kind)
  if known is not None:
    return known * jax.device_count(), "data sheet"
  size = 1024
  x = jnp.ones((size, size))
  product = jax.jit(lambda a, b: a @ b)
  times = [timing.timed(product, x, x)[0] for _ in range(11)]  # one compiles
  # Devices that a processor simulates share it.
  count = 1 if device.platform == "cpu" else jax.device_count()
  return count * 2 * size**3 / min(times), "measured"
