"""Gumbel-max list sampling: target and drafts race on the same noise.

Rowan, Phan and Khisti (2025), after Daliri et al. (2024). Path k draws its t-th
token as `argmax_i log p_t(i) + N^k_{t,i}` with Gumbel noise N. With A the paths
that agree with the text so far (all at first), the next token is

  Y_t = argmax_i log q_t(i) + max_{k in A} N^k_{t,i},

which is distributed as q_t, because the maximum of Gumbel noise over paths is
shifted Gumbel noise. A then keeps the paths that drafted Y_t; the round ends
once it is empty, or with `Y_{L+1}` after the last drafted token. Given drafted
tokens and noise, the text does not depend on the draft's distribution ("drafter
invariance"); with one path it does not depend on the drafted tokens either, so
any draft gives the same text from the same seed. P(Y in X) is at least

  sum_j K / sum_i (max(q_i / q_j, p_i / p_j) + (K - 1) q_i / q_j).

The noise belongs to positions of the text, so the next round sees the noise of
positions beyond t again. That is exact, because whether a round ends at t
depends only on noise up to t.

Given the noise the rule is a point mass, so node probabilities are 0 and 1.
Losslessness holds over the noise, and is tested by sampling.
"""

import functools

import jax.numpy as jnp
from jax import Array

from specjax import random
from specjax.rules import requirements
from specjax.siblings import SHARED_NOISE, Siblings
from specjax.tree import Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification


def verify(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  del topology  # paths are whole
  tree = draft.tree
  if not tree.num_drafted:
    return Verification(
      node_probs=jnp.ones_like(target_log_probs[:, :, 0]),
      next_log_probs=lambda node: take_node(target_log_probs, node),
    )
  assert draft.noise is not None  # `siblings.with_noise`
  batch = draft.tokens.shape[0]
  alive = jnp.ones((batch, len(tree.children[0])), bool)
  node = jnp.zeros((batch,), jnp.int32)
  ended = jnp.zeros((batch,), bool)
  next_token = node
  for depth in range(tree.max_depth + 1):
    noise = [
      jnp.where(alive[:, k, None], draft.noise[:, k, depth], -jnp.inf)
      for k in range(alive.shape[1])
    ]
    most = functools.reduce(jnp.maximum, noise)  # fuses, unlike `max(axis=1)`
    winner = random.race(most, take_node(target_log_probs, node))
    next_token = jnp.where(ended, next_token, winner)
    if depth == tree.max_depth:
      break
    level = tree.levels[depth + 1]
    tokens = draft.tokens[:, level.start : level.stop]
    survives = alive & (tokens == winner[:, None])
    ended |= ~survives.any(axis=1)
    best = level.start + jnp.argmax(survives, axis=1).astype(jnp.int32)
    node = jnp.where(ended, node, best)
    alive = jnp.where(ended[:, None], alive, survives)
  here = node[:, None] == jnp.arange(tree.num_nodes)
  point = next_token[:, None] == jnp.arange(target_log_probs.shape[-1])
  log_probs = jnp.where(point, 0, -jnp.inf).astype(target_log_probs.dtype)
  return Verification(
    node_probs=here.astype(target_log_probs.dtype),
    next_log_probs=lambda node: log_probs,
  )


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless the tree is paths drawn with shared noise."""
  requirements.equal_paths("gumbel_list", tree)
  requirements.drawn("gumbel_list", tree, siblings, SHARED_NOISE)


RULE = Rule(
  name="gumbel_list", verify=verify, lossless=True, check=check, with_noise=True
)
