"""Distributions of siblings: each child is drawn given its previous siblings.

A draft model gives one distribution p per node; a child's distribution follows
from p and the previous siblings. Drafters draw from these distributions, rules
verify against them, and `specjax.exact` sums over them. They share this one
definition, so rules always get the distributions that tokens were drawn from.

Distributions are log-probabilities over the last axis. If p has no mass (all
-inf, as below a leaf), its children's distributions have none either.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import random
from specjax.calls import Grammar
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Siblings:
  """A way to draw the children of a node, static and hashable.

  Attributes:
    name: as in `specjax.siblings.get`.
    child: `(parent f32[..., V], previous i32[..., j], count i32[...],
      ranking f32[..., V] | None = None) -> f32[..., V]`: the distribution of
      child j given the parent's distribution p, the tokens of children 0..j-1
      (`previous`, the previous siblings; -1 is padding), and how many children
      the node has. Once the previous siblings exhaust p's mass, as they often
      do after the warp, the child is the remaining token that `ranking` puts
      highest, or without a ranking uniform over the remaining tokens.
    independent: whether every child is drawn from p itself, so that siblings
      may carry equal tokens.
    deterministic: whether the children are a function of p. They are then taken
      from the draft model's distribution before the warp, so that tokens are
      ranked even at temperature 0.
    with_noise: whether drafts carry the noise they were drawn with
      (`specjax.types.Draft.noise`).
    max_children: the most children a node may have; None for any number.
  """

  name: str
  child: Callable[..., Array]
  independent: bool = False
  deterministic: bool = False
  with_noise: bool = False
  max_children: int | None = None


_MOST_UNROLLED = 8


def scan_siblings(
  body: Callable[[Any, Array | int], tuple[Any, Any]], carry: Any, count: int
) -> tuple[Any, Any]:
  """Scans over siblings in sampling order, as `lax.scan` does.

  `body` is `(carry, j) -> (carry, out)`, with j an integer if the loop is
  unrolled (faster for few siblings), else `i32[]`.
  """
  if count > _MOST_UNROLLED:
    return jax.lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))
  outs = []
  for j in range(count):
    carry, out = body(carry, j)
    outs.append(out)
  return carry, jax.tree.map(lambda *x: jnp.stack(x), *outs)


def previous(tokens: Array, j: Array | int) -> Array:
  """The siblings before child j, `i32[..., j]`; padded to C if j is traced."""
  if isinstance(j, int):
    return tokens[..., :j]
  return jnp.where(jnp.arange(tokens.shape[-1]) < j, tokens, -1)


def _point(token: Array, like: Array) -> Array:
  """A point mass on a token; no mass where `like` has none."""
  here = token[..., None] == jnp.arange(like.shape[-1])
  return jnp.where(here & _has_mass(like), 0, -jnp.inf).astype(like.dtype)


def _has_mass(log_probs: Array) -> Array:
  """`bool[..., 1]`, False for a row that is all -inf."""
  return jnp.max(log_probs, axis=-1, keepdims=True) > -jnp.inf


def _independent(parent, previous, count, ranking=None):
  del previous, count, ranking
  return parent


def _rest(parent, previous, ranking):
  """Logits of p without the drawn tokens; if these exhaust p, of the others."""
  tried = previous[..., None] == jnp.arange(parent.shape[-1])
  tried = jnp.any(tried, axis=-2)
  rest = jnp.where(tried, -jnp.inf, parent)
  left = jnp.max(rest, axis=-1, keepdims=True) > -jnp.inf
  if ranking is None:
    return jnp.where(left, rest, jnp.where(tried, -jnp.inf, 0))
  floor = jnp.maximum(ranking, jnp.finfo(ranking.dtype).min)
  others = lambda: random.argmax(jnp.where(tried, -jnp.inf, floor))
  return jax.lax.cond(
    jnp.all(left | ~_has_mass(parent)),
    lambda: jnp.where(left, rest, 0),  # rows without mass
    lambda: jnp.where(left, rest, _point(others(), parent)),
  )


def _untried(parent, previous, count, ranking=None):
  """The distribution without the previous siblings.

  Normalized relative to its own largest entry: beside a sibling with nearly all
  the mass, logarithms of size 1e7 are spaced by whole units in float32.
  """
  del count
  if not previous.shape[-1]:
    return parent
  log_probs = jax.nn.log_softmax(_rest(parent, previous, ranking), axis=-1)
  return jnp.where(_has_mass(parent), log_probs, -jnp.inf)


def _next_largest(parent, previous, count, ranking=None):
  """A point mass on the most probable token not drawn yet."""
  del count
  return _point(random.argmax(_rest(parent, previous, ranking)), parent)


def _largest_then_random(parent, previous, count, ranking=None):
  """The count - 1 most probable tokens, then one drawn from the others."""
  last = jnp.sum(previous >= 0, axis=-1) >= jnp.asarray(count) - 1
  return jnp.where(
    last[..., None],
    _untried(parent, previous, count, ranking),
    _next_largest(parent, previous, count, ranking),
  )


def _hub_pair(parent, previous, count, ranking=None):
  """First x ~ p, then the hub argmax p; if x is the hub, p without the hub."""
  if previous.shape[-1] == 0:
    return parent
  hub, first = random.argmax(parent), previous[..., :1]
  second = jnp.where(
    first == hub[..., None],
    _untried(parent, previous, count, ranking),
    _point(hub, parent),
  )
  return jnp.where(first < 0, parent, second)


def _carried(parent, previous, count, ranking=None):
  del parent, previous, count, ranking
  raise ValueError(
    "siblings 'given' cannot be drawn by name: their distributions come with "
    "each Draft"
  )


IID = Siblings(name="iid", child=_independent, independent=True)
"""Every child is drawn from p, as in K paths, SpecTr and SpecInfer."""

SHARED_NOISE = Siblings(
  name="shared_noise", child=_independent, independent=True, with_noise=True
)
"""As `IID`, but drawn by a race of Gumbel noise that the draft carries."""

WITHOUT_REPLACEMENT = Siblings(name="without_replacement", child=_untried)
"""One by one, without replacement: Gumbel top-k (Kool et al., ICML 2019), as in
RSD and Sequoia. Once p is exhausted (at temperature 0, after the first child),
the draft model's most likely remaining tokens."""

