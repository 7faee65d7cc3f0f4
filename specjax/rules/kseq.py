"""k-SEQ, SpecTr's selection rule (Sun et al., NeurIPS 2023).

All k i.i.d. candidates get the same test, in order: x is accepted with
probability `c(x) = min(1, q(x) / (r p(x)))`. With `b(r) = sum min(p, q / r)`,
one of k is accepted with probability `1 - (1 - b)^k`, a token x with `min(p, q
/ r) (1 - (1 - b)^k) / b`, and the residual is q minus that. It has no negative
entry iff `1 - (1 - b)^k <= r b`. The smallest such r, found between 1 and k,
accepts most: at least `1 - (1 - 1/k)^k` of the optimum. It is computed for each
node and number of surviving paths.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.rules import requirements
from specjax.rules.nodewise import Decision, decide_single, verify_nodes
from specjax.types import Rule


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  if len(tokens) == 1:
    return decide_single(target_log_probs, draft_log_probs, tokens, valid)
  target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs[0])
  count = jnp.sum(valid)
  scale = solve(target, draft, count, most=len(tokens))
  test = distributions.share(target[tokens], scale * draft[tokens])
  taken = jnp.minimum(draft, target / scale)
  taken *= accepted_per_try(jnp.sum(taken), count, most=len(tokens))
  return Decision(
    accept=first_success(jnp.where(valid, test, 0)),
    next_log_probs=distributions.normalize(
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

  Valid means `f(r) = r - (1 - (1 - b)^k) / b >= 0`. Newton steps inside a
  bracket start from its geometric mean and aim a few roundings above the root.
  The upper end of the bracket, which is valid, is returned: a scale that is too
  large by rounding costs acceptance, one that is too small would be biased.

  Args:
    target, draft: `f32[V]`, probabilities.
    count: `i32[]`, k.
    most: a static bound on k.

  Returns:
    `f32[]`.
  """
  return _root(target, draft, count, most)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _root(target, draft, count, most):
  eps = jnp.finfo(target.dtype).eps
  aim = 16 * eps  # beyond the rounding of sums, or no point is ever valid

  def narrow(state):
    low, high, scale, _, rounds = state
    given = target / scale
    one = jnp.sum(jnp.minimum(draft, given))
    per_scale = -jnp.sum(jnp.where(given < draft, given, 0)) / scale
    tries, slope = jax.jvp(
      lambda b: accepted_per_try(b, count, most=most), (one,), (per_scale,)
    )
    over = scale - tries  # f
    valid = over >= 0
    low, high = jnp.where(valid, low, scale), jnp.where(valid, scale, high)
    done = (high <= low) | (valid & (over <= 2 * aim))
    step = scale - (over - aim) / jnp.maximum(1 - slope, eps)
    inside = (step > low) & (step < high)
    step = jnp.where(inside, step, (low + high) / 2)
    return low, high, step, done, rounds + 1

  one = jnp.ones_like(target[0])
  most_scale = one * jnp.maximum(count, 1)
  start = (one, most_scale, jnp.sqrt(most_scale), count <= 1, 0)
  most_rounds = 12 if target.dtype == jnp.float32 else 24
  return jax.lax.while_loop(
    lambda state: ~state[3] & (state[4] < most_rounds), narrow, start
  )[1]


@_root.defjvp
def _root_jvp(most, primals, tangents):
  """The derivatives of a root of f; 0 at the ends of the bracket."""
  target, draft, count = primals
  scale = _root(target, draft, count, most)

  def excess(target, draft, scale):
    one = jnp.sum(jnp.minimum(draft, target / scale))
    return scale - accepted_per_try(one, count, most=most)

  _, change = jax.jvp(
    lambda target, draft: excess(target, draft, scale),
    (target, draft),
    tangents[:2],
  )
  rise = jax.grad(excess, argnums=2)(target, draft, scale)
  inside = (scale > 1) & (rise > 0)
  return scale, -jnp.where(inside, change / jnp.where(inside, rise, 1), 0)


def check(tree, siblings) -> None:
  """Raises ValueError unless siblings are independent."""
  requirements.independent("kseq", tree, siblings)


RULE = Rule(
  name="kseq", verify=verify_nodes(decide), lossless=True, check=check
)
