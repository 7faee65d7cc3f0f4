"""EAGLE drafts from the right features, the right slots and the right laws.

The toy head has the target's very law if the feature, the token and the slots
it sees are all right, and another one otherwise: then not all is accepted.
"""

import dataclasses
import functools
import types

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys
from decoding import LENGTHS, PROMPTS, TARGET, VOCAB

import specjax
from specjax import drafters, rules
from specjax.adaptive.ladder import make_ladder
from specjax.drafters.shared import best_first
from specjax.drafters.shared.arguments import Drawing
from specjax.siblings import GIVEN
from specjax.tree import Form, Tree, bound, chain
from specjax.types import Commit, Drafter, ModelOutput

PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(TARGET))
NEAR = toys.pair(TARGET, noise=0.8, seed=1)
LAYERS = 3
TOY = toys.table_model(VOCAB, layers=LAYERS)
HEAD = toys.feature_model(VOCAB, num_features=LAYERS)
# The accepted path is 0, 1, 3, 5: not the first nodes.
TREE = Tree((-1, 0, 0, 1, 2, 3))
DRAFTERS = {
  "chain": drafters.eagle(HEAD, tree=chain(3), vocab_size=VOCAB),
  "tree": drafters.eagle(HEAD, tree=TREE, vocab_size=VOCAB),
  "dynamic": drafters.eagle(HEAD, tree=bound(9, 4, 3), vocab_size=VOCAB),
}


def make(drafter: Drafter, rule=None):
  certain = drafter.tree.form is Form.FREE
  return specjax.make_decoder(
    TOY, drafter=drafter, rule=rule or ("match" if certain else "recursive")
  )


start = functools.partial(decoding.start, params=PARAMS)


@pytest.mark.parametrize(
  "name", ["tree", pytest.param("chain", marks=pytest.mark.slow)]
)
def test_correct_features_make_every_draft_accepted(name):
  """The deepest path of every draft is, with probability one.

  The row whose prompt is one token has no feature in its first round.
  """
  drafter = DRAFTERS[name]
  decoder = make(drafter)
  state = start(decoder)
  step = jax.jit(decoder.step)
  for number in range(4):
    running = ~np.asarray(state.done)
    if not number:
      running[np.asarray(LENGTHS) == 1] = False
    state, info = step(PARAMS, state)
    depth = np.asarray(info.draft.topology().depth)
    deepest = (depth == drafter.tree.max_depth) * np.asarray(info.node_probs)
    assert deepest.sum(1)[running].min() > 1 - 1e-5


def test_commit_feeds_committed_path_and_keeps_other_rows_state():
  drafter = DRAFTERS["tree"]
  before = drafter.init(PARAMS, 2, 16, None)
  before = dataclasses.replace(
    before, hidden=(before.hidden[0] - 1,), logits=before.logits - 1
  )
  after = drafter.commit(
    PARAMS,
    before,
    Commit(
      tokens=jnp.arange(12).reshape(2, 6) % VOCAB, start=jnp.array([5, 7]),
      path=jnp.array([[0, 1, 3, 5]] * 2), length=jnp.array([6, 10]),
      newest=jnp.array([2, 8]),
      target_output=ModelOutput(
        logits=jnp.zeros(()),
        features=jnp.arange(2.0 * 6 * LAYERS).reshape(2, 6, LAYERS),
      ),
      num_refed=jnp.zeros(2, jnp.int32),
    ),
  )  # fmt: skip
  (hidden,), (cache,) = after.hidden, after.caches
  np.testing.assert_array_equal(hidden[0], before.hidden[0][0])
  np.testing.assert_array_equal(after.logits[0], before.logits[0])
  # Two places, the last of node 1's feature and the newest token.
  feature = 6 * LAYERS + LAYERS + 1 - toys.SHIFT
  expected = (feature + 9 * int(toys.weight_at(9))) % len(TARGET)
  assert hidden[1].tolist() == [expected]
  assert cache.length.tolist() == [5, 9]


def test_head_state_stays_correct_across_varying_draft_lengths():
  """Chains of 0, 1 and 3 tokens go on with each other's state.

  It has the target's law if it has read all pairs: then all is accepted.
  """
  ladder = make_ladder(
    TOY,
    lambda tree: drafters.eagle(HEAD, tree=tree, vocab_size=VOCAB),
    rule=rules.get("token"), vocab_size=VOCAB, lengths=(0, 1, 3),
  )  # fmt: skip
  state = ladder.longest.init(
    PARAMS, PROMPTS[2:3], LENGTHS[2:3], jax.random.key(0), buffer_length=40,
    max_new_tokens=30,
  )  # fmt: skip
  steps = {n: jax.jit(one.steps) for n, one in ladder.decoders.items()}
  plan = (3, 0, 0, 1, 3, 1, 0, 3, 3)
  for length in plan:
    state = steps[length](PARAMS, state, 1)
  assert not state.done.any()
  assert state.counters.num_drafted[0] == sum(plan)
  assert state.counters.num_accepted[0] == sum(plan)