TOP_K = Siblings(name="top_k", child=_next_largest, deterministic=True)
"""The most probable tokens, as in EAGLE's and Medusa's trees."""

GREEDY = Siblings(name="greedy", child=_largest_then_random)
"""All but the last are the most probable tokens, the last is drawn from the
rest (Hu et al., ICLR 2025)."""

GIVEN = Siblings(name="given", child=_carried)
"""Each token comes with its own distribution or is deterministic, so looked-up
and drawn tokens can be siblings. Only their drafter can make them."""

HUB = Siblings(name="hub", child=_hub_pair, max_children=2)
"""Pairs with the most probable token a (SpecHub, EMNLP 2024): (x, a) with
probability p(x), (a, x) with probability p(a) p(x) / (1 - p(a))."""

SIBLINGS: dict[str, Siblings] = {
  siblings.name: siblings
  for siblings in (IID, SHARED_NOISE, WITHOUT_REPLACEMENT, TOP_K, GREEDY, HUB)
}

GRAMMAR = Grammar(kind="siblings", entries=SIBLINGS)


def log_probs_of_tokens(
  tree: Tree, siblings: Siblings, tokens: Array, model_log_probs: Array
) -> Array:
  """The distribution that each token of a tree was drawn from.

  Args:
    tree: the tree.
    siblings: how the children of a node are drawn.
    tokens: `i32[B, N + 1]`.
    model_log_probs: `f32[B, N + 1, V]`, the draft model's after each node.

  Returns:
    `f32[B, N + 1, V]`, see `specjax.types.Draft`; row 0 is all -inf.
  """
  given = [jnp.full_like(model_log_probs[:, 0], -jnp.inf)]
  for node in range(1, tree.num_nodes):
    parent = tree.parents[node]
    family = tree.children[parent]
    before = np.array(family[: tree.rank[node]], np.int32)
    count = jnp.full(tokens.shape[:1], len(family))
    given.append(
      siblings.child(model_log_probs[:, parent], tokens[:, before], count)
    )
  return jnp.stack(given, axis=1)


def get(name: str | Siblings) -> Siblings:
  """The `Siblings` of that name; a `Siblings` is returned as is.

  Raises:
    ValueError: for an unknown name, listing the known ones.
  """
  if isinstance(name, Siblings):
    return name
  if name == GIVEN.name:  # no way to draw: a drafter's own
    return GIVEN
  return GRAMMAR.make(name)
