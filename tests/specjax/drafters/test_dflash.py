"""A block reads all committed features, and none of another block's slots."""

import functools
import heapq

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys
from decoding import TARGET, VOCAB

import specjax
from specjax import shapes
from specjax.drafters import dflash
from specjax.tree import Tree, bound, chain

DRAFT = toys.near(TARGET, noise=0.8, seed=1)
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))
TOY = toy_heads.target(VOCAB)
HEAD = toys.block_model(VOCAB, num_features=toy_heads.LAYERS, num_depths=3)
# The accepted path is 0, 1, 3, 5: not the first nodes.
TREE = Tree((-1, 0, 0, 1, 2, 3))
DRAWN = dflash(HEAD, tree=TREE, vocab_size=VOCAB)


start = functools.partial(decoding.start, params=PARAMS)


def expected_logits(state, row):
  """Of each depth, from a row's text in NumPy, `f[K, V]`."""
  text = np.asarray(state.tokens[row, : state.length[row]])
  total = toy_heads.block_total(text, len(DRAFT))
  return DRAFT[toys.depth_row(total, np.arange(3), len(DRAFT))]


def rounds(drafter, rule="recursive", count=4):
  """Drafts of some rounds: `(state, draft)` of each."""
  decoder = specjax.make_decoder(TOY, drafter=drafter, rule=rule)
  propose, step = jax.jit(decoder.propose), jax.jit(decoder.step)
  state = start(decoder)
  for _ in range(count):
    yield state, propose(PARAMS, state)[0]
    state, _ = step(PARAMS, state)


def test_log_probs_come_from_all_committed_features():
  for state, draft in rounds(DRAWN):
    for row in np.flatnonzero(~np.asarray(state.done)):
      laws = jax.nn.log_softmax(expected_logits(state, row))
      expected = laws[TREE.depth[1:] - 1]
      np.testing.assert_allclose(draft.log_probs[row, 1:], expected, atol=1e-4)


def test_best_tree_matches_exhaustive_search_over_paths():
  """By going through every path."""
  size, children = 12, 3
  best = dflash(
    HEAD, tree=bound(size, 3, children), siblings="given", vocab_size=VOCAB
  )
  for state, draft in rounds(best, "match", 2):
    for row in np.flatnonzero(~np.asarray(state.done)):
      law = np.asarray(jax.nn.log_softmax(expected_logits(state, row)))
      paths, last = {}, {(): 0.0}
      for of_depth in law:
        ranked = np.argsort(-of_depth, kind="stable")[:children]
        last = {
          (*p, int(t)): s + of_depth[t] for p, s in last.items() for t in ranked
        }
        paths |= last
      wanted = sorted(paths, key=lambda p: -paths[p])[:size]
      assert toy_heads.paths_of(draft, row) == set(wanted)


@pytest.mark.parametrize("size", [8, 11])
def test_families_expand_the_likeliest_node_first(size):
  """As from a heap, by a reference in Python; the last one is cut short."""
  count, depth = 3, 3
  shape = shapes.dynamic(size, top_k=count, families=True)
  drafter = dflash(HEAD, tokens=depth, tree=shape, vocab_size=VOCAB)
  for state, draft in rounds(drafter, "match", 2):
    for row in np.flatnonzero(~np.asarray(state.done)):
      law = np.asarray(jax.nn.log_softmax(expected_logits(state, row)))
      heap, nodes = [(0.0, 0, 0)], []  # less the score, the node, its depth
      while len(nodes) < size:
        score, node, level = heapq.heappop(heap)
        if level == depth:
          continue
        for token in np.argsort(-law[level], kind="stable")[:count]:
          nodes.append((node, int(token)))
          child = (score - law[level, token], len(nodes), level + 1)
          heapq.heappush(heap, child)
      assert draft.parents[row, 1:].tolist() == [p for p, _ in nodes[:size]]
      assert draft.tokens[row, 1:].tolist() == [t for _, t in nodes[:size]]


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(tree=chain(4)), "dflash predicts 3 tokens ahead, got a tree of dep"),
    (dict(tree=bound(4, 2, 2), siblings="top_k"), "leave out siblings"),
  ],
)
def test_incompatible_trees_are_rejected(settings, message):
  with pytest.raises(ValueError, match=message):
    dflash(HEAD, vocab_size=VOCAB, **settings)
