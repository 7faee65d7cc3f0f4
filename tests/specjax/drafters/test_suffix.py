"""Retrieval: what occurred before, how often, and the tree that comes of it."""

import collections
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.families import suffix
from specjax.drafters.shared import corpus as corpus_lib
from specjax.drafters.shared import occurrences, tries

DEPTH, NODES, MOST, LENGTH = 4, 9, 5, 40
SIZES = dict(depth=DEPTH, max_match=MOST)
RULE = dict(num_nodes=NODES, max_match=MOST)


def texts(count, *, words=3, seed=0):
  """Texts that repeat themselves, and their lengths."""
  rng = np.random.default_rng(seed)
  buffers = rng.integers(0, words, (count, LENGTH))
  for row in buffers[::2]:  # some consist of a few phrases
    phrases = rng.integers(0, words + 3, (2, 5))
    row[:] = phrases[rng.integers(0, 2, LENGTH // 5)].reshape(-1)
  return buffers.astype(np.int32), rng.integers(1, LENGTH + 1, count)


# --------------------------------------------------------- slow, plain Python


def slow_hits(text, count):
  """`(match, continuation)` of the best occurrences of a text's end."""
  last, actual = len(text) - 1, []
  for end in range(last):
    match = 0
    while (
      match < MOST
      and match <= end
      and (text[end - match] == text[last - match])
    ):
      match += 1
    if match:
      ahead = [end + 1 + i % (last - end) for i in range(DEPTH)]
      actual.append((match, end, tuple(text[i] for i in ahead)))
  actual.sort(reverse=True)
  return [(match, tokens) for match, _, tokens in actual[:count]]


def slow_corpus_hits(documents, text):
  """All continuations of the longest end of a text, in lexicographic order."""
  for match in range(min(MOST, len(text)), 0, -1):
    results = []
    for document in documents:
      for at in range(len(document) - match + 1):
        if document[at : at + match] == text[-match:]:
          # What comes last in the order is the end of a document: cut off.
          results.append(tuple(document[at + match :]))
    if results:
      return [(match, tokens[:DEPTH]) for tokens in sorted(results)]
  return []


def slow_values(hits, *, per_match, min_prob):
  """`{beginning: probability}` of the beginnings that are taken."""
  best, best_score = {}, -1.0
  for match in range(MOST, 0, -1):
    ways = [tokens for m, tokens in hits if m >= match]
    counts = collections.Counter(
      w[: d + 1] for w in ways for d in range(len(w))
    )
    order = {}  # of equal ones the less deep, then what was found first
    for w in ways:
      for d in range(len(w)):
        order.setdefault(w[: d + 1], (d, len(order)))
    ranked = sorted(
      counts, key=lambda w: (-counts[w], order[w][0], first_of(ways, w))
    )
    budget = math.floor(min(per_match * match, NODES))
    taken = {
      w: counts[w] / len(ways)
      for w in ranked[:budget]
      if np.float32(counts[w] / len(ways)) >= np.float32(min_prob)
    }
    score = sum(taken.values())
    if score > best_score + 1e-6:
      best, best_score = taken, score
  return best


def first_of(ways, beginning):
  """The first of the continuations that begins so."""
  return next(i for i, w in enumerate(ways) if w[: len(beginning)] == beginning)


def slow_tree(sources, all_hits):
  """Of the beginnings that any source takes the most valuable, as a set."""
  values = {}
  for taken in sources:
    for beginning, value in taken.items():
      values[beginning] = max(values.get(beginning, 0), value)
  ways = [tokens for hits in all_hits for _, tokens in hits]
  ranked = sorted(values, key=lambda w: (-values[w], len(w), first_of(ways, w)))
  return ranked[:NODES]


# ------------------------------------------------------------------ the tests


def trie_paths(trie, row):
  """The beginnings that a row's trie holds, in its order."""
  paths, actual = {0: ()}, []
  for node, (token, parent) in enumerate(
    zip(trie.tokens[row], trie.parents[row], strict=True), start=1
  ):
    if parent >= 0:
      paths[node] = (*paths[int(parent)], int(token))
      actual.append(paths[node])
  return actual


@pytest.mark.parametrize("per_match", [1.5, math.inf])
@pytest.mark.parametrize("count", [6, 50])
def test_draft_tree_matches_naive_counting(count, per_match):
  """Few hits, or all; a budget by the match, or the whole."""
  buffers, lengths = texts(120)
  rule = RULE | dict(nodes_per_match=per_match, min_prob=0.25)

  @jax.jit
  def run(buffers, lengths):
    actual = occurrences.in_text(buffers, lengths, count=count, **SIZES)
    return actual, occurrences.merge([actual], **rule)

  actual, trie = jax.device_get(run(buffers, lengths))
  sizes = set()
  for row, length in enumerate(lengths):
    text = buffers[row, :length].tolist()
    hits = slow_hits(text, count)
    real = actual.match[row] > 0
    np.testing.assert_array_equal(
      actual.present[row], np.repeat(real[:, None], DEPTH, axis=1)
    )
    assert [
      (int(m), tuple(t.tolist()))
      for m, t in zip(
        actual.match[row][real], actual.tokens[row][real], strict=True
      )
    ] == hits
    taken = slow_values(hits, per_match=per_match, min_prob=0.25)
    expected = slow_tree([taken], [hits])
    assert trie_paths(trie, row) == expected
    np.testing.assert_allclose(
      trie.values[row][: len(expected)], [taken[w] for w in expected], rtol=1e-6
    )
    sizes.add(len(expected))
  assert {0, NODES} <= sizes or per_match == 1.5
  assert len(sizes) >= 4


DOCUMENTS = [
  np.random.default_rng(i).integers(0, 3 + i % 3, 5 + 7 * i).tolist()
  for i in range(12)
]


def test_suffix_array_is_sorted():
  built = corpus_lib.build([*DOCUMENTS, [], [1, 1, 1, 1, 1, 1, 1]])
  tokens = built.tokens.tolist()
  assert tokens.count(corpus_lib.BREAK) == 13
  order = [tokens[place:] for place in built.places]
  assert order == sorted(order)
  assert sorted(built.places) == list(range(len(tokens)))


def test_corpus_lookup_uses_the_longest_matching_suffix():
  """And gives every continuation, none across the end of a document."""
  built = jax.tree.map(jnp.asarray, corpus_lib.build(DOCUMENTS))
  buffers, lengths = texts(150, words=4, seed=1)
  run = jax.jit(
    lambda c, t, n: corpus_lib.in_corpus(c, t, n, count=600, **SIZES)
  )
  actual = jax.device_get(run(built, buffers, lengths))
  matches = set()
  for row, length in enumerate(lengths):
    hits = slow_corpus_hits(DOCUMENTS, buffers[row, :length].tolist())
    here = actual.match[row] > 0
    each = zip(
      actual.match[row][here],
      actual.tokens[row][here],
      actual.present[row][here],
      strict=True,
    )
    fast = [(int(m), tuple(t[present].tolist())) for m, t, present in each]
    assert fast == hits
    matches.add(hits[0][0] if hits else 0)
  assert {0, 1, MOST} <= matches


def test_hit_limit_preserves_continuation_frequencies():
  documents = [[7, 1]] * 30 + [[7, 2]] * 60 + [[7, 3]] * 10
  built = jax.tree.map(jnp.asarray, corpus_lib.build(documents))
  actual = corpus_lib.in_corpus(
    built, jnp.array([[5, 7]]), jnp.array([2]), count=10, depth=2, max_match=3
  )
  assert actual.tokens[0, :, 0].tolist() == [1] * 3 + [2] * 6 + [3]
  assert not actual.present[0, :, 1].any()
  assert (actual.match[0] == 1).all()


def test_corpus_continuations_stop_at_out_of_vocab_tokens():
  search = suffix.Search(
    depth=3, max_hits=4, max_match=3, nodes_per_match=1.0, min_prob=0.1,
    own_text=False, corpus=True, vocab_size=5,
  )  # fmt: skip
  index = corpus_lib.build([[1, 2, 5, 3], [1, 4, 3, 1], [1, 6]])
  text = types.SimpleNamespace(
    tokens=jnp.array([[2, 1, 9]]), length=jnp.array([2])
  )
  (actual,) = search.find(jax.tree.map(jnp.asarray, index), text)
  ways = [
    tokens[present].tolist()
    for tokens, present in zip(actual.tokens[0], actual.present[0], strict=True)
  ]
  assert ways == [[], [2], [4, 3, 1], []]
  assert (actual.match[0] == 1).all()


def test_text_and_corpus_hits_merge_into_one_tree():
  """Nodes are counted once, and worth what the better of both gives them."""
  built = jax.tree.map(jnp.asarray, corpus_lib.build(DOCUMENTS))
  buffers, lengths = texts(60, words=4, seed=2)
  rule = RULE | dict(nodes_per_match=2.0, min_prob=0.1)

  @jax.jit
  def run(corpus, buffers, lengths):
    sources = [
      occurrences.in_text(buffers, lengths, count=30, **SIZES),
      corpus_lib.in_corpus(corpus, buffers, lengths, count=600, **SIZES),
    ]
    return occurrences.merge(sources, **rule)

  trie = jax.device_get(run(built, buffers, lengths))
  shared = 0
  for row, length in enumerate(lengths):
    text = buffers[row, :length].tolist()
    hits = [slow_hits(text, 30), slow_corpus_hits(DOCUMENTS, text)]
    taken = [slow_values(h, per_match=2.0, min_prob=0.1) for h in hits]
    assert trie_paths(trie, row) == slow_tree(taken, hits)
    shared += bool(taken[0].keys() & taken[1].keys())
  assert shared > 5


def test_shared_prefixes_are_merged():
  tokens = jnp.array([[[1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3]]])
  present = jnp.ones_like(tokens, bool).at[0, 2, 2].set(False)
  actual, parents = tries.merge(tokens, present)
  assert actual.shape == parents.shape == (1, 12)
  assert parents[0].tolist() == [0, 1, 2, -1, -1, 2, 0, 7, -1, -1, -1, -1]


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(tokens=0), "depth must be >= 1, got 0"),
    (dict(nodes=3), r"at least the depth of a draft \(4\), got 3"),
    (dict(min_prob=1.5), r"min_prob must be in \[0, 1\], got 1.5"),
  ],
)
def test_invalid_settings_and_corpora_are_rejected(changes, words):
  with pytest.raises(ValueError, match=words):
    suffix.suffix(**dict(nodes=6, tokens=4) | changes)
  for documents in ([], [[]], [[1, -1]]):
    with pytest.raises(
      ValueError, match=r"needs at least one token|not be negative"
    ):
      corpus_lib.build(documents)
