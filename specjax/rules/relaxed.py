"""Lossy rules for a single path that accept more often than a lossless rule.

Each accepts a drafted token x ~ p with probability b(x), and draws from P after
a rejection. The distribution of the token is then `A = b p + Z P` with `Z = sum
(1 - b) p`, and its exact distance from the target, TV(A, q), is reported
(`Verification.total_variation`).

For `b >= min(1, q / p)` the least distance is `TV(p, q) - Z`, attained by the
ordinary residual `norm([q - p]_+)`: acceptance is traded for distance one to
one (Yin et al., NeurIPS 2024, Theorems 4 and 5). `decoding_opt` is on that
line, `decoding_uno` above it. Rules defined by their output distribution are in
`known_target`.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from specjax import distributions
from specjax.rules import requirements
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.types import Rule


def single_path_rule(
  name: str,
  accept: Callable[[Array, Array], Array],
  after_rejection: Callable[[Array, Array], tuple[Array, Array, Array]],
) -> Rule:
  """A lossy rule for a single path.

  Args:
    name: the rule's name.
    accept: `(log q f32[V], log p f32[V]) -> b f32[V]` in [0, 1].
    after_rejection: `(log q, log p) -> (m f32[V], sum(m), log P f32[V])`, where
      `P = m / sum(m)`.
  """

  def decide(target_log_probs, draft_log_probs, tokens, valid):
    drafted = draft_log_probs[0]
    b = accept(target_log_probs, drafted)
    draft, target = jnp.exp(drafted), jnp.exp(target_log_probs)
    rejected = jnp.sum(jnp.where(b < 1, draft - b * draft, 0))
    after, total, next_log_probs = after_rejection(target_log_probs, drafted)
    got = b * draft + rejected / total * after
    return Decision(
      accept=jnp.where(valid, b[tokens], 0),
      next_log_probs=next_log_probs,
      total_variation=jnp.sum(jnp.where(got > target, got - target, 0)),
    )

  def check(tree, siblings):
    del siblings
    requirements.single_path(name, tree)

  return Rule(
    name=name, verify=verify_nodes(decide), lossless=False, check=check
  )


def after_residual(target_log_probs, draft_log_probs):
  """`norm([q - p]_+)` after a rejection: mass, its sum, log-probabilities."""
  target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
  mass = jnp.where(target > draft, target - draft, 0)
  total = jnp.sum(mass)
  some = total > 0
  return (
    jnp.where(some, mass, target),
    jnp.where(some, total, 1),
    distributions.normalize(mass, target_log_probs),
  )


def after_target(target_log_probs, draft_log_probs):
  """The target's own distribution after a rejection; see `after_residual`."""
  del draft_log_probs
  return jnp.exp(target_log_probs), 1, target_log_probs


def _over_accept(epsilon: float) -> Callable[[Array, Array], Array]:
  if not epsilon >= 0:
    raise ValueError(f"epsilon must be >= 0, got {epsilon}")
  return lambda target, draft: distributions.share(
    jnp.exp(target) + epsilon, jnp.exp(draft)
  )


def decoding_opt(epsilon: float = 0.1) -> Rule:
  """Accepts with `min(1, (q + e) / p)`; the best residual (Yin et al., 2024).

  Args:
    epsilon: e >= 0; 0 is lossless.

  Raises:
    ValueError: if `epsilon` is negative.
  """
  return single_path_rule("decoding_opt", _over_accept(epsilon), after_residual)


def decoding_uno(epsilon: float = 0.1) -> Rule:
  """Like `decoding_opt`, but a rejection draws from the target (Yin et al.).

  Args:
    epsilon: e >= 0; lossy even at 0.

  Raises:
    ValueError: if `epsilon` is negative.
  """
  return single_path_rule("decoding_uno", _over_accept(epsilon), after_target)
