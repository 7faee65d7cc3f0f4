"""Lookahead: the window, the pool, and the texts that come of them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import LENGTHS, MODEL, PARAMS, PROMPTS, VOCAB, rows_of

import specjax
from specjax.drafters.families import lookahead
from specjax.types import Commit, ModelOutput
from specjax.warp import make_sampling

W, N, G = 4, 4, 3
SIZES = dict(window=W, tokens=N - 1, num_guesses=G)
DRAFTER = lookahead.lookahead(**SIZES, pool_size=40, vocab_size=VOCAB)
DECODER = specjax.make_decoder(MODEL, drafter=DRAFTER, rule="match")
STEP = jax.jit(DECODER.step)
# Logits that depend on the newest token and its position: texts that repeat.
LOOPS = dataclasses.replace(
  PARAMS, target=jnp.asarray(toys.table(VOCAB, seed=3, contexts=7))
)


def begin(prompts=PROMPTS, lengths=LENGTHS, *, decoder=DECODER, temperature=0.0,
          budget=30, params=PARAMS):  # fmt: skip
  return decoder.init(
    params, jnp.asarray(prompts), lengths, jax.random.key(0),
    buffer_length=40, max_new_tokens=budget,
    sampling=make_sampling(len(lengths), temperature=temperature),
  )  # fmt: skip


class Slow:
  """One row of the drafter in plain Python, from what was fed and accepted."""

  def __init__(self, text):
    self.fed, self.pool = [], []
    known = len(text)
    self.window = [
      [text[(i * known // W + level) % known] for i in range(W)]
      for level in range(N - 1)
    ]
    self.read(text[:-1])

  def insert(self, grams):
    """The newest last; what comes again becomes the newest."""
    for gram in grams:
      self.pool = [g for g in self.pool if g != gram] + [gram]

  def read(self, tokens):
    grams = []
    for token in tokens:
      self.fed.append(token)
      if len(self.fed) >= N:
        grams.append(tuple(self.fed[-N:]))
    self.insert(grams)

  def guesses(self, root):
    """Paths from the root, those of the newest sequences first."""
    actual = [g[1:] for g in reversed(self.pool) if g[0] == root][:G]
    each = (g[: d + 1] for g in actual for d in range(N - 1))
    return list(dict.fromkeys(each))

  def after(self, context, accepted, table):
    """A round that committed `context`, of which so many tokens were new."""
    root = context[-1]
    level0 = [root, *self.window[0][1:]]
    new = []
    for i in range(W):
      column = [self.window[level][i] for level in range(1, N - 1)]
      seen = [*context[:-1], *level0[: i + 1], *column]
      new.append(int(np.argmax(toys.context_logits(table, seen))))
    columns = [level0, *self.window[1:], new]
    self.insert([tuple(level[i] for level in columns) for i in range(W)])
    self.window = columns[1:]
    self.read([root, *accepted])


def paths_of(draft, row):
  """The tokens on the way to each node of a row that is there."""
  topology = draft.topology()
  results = []
  for node in range(1, draft.tree.num_nodes):
    if topology.present[row, node]:
      way = topology.paths[row, node, 1 : topology.depth[row, node] + 1]
      results.append(tuple(np.asarray(draft.tokens[row])[way].tolist()))
  return results


def in_pool(pool, row=0):
  """The sequences of a row, the newest last."""
  stamps = np.asarray(pool.stamps[row])
  held = np.asarray(pool.grams[row])[np.argsort(stamps)]
  return list(map(tuple, held[np.sort(stamps) > 0].tolist()))


def test_rounds_match_python_reference_of_the_paper():
  """Guesses, window and pool of every row, greedy and sampled, to the end.

  One comes to its end earlier, and rests while the others go on.
  """
  state = begin(
    temperature=np.array([0.0, 0.0, 0.5, 1.0, 0.0]), params=LOOPS,
    budget=np.array([30, 30, 30, 30, 9]),
  )  # fmt: skip
  table = np.asarray(LOOPS.target)
  texts = rows_of(state)
  slow = [Slow(text) for text in texts]
  hits = rested = 0
  for _ in range(14):
    running = ~np.asarray(state.done)
    before = state.drafter_state
    state, info = STEP(LOOPS, state)
    for name in ("window", "tail"):
      old, new = (getattr(s, name) for s in (before, state.drafter_state))
      np.testing.assert_array_equal(old[~running], new[~running])
    rested += int((~running).sum())
    draft = jax.device_get(info.draft)
    after = rows_of(state)
    for row in np.flatnonzero(running):
      one, root = slow[row], texts[row][-1]
      actual = paths_of(draft, row)
      assert actual == one.guesses(root)
      hits += bool(actual)
      lanes = draft.tokens[row, draft.tree.num_nodes :].tolist()
      assert lanes == [*itertools.chain(*one.window)][1:]
      one.after(texts[row], after[row][len(texts[row]) : -1], table)
      assert in_pool(state.drafter_state.pool, row) == one.pool[-40:]
    texts = after
  assert hits > 20
  assert rested > 5
  assert state.counters.num_accepted.sum() > 10
  assert state.counters.accept_counts[:, N - 1].sum() > 0  # N tokens a round


@pytest.mark.parametrize("count", [8, lookahead._CHUNK + 5])
def test_reinserted_ngrams_become_the_newest(count):
  """Of those that come together too; those that do not count are nowhere."""
  small = lookahead.lookahead(
    window=1, tokens=1, num_guesses=1, pool_size=40, vocab_size=VOCAB
  )
  pool, expected = small.init(None, 1, 0, None).pool, []
  rng = np.random.default_rng(0)
  for _ in range(3):
    grams = rng.integers(0, 5, (1, count, 2))
    kept = rng.random((1, count)) < 0.7
    pool = lookahead._insert_many(pool, jnp.asarray(grams), jnp.asarray(kept))
    for gram in map(tuple, grams[kept].tolist()):
      expected = [g for g in expected if g != gram] + [gram]
    assert in_pool(pool) == expected


@pytest.mark.parametrize("from_text", [True, False])
def test_column_continuation_ignores_nan_and_padding_logits(from_text):
  """By hand, of a round that has committed two tokens."""
  small = lookahead.lookahead(
    window=2, tokens=1, num_guesses=1, pool_size=40, vocab_size=3,
    from_text=from_text,
  )  # fmt: skip
  state = small.init(None, 1, 0, None)
  state = dataclasses.replace(state, window=jnp.array([[[0, 2]]]))
  nan = jnp.nan  # those of the newest token, of a guess, and of a lane
  logits = jnp.array([[[0, 2, 1, 9], [3, 0, 0, 0], [nan, 1, 2, 9]]])
  actual = small.commit(
    None, state,
    Commit(
      tokens=jnp.array([[1, 0, 2]]), start=jnp.array([4]),
      path=jnp.array([[0, 1]]), length=jnp.array([7]),
      target_output=ModelOutput(logits=logits), num_refed=jnp.array([0]),
      newest=jnp.array([0]),
    ),
  )  # fmt: skip
  assert actual.window.tolist() == [[[1, 2]]]
  assert actual.tail.tolist() == [[0]]
  of_text = [(1, 0)] if from_text else []
  assert in_pool(actual.pool) == [(1, 1), (2, 2), *of_text]


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(window=0), "tokens >= 1, got 0"),
    (dict(tokens=0), "and 0"),
    (dict(pool_size=5), "pool_size must be at least 32, got 5"),
  ],
)
def test_invalid_sizes_are_rejected(changes, words):
  with pytest.raises(ValueError, match=words):
    lookahead.lookahead(**{**SIZES, "vocab_size": VOCAB} | changes)
