"""Tokens of a block that depend on their path; paths that end by confidence."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys
from decoding import TARGET, VOCAB
from toy_heads import WORDS, error

import specjax
from specjax import shapes
from specjax.drafters import dspark
from specjax.tree import Form, Tree, bound, chain

DRAFT = toys.near(TARGET, noise=0.8, seed=1)
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))
HEAD = toys.markov_block(VOCAB, num_features=toy_heads.LAYERS, num_depths=3)
TREE = Tree((-1, 0, 0, 1, 2, 2, 3))


def row_after(text, path):
  """The row of the table after a text and some drafted tokens, in NumPy."""
  contexts, state = len(DRAFT), 0
  for token in [text[-1], *path]:
    state = 3 * state + token + 1
  total = toy_heads.block_total(text, contexts)
  row = toys.depth_row(total, len(path), contexts)
  return int((row + 7 * state) % contexts)


def law_after(text, path):
  return np.asarray(jax.nn.log_softmax(DRAFT[row_after(text, path)]))


def drafts(drafter, rule, count=3):
  """The texts and drafts of some rounds, a row at a time."""
  decoder = specjax.make_decoder(
    toy_heads.target(VOCAB), drafter=drafter, rule=rule
  )
  propose, step = jax.jit(decoder.propose), jax.jit(decoder.step)
  state = decoding.start(decoder, params=PARAMS)
  for _ in range(count):
    draft = propose(PARAMS, state)[0]
    for row in np.flatnonzero(~np.asarray(state.done)):
      text = np.asarray(state.tokens[row, : state.length[row]])
      yield text, jax.tree.map(lambda x, row=row: np.asarray(x[row]), draft)
    state, _ = step(PARAMS, state)


def path_to(draft, parents, node):
  """Tokens from the root, which is not among them, to a node."""
  path = []
  while node:
    path.insert(0, int(draft.tokens[node]))
    node = parents[node]
  return path


def test_node_distributions_are_conditioned_on_their_path():
  for text, draft in drafts(dspark(HEAD, tree=TREE), "recursive"):
    for node, parent in enumerate(TREE.parents[1:], 1):
      expected = law_after(text, path_to(draft, TREE.parents, parent))
      np.testing.assert_allclose(draft.log_probs[node], expected, atol=1e-5)


def test_nodes_exist_only_below_confident_ancestors():
  drafter = dspark(HEAD, tree=TREE, threshold=0.5)
  missing = 0
  for text, draft in drafts(drafter, "recursive"):
    exists = [True]
    for parent in TREE.parents[1:]:
      row = row_after(text, path_to(draft, TREE.parents, parent))
      exists.append(exists[parent] and row % 3 != 0)
    assert (draft.parents[1:] >= 0).tolist() == exists[1:]
    missing += exists.count(False)
  assert missing


def test_dynamic_tree_keeps_the_likeliest_paths():
  """Of those that its beam of three scores, each by the law of its own path."""
  size, beam, deepest = 12, 3, 0
  drafter = dspark(HEAD, tree=bound(size, 3, beam))
  for text, draft in drafts(drafter, "match", 2):
    scores, level = {}, {(): 0.0}
    for _ in range(3):
      kept = sorted(level, key=level.get, reverse=True)[:beam]
      level = {
        (*path, int(t)): level[path] + law[t]
        for path in kept
        for law in [law_after(text, path)]
        for t in np.argsort(-law)[:beam]
      }
      scores |= level
    wanted = sorted(scores, key=scores.get, reverse=True)[:size]
    deepest += sum(len(path) == 3 for path in wanted)
    paths = {
      tuple(path_to(draft, draft.parents, node)) for node in range(1, size + 1)
    }
    assert paths == set(wanted)
  assert deepest > 10


def ends_by_the_drawn_token(drafter):
  """Drops a drawn token that was improbable, and what is below it."""

  def propose(params, state, cache, context):
    draft, state, cache = drafter.propose(params, state, cache, context)
    own = jnp.take_along_axis(draft.log_probs, draft.tokens[..., None], -1)
    sure = own[..., 0] > jnp.log(0.4)
    here = jnp.cumprod(sure.at[:, 0].set(True), axis=1) > 0
    parents = jnp.where(here, np.array(draft.tree.parents), -1)
    return dataclasses.replace(draft, parents=parents), state, cache

  return dataclasses.replace(drafter, propose=propose)


def test_cutting_by_drawn_token_probability_is_lossy():
  head = toys.markov_block(WORDS, num_features=toy_heads.LAYERS, num_depths=3)
  cut = dspark(head, tree=chain(2), threshold=0.5)
  assert cut.tree.form is Form.MASKED
  assert error(cut, "token") < 1e-10
  assert error(ends_by_the_drawn_token(cut), "token") > 1e-3


@pytest.mark.parametrize(
  ("drafter", "message"),
  [
    (lambda: dspark(HEAD, tree=chain(4)), "predicts 3 tokens ahead"),
    (
      lambda: dspark(HEAD, tree=shapes.dynamic(6, families=True)),
      "the same at all nodes of a depth",
    ),
    (lambda: dspark(HEAD, tokens=2, threshold=2), r"threshold must be in"),
    (
      lambda: dspark(
        dataclasses.replace(
          HEAD, markov=dataclasses.replace(HEAD.markov, estimates=False)
        ),
        tokens=2,
        threshold=0.5,
      ),
      "estimates no acceptance",
    ),
    (lambda: dspark(HEAD, tree=bound(4, 2, 2), threshold=0.5), "ranks"),
    (
      lambda: dspark(dataclasses.replace(HEAD, markov=None), tokens=2),
      "needs a head with a MarkovModel",
    ),
  ],
)
def test_incompatible_settings_are_rejected(drafter, message):
  with pytest.raises(ValueError, match=message):
    drafter()
