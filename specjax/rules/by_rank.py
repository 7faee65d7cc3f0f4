"""Lossy rules for one path that accept by rank in the target's distribution.

SpecDec (Xia et al., Findings of EMNLP 2023) accepts a token that is among the
target's beta most likely and close enough to the first (`top_beta`); blockwise
parallel decoding (Stern et al., 2018, section 5), one among the k most likely,
and the first tokens of a block unconditionally (`blockwise`).

The target's distribution q alone decides b(x), whether a token x is accepted,
and P, the distribution of the token where the path ends. Let p be the
distribution that the drafted token was drawn from (a point mass if it is
deterministic) and `Z = sum (1 - b) p`. Then a token's distribution is `b p + Z
P`, or P after the last node. Its exact distance from q is reported
(`Verification.total_variation`).

Ties in rank go to the first token, as in greedy decoding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import random
from specjax.rules import requirements
from specjax.tree import Topology, take_node
from specjax.types import Draft, Rule, Verification


def _rule(
  name: str,
  accepted: Callable[[Array], Array],
  at_the_end: Callable[[Array], Array],
) -> Rule:
  """A rule of this module from b and P, functions of log q, `f[B, .., V]`."""

  def verify(
    draft: Draft, topology: Topology, target_log_probs: Array
  ) -> Verification:
    nodes = draft.tree.num_nodes
    present = topology.present[:, 1:nodes]
    enough = accepted(target_log_probs[:, :-1])
    tokens = draft.tokens[:, 1:nodes, None]
    passes = jnp.take_along_axis(enough, tokens, axis=-1)[..., 0] & present
    accept = passes.astype(target_log_probs.dtype)
    one = jnp.ones_like(target_log_probs[:, :1, 0])
    reach = jnp.cumprod(jnp.concatenate([one, accept], axis=1), axis=1)
    after = at_the_end(target_log_probs)
    ends = jnp.exp(after)
    drafted = jnp.exp(draft.distributions(target_log_probs)[:, 1:])
    refused = jnp.sum(jnp.where(enough, 0, drafted), axis=-1)
    refused = jnp.where(present, refused, 1)[..., None]
    kept = jnp.where(enough & present[..., None], drafted, 0)
    got = jnp.concatenate([kept + refused * ends[:, :-1], ends[:, -1:]], axis=1)
    excess = jnp.maximum(got - jnp.exp(target_log_probs), 0)
    return Verification(
      node_probs=reach * jnp.concatenate([1 - accept, one], axis=1),
      next_log_probs=lambda node: take_node(after, node),
      total_variation=jnp.sum(excess, axis=-1),
    )

  def check(tree, siblings) -> None:
    del siblings
    requirements.single_path(name, tree)

  return Rule(name=name, verify=verify, lossless=False, check=check)


def top_beta(beta: int = 3, tau: float = 1.0) -> Rule:
  """SpecDec's verification (Xia et al., Findings of EMNLP 2023).

  Accepts one of the target's beta most probable tokens if it is at most tau
  nats less probable than the first. The path is followed by the target's most
  probable token. This approximates *greedy* decoding (and equals it if
  `beta=1`), so run it at temperature 1, where distributions rank the tokens.

  Args:
    beta: at least 1.
    tau: at least 0, in nats.

  Raises:
    ValueError: for values out of range.
  """
  if beta < 1 or not tau >= 0:
    raise ValueError(
      f"top_beta needs beta >= 1 and tau >= 0, got {beta} and {tau}"
    )

  def accepted(target):
    best = jnp.max(target, axis=-1, keepdims=True)
    return likeliest(target, beta) & (target >= best - tau)

  first = lambda log_probs: jnp.where(_is_first(log_probs), 0.0, -jnp.inf)
  return _rule("top_beta", accepted, lambda q: first(q).astype(q.dtype))


def blockwise(top_k: int = 2, min_accepted: int = 0) -> Rule:
  """Acceptance of blockwise parallel decoding (Stern et al., 2018).

  The paper's exact variant is `match`. This one accepts the target's k
  likeliest tokens, and the first tokens of a block unconditionally. The token
  at the path's end is drawn from the target. Ranks are those of the *warped*
  target: for the paper's greedy decoding with top-k use a small temperature
  above 0.

  Args:
    top_k: how many of the target's likeliest tokens to accept, at least 1.
    min_accepted: how many tokens of a block are always accepted (the paper's
      minimum block is one more: it counts the target's own token).

  Raises:
    ValueError: if either is out of range.
  """
  if top_k < 1 or min_accepted < 0:
    raise ValueError(
      "blockwise needs top_k >= 1 and min_accepted >= 0, got "
      f"{top_k} and {min_accepted}"
    )

  def accepted(target):
    first = np.arange(target.shape[1]) < min_accepted
    return likeliest(target, top_k) | first[:, None]

  return _rule("blockwise", accepted, lambda target: target)


def likeliest(log_probs: Array, count: int) -> Array:
  """Mask of the `count` likeliest tokens, `f[..., V] -> bool[..., V]`.

  Ties go to the first token; tokens without mass are left out.
  """

  def add(_, among):
    left = jnp.where(among, -jnp.inf, log_probs)
    return among | _is_first(left)

  chosen = _is_first(log_probs)
  if count > 1:
    most = min(count, log_probs.shape[-1])
    chosen = jax.lax.fori_loop(1, most, add, chosen)
  return chosen & (log_probs > -jnp.inf)


def _is_first(log_probs: Array) -> Array:
  """`bool[..., V]`, true at the largest entry; the first of equals."""
  best = random.argmax(log_probs)[..., None]
  return jnp.arange(log_probs.shape[-1]) == best
