"""The loss of a head: its predictions some tokens ahead against the target's.

At position t a head has the target's feature of token t and, if it is EAGLE's,
the tokens after it. At depth j it predicts token t + 2 + j, and is compared
with the target's own distribution after token t + 1 + j. The target's features
are computed in the same jitted step, or stored (`launch.training.features`);
its logits cover the draft vocabulary only, unless the objective needs the
others.

Most heads predict at every position. DFlash runs separate passes over blocks
that start at some positions of each text (`draw_places`); P-EAGLE takes each
depth at fewer random positions than the one before.

DFlash 2's selector is trained on the objective as well, over the candidates,
after the text's own tokens. With `next_token`, as in NVIDIA's recipe, it counts
where the next token is a candidate; other recipes (SpecForge) insert it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.head_shapes import HeadModule
from models.networks import dflash2, dflash_training
from models.networks.dflash import Parallel
from models.networks.eagle import Eagle
from models.networks.linear import project
from models.networks.mtp import Mtp
from models.networks.training_time_test import ahead, unmask, unroll
from models.networks.transformer import FINAL, Features, Transformer
from specjax.training import losses

# Objectives whose optimum on the draft vocabulary is the target's distribution
# *conditioned* on that vocabulary: the rest only changes a constant, or the
# weight of a position. The others depend on acceptance.
_GIVEN = ("next_token", "forward_kl", "reverse_kl")
_OF_TEXT = ("next_token", "next_token_and_tv")  # labels are the text's tokens
_NEVER = -1e9  # a logit
_ROWS = 128  # positions with logits of the whole vocabulary at once


class Vocabulary(NamedTuple):
  """A draft vocabulary: W ascending `ids`, `i32[W]`, out of `size` tokens."""

  ids: np.ndarray
  size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
  """Settings of a head's loss.

  Attributes:
    objective: a name in `specjax.training.losses.OBJECTIVES`.
    depth: G, tokens of a draft.
    decay: weight of each depth's loss relative to the depth before.
    feature_weight: weight of EAGLE-1's distance to the target's next feature.
    first: first position that counts in a row.
    confidence: whether the head learns to estimate its acceptance.
    selects: whether the head has DFlash 2's selector.
    by_count: whether a depth counts by its number of positions (P-EAGLE).
  """

  objective: str
  depth: int
  decay: float
  feature_weight: float
  first: int
  confidence: bool = False
  selects: bool = False
  by_count: bool = False


class States(NamedTuple):
  """The target's states of a batch.

  Attributes:
    features: `f[B, T, F]`, the head's input.
    final: `f[B, T, D]`, the output projection's input.
  """

  features: Array
  final: Array


def make_pass(target: Transformer, features: Features) -> Callable[..., States]:
  """`(params, batch) -> States`, a pass of the target without logits."""
  definition = nnx.graphdef(target)
  wanted = features if features == (FINAL,) else (*features, FINAL)
  width = target.config.embed_dim

  def watch(params, batch) -> States:
    tokens = batch["tokens"][:, :-1]
    output, _ = nnx.merge(definition, params)(
      tokens,
      positions=batch["positions"][:, :-1],
      segments=batch["segments"][:, :-1],
      logits_at=jnp.zeros((len(tokens), 0), jnp.int32),
      features=wanted,
    )
    states = jax.lax.stop_gradient(output.features)
    final = states[..., -width:]
    return States(
      features=final if wanted == features else states[..., :-width],
      final=final,
    )

  return watch


def head_logits(
  module: HeadModule, inputs: States, batch: dict[str, Array], depth: int
) -> Iterator[tuple[Array, Any, Array | None]]:
  """At each depth, the head's logits `f32[B, A, W]`, extras, and positions.

  Positions are `i32[B, A]`, of the batch's places, or None for all T of a row.
  Extras are the states that are fed back, DSpark's log-odds of acceptance, the
  selector's scores (`models.networks.dflash2.DFlash2.along`), or None.
  """
  where = {x: batch[x][:, :-1] for x in ("positions", "segments")}
  tokens, features = batch["tokens"], inputs.features
  places = batch.get("places")
  if isinstance(module, Eagle | Mtp):
    if module.config.kind == "p_eagle":
      for logits, some in unmask(
        module, tokens, features, places, steps=depth, **where
      ):
        yield logits, None, some
      return
    for logits, states in unroll(
      module, tokens, features, steps=depth, **where
    ):
      yield logits, states, None
    return
  more = None
  if isinstance(module, Parallel):
    logits, more = dflash_training.predict(
      module, tokens, features, places, **where
    )
  else:
    logits = module(features)
  for j in range(depth):
    yield logits[:, :, j], jax.tree.map(lambda x, j=j: x[:, :, j], more), places


def counted(batch: dict[str, Array], depth: int, first: int) -> Array:
  """`f32[B, T]`, 1 where token `t + 2 + depth` is in token t's document."""
  segments = batch["segments"]
  length = segments.shape[1] - 1
  here, later = segments[:, :-1], ahead(segments, 2 + depth, length)
  place = jnp.arange(length) + 2 + depth
  inside = (here == later) & (here > 0) & (place >= first)
  return inside.astype(jnp.float32)


