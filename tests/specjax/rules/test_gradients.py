"""Acceptance can be differentiated: distillation through a rule is possible."""

import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.siblings import GREEDY, HUB, IID, WITHOUT_REPLACEMENT
from specjax.tree import Tree, chain, k_ary, paths

SHAPES = (
  (chain(2), IID),
  (paths(2, 2), IID),
  (Tree((-1, 0, 0, 1, 1)), WITHOUT_REPLACEMENT),
  (k_ary(1, 2), WITHOUT_REPLACEMENT),
  (k_ary(2, 1), GREEDY),
  (k_ary(2), HUB),
)
# The plan is a constant to differentiation; chains have none.
PLANNED = ("transport", "block_transport", "score_block")
VOCAB, ROWS = 5, 3


def fits(rule, tree, siblings):
  try:
    rule.check(tree, siblings)
  except ValueError:
    return False
  return not rule.with_noise


def cases(name, rule):
  """The last that fits, and of what is planned all, in every run."""
  fitting = [shape for shape in SHAPES if fits(rule, *shape)]
  for number, (tree, siblings) in enumerate(fitting, 1):
    always = number == len(fitting) or name in PLANNED
    yield pytest.param(
      name, tree, siblings, id=f"{name}-{siblings.name}-{tree.parents}",
      marks=() if always else pytest.mark.slow,
    )  # fmt: skip


CASES = [case for name in rules.RULES for case in cases(name, rules.get(name))]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name, tree, siblings", CASES)
def test_accepted_length_gradient_matches_finite_differences(
  name, tree, siblings
):
  """Finite, and the slope of finite differences: random drafts, some zeros."""
  rng = np.random.default_rng(0)
  shape = (ROWS, tree.num_nodes, VOCAB)
  logits, others = rng.standard_normal(shape), rng.standard_normal(shape)
  others[0, 0, 1] = -np.inf
  target = others - np.logaddexp.reduce(others, axis=-1, keepdims=True)
  tokens = jnp.asarray(rng.integers(0, VOCAB, shape[:2]), jnp.int32)
  leaf = np.array([not children for children in tree.children])
  zero = np.zeros(shape, bool)
  zero[0, :, 0] = True
  rule = rules.get(name)

  @jax.jit  # one program for the length and its slope
  @jax.value_and_grad
  def accepted(logits):
    law = jax.nn.log_softmax(logits)
    law = jnp.where(leaf[:, None] | zero, -jnp.inf, law)
    draft = instances.make_draft(tree, siblings, tokens, law)
    actual = rule.verify(draft, draft.topology(), jnp.asarray(target))
    return jnp.sum(actual.node_probs * tree.depth)

  slope = np.asarray(accepted(logits)[1])
  assert np.isfinite(slope).all()
  if name in PLANNED and not tree.is_chain:
    assert np.abs(slope).max() > 1e-3
    return
  way, step = rng.standard_normal(shape), 1e-6
  above, below = (accepted(logits + s * way)[0] for s in (step, -step))
  expected = (float(above) - float(below)) / (2 * step)
  assert np.sum(slope * way) == pytest.approx(expected, abs=1e-6)
