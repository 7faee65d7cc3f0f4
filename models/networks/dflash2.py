"""DFlash 2's head: DFlash's block with convolutions and a selector.

z-lab and Inco (2026). Around attention and MLP of every layer, a short causal
convolution over the block mixes each token with the one before; its kernels
depend on the token, by group of channels. The distribution of a token depends
on the token drafted before it: at every position the tokens with the largest
logits are candidates, and a product of three codes, those of the token before,
the hidden state and the candidate, is added to each candidate's logit. All
other tokens have zero probability.

Letters in shapes: as in `models.networks.dflash`; C candidates of a position, R
channels of a code.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.networks.dflash import Parallel, ParallelConfig
from models.networks.layers import Layer
from models.networks.linear import Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(ParallelConfig):
  """Configuration of DFlash 2's head.

  Attributes:
    taps: taps of a convolution: a token, and those just before it.
    group: channels that share a kernel's change.
    rank: R.
    num_candidates: C.
    logit_scale: factor of the candidates' logits, after they are chosen.
    softcap: soft cap of the scaled logits, or None.
  """

  taps: int
  group: int
  rank: int
  num_candidates: int
  logit_scale: float = 1.0
  softcap: float | None = None

  kind = "dflash2"
  state_size = 0  # of `specjax.types.MarkovModel`, and whether it estimates
  confidence = False

  def __post_init__(self):
    super().__post_init__()
    if self.layers.embed_dim % self.group:
      raise ValueError(
        f"groups of {self.group} channels do not divide a width of "
        f"{self.layers.embed_dim}"
      )
    if self.num_candidates > self.layers.vocab_size:
      raise ValueError(
        f"{self.num_candidates} candidates are more than the "
        f"{self.layers.vocab_size} tokens"
      )


class GroupedConv(nnx.Module):
  """Computes kernels for a block's input and output from its input."""

  def __init__(self, config: DFlash2Config, dtype, rngs: nnx.Rngs):
    width, taps = config.layers.embed_dim, config.taps
    self.group, self.taps = config.group, taps
    self.base_kernel = nnx.Param(
      jnp.zeros((2, taps, width), dtype).at[:, 0].set(1)
    )
    self.kernel_projection = Linear(
      width, 2 * taps * (width // config.group), False, dtype, rngs
    )

  def __call__(self, x: Array) -> tuple[Array, Array]:
    """Two arrays `[B, T, taps, H]` for a normed input `[B, T, H]`."""
    changes = self.kernel_projection(x)
    changes = changes.reshape(*x.shape[:-1], 2, self.taps, -1)
    changes = jnp.repeat(changes, self.group, axis=-1)
    kernels = self.base_kernel[...] + changes
    return kernels[:, :, 0], kernels[:, :, 1]


def convolved(x: Array, kernels: Array) -> Array:
  """Convolves a block, `[B, T, H]`, with zeros before it.

  Args:
    x: `[B, T, H]`, a whole block.
    kernels: `[B, T, taps, H]`, with the token's own tap first.
  """
  before = lambda tap: jnp.pad(x, ((0, 0), (tap, 0), (0, 0)))[:, : x.shape[1]]
  out = kernels[:, :, 0] * x
  for tap in range(1, kernels.shape[2]):
    out += kernels[:, :, tap] * before(tap)
  return out


def spread(logits: Array, candidates: Array, vocab_size: int) -> Array:
  """Candidates' logits among all V tokens', `f32[..., C] -> f32[..., V]`."""
  every = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf)
  return jnp.put_along_axis(every, candidates, logits, axis=-1, inplace=False)


class ConvLayer(Layer):
  """A layer with convolutions around attention and MLP."""

  def __init__(self, config: DFlash2Config, dtype, rngs: nnx.Rngs):
    super().__init__(config.layers, dtype, rngs=rngs)
    self.attention_conv = GroupedConv(config, dtype, rngs)
    self.mlp_conv = GroupedConv(config, dtype, rngs)

  def attend(self, x, rotary, visible, kv, start, *, layer=None):
    """See `Layer`."""
    x = self.attention_norm(x)
    read, given = self.attention_conv(x)
    out, kv = self.attention(
      convolved(x, read), rotary, visible, kv, start, layer=layer
    )
    return convolved(out, given), kv

  def mlp_output(self, x: Array, *, at: Array | None = None) -> Array:
    """See `Layer`."""
    del at
    x = self.mlp_norm(x)
    read, given = self.mlp_conv(x)
    return convolved(self.mlp(convolved(x, read)), given)


