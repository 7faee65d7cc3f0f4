"""Recursive rejection: tests candidates in turn against the residual.

With `q^1 = q`, candidate x_i, drawn from d_i given its previous siblings, is
accepted with probability `min(1, q^i(x_i) / d_i(x_i))`; otherwise `q^{i+1} =
norm([q^i - d_i]_+)`. After the last rejection the next token is drawn from that
residual. Lossless for any siblings, because each test is single-draft
verification against the residual of the tests before.

- Independent siblings: SpecInfer's multi-step sampling (Miao et al., ASPLOS
  2024). In the scale form, with `s_0 = 0, s_{j+1} = s_j + R(s_j)`, the residual
  is `q^{j+1} = norm([q - s_j p]_+)`, normalized once. All m are rejected with
  probability R(s_m) (`specjax.distributions.rejection`).
- Without replacement: RSD (Jeon et al., 2024) and Sequoia (Chen et al., NeurIPS
  2024). A sibling drawn after p has run out of mass may have any distribution.
- Deterministic: EAGLE's trees; x is accepted with its mass in the residual.
  Deterministic and drawn siblings may mix: each is tested with its own
  distribution.

Rule `batch` is Algorithm 4 of Yin et al. (NeurIPS 2024): the first tokens of M
i.i.d. paths are tested in turn; after an acceptance the walk stays on that path
with the single-draft test at every position. Its expected number of rejections
is their Theorem 3. Rule `recursive` instead continues with every path that
agrees so far.
"""

import jax.numpy as jnp

from specjax import distributions
from specjax import siblings as siblings_lib
from specjax.rules import requirements
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.types import Rule


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  if len(draft_log_probs) == 1:
    return _decide_equal(target_log_probs, draft_log_probs[0], tokens, valid)
  target = jnp.exp(target_log_probs)
  one = jnp.ones_like(target[0])

  def test_next(carry, i):
    left, mass, alive = carry  # R^i q^i, R^i
    probs, token = jnp.exp(draft_log_probs[i]), tokens[i]
    test = distributions.share(left[token], mass * probs[token])
    test = jnp.where(valid[i], test, 0)
    less = jnp.where(valid[i], mass, 0) * probs
    left = jnp.where(left > less, left - less, 0)
    return (left, jnp.sum(left), alive * (1 - test)), alive * test

  (left, _, _), accept = siblings_lib.scan_siblings(
    test_next, (target, one, one), len(tokens)
  )
  return Decision(
    accept=accept,
    next_log_probs=distributions.normalize(left, target_log_probs),
  )


def _decide_equal(target_log_probs, draft_log_probs, tokens, valid):
  """The scale form, for candidates all drawn from one distribution `f32[V]`."""
  target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
  one = jnp.ones_like(target[0])

  def test_next(carry, i):
    scale, mass, alive = carry  # s_j, R(s_j)
    token = tokens[i]
    test = distributions.share(
      target[token] - scale * draft[token], mass * draft[token]
    )
    test = jnp.where(valid[i], test, 0)
    scale = jnp.where(valid[i], scale + mass, scale)
    mass = jnp.where(
      valid[i], distributions.rejection(target, draft, scale), mass
    )
    return (scale, mass, alive * (1 - test)), alive * test

  (scale, _, _), accept = siblings_lib.scan_siblings(
    test_next, (jnp.zeros_like(one), one, one), len(tokens)
  )
  rest = jnp.maximum(target - scale * draft, 0)
  return Decision(
    accept=accept,
    next_log_probs=distributions.normalize(rest, target_log_probs),
  )


def check(tree, siblings) -> None:
  """Accepts any tree and any siblings."""
  del tree, siblings


def check_batch(tree, siblings) -> None:
  """Raises ValueError unless the tree is independent paths."""
  requirements.equal_paths("batch", tree)
  requirements.independent("batch", tree, siblings)


RULE = Rule(
  name="recursive", verify=verify_nodes(decide), lossless=True, check=check
)
BATCH = Rule(
  name="batch",
  verify=verify_nodes(decide, merge=False),
  lossless=True,
  check=check_batch,
)