def reference_tree(state, params, *, num_nodes, depth, top_k):
  """EAGLE-2's tree by plain Python: `[{path: tokens}]` of each row.

  The toy's laws from whole contexts; accepted tokens are chosen by the
  cumulative probability, parents first.
  """
  results = []
  for row in range(len(state.length)):
    text = np.asarray(state.tokens[row, : state.length[row]]).tolist()
    law = lambda path, text=text: np.asarray(
      jax.nn.log_softmax(
        toys.context_logits(np.asarray(params.draft), [*text, *path])
      )
    )
    frontier, scored = [((), 0.0)], []
    for _ in range(depth):
      below = [
        ((*path, int(t)), score + law(path)[t])
        for path, score in frontier
        for t in np.argsort(-law(path), kind="stable")[:top_k]
      ]
      scored += below
      frontier = sorted(below, key=lambda x: -x[1])[:top_k]
    best = sorted(scored, key=lambda x: -x[1])[:num_nodes]
    results.append({path for path, _ in best})
  return results


def test_dynamic_tree_omits_zero_probability_and_nan_nodes():
  """Nor do they take the places of nodes that have some."""
  sure, even = [0, -np.inf, -np.inf], [0, 0, -np.inf]
  unknown, first = [np.nan] * 3, [np.log(0.6), np.log(0.4), -np.inf]
  rows = {  # the root's law, and by depth that after each of two tokens
    "one of two is NaN": (first, (even, unknown), (even, sure)),
    "the root's is": (unknown, (even, even), (even, even)),
    "all is certain": (sure, (sure, even), (sure, even)),
  }
  fed = []

  def padded(logits):  # with a token that there is not
    logits = jnp.array(logits)
    return jnp.concatenate([logits, 0 * logits[..., :1] + 9], axis=-1)

  def feed(carry, depth, tokens, parents):
    fed.append((tokens.tolist(), parents.tolist()))
    logits = [[row[depth][t % 2] for t in range(2)] for row in rows.values()]
    return padded(logits), carry

  context = types.SimpleNamespace(
    length=jnp.ones(3), root=jnp.full((3, 1), 2)
  )  # fmt: skip
  draft, _ = best_first.draft_tree(
    padded([row[0] for row in rows.values()]), feed, None, context,
    Drawing(tree=bound(5, 3, 2), siblings=GIVEN, vocab_size=3), width=2,
  )  # fmt: skip
  # Both that are continued at depth 2 hang on the likelier one.
  assert [x[0] for x in fed[1]] == [[0, 1], [0, 0]]
  assert draft.parents.tolist() == [
    [-1, 0, 0, 1, 1, 4],
    [-1] * 6,
    [-1, 0, -1, 1, -1, 3],
  ]
  assert draft.tokens[0].tolist() == [2, 0, 1, 0, 1, 0]
  assert draft.tokens[2, [1, 3, 5]].tolist() == [0, 0, 0]


def test_dynamic_tree_matches_eagle_2_reference():
  drafter = DRAFTERS["dynamic"]
  decoder = make(drafter)
  begun = start(decoder, params=NEAR)
  state = jax.jit(decoder.steps)(NEAR, begun, jnp.int32(2))
  draft, *_ = jax.jit(decoder.propose)(NEAR, state)
  expected = reference_tree(state, NEAR, num_nodes=9, depth=4, top_k=3)
  for row in np.flatnonzero(~np.asarray(state.done)):
    assert toy_heads.paths_of(draft, row) == expected[row]


def test_p_eagle_masks_follow_newest_pair_and_leave_no_state():
  """Laws of each depth from the whole text, by the toy's sums in NumPy."""
  token, state, depth = 2, 5, 3
  head = toy_heads.with_masks(VOCAB, token, state)
  decoder = make(drafters.p_eagle(head, tokens=depth), "token")
  now = start(decoder, params=NEAR)
  for _ in range(4):
    draft, *_ = jax.jit(decoder.propose)(NEAR, now)
    for row in np.flatnonzero(~np.asarray(now.done) & (now.length > 1)):
      count = int(now.length[row])
      weight = np.asarray(toys.weight_at(np.arange(count + depth)))
      seen = ((now.tokens[row, :count] + 1) * weight[:count]).sum()
      read = [seen]  # rows of the table
      for mask in (token + 1) * weight[count : count + depth - 1]:
        seen = seen + mask
        read.append(2 * (state + mask) - seen)
      laws = jax.nn.log_softmax(NEAR.draft[np.array(read) % len(TARGET)])
      np.testing.assert_allclose(draft.log_probs[row, 1:], laws, atol=1e-5)
    now, _ = jax.jit(decoder.step)(NEAR, now)


def test_single_token_prompt_reads_a_zero_feature():
  """The head reads zeros beside the token, at the first place."""
  decoder = make(DRAFTERS["chain"])
  begun = start(decoder)
  (cache,) = begun.drafter_state.caches
  assert cache.length.tolist() == np.maximum(LENGTHS - 1, 1).tolist()
  draft, *_ = decoder.propose(PARAMS, begun)
  (row,) = np.flatnonzero(LENGTHS == 1)
  read = -toys.SHIFT + (PROMPTS[row, 0] + 1) * int(toys.weight_at(1))
  np.testing.assert_allclose(
    draft.log_probs[row, 1], jax.nn.log_softmax(TARGET[read % len(TARGET)]),
    atol=1e-5,
  )  # fmt: skip


def test_cache_has_a_slot_for_every_fed_node():
  few = drafters.eagle(HEAD, tree=bound(6, 4, 3), vocab_size=VOCAB)
  assert few.init(PARAMS, 1, 20, None).caches[0].slots >= 20 + 3 * 3
