"""Medusa's heads, which predict several tokens ahead from one feature.

Each depth has its own residual blocks and output projection (Cai et al., ICML
2024). They read the hidden state that gives the target's logits, the feature
`FINAL`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.networks.heads import HeadConfig
from models.networks.layers import Linear
from models.networks.params import split
from models.sharding import Sharding, constrain
from specjax.types import MarginalModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
  """Shapes of Medusa's heads.

  Attributes:
    num_heads: K, number of depths; head k predicts the token k + 1 after the
      one that the target predicts.
    embed_dim: D, width of the feature.
    vocab_size: V.
    num_layers: residual blocks of each head.
    bias: whether blocks have a bias.
  """

  num_heads: int
  embed_dim: int
  vocab_size: int
  num_layers: int
  bias: bool = True

  kind = "medusa"
  shared = frozenset()

  @property
  def num_predicted(self) -> int:
    """K."""
    return self.num_heads

  @property
  def num_features(self) -> int:
    """D."""
    return self.embed_dim

  def even_sizes(self) -> tuple[int, ...]:
    """Sizes that must be multiples of the number of devices."""
    return (self.embed_dim, self.vocab_size)


class MedusaHead(nnx.Module):
  """Residual blocks `x + silu(W x + b)`, then an output projection."""

  def __init__(self, config: MedusaConfig, dtype, *, rngs: nnx.Rngs):
    c, size = config, config.embed_dim
    block = lambda: Linear(size, size, c.bias, dtype, rngs, std=0)
    self.blocks = nnx.List([block() for _ in range(c.num_layers)])
    self.lm_head = Linear(size, c.vocab_size, False, dtype, rngs)

  def __call__(self, x: Array) -> Array:
    """`[..., D] -> [..., V]`."""
    for block in self.blocks:
      x = x + jax.nn.silu(block(x))
    return self.lm_head(x)


class Medusa(nnx.Module):
  """K heads; blocks are initially zero, so a head is just its projection."""

  def __init__(
    self, config: MedusaConfig, *, dtype=jnp.float32, rngs: nnx.Rngs
  ):
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.heads = nnx.List(
      [MedusaHead(config, dtype, rngs=rngs) for _ in range(config.num_heads)]
    )

  def __call__(self, x: Array) -> Array:
    """`[..., D] -> f32[..., K, V]`, logits of each depth."""
    logits = [head(x.astype(self.dtype)) for head in self.heads]
    return jnp.stack(logits, axis=-2).astype(jnp.float32)


def as_marginals(module: Medusa, *, sharding: Sharding | None = None):
  """Splits heads into pure functions and their parameters.

  Args:
    module: the network, or its shapes (`params.shapes_of`).
    sharding: where logits lie on the mesh in use; None for one device.

  Returns:
    The `MarginalModel`, and the parameters to call it with.
  """
  merge, params = split(module)

  def marginals(params, features):
    features = constrain(features, "act_btd", sharding=sharding)
    logits = merge(params)(features)
    return constrain(logits, "logits_btv", sharding=sharding)

  c = module.config
  return MarginalModel(
    vocab_size=c.vocab_size, num_features=c.embed_dim, num_depths=c.num_heads,
    apply=marginals,
  ), params  # fmt: skip
