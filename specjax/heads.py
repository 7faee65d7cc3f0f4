"""Draft heads: models that read a target's features, cache or text.

Letters in shapes as in `specjax.types`; V' is a head's own vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array

from specjax.cache import Cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureModel:
  """A head on the target's features, as pure functions (EAGLE, MTP).

  Attributes:
    vocab_size: V', the last axis of its logits; -inf for undraftable tokens.
    num_features: F, width of the target's features.
    init_cache: `(batch, slots) -> Cache`.
    fuse: `(params, features f[B, T, F]) -> f[B, T, H]`: the target's features
      as hidden states of the head.
    apply: `(params, tokens i32[B, T], hidden f[B, T, H], cache, *, positions,
      mask, logits_at) -> (logits f32[B, T, V'], hidden f[B, T, H], cache)`,
      with the keyword arguments of `LanguageModel.apply`.
    max_positions: how many positions it supports; None if unbounded.
    later: the layers after the first, for heads with a layer per token
      (multi-token prediction): models on the same parameters, with their own
      caches, that read the previous layer's states.
    mask: `params -> (id, features f[F])`, the token and features that stand for
      unknown ones, for heads that predict all depths in one pass (P-EAGLE);
      None for heads that draft token by token.
  """

  vocab_size: int
  num_features: int
  init_cache: Callable[[int, int], Cache]
  fuse: Callable[[Any, Array], Array]
  apply: Callable[..., tuple[Array, Array, Cache]]
  max_positions: int | None = None
  later: tuple["FeatureModel", ...] = ()
  mask: Callable[[Any], tuple[int, Array]] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockModel:
  """A head that predicts a block in one pass (DFlash, DSpark).

  Attributes:
    vocab_size: V', the last axis of its logits; -inf for undraftable tokens.
    num_features: F, width of the target's features.
    num_depths: K, tokens that a block adds after the newest one.
    init_cache: `(batch, slots) -> Cache`.
    read: `(params, features f[B, T, F], cache) -> cache`: writes T committed
      tokens to slots `cache.length ..` and adds T to the length. Slot i holds
      position i.
    predict: `(params, newest i32[B, 1], cache) -> (f32[B, K, V'], cache)`,
      logits of the tokens after the newest, which follows the cached ones. It
      writes at most the next K + 1 slots and keeps the length.
    max_positions: how many positions it supports; None if unbounded.
    markov: makes each token depend on those drafted before it; None for heads
      whose tokens are independent. With it `predict` returns, instead of
      logits, a pytree of arrays `[B, K, ...]` that `markov` reads.
  """

  vocab_size: int
  num_features: int
  num_depths: int
  init_cache: Callable[[int, int], Cache]
  read: Callable[[Any, Array, Cache], Cache]
  predict: Callable[[Any, Array, Cache], tuple[Any, Cache]]
  max_positions: int | None = None
  markov: "MarkovModel | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkovModel:
  """Conditions a block's distributions on the tokens drafted so far.

  Attributes:
    state_size: S, width of the state carried along a path; 0 if the next token
      depends on the previous one alone.
    estimates: whether it estimates acceptance.
    apply: `(params, row, tokens i32[B, W], state f[B, W, S]) -> (logits f32[B,
      W, V'], state f[B, W, S], confidence f32[B, W])`. `row` is the output of
      `BlockModel.predict` for the next depth, `[B, 1, ...]`; the tokens are W
      nodes of one depth, with the states of their parents (0 for the root's).
      The confidence estimates the probability that the next token is accepted,
      before it is drawn; 1 if the head makes no estimate.
  """

  state_size: int
  estimates: bool
  apply: Callable[..., tuple[Array, Array, Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginalModel:
  """Heads that predict all depths from one feature vector (Medusa).

  Attributes:
    vocab_size: V', the last axis of their logits; -inf for undraftable tokens.
    num_features: F, width of the target's features.
    num_depths: K, tokens they predict ahead.
    apply: `(params, features f[B, F]) -> f32[B, K, V']`, logits of the K tokens
      after the newest one, from the feature of the token before it.
  """

  vocab_size: int
  num_features: int
  num_depths: int
  apply: Callable[[Any, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBlockModel:
  """An encoder-decoder that predicts a block from the whole text (SpecDec).

  Attributes:
    vocab_size: V', the last axis of its logits.
    num_depths: K, tokens of a block.
    encode: as in `LanguageModel`.
    predict: `(params, tokens i32[B, L], length i32[B], memory) -> f32[B, K,
      V']`, logits of the K tokens after the first `length` ones; later tokens
      are masked out, and `memory` is the result of `encode`.
  """

  vocab_size: int
  num_depths: int
  encode: Callable[[Any, Any], Any]
  predict: Callable[[Any, Array, Array, Any], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheReader:
  """A draft without a cache that attends to the target's (Gemma 4 assistant).

  Attributes:
    vocab_size: V', the last axis of its logits.
    num_features: F, width of the target's final hidden state.
    apply: `(params, tokens i32[B, T], hidden f[B, T, F], cache, *, positions
      i32[B, T]) -> (logits f32[B, T, V'], hidden f[B, T, F])`. `hidden` is the
      previous token's hidden state, the target's or its own. All tokens see
      slots `0 .. cache.length - 1` of the target's cache and not each other;
      nothing is written.
    max_positions: how many positions it supports; None if unbounded.
  """

  vocab_size: int
  num_features: int
  apply: Callable[..., tuple[Array, Array]]
  max_positions: int | None = None
