"""RASD's tree: what was retrieved is scored, and joined with what was drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax.drafters.families import rasd
from specjax.drafters.shared import occurrences, tries
from specjax.siblings import IID
from specjax.tree import Tree, chain

VOCAB = 3
MODEL = toys.table_model(VOCAB)
RETRIEVAL = dict(vocab_size=VOCAB, max_match=3, max_hits=9, min_prob=0)


def test_retrieved_and_drawn_tokens_are_deduplicated():
  """Its children hang on the drawn node, and its place goes to another."""
  tree = Tree((-1, 0, 0, 1))
  drawn = specjax.Draft(
    tree=tree, siblings=IID, tokens=jnp.array([[9, 4, 5, 6]]),
    log_probs=jnp.zeros((1, 4, 8)),
  )  # fmt: skip
  actual = tries.Trie(  # 4; 4 6; 7; 4 6 1; 5 2; 7 3
    tokens=jnp.array([[4, 6, 7, 1, 2, 3]]),
    parents=jnp.array([[0, 1, 0, 2, -1, 3]]),
    values=jnp.ones((1, 6)),
  )
  scores = jnp.array([[-0.1, -0.2, -3.0, -0.3, -0.2, -4.0]])
  draft = rasd._merged(drawn, actual, scores, occurrences.bounds(6, 3))
  assert draft.tokens.tolist() == [[9, 4, 5, 6, 1, 7, 3]]
  assert draft.parents.tolist() == [[-1, 0, 0, 1, 3, 0, 5]]
  fewer = rasd._merged(drawn, actual, scores, occurrences.bounds(5, 3))
  assert fewer.parents.tolist() == [[-1, 0, 0, 1, 3, 0]]
  more = occurrences.bounds(8, 3)
  unlikely = scores.at[0, 2].set(-1.0).at[0, 5].set(-jnp.inf)
  draft = rasd._merged(drawn, actual, unlikely, more)
  assert draft.tokens[0, 4:6].tolist() == [1, 7]
  assert draft.parents.tolist() == [[-1, 0, 0, 1, 3, 0, -1, -1, -1]]


def ways_of(tokens, parents):
  """`{node: tokens from the root on}` of a tree whose parents are data."""
  ways = {0: ()}
  for node, parent in enumerate(parents[1:].tolist(), start=1):
    if parent >= 0:
      ways[node] = (*ways[parent], int(tokens[node]))
  return ways


def test_draft_model_keeps_the_likeliest_retrieved_paths():
  """By the whole way to each, in plain Python; nothing without mass, or NaN."""
  sizes = dict(count=9, depth=3, max_match=3)
  rule = dict(num_nodes=14, max_match=3, nodes_per_match=9, min_prob=0)
  drafter = rasd.rasd(
    MODEL, tree=chain(1), siblings=IID, nodes=6, tokens=3,
    num_retrieved=14, nodes_per_match=9, **RETRIEVAL,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  table = toys.table(VOCAB, seed=2)
  table[rng.integers(0, len(table), 9), rng.integers(0, 3, 9)] = -np.inf
  table[::24] = np.nan
  texts, lengths = rng.integers(0, 3, (24, 20)), rng.integers(6, 21, 24)
  params = specjax.Params(
    target=jnp.asarray(table), draft=rasd.Parts(model=jnp.asarray(table))
  )
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule="recursive")
  state = decoder.init(
    params, texts, lengths, jax.random.key(0), buffer_length=24,
    max_new_tokens=4,
  )  # fmt: skip
  draft, *_ = jax.jit(decoder.propose)(params, state)
  actual = occurrences.in_text(state.tokens, state.length, **sizes)
  trie = jax.device_get(occurrences.merge([actual], **rule))
  chosen = left = 0
  for row in np.flatnonzero(~np.asarray(state.done)):
    text, score = texts[row, : lengths[row]].tolist(), {(): 0.0}
    for way in ways_of(
      [0, *trie.tokens[row]], np.r_[-1, trie.parents[row]]
    ).values():
      if way:
        logits = toys.context_logits(table, text + list(way[:-1]))
        law = np.asarray(jax.nn.log_softmax(logits))
        score[way] = score[way[:-1]] + law[way[-1]]
    ways = ways_of(
      np.asarray(draft.tokens[row]), np.asarray(draft.parents[row])
    )
    kept = set(ways.values()) - {(), ways[1]}
    able = [w for w in score if len(w) and w != ways[1] and score[w] > -np.inf]
    able.sort(key=lambda w: -score[w])
    assert kept == set(able[:5])
    assert len(ways) == 2 + len(kept)
    chosen += len(able) > 5
    left += len(able) < 5
  assert min(chosen, left) > 2


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(nodes=3), "nodes must be above the 3 of the draft's own tree"),
    (dict(tree=chain(1), tokens=9), r"depth of a draft \(9\), got 7"),
    (dict(num_retrieved=2), "at least the depth of a draft"),
    (dict(siblings="shared_noise", tree=chain(2)), "carry noise"),
  ],
)
def test_incompatible_trees_and_sizes_are_rejected(changes, words):
  settings = dict(
    tree=Tree((-1, 0, 0, 1)), siblings=IID, nodes=7, tokens=3, vocab_size=VOCAB
  )
  with pytest.raises(ValueError, match=words):
    rasd.rasd(MODEL, **settings | changes)
