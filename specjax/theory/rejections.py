"""Expected rejections of speculative and batch decoding (Yin et al., 2024).

"A Theoretical Perspective for Speculative Decoding Algorithm", NeurIPS 2024. A
run decodes T tokens; every round drafts all that remain, so each position is
drafted and there is no bonus token. A rejection is a round that ends with a
residual token. Chains are `specjax.theory.markov.MarkovPair`; everything is a
dynamic program over positions and states, O(T V^2 M).
"""

import jax
import jax.numpy as jnp
from jax import Array

from specjax import distributions
from specjax.theory.markov import MarkovPair


def total_variation(draft: Array, target: Array) -> Array:
  """`TV(p, q) = sum [q - p]_+` over the last axis: P(one draft is rejected).

  Args:
    draft, target: `f[..., V]`, probabilities.

  Returns:
    `f[...]`.
  """
  return distributions.rejection(
    target, draft, jnp.ones(draft.shape[:-1], draft.dtype)
  )


def batch_rejection(
  draft: Array, target: Array, num_drafts: int | Array
) -> tuple[Array, Array]:
  """P(all M i.i.d. drafts are rejected), and the residual's mass.

  `Pi_M = R(s_M)` with `s_0 = 0, s_{m+1} = s_m + R(s_m)` (Theorem 3's product of
  total variations), and the residual's mass `[q - s_M p]_+`, which sums to it.

  Args:
    draft, target: `f[..., V]`, probabilities.
    num_drafts: M >= 1.

  Returns:
    `f[...]` and `f[..., V]`.
  """
  scale = jnp.zeros(draft.shape[:-1], draft.dtype)
  scale = jax.lax.fori_loop(
    0,
    num_drafts,
    lambda _, s: s + distributions.rejection(target, draft, s),
    scale,
  )
  left = target - scale[..., None] * draft
  left = jnp.where(left > 0, left, 0)
  return jnp.sum(left, axis=-1), left


def theorem1(pair: MarkovPair) -> Array:
  """E[rejections] of speculative decoding with one draft, `f[]`.

  Theorem 1: the sum over positions of the expectation, under the target's own
  law of the prefix, of `TV(p_n, q_n)`. By Theorem 2 this is optimal among
  lossless algorithms that draft token by token from p and accept each token on
  its own; block verification and several drafts are outside that class.
  """
  return _expected(pair, 1)


def theorem3(pair: MarkovPair, num_drafts: int) -> Array:
  """E[rejections] of batch decoding with M drafts (Algorithm 4), `f[]`.

  Theorem 3. Every restart makes M drafts; once one of them is accepted the rest
  of its sequence is verified as a single draft. A position is fresh with mass f
  and then rejected with `Pi_M`, else with `TV`.

  Raises:
    ValueError: if `num_drafts` is not positive.
  """
  _check_drafts(num_drafts)
  return _expected(pair, num_drafts)


def limit(pair: MarkovPair) -> Array:
  """Theorem 3's number as M goes to infinity (Proposition 1), `f[]`.

  `Pi_M` tends to the target's mass where the draft has none. Only the first
  token of a restart has many drafts; the others are rejected with `TV` for any
  M, so the limit is positive if draft and target differ there.
  """
  return _expected(pair, None)


def _expected(pair: MarkovPair, num_drafts: int | None):
  """`f[]`; jitted, float64 if jax has it enabled."""
  return _recursion(
    jax.tree.map(jnp.asarray, pair), 0 if num_drafts is None else num_drafts
  )


@jax.jit
def _recursion(pair: MarkovPair, num_drafts):
  """The recursion of Theorem 3; `num_drafts` 0 stands for the limit.

  State x carries q(x), the target's mass of prefixes ending in x, and f(x), the
  mass of those whose last token came from a rejection.
  """

  def rejected(draft, target):
    by_draws, left = batch_rejection(draft, target, jnp.maximum(num_drafts, 1))
    uncovered = jnp.where(draft > 0, 0, target)
    return (
      jnp.where(num_drafts > 0, by_draws, uncovered.sum(-1)),
      jnp.where(num_drafts > 0, left, uncovered),
    )

  def step(carry, laws_here):
    mass, fresh = carry  # [V] each, over the token before
    draft, target = laws_here  # [V, V]
    excess = jnp.where(target > draft, target - draft, 0)
    all_rejected, left = rejected(draft, target)
    going = mass - fresh
    here = fresh @ all_rejected + going @ excess.sum(-1)
    return (mass @ target, fresh @ left + going @ excess), here

  vocab = pair.vocab_size
  # Before the first token there is one state, and it is fresh.
  start = jnp.zeros(vocab).at[0].set(1.0)
  first = tuple(
    jnp.broadcast_to(x, (vocab, vocab))
    for x in (pair.draft_initial, pair.target_initial)
  )
  carry, here = step((start, start), first)
  _, rest = jax.lax.scan(step, carry, (pair.draft, pair.target))
  return here + rest.sum()


def bernoulli(draft: float, target: float, num_drafts: int) -> float:
  """`Pi_M` of p = Ber(u), q = Ber(v): the closed form.

  `|u - v| (1 - u)^(M - 1)` if v > u, `|u - v| u^(M - 1)` if v < u.

  Args:
    draft: u.
    target: v.
    num_drafts: M >= 1.

  Raises:
    ValueError: for probabilities outside [0, 1] or no draft.
  """
  for name, value in (("draft", draft), ("target", target)):
    if not 0 <= value <= 1:
      raise ValueError(f"{name} must be in [0, 1], got {value}")
  _check_drafts(num_drafts)
  over = 1 - draft if target > draft else draft
  return abs(draft - target) * over ** (num_drafts - 1)


def uniform(draft_size: int, target_size: int, num_drafts: int) -> float:
  """`Pi_M` of the uniform laws on the first V and V' <= V tokens.

  `(1 - V' / V)^M`: residuals stay uniform.

  Raises:
    ValueError: if not 1 <= V' <= V, or there is no draft.
  """
  if not 1 <= target_size <= draft_size:
    raise ValueError(
      f"sizes must satisfy 1 <= target <= draft, got {target_size} and "
      f"{draft_size}"
    )
  _check_drafts(num_drafts)
  return (1 - target_size / draft_size) ** num_drafts


def _check_drafts(num_drafts: int) -> None:
  if num_drafts < 1:
    raise ValueError(f"num_drafts must be >= 1, got {num_drafts}")