def draw_places(
  batch: dict[str, Array], key: Array, *, count: int, first: int
) -> dict[str, Array]:
  """Adds `places`, `i32[B, A]`, where blocks start, to a batch.

  In each row A = `count` distinct places are drawn from those with a token to
  predict; if a row has fewer, the rest do not count.
  """
  some = counted(batch, 0, first)
  _, places = jax.lax.top_k(some + jax.random.uniform(key, some.shape), count)
  return batch | {"places": places}


def _at(places: Array | None, x: Array) -> Array:
  """`x[B, T, ...]` at places, or all of it without places."""
  if places is None:
    return x
  places = places.reshape(*places.shape, *[1] * (x.ndim - 2))
  return jnp.take_along_axis(x, places, axis=1)


def make_loss(
  loss: Loss, watch: Callable[..., States], rows: Callable, words: Vocabulary
) -> Callable:
  """Makes the loss of a batch, in float32 whatever the head's dtype.

  Args:
    loss: its settings.
    watch: from `make_pass`.
    rows: maps the target's parameters to its output projection `f[V', D]`.
    words: the draft vocabulary.

  Returns:
    `(head module, target's parameters, batch) -> f32[]`. The target's logits
    are computed in the head's dtype if the draft vocabulary's suffice.
  """
  conditioned = loss.objective in _GIVEN
  given = conditioned and not loss.confidence
  compared = slice(-1 if conditioned and not given else None)
  whole_draft = loss.objective == "acceptance"
  objective = (
    losses.block_acceptance(loss.depth)
    if whole_draft
    else losses.get(loss.objective)
  )
  place = np.full(words.size, len(words.ids), np.int32)  # W for no place
  place[words.ids] = np.arange(len(words.ids))

  def total(module, target, batch) -> Array:
    states = watch(target, batch)
    output = rows(target)
    length = states.final.shape[1]
    # If all tokens count, these are compared with a float32 normalizer.
    dtype = module.dtype if given else jnp.float32
    final, table = states.final.astype(dtype), output[words.ids].astype(dtype)
    taught = project(final, table, result=jnp.float32)
    if not given:
      taught = _with_rest(taught, normalizers(states.final, output, words)[0])
    labels = jnp.asarray(place)[batch["tokens"]]
    summed, shares, drafts = 0.0, 0.0, []
    for j, (logits, state, places) in enumerate(
      head_logits(module, states, batch, loss.depth)
    ):
      weights = _at(places, counted(batch, j, loss.first))
      label = _at(places, ahead(labels, 2 + j, length))
      logits = logits[..., : len(words.ids)].astype(jnp.float32)
      if not given:
        logits = _with_rest(logits, None)
      draftable = weights * (label < len(words.ids))
      if loss.objective == "next_token":
        weights = draftable
      if loss.objective in _OF_TEXT:
        label = jnp.minimum(label, len(words.ids) - 1)
      judge = _at(places, ahead(taught, 1 + j, length))
      share = loss.decay**j
      if loss.by_count:
        share *= jnp.sum(weights)
      shares += share
      if whole_draft:
        drafts.append((logits, judge, label, weights))
      else:
        summed += share * (
          objective(logits[..., compared], judge[..., compared], label, weights)
          if loss.objective != "next_token_and_tv"
          else objective(logits, judge, label, weights, draftable)
        )
      if loss.confidence:
        chance = 1 - losses.distance(logits, judge)
        summed += share * losses.confidence(state, chance, weights)
      if loss.selects:
        scores, candidates = state
        chosen = candidates == label[..., None]
        if loss.objective in _OF_TEXT:
          weights = weights * chosen.any(axis=-1)
        judge = jnp.take_along_axis(judge, candidates, axis=-1)
        summed += share * objective(
          scores, judge, jnp.argmax(chosen, axis=-1), weights
        )
      if loss.feature_weight:
        nearby = ahead(states.features, 1 + j, length)
        distance = losses.smooth_l1(state, nearby, weights)
        summed += share * loss.feature_weight * distance
    if whole_draft:
      drafted = (jnp.stack(xs, axis=2) for xs in zip(*drafts, strict=True))
      return summed + objective(
        *(x.reshape(-1, loss.depth, *x.shape[3:]) for x in drafted)
      )
    return summed / jnp.maximum(shares, 1)

  return total