class Selector(nnx.Module):
  """Computes what the token before adds to the candidates' logits."""

  def __init__(self, config: DFlash2Config, dtype, rngs: nnx.Rngs):
    c = config.layers
    init = nnx.initializers.normal(0.02)
    codes = lambda: nnx.Param(
      init(rngs.params(), (c.vocab_size, config.rank), dtype)
    )
    self.hidden_projection = Linear(
      c.embed_dim, config.rank, False, dtype, rngs
    )
    self.predecessor_codebook, self.successor_codebook = codes(), codes()

  def __call__(self, code: Array, tokens: Array, candidates: Array) -> Array:
    """`f32[B, W, C]` for the tokens before, `i32[B, W]`.

    Args:
      code: `[B, 1, R]`, the hidden state's.
      tokens: those before.
      candidates: `i32[B, 1, C]`.
    """
    code = code * self.predecessor_codebook[...][tokens]
    successors = self.successor_codebook[...][candidates[:, 0]]
    return jnp.einsum(
      "bwr,bcr->bwc", code, successors, preferred_element_type=jnp.float32
    )


class DFlash2(Parallel):
  """The network: `Parallel` with convolutions and a selector."""

  config: DFlash2Config

  def __init__(
    self, config: DFlash2Config, *, dtype=jnp.float32, rngs: nnx.Rngs
  ):
    super().__init__(config, dtype=dtype, rngs=rngs)
    self.candidate_selector = Selector(config, dtype, rngs)

  def make_layer(self, dtype, rngs: nnx.Rngs) -> Layer:
    """See `Parallel`."""
    return ConvLayer(self.config, dtype, rngs)

  def places(self, hidden: Array, put) -> tuple[Array, Array, Array]:
    """Computes the inputs of `after` from hidden states `[B, K, H]`.

    Candidates `i32[B, K, C]`, their logits, and codes `[B, K, R]`.
    """
    return self.candidates(put(self.logits(hidden), "logits_btv"), hidden)

  def candidates(
    self, logits: Array, hidden: Array
  ) -> tuple[Array, Array, Array]:
    """Like `places`, given the logits too."""
    c = self.config
    logits, candidates = jax.lax.top_k(logits, c.num_candidates)
    logits *= c.logit_scale
    if c.softcap is not None:
      logits = c.softcap * jnp.tanh(logits / c.softcap)
    code = self.candidate_selector.hidden_projection(hidden)
    return candidates, logits, code

  def after(
    self, row, tokens: Array, state: Array, put
  ) -> tuple[Array, Array, Array]:
    """As `specjax.types.MarkovModel.apply`."""
    candidates, logits, code = row
    logits = logits + self.candidate_selector(code, tokens, candidates)
    every = spread(
      logits,
      jnp.broadcast_to(candidates, logits.shape),
      self.config.layers.vocab_size,
    )
    return put(every, "logits_btv"), state, jnp.ones(tokens.shape)

  def along(
    self, logits: Array, hidden: Array, tokens: Array
  ) -> tuple[Array, tuple[Array, Array]]:
    """Whole blocks of known tokens, in training.

    Args:
      logits: `f32[B, K, V]`.
      hidden: `[B, K, H]`.
      tokens: `i32[B, K]`, the token before each position.

    Returns:
      The same logits; and the candidates' logits `f32[B, K, C]` after these
      tokens with the candidates `i32[B, K, C]`.
    """
    candidates, scores, code = self.candidates(logits, hidden)
    each = lambda x: x.reshape(-1, 1, x.shape[-1])
    added = self.candidate_selector(
      each(code), tokens.reshape(-1, 1), each(candidates)
    )
    return logits, (scores + added.reshape(scores.shape), candidates)
