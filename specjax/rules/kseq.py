"""k-SEQ, SpecTr's selection rule (Sun et al., NeurIPS 2023, Algorithm 1).

All k i.i.d. candidates are tested alike, in order: x is accepted with
probability `c(x) = min(1, q(x) / (r p(x)))`. With `b(r) = sum min(p, q / r)`,
one of k is accepted with probability `1 - (1 - b)^k`, a token x with `min(p, q
/ r) (1 - (1 - b)^k) / b`, and the residual is what q has beyond that: it has no
negative entry iff `1 - (1 - b)^k <= r b`. The smallest such r, found between 1
and k, accepts most: at least `1 - (1 - 1/k)^k` of the optimum. It is solved
anew for every node and number of surviving paths.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.rules import checks
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.types import Rule


def decide(siblings, target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  del siblings
  target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
  count = jnp.sum(valid)
  scale = solve(target, draft, count, most=len(tokens))
  test = laws.share(target[tokens], scale * draft[tokens])
  taken = jnp.minimum(draft, target / scale)
  taken *= accepted_per_try(jnp.sum(taken), count, most=len(tokens))
  return Decision(
    accept=first_success(jnp.where(valid, test, 0)),
    next_log_probs=laws.normalize(
      jnp.maximum(target - taken, 0), target_log_probs
    ),
  )


def first_success(tests: Array) -> Array:
  """The probability that each of independent tests is the first to pass.

  Args:
    tests: `f32[C]`, the probability that each passes.

  Returns:
    `f32[C]`.
  """
  fails = jnp.cumprod(1 - tests)
  return tests * jnp.concatenate([jnp.ones_like(fails[:1]), fails[:-1]])


def accepted_per_try(one: Array, count: Array, *, most: int) -> Array:
  """`(1 - (1 - b)^k) / b`, which is k at b = 0.

  Args:
    one: `f32[...]`, b in [0, 1].
    count: `i32[...]`, k.
    most: a static bound on k.

  Returns:
    `f32[...]`.
  """
  powers = jnp.maximum(1 - one, 0)[..., None] ** np.arange(most)
  return jnp.sum(
    jnp.where(np.arange(most) < count[..., None], powers, 0), axis=-1
  )


def solve(target: Array, draft: Array, count: Array, *, most: int) -> Array:
  """The smallest valid scale r in [1, k], from above.

  Valid means `f(r) = r - (1 - (1 - b)^k) / b >= 0`. False position with the
  Illinois change keeps a valid upper end throughout, and that end is returned:
  a scale too large by rounding costs acceptance, one too small would be biased.

  Args:
    target, draft: `f32[V]`, probabilities.
    count: `i32[]`, k.
    most: a static bound on k.

  Returns:
    `f32[]`.
  """

  def excess(scale):
    one = jnp.sum(jnp.minimum(draft, target / scale))
    return scale - accepted_per_try(one, count, most=most)

  def narrow(_, bracket):
    low, f_low, high, f_high, last = bracket
    width = f_high - f_low
    guess = high - f_high * (high - low) / jnp.where(width > 0, width, 1)
    guess = jnp.clip(guess, low, high)
    f_guess = excess(guess)
    above = f_guess >= 0
    # Illinois: an end that stays twice has its value halved.
    f_low = jnp.where(above & (last == 1), f_low / 2, f_low)
    f_high = jnp.where(~above & (last == -1), f_high / 2, f_high)
    return (
      jnp.where(above, low, guess),
      jnp.where(above, f_low, f_guess),
      jnp.where(above, guess, high),
      jnp.where(above, f_guess, f_high),
      jnp.where(above, 1, -1),
    )

  one = jnp.ones_like(target[0])
  low, high = one, one * jnp.maximum(count, 1)
  start = (low, excess(low), high, excess(high), jnp.zeros((), int))
  rounds = 8 if target.dtype == jnp.float32 else 20
  found = jax.lax.fori_loop(0, rounds, narrow, start)
  # The lower end may be valid itself (equal laws, k = 1).
  return jnp.where(start[1] >= 0, low, found[2])


def check(tree, siblings) -> None:
  """Raises ValueError unless siblings are independent."""
  checks.independent("kseq", tree, siblings)


RULE = Rule(
  name="kseq", verify=verify_nodes(decide), lossless=True, check=check
)
