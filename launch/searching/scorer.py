"""How well a target that skips sub-layers drafts for itself, in one pass.

A drafted token that comes first sees what the target has read in full, and
itself alone in the thinned model. So a text is read once by the whole target,
and then again by the thinned one with each token at its own place, seeing the
slots that the target has filled before it and its own: every place of the text
is a first drafted token. How much the two laws of a place have in common,
sum min(p, q) of the warped laws, is the probability that a token drafted there
is accepted. Tokens drafted deeper see thinned slots too: that a throughput
formula takes all depths for equal is its guess, and an optimistic one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.networks import gated
from models.networks.params import split
from models.networks.transformer import Fed, SkippedLayers, Transformer
from specjax import cache as cache_lib
from specjax import warp
from specjax.types import Sampling
from specjax.warp import make_sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
  """Texts that a target emitted.

  Attributes:
    tokens: `i32[B, T]`, prompts and completions, right-padded.
    judged: `bool[B, T]`, the places after which an emitted token stands.
  """

  tokens: np.ndarray
  judged: np.ndarray


class Scorer:
  """The acceptance of any set of skipped sub-layers on some texts.

  Attributes:
    config: of the target.
  """

  def __init__(
    self, module: Transformer, texts: Texts, sampling: dict, *, vocab_size: int
  ):
    """Reads the texts with the whole target.

    Args:
      module: the target.
      texts: what it emitted.
      sampling: settings of `make_sampling`, for both laws.
      vocab_size: V, the number of real tokens.
    """
    self.config = module.config
    self._texts = texts
    merge, self._params = split(module)
    rows, width = texts.tokens.shape
    self._seen = two_passes_mask(width)
    settings: Sampling = make_sampling(rows, **sampling)

    def law_of(logits):
      return warp.warp(logits[..., :vocab_size], settings)

    def read(params, tokens):
      module = merge(params)
      cache = new_cache(self.config, rows, 2 * width, module.dtype)
      output, cache = module(tokens, cache)
      return law_of(output.logits), cache

    def acceptance(params, gates, tokens, law, cache):
      module = merge(params)
      fed = again(module, tokens, cache, self._seen)
      thin = law_of(gated.forward(module, gates, fed).logits)
      each = jnp.sum(jnp.minimum(jnp.exp(thin), jnp.exp(law)), axis=-1)
      judged = jnp.asarray(texts.judged)
      # What is no law is accepted never.
      each = jnp.where(judged & ~jnp.isnan(each), each, 0)
      return jnp.sum(each) / jnp.sum(judged)

    self._law, self._cache = jax.jit(read)(self._params, texts.tokens)
    self._acceptance = jax.jit(acceptance)

  def acceptance(self, skipped: SkippedLayers) -> float:
    """The mean probability that a drafted token is accepted."""
    skipped.check(self.config.num_layers)
    gates = gated.gates_of(
      self.config.num_layers, skipped.attention, skipped.mlp
    )
    return float(
      self._acceptance(
        self._params, gates, self._texts.tokens, self._law, self._cache
      )
    )


def new_cache(config, rows: int, slots: int, dtype) -> cache_lib.Cache:
  """An empty cache of a transformer on one device."""
  return cache_lib.make_cache(
    batch=rows,
    slots=slots,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
    with_positions=True,
  )


def two_passes_mask(width: int) -> np.ndarray:
  """`bool[T, 2 T]`: slots that were read before a place, and its own again."""
  before = np.tri(width, k=-1, dtype=bool)
  return np.concatenate([before, np.eye(width, dtype=bool)], axis=1)


def again(
  module: Transformer, tokens: Array, cache: cache_lib.Cache, seen: np.ndarray
) -> Fed:
  """Texts that were read, fed once more behind themselves."""
  width = tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
  full = cache.replace(length=jnp.full((len(tokens),), width, jnp.int32))
  return module.enter(tokens, full, positions=positions, mask=seen)
