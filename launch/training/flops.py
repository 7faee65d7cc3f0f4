"""Floating point operations of training, and the share of the peak they reach.

Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B): operations
that the model needs, nothing recomputed counted, over what the chips could do.
"""

import functools
import time

import jax
import jax.numpy as jnp
import ml_collections

from launch import hardware
from models.networks.description import TransformerConfig, mlp_weights
from specjax.training import losses


def forward_flops(config: TransformerConfig, length: int) -> float:
  """Operations of a forward pass, per token of a sequence of `length`.

  Two for each weight of a matrix product (the embedding is a lookup, the output
  projection is not), and the causal half of the attention's products.
  """
  c = config
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  attention = c.embed_dim * (2 * heads + 2 * kv)
  mlps = sum(mlp_weights(c.layer(i), c.embed_dim) for i in range(c.num_layers))
  weights = c.num_layers * attention + mlps + c.embed_dim * c.vocab_size
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


@functools.cache
def peak_flops() -> tuple[float, str]:
  """Operations per second that all devices together can do.

  Returns:
    The number, and where it comes from: "data sheet", or "measured": the best
    of some float32 products of 1024 x 1024 matrices on this device.
  """
  device = jax.devices()[0]
  known = hardware.peak_flops_of(device.device_kind)
  if known is not None:
    return known * jax.device_count(), "data sheet"
  size, times = 1024, []
  x = jnp.ones((size, size))
  product = jax.jit(lambda a, b: a @ b)
  product(x, x).block_until_ready()
  for _ in range(10):
    start = time.perf_counter()
    product(x, x).block_until_ready()
    times.append(time.perf_counter() - start)
  # Simulated devices share one processor.
  return 2 * size**3 / min(times), "measured"
