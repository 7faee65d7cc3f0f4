"""Non-stationary Markov chains: language models whose theory is computable.

A draft and a target over V tokens and a horizon of T positions; the law of a
token depends on the token before it and on its position. The chains are
`LanguageModel`s too, so that the shipped loop decodes them.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import cache as cache_lib
from specjax.structs import struct
from specjax.types import LanguageModel, ModelOutput, Params


@struct
class MarkovPair:
  """The chains of a draft and a target.

  Attributes:
    draft_initial, target_initial: `f[V]`, the first token's law.
    draft, target: `f[T - 1, V, V]`; entry (t, x, y) is the probability of y at
      position t + 1 after x at position t.
  """

  draft_initial: Array
  target_initial: Array
  draft: Array
  target: Array

  @property
  def horizon(self) -> int:
    """T, the number of positions."""
    return self.draft.shape[0] + 1

  @property
  def vocab_size(self) -> int:
    """V."""
    return self.draft_initial.shape[0]


def make_pair(
  *,
  draft_initial: np.ndarray,
  target_initial: np.ndarray,
  draft: np.ndarray,
  target: np.ndarray,
) -> MarkovPair:
  """A checked `MarkovPair`, with rows normalized up to rounding.

  Args:
    draft_initial, target_initial, draft, target: as in `MarkovPair`.

  Returns:
    The pair, in float64 NumPy arrays.

  Raises:
    ValueError: for inconsistent shapes, or rows that are not laws.
  """
  arrays = {
    "draft_initial": draft_initial,
    "target_initial": target_initial,
    "draft": draft,
    "target": target,
  }
  arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
  vocab = len(arrays["draft_initial"])
  steps = len(arrays["draft"])
  for name, array in arrays.items():
    shape = (vocab,) if name.endswith("initial") else (steps, vocab, vocab)
    if array.shape != shape:
      raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    off = np.abs(array.sum(-1) - 1).max(initial=0)
    if not off <= 1e-6 or (array < 0).any():
      raise ValueError(f"rows of {name} must be probabilities that sum to 1")
  return MarkovPair(
    **{name: x / x.sum(-1, keepdims=True) for name, x in arrays.items()}
  )


def random_pair(seed: int, *, vocab_size: int, horizon: int) -> MarkovPair:
  """A pair of independent laws, uniform on the simplex (Dirichlet(1)).

  Args:
    seed: of NumPy's default generator.
    vocab_size: V.
    horizon: T, at least 1.
  """
  rng = np.random.default_rng(seed)
  ones = np.ones(vocab_size)
  rows = lambda: rng.dirichlet(ones, (horizon - 1, vocab_size))
  return make_pair(
    draft_initial=rng.dirichlet(ones),
    target_initial=rng.dirichlet(ones),
    draft=rows(),
    target=rows(),
  )


def language_models(pair: MarkovPair) -> tuple[LanguageModel, Params]:
  """A `LanguageModel` for both chains, and their parameters.

  Decode from a prompt of any one token: position 0 is before the first token.
  After the horizon every law is uniform. The cache is empty.
  """
  vocab = pair.vocab_size

  def init_cache(batch, slots):
    del slots
    return cache_lib.Cache(
      keys=(), values=(), positions=None, length=jnp.zeros((batch,), jnp.int32)
    )

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    del mask
    fed = tokens.shape[1]
    if positions is None:
      positions = cache.length[:, None] + jnp.arange(fed)
    if logits_at is not None:
      take = lambda x: jnp.take_along_axis(x, logits_at, axis=1)
      positions, tokens = take(positions), take(tokens)
    place = jnp.minimum(positions, params.shape[0] - 1)
    logits = params[place, tokens]
    return ModelOutput(logits=logits), cache.replace(length=cache.length + fed)

  def table(initial, steps):  # [T + 1, V, V] of log-probabilities
    first = np.broadcast_to(np.asarray(initial), (1, vocab, vocab))
    after = np.full((1, vocab, vocab), 1 / vocab)
    with np.errstate(divide="ignore"):
      return jnp.asarray(
        np.log(np.concatenate([first, np.asarray(steps), after])), jnp.float32
      )

  model = LanguageModel(vocab_size=vocab, init_cache=init_cache, apply=apply)
  params = Params(
    target=table(pair.target_initial, pair.target),
    draft=table(pair.draft_initial, pair.draft),
  )
  return model, params
