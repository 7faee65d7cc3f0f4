"""Rules that decide node by node: nodes beyond the bounds, equal paths."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax import rules
from specjax.rules.nodewise import verify_nodes
from specjax.siblings import IID, WITHOUT_REPLACEMENT
from specjax.tree import Form, Tree, paths
from specjax.types import Draft

VOCAB = 6


def test_nodes_beyond_max_depth_are_never_reached():
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


def test_equal_paths_report_equal_total_variation():
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
