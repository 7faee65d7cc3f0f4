"""Heads that say all depths at once: what they read, draw and choose."""

import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import PROMPTS, TARGET, VOCAB

import specjax
from specjax import drafters, shapes, tree
from specjax.types import MarginalModel

LAYERS, LAYER, HEADS = 2, 1, 3
TOY = toys.table_model(VOCAB, layers=LAYERS)
# A table for each head, looked up by the feature that it reads.
TABLES = np.stack([toys.table(VOCAB, seed=s) for s in (5, 6, 7)])
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(TABLES))


def marginals(params, features):
  context = (features[:, LAYER] - LAYER * toys.SHIFT).astype(jnp.int32)
  return jnp.moveaxis(params[:, context], 0, 1)  # [B, K, V]


HEAD = MarginalModel(
  vocab_size=VOCAB, num_features=LAYERS, num_depths=HEADS, apply=marginals
)


def make(shape, **more):
  return drafters.medusa(HEAD, tree=shape, **more)


TREE = tree.Tree((-1, 0, 0, 0, 1, 1, 2, 4))
DRAFTERS = {
  "sampled": (make(tree.chain(2)), "token"),
  "certain": (make(TREE, siblings="given"), "match"),
}  # fmt: skip


start = functools.partial(decoding.start, params=PARAMS)


def expected_logits(state, row):
  """Of each head, from the whole text but its newest token, in NumPy."""
  text = np.asarray(state.tokens[row, : state.length[row] - 1])
  return np.stack([toys.context_logits(t, text) for t in TABLES])


@pytest.mark.parametrize("name", ["sampled", "certain"])
def test_heads_read_the_last_processed_tokens_feature(name):
  """After a prompt and after rounds, whatever of a tree is accepted."""
  drafter, rule = DRAFTERS[name]
  decoder = specjax.make_decoder(TOY, drafter=drafter, rule=rule)
  state = start(decoder)
  propose, step = jax.jit(decoder.propose), jax.jit(decoder.step)
  shape = drafter.tree
  for _ in range(3):
    draft = propose(PARAMS, state)[0]
    for row in range(len(PROMPTS)):
      if state.done[row] or state.length[row] == 1:
        continue
      logits = expected_logits(state, row)
      for node in range(1, shape.num_nodes):
        of_depth = logits[shape.depth[node] - 1]
        if name == "certain":
          ranked = np.argsort(-of_depth, kind="stable")
          assert draft.tokens[row, node] == ranked[shape.rank[node]]
        else:
          np.testing.assert_allclose(
            draft.log_probs[row, node], jax.nn.log_softmax(of_depth), atol=1e-5
          )
    state, _ = step(PARAMS, state)


def test_published_trees_have_expected_node_counts():
  count = lambda t: np.bincount(t.depth).tolist()[1:]
  assert count(shapes.PUBLISHED["mc_sim_7b_63"]) == [10, 28, 23, 2]
  assert count(shapes.PUBLISHED["eagle_25"]) == [4, 8, 8, 3, 2]
  # Node 0-0's children are 000 to 009.
  largest = shapes.PUBLISHED["mc_sim_7b_63"]
  assert [len(c) for c in largest.children[:4]] == [10, 10, 7, 3]
  assert len(largest.children[11]) == 10


def test_tree_of_ranks_builds_and_validates_rank_paths():
  actual = shapes.tree_of_ranks(((0, 0), (1,), (0,), (1, 0), (1, 0, 0)))
  assert actual.parents == (-1, 0, 0, 1, 2, 4)
  for paths, message in (
    (((0,), (0,)), "every node once"),
    (((0,), (0, 1)), r"\(0, 1\) needs \(0, 0\), which is missing"),
    (((0, 0),), r"\(0, 0\) needs \(0,\), which is missing"),
  ):
    with pytest.raises(ValueError, match=message):
      shapes.tree_of_ranks(paths)


@pytest.mark.parametrize(
  "shape, message",
  [
    (tree.chain(4), "predicts 3 tokens ahead.* depth 4"),
    (tree.k_ary(12), "at most 11 per node, got a tree with 12"),
  ],
)
def test_incompatible_trees_are_rejected(shape, message):
  with pytest.raises(ValueError, match=message):
    make(shape, siblings="given")
