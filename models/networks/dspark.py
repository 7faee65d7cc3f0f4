"""DSpark's head: DFlash's block, then a Markov chain over its tokens.

DeepSeek-AI (2026, arXiv 2607.05147). One pass gives hidden states h_k and
logits U_k of all positions of a block, like DFlash. A low-rank bias then makes
the distribution of token k depend on the token x drafted before it: W2 projects
W1[x], a code with r channels, to a bias for all logits. The code is used as is
("vanilla"), multiplied by a gate of h_k ("gated"), or passed through a
recurrent cell whose state follows the path ("rnn"). A confidence head reads h_k
and W1[x] and estimates, before token k is drawn, its acceptance probability.

Letters in shapes: as in `models.networks.dflash`; S the state's size, r or 0.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.networks.dflash import Parallel, ParallelConfig, as_block_model
from models.networks.heads import embedding
from models.networks.layers import Linear
from models.networks.params import split
from models.sharding import Sharding, constrain
from specjax.cache import Cache
from specjax.types import BlockModel, MarkovModel

KINDS = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(ParallelConfig):
  """Configuration of DSpark's head.

  Attributes:
    markov: one of `KINDS`.
    rank: r.
    confidence: whether there is a confidence head.
    confidence_reads_code: whether it reads W1[x] in addition to h_k.
  """

  markov: str = "vanilla"
  rank: int = 256
  confidence: bool = False
  confidence_reads_code: bool = True
  from_newest: bool = True

  kind = "dspark"

  @property
  def state_size(self) -> int:
    """S, channels of a path's state."""
    return self.rank if self.markov == "rnn" else 0


class Markov(nnx.Module):
  """The bias from the token before."""

  def __init__(self, config: DSparkConfig, *, dtype, rngs: nnx.Rngs):
    c, r, width = config.layers, config.rank, config.layers.embed_dim
    self.kind = config.markov
    self.markov_w1 = embedding(c.vocab_size, r, dtype, rngs)
    words = config.draft_vocab_size or c.vocab_size
    self.markov_w2 = Linear(r, words, False, dtype, rngs)
    if self.kind == "gated":
      self.gate_proj = Linear(width + r, r, True, dtype, rngs)
    if self.kind == "rnn":
      self.joint_proj = Linear(2 * r + width, 3 * r, True, dtype, rngs)

  def __call__(
    self, hidden: Array, code: Array, state: Array
  ) -> tuple[Array, Array]:
    """Biases and states after some tokens.

    Args:
      hidden: `[..., H]`, h of the positions after the tokens.
      code: `[..., r]`, W1 of the tokens.
      state: `[..., S]`, before those tokens.

    Returns:
      `f32[..., W]`, and the states after them, `[..., S]`.
    """
    match self.kind:
      case "gated":
        both = jnp.concatenate([hidden, code], axis=-1)
        code = jax.nn.sigmoid(self.gate_proj(both)) * code
      case "rnn":
        every = jnp.concatenate([state, code, hidden], axis=-1)
        gate, new, out = jnp.split(self.joint_proj(every), 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(new)
        code = jnp.tanh(out)
    return self.markov_w2(code).astype(jnp.float32), state


class DSpark(Parallel):
  """The network: `Parallel` with `condition` on the token before."""

  config: DSparkConfig

  def __init__(
    self, config: DSparkConfig, *, dtype=jnp.float32, rngs: nnx.Rngs
  ):
    super().__init__(config, dtype=dtype, rngs=rngs)
    self.markov_head = Markov(config, dtype=dtype, rngs=rngs)
    if config.confidence:
      read = config.layers.embed_dim
      read += config.rank * config.confidence_reads_code
      self.confidence_head = Linear(read, 1, True, dtype, rngs)

  def places(self, hidden: Array, put) -> tuple[Array, Array]:
    """Computes the inputs of `after` from hidden states `[B, K, H]`."""
    return put(self.logits(hidden), "logits_btv"), hidden

  def after(
    self, row, tokens: Array, state: Array, put
  ) -> tuple[Array, Array, Array]:
    """As `specjax.types.MarkovModel.apply`."""
    logits, hidden = row
    logits, state, sure = self.condition(logits, hidden, tokens, state)
    logits = self.spread(put(logits, "logits_btv"))
    return logits, state, jax.nn.sigmoid(sure)

  def condition(
    self, logits: Array, hidden: Array, tokens: Array, state: Array
  ) -> tuple[Array, Array, Array]:
    """The distributions after some tokens.

    Args:
      logits: `f32[..., W]`, U of the positions after the tokens.
      hidden: `[..., H]`, h of these positions.
      tokens: `i32[...]`, the tokens before them.
      state: `[..., S]`, before the tokens.

    Returns:
      Logits `f32[..., W]`, states `[..., S]`, and log-odds of acceptance
      `f32[...]`, infinite without a confidence head.
    """
    code = self.markov_head.markov_w1(tokens)
    hidden = jnp.broadcast_to(hidden, (*code.shape[:-1], hidden.shape[-1]))
    bias, state = self.markov_head(hidden, code, state)
    sure = jnp.full(tokens.shape, jnp.inf)
    if self.config.confidence:
      read = hidden
      if self.config.confidence_reads_code:
        read = jnp.concatenate([hidden, code], axis=-1)
      sure = self.confidence_head(read)[..., 0].astype(jnp.float32)
    return logits + bias, state, sure

  def along(
    self, logits: Array, hidden: Array, tokens: Array
  ) -> tuple[Array, Array | None]:
    """Like `condition` for whole blocks of known tokens, in training.

    Args:
      logits: `f32[B, K, W]`.
      hidden: `[B, K, H]`.
      tokens: `i32[B, K]`, the token before each position.

    Returns:
      Logits `f32[B, K, W]` and log-odds of acceptance `f32[B, K]`, or None
      without a confidence head.
    """
    state, each = jnp.zeros((len(tokens), self.config.state_size)), []
    for k in range(tokens.shape[1]):
      one, state, sure = self.condition(
        logits[:, k], hidden[:, k], tokens[:, k], state
      )
      each.append((one, sure))
    logits, sure = (jnp.stack(x, axis=1) for x in zip(*each, strict=True))
    return logits, sure if self.config.confidence else None


def as_markov_blocks(
  module: Any, *, sharding: Sharding | None = None
) -> tuple[BlockModel, nnx.State]:
  """Like `models.networks.dflash.as_block_model`, with a `MarkovModel`.

  Args:
    module: a `Parallel` with `places` and `after`, such as `DSpark`.
    sharding: as there.
  """
  model, _ = as_block_model(module, sharding=sharding)
  merge, params = split(module)
  put = functools.partial(constrain, sharding=sharding)

  def predict(params, newest: Array, cache: Cache):
    head = merge(params)
    hidden, cache = head.states(newest, cache, put)
    return head.places(hidden, put), cache

  def apply(params, row, tokens: Array, state: Array):
    return merge(params).after(row, tokens, state, put)

  markov = MarkovModel(
    state_size=module.config.state_size,
    estimates=module.config.confidence,
    apply=apply,
  )
  return dataclasses.replace(model, predict=predict, markov=markov), params
