"""Drafters: what they look up, and what they leave behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, random, shapes, siblings
from specjax.drafters.families.ngram import look_up
from specjax.tree import Form, Tree, chain, paths
from specjax.types import Context, pick_nodes
from specjax.warp import make_sampling


def test_look_up_matches_naive_search():
  rng = np.random.default_rng(0)
  run = jax.jit(lambda t, n: look_up(t, n, count=4, max_ngram=3))
  for _ in range(200):
    length = int(rng.integers(1, 20))
    buffer = rng.integers(0, 4, 20)
    text = buffer[:length].tolist()
    best, at = 0, None
    for end in range(length - 1):
      size = 0
      while size < min(3, end + 1) and text[end - size] == text[-1 - size]:
        size += 1
      if size and size >= best:
        best, at = size, end
    at = length - 2 if at is None else at
    period = length - 1 - at
    expected = [text[max(at + 1 + i % period, 0)] for i in range(4)]
    actual, matched = run(jnp.asarray([buffer]), jnp.array([length]))
    assert actual[0].tolist() == expected
    assert matched[0] == best


VOCAB = 11
VOCABULARY = dict(vocab_size=VOCAB)
TARGET = toys.table(VOCAB, seed=0)
MODEL = toys.table_model(VOCAB)
PARAMS = toys.pair(TARGET, noise=0.7, seed=1)
PROMPTS = np.random.default_rng(1).integers(0, VOCAB, (4, 5))
LENGTHS = np.array([1, 2, 5, 4])


def cached_tokens(cache, row):
  """The tokens a toy model's cache holds for a row."""
  count = int(cache.length[row])
  return np.asarray(cache.keys[0][row, 0, :count, 0]).astype(int).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(
  "make",
  [
    lambda: drafters.model(MODEL, tree=paths(3, 3), **VOCABULARY),
    lambda: drafters.model(
      MODEL,
      tree=Tree((-1, 0, 0, 1, 1, 2, 3)),
      siblings=siblings.WITHOUT_REPLACEMENT,
      **VOCABULARY,
    ),
    lambda: drafters.layer_skip(MODEL, tree=paths(3, 2), **VOCABULARY),
  ],
  ids=["paths", "uneven tree", "layer skip paths"],
)
def test_caches_hold_the_committed_tokens_after_every_step(make):
  """With none, some or all accepted, with paths and ragged rows."""
  drafter = make()
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule="match")
  state = decoder.init(
    PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
    buffer_length=45, max_new_tokens=40,
    sampling=make_sampling(4, temperature=[0.0, 0.3, 0.6, 1.0]),
  )  # fmt: skip
  step = jax.jit(decoder.step)
  accepted = set()
  for _ in range(9):
    before = np.asarray(state.length)
    state, _ = step(PARAMS, state)
    accepted |= set(np.asarray(state.length - before).tolist())
    for row in range(4):
      length = int(state.length[row])
      text = np.asarray(state.tokens[row, :length]).tolist()
      assert cached_tokens(state.target_cache, row) == text[:-1]
      if drafter.name == "model":
        # All but the last two, which the next proposal feeds again.
        held = state.drafter_state.replace(
          length=jnp.maximum(state.length - 2, 0)
        )
        assert cached_tokens(held, row) == text[:-2]
  assert {1, 4} <= accepted  # nothing accepted, and everything


@pytest.mark.parametrize("make", [drafters.model, drafters.layer_skip])
@pytest.mark.parametrize("width", [1, 3])
def test_paths_drafted_in_a_loop_equal_the_unrolled_ones(make, width):
  drafter = make(MODEL, tree=paths(4, width), vocab_size=VOCAB)
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule="kseq")
  state = decoder.init(
    PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
    buffer_length=25, max_new_tokens=20,
    sampling=make_sampling(4, temperature=[0.0, 0.5, 1.0, 2.0]),
  )  # fmt: skip
  looped = lambda state: decoder.propose(PARAMS, state)
  unrolled = lambda state: decoder.propose(  # draws one by one, as exact does
    PARAMS, state, lambda *draw: pick_nodes(*draw)
  )
  programs = [str(jax.make_jaxpr(run)(state)) for run in (looped, unrolled)]
  assert programs[0].count("scan[") > programs[1].count("scan[")
  (one, _, *rest), (other, _, *others) = (
    jax.jit(run)(state) for run in (looped, unrolled)
  )
  np.testing.assert_array_equal(one.tokens, other.tokens)
  np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, rest, others)


def test_target_drafting_for_itself_is_always_accepted():
  drafter = drafters.layer_skip(MODEL, tree=chain(3), vocab_size=VOCAB)
  decoder = specjax.make_decoder(MODEL, drafter=drafter)
  state = decoder.init(
    PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
    buffer_length=25, max_new_tokens=20, sampling=make_sampling(4),
  )  # fmt: skip
  counters = jax.jit(decoder.generate)(PARAMS, state).counters
  np.testing.assert_array_equal(counters.num_accepted, 15)
  np.testing.assert_array_equal(counters.num_target_calls, 5)


def test_incompatible_trees_and_depths_are_rejected():
  with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
    drafters.model(MODEL, tokens=0)
  with pytest.raises(ValueError, match="has depth 1: leave out tokens="):
    drafters.model(MODEL, tokens=3, tree=chain(1))
  with pytest.raises(ValueError, match="a dynamic tree needs a head"):
    drafters.layer_skip(MODEL, tree=shapes.dynamic(9))
  with pytest.raises(TypeError, match="tree must be a specjax"):
    drafters.model(MODEL, tree=(-1, 0))
  for tree in (Tree((-1, 0), form=Form.MASKED), Tree((-1, 0), lanes=(0,))):
    with pytest.raises(ValueError, match="must be of fixed form"):
      drafters.model(MODEL, tree=tree)


def test_tree_depth_follows_tokens_and_defaults_to_five():
  assert drafters.model(MODEL).tree == chain(5)
  made = drafters.model(MODEL, tokens=2, tree=shapes.paths(3))
  assert made.tree == paths(2, 3)


def test_bfloat16_distribution_samples_rare_tokens_accurately():
  """Numbers of eight bits would never draw a token of less than 1 in 256."""
  count = 200_000
  law = jnp.log(jnp.array([0.999, 0.001])).astype(jnp.bfloat16)
  keys = random.row_keys(jax.random.key(0), jnp.arange(count))
  context = Context(
    tokens=None, length=None, max_depth=None, sampling=None, keys=keys,
    row_keys=keys, numbers=random.drafted_numbers(keys, 1),
  )  # fmt: skip
  drawn = context.draw([1], jnp.broadcast_to(law, (count, 1, 2)))
  said = float(jnp.exp(law[1].astype(jnp.float32)))
  wide = 5 * np.sqrt(said / count)
  assert abs(float(drawn.mean()) - said) < wide