def make_measure(
  loss: Loss, watch: Callable[..., States], rows: Callable, words: Vocabulary
) -> Callable:
  """Makes the sums for validation; arguments as for `make_loss`.

  Returns:
    `(head module, target's parameters, batch) -> {name: f32[]}`: for each depth
    j from 1, `tokens_j`, `accepted_j` (one minus the total variation from the
    target's full distribution) and `agreed_j` (equal most likely tokens).
  """

  def measure(module, target, batch) -> dict[str, Array]:
    states = watch(target, batch)
    output = rows(target)
    length = states.final.shape[1]
    everywhere, best = normalizers(states.final, output, words)
    law = _with_rest(project(states.final, output[words.ids]), everywhere)
    sums = {}
    for j, (logits, more, places) in enumerate(
      head_logits(module, states, batch, loss.depth), 1
    ):
      weights = _at(places, counted(batch, j - 1, loss.first))
      if loss.selects:
        logits = dflash2.spread(*more, logits.shape[-1])
      logits = logits[..., : len(words.ids)]
      judge = _at(places, ahead(law, j, length))
      distance = losses.total_variation(
        _with_rest(logits, None), judge, None, weights
      )
      predicted = jnp.asarray(words.ids)[jnp.argmax(logits, axis=-1)]
      same = predicted == _at(places, ahead(best, j, length))
      sums[f"tokens_{j}"] = jnp.sum(weights)
      sums[f"accepted_{j}"] = jnp.sum(weights) * (1 - distance)
      sums[f"agreed_{j}"] = jnp.sum(weights * same)
    return sums

  return measure


def normalizers(
  final: Array, output: Array, words: Vocabulary
) -> tuple[Array, Array]:
  """The target's log-normalizer and most likely token over all its tokens.

  Computes the logits of a few positions at a time; all at once would dominate
  the memory of a step.

  Args:
    final: `f[B, T, D]`.
    output: `f[V', D]`.
    words: the draft vocabulary; rows beyond its `size` are padding.
  """
  output = output[: words.size]

  def some(rows):
    logits = project(rows, output).astype(jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

  flat = final.reshape(-1, final.shape[-1])
  both = jax.lax.map(some, flat, batch_size=min(_ROWS, len(flat)))
  return tuple(x.reshape(final.shape[:-1]) for x in both)


def _with_rest(logits: Array, everywhere: Array | None) -> Array:
  """Appends to logits `f[B, T, W]` one for all tokens outside the vocabulary.

  `everywhere`, `f32[B, T]`, is the log-normalizer over all tokens; None if
  there are no others.
  """
  if everywhere is None:
    rest = jnp.full(logits.shape[:-1], _NEVER)
  else:
    inside = jax.nn.logsumexp(logits, axis=-1)
    outside = -jnp.expm1(jnp.minimum(inside - everywhere, 0))
    rest = jnp.where(
      outside > 0, everywhere + jnp.log(jnp.maximum(outside, 1e-30)), _NEVER
    )
  return jnp.concatenate([logits, rest[..., None]], axis=-1)
