"""A residual of differences at the rounding of equals is a law all the same."""

import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.siblings import GREEDY, HUB, IID, SHARED_NOISE, WITHOUT_REPLACEMENT
from specjax.tree import chain, paths

ROWS, VOCAB = 64, 6
STAR = paths(1, 4)  # four children
APART = {"float32": [1e-6, 3e-7, 1e-7, 0], "float64": [1e-9, 1e-12, 1e-15, 0]}
SHAPES = (
  (STAR, WITHOUT_REPLACEMENT), (STAR, IID), (STAR, GREEDY),
  (STAR, SHARED_NOISE),
  (paths(1, 2), HUB), (chain(1), IID),
)  # fmt: skip


def near_laws(dtype):
  """Log-laws of draft and target that agree to `APART`.

  Some tokens have 1e-15, in every other four rows of another size in each.
  """
  rng = np.random.default_rng(0)
  row = np.arange(ROWS)[:, None]
  apart = np.array(APART[dtype])[row % 4]
  target = rng.dirichlet(np.ones(VOCAB), ROWS)
  tail = rng.random((ROWS, VOCAB)) < 0.4
  tail[:, 0] = False
  target = np.where(tail, 1e-15 * rng.random((ROWS, VOCAB)), target)
  draft = target * (1 + apart * rng.standard_normal((ROWS, VOCAB)))
  other = tail & (row // 4 % 2 == 0)
  draft = np.where(other, 1e-15 * rng.random((ROWS, VOCAB)), draft)
  return [
    np.log(law / law.sum(1, keepdims=True)).astype(dtype)
    for law in (draft, target)
  ]


@pytest.mark.parametrize("dtype", APART)
@pytest.mark.parametrize("name", rules.RULES)
def test_near_tie_residuals_sum_to_one(name, dtype, request):
  if dtype == "float64":
    request.getfixturevalue("x64")
  rule = rules.get(name)
  tree, siblings = instances.first_shape(rule, SHAPES)
  draft, target = near_laws(dtype)
  rng = np.random.default_rng(1)
  shape = (ROWS, tree.num_nodes)
  tokens = rng.integers(0, VOCAB, shape)
  if not siblings.independent and not siblings.with_noise:  # the likeliest ones
    order = np.argsort(-draft, axis=1)
    tokens = order[:, tree.rank]
  noise = None
  if siblings.with_noise:
    noise = jnp.asarray(rng.gumbel(size=(ROWS, 1, 4, VOCAB)), dtype)
  every = lambda law: jnp.repeat(jnp.asarray(law)[:, None], shape[1], axis=1)
  leaf = np.array([not children for children in tree.children])
  given = instances.make_draft(
    tree, siblings, jnp.asarray(tokens, jnp.int32),
    jnp.where(leaf[:, None], -jnp.inf, every(draft)), noise,
  )  # fmt: skip

  @jax.jit
  def ask(draft, target):
    actual = rule.verify(draft, draft.topology(), target)
    root = jnp.zeros(ROWS, jnp.int32)
    return actual.node_probs, jnp.exp(actual.next_log_probs(root))

  node_probs, rest = ask(given, every(target))
  assert rest.dtype == dtype
  assert node_probs.min() >= 0
  tolerance = 8 * np.finfo(dtype).eps
  np.testing.assert_allclose(node_probs.sum(1), 1, atol=tolerance)
  np.testing.assert_allclose(rest.sum(1), 1, atol=tolerance)
