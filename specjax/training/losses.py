"""Training objectives: the text, the target's distribution, or acceptance.

Every objective is a mean loss over predicted positions, in nats or in shares of
a token, from the distributions of student p and teacher q after the same
contexts. How contexts are chosen is up to `launch.training.model`.

On the teacher's own samples `acceptance` is an unbiased estimate of what
makes speculative decoding fast. For tokens x_1.. drawn from q,

  E_q[prod_j min(1, p(x_j) / q(x_j))] = sum_x prod_j min(p(x_j), q(x_j))
    = P(the first i tokens drafted from p are accepted),

since the sum is symmetric: `rules.get("token")`, *with the distributions' roles
exchanged*, says how much of the target's text it would accept. Differentiating
the shipped rule needs no score function, because the text does not depend on p.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specjax import rules
from specjax.siblings import IID
from specjax.tree import chain
from specjax.types import Draft

# `(student f32[B, T, V], teacher f32[B, T, V] or None, labels i32[B, T],
# weights f32[B, T]) -> f32[]`, logits, the tokens after each position, and 1
# where a token counts.
Objective = Callable[[Array, Array | None, Array, Array], Array]


def mean(values: Array, weights: Array) -> Array:
  """The weighted mean over positions, 0 if no position counts."""
  counted = jnp.where(weights > 0, values * weights, 0)
  return jnp.sum(counted) / jnp.maximum(jnp.sum(weights), 1)


def next_token(student, teacher, labels, weights) -> Array:
  """Cross-entropy of the text, nats per token."""
  del teacher
  log_probs = jax.nn.log_softmax(student)
  each = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
  return -mean(each, weights)


def forward_kl(student, teacher, labels, weights) -> Array:
  """`KL(q || p)`, nats: p must cover the target's tokens."""
  del labels
  log_p, log_q = _log_laws(student, teacher)
  return mean(_divergence(log_q, log_p), weights)


def reverse_kl(student, teacher, labels, weights) -> Array:
  """`KL(p || q)`, nats: p must avoid tokens that the target would not emit."""
  del labels
  log_p, log_q = _log_laws(student, teacher)
  return mean(_divergence(log_p, log_q), weights)


def _divergence(log_p, log_q) -> Array:
  """`KL(p || q)`; tokens without mass under p contribute nothing."""
  has_mass = log_p > -jnp.inf
  ratio = jnp.where(has_mass, log_p, 0) - jnp.where(has_mass, log_q, 0)
  return jnp.sum(jnp.exp(log_p) * ratio, -1)


def total_variation(student, teacher, labels, weights) -> Array:
  """`TV(p, q)`: one minus the probability that a drafted token is accepted."""
  del labels
  return mean(distance(student, teacher), weights)


def distance(student: Array, teacher: Array) -> Array:
  """`TV(p, q)` of each position, `f32[B, T]`."""
  p, q = map(jnp.exp, _log_laws(student, teacher))
  return jnp.sum(jnp.where(q > p, q - p, 0), -1)


def next_token_and_tv(student, teacher, labels, weights, text=None) -> Array:
  """DSpark's (2026): 0.1 `next_token` plus 0.9 times twice `total_variation`.

  `text` holds the weights of the first term, by default those of both.
  """
  text = weights if text is None else text
  return 0.1 * next_token(student, teacher, labels, text) + (
    1.8 * total_variation(student, teacher, labels, weights)
  )


def confidence(log_odds: Array, accepted: Array, weights: Array) -> Array:
  """Cross-entropy of estimated acceptance probabilities (DSpark), nats.

  Args:
    log_odds: `f32[B, T]`, log-odds of the estimates.
    accepted: `f32[B, T]`, the true ones, `1 - distance`; no gradient.
    weights: `f32[B, T]`, 1 where a position counts.
  """
  accepted = jax.lax.stop_gradient(accepted)
  each = accepted * jax.nn.log_sigmoid(log_odds)
  return -mean(each + (1 - accepted) * jax.nn.log_sigmoid(-log_odds), weights)


def acceptance(block: int = 5) -> Objective:
  """Minus the expected share of a block of drafted tokens that is accepted.

  Exact in expectation on the teacher's own samples; on other text it is just
  some function of that text.

  Args:
    block: drafted tokens per round, gamma; a block starts every `block`
      positions, and counts only if all of its positions have weight.

  Returns:
    The objective, in [-1, 0].
  """
  chosen = block_acceptance(block)

  def objective(student, teacher, labels, weights) -> Array:
    count = labels.shape[1] // block
    cut = lambda x: x[:, : count * block].reshape(-1, block, *x.shape[2:])
    return chosen(*map(cut, (student, teacher, labels, weights)))

  return objective


def block_acceptance(block: int) -> Objective:
  """`acceptance` of given blocks, each a row of T = block positions.

  Blocks may then begin at every position, as a head's drafts do.
  """
  tree, verify = chain(block), rules.get("token").verify

  def objective(student, teacher, labels, weights) -> Array:
    log_p, log_q = _log_laws(student, teacher)
    # Roles exchanged: the text is the teacher's, and p is the target.
    judge = jnp.pad(log_p, ((0, 0), (0, 1), (0, 0)), mode="edge")
    author = jnp.pad(log_q, ((0, 0), (1, 0), (0, 0)))
    draft = Draft(
      tree=tree,
      siblings=IID,
      tokens=jnp.pad(labels, ((0, 0), (1, 0))),
      log_probs=author,
    )
    verification = verify(draft, draft.topology(), judge)
    share = verification.node_probs @ (tree.depth / block)
    return -mean(share, weights.min(axis=1))

  return objective


def smooth_l1(predicted: Array, wanted: Array, weights: Array) -> Array:
  """Smooth L1 (Huber) loss on hidden states, as in EAGLE-1's training.

  Quadratic below 1, linear above; the mean over channels.

  Args:
    predicted: `f[B, T, H]`.
    wanted: `f[B, T, H]`, no gradient.
    weights: `f32[B, T]`, 1 where a position counts.
  """
  away = jnp.abs(predicted - jax.lax.stop_gradient(wanted))
  each = jnp.where(away < 1, away**2 / 2, away - 0.5)
  return mean(each.mean(-1), weights)


def _log_laws(student: Array, teacher: Array) -> tuple[Array, Array]:
  return (
    jax.nn.log_softmax(student),
    jax.lax.stop_gradient(jax.nn.log_softmax(teacher)),
  )


OBJECTIVES: dict[str, Objective] = {
  "next_token": next_token,
  "forward_kl": forward_kl,
  "reverse_kl": reverse_kl,
  "total_variation": total_variation,
  "next_token_and_tv": next_token_and_tv,
  "acceptance": acceptance(),
}


def needs_teacher(name: str) -> bool:
  """True if an objective needs the target's distributions."""
  return get(name) is not next_token


def get(name: str, *, block: int = 5) -> Objective:
  """The objective of that name.

  Args:
    name: one of `OBJECTIVES`.
    block: see `acceptance`; the others ignore it.

  Raises:
    ValueError: for an unknown name, listing the known ones, or a block < 1.
  """
  if block < 1:
    raise ValueError(f"block must be >= 1, got {block}")
  if name not in OBJECTIVES:
    raise ValueError(
      f"unknown objective {name!r}, expected one of {sorted(OBJECTIVES)}"
    )
  return acceptance(block) if name == "acceptance" else OBJECTIVES[name]
