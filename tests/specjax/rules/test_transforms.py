"""Rules are pure functions: under `jit` and `vmap` they say the same."""

import dataclasses

import instances
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.rules.nodewise import verify_nodes
from specjax.siblings import GREEDY, HUB, IID, SHARED_NOISE, WITHOUT_REPLACEMENT
from specjax.tree import Form, Tree, chain, k_ary, paths
from specjax.types import Draft

VOCAB = 6
SHAPES = (
  (Tree((-1, 0, 0, 1, 2, 2)), IID),
  (paths(2, 2), SHARED_NOISE),
  (paths(2, 2), IID),
  (Tree((-1, 0, 0, 1, 1)), WITHOUT_REPLACEMENT),
  (paths(2, 2), WITHOUT_REPLACEMENT),
  (k_ary(2), GREEDY),
  (k_ary(2), HUB),
  (chain(2), IID),
)


def first_shape(rule):
  """The first tree and siblings that a rule is for."""
  for tree, siblings in SHAPES:
    if siblings.with_noise == rule.with_noise:
      try:
        rule.check(tree, siblings)
      except ValueError:
        continue
      return tree, siblings
  raise AssertionError(rule.name)


@pytest.mark.parametrize("name", rules.RULES)
def test_batches_of_batches_are_one_batch(name):
  rule = rules.get(name)
  tree, siblings = first_shape(rule)
  rng = np.random.default_rng(0)
  rows, nodes = 6, tree.num_nodes
  leaf = np.array([not children for children in tree.children])
  law = jax.nn.log_softmax(rng.standard_normal((rows, nodes, VOCAB)))
  noise = None
  if siblings.with_noise:
    noise = jnp.asarray(rng.gumbel(size=(rows, 2, 3, VOCAB)), jnp.float32)
  tokens = rng.integers(0, 3, (rows, nodes))  # few: siblings are often equal
  if not siblings.independent:  # the most probable one, and others
    top = np.asarray(law).argmax(-1)[:, np.maximum(tree.parents, 0)]
    tokens = (top + tree.rank) % VOCAB
  draft = instances.make_draft(
    tree,
    siblings,
    jnp.asarray(tokens, jnp.int32),
    jnp.where(leaf[:, None], -jnp.inf, law),
    noise,
  )
  target = jax.nn.log_softmax(rng.standard_normal((rows, nodes, VOCAB)))

  def ask(draft, target):
    actual = rule.verify(draft, draft.topology(), target)
    node = jnp.argmax(actual.node_probs, axis=1)
    return (
      actual.node_probs,
      actual.next_log_probs(node),
      actual.total_variation,
    )

  flat = jax.jit(ask)(draft, target)
  fold = lambda x: x.reshape(3, 2, *x.shape[1:])
  nested = jax.jit(jax.vmap(ask))(*jax.tree.map(fold, (draft, target)))
  for one, other in zip(
    jax.tree.leaves(flat), jax.tree.leaves(nested), strict=True
  ):
    np.testing.assert_allclose(
      np.exp(fold(one)), np.exp(other), rtol=1e-5, atol=1e-6
    )
  np.testing.assert_allclose(flat[0].sum(1), 1, atol=1e-5)


def test_what_is_deeper_than_the_bounds_is_nowhere_reached():
  """In a tree of two levels a third one hangs: its nodes are not there."""
  tree = Tree((-1, 0, 1, 1), form=Form.FREE)
  rng = np.random.default_rng(0)
  law = lambda: jnp.log(jnp.asarray(rng.dirichlet(np.ones(VOCAB), (1, 4))))
  draft = Draft(
    tree=tree,
    siblings=WITHOUT_REPLACEMENT,
    tokens=jnp.array([[0, 1, 2, 3]]),
    log_probs=law(),
    parents=jnp.array([[-1, 0, 1, 2]]),
  )
  for name in ("match", "recursive", "traversal"):
    actual = rules.get(name).verify(draft, draft.topology(), law())
    np.testing.assert_allclose(actual.node_probs.sum(), 1, rtol=1e-5)
    assert actual.node_probs[0, 3] == 0


def test_equal_paths_lose_the_same():
  """A lossy rule's distance stands at a node, and at one that equals it."""

  def decide(target_log_probs, draft_log_probs, tokens, valid):
    actual = rules.recursive.decide(
      target_log_probs, draft_log_probs, tokens, valid
    )
    lost = jnp.exp(target_log_probs[0])  # another at every node
    return dataclasses.replace(actual, total_variation=lost)

  law = jnp.log(jnp.asarray(np.random.default_rng(1).dirichlet(
    np.ones(VOCAB), (1, 5))))  # fmt: skip
  draft = Draft(
    tree=paths(2, 2),
    siblings=IID,
    tokens=jnp.array([[0, 3, 3, 1, 1]]),
    log_probs=jnp.broadcast_to(law[:, :1], law.shape),
  )
  lossy = verify_nodes(decide)
  target = law.at[:, 2].set(law[:, 1]).at[:, 4].set(law[:, 3])
  actual = lossy(draft, draft.topology(), target).total_variation
  assert actual[0, 1] == actual[0, 2] > 0
