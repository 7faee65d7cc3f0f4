"""Online drafts: what they keep, what they learn, and that nothing is lossy."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import DRAFT, PROMPTS, TARGET, VOCAB

import specjax
from specjax import drafters, exact, rows
from specjax.drafters import eagle
from specjax.drafters.families import online
from specjax.training import learning, losses
from specjax.tree import chain, paths

LAYERS = 2
MODEL = toys.table_model(VOCAB, layers=LAYERS)
HEAD = toys.feature_model(VOCAB, num_features=LAYERS)
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))
OF = dict(vocab_size=VOCAB)
MODEL_LOGITS = online.model_logits(MODEL, **OF)
TREES = {"chain": chain(3), "paths": paths(2, 3)}


def make(tree="chain", **options):
  inner = drafters.model(MODEL, tree=TREES[tree], **OF)
  return online.online(inner, **{"entries": 48, **OF, **options})


DRAFTERS = {name: make(name) for name in TREES}


def decoder_of(drafter, rule="match"):
  return specjax.make_decoder(MODEL, drafter=drafter, rule=rule)


start = functools.partial(decoding.start, params=PARAMS)


def after_rounds(drafter, count=6):
  decoder = decoder_of(drafter)
  return jax.jit(decoder.steps)(PARAMS, start(decoder), count)


def log_law(table, context):
  return np.asarray(jax.nn.log_softmax(toys.context_logits(table, context)))


def ring_error(state, ring) -> float:
  """Distance of a ring from the one that the texts of a state imply.

  Every entry but tokens and places is held against the target in plain Python.
  """
  ring, worst = online.in_order(ring), 0.0
  for row in range(len(PROMPTS)):
    text = np.asarray(state.tokens[row, : state.length[row]])
    count = int(ring.written[row])
    assert count == min(len(text) - 1, ring.tokens.shape[1])
    first = len(text) - 1 - count
    for entry in range(count):
      place = first + entry
      assert int(ring.tokens[row, entry]) == text[place]
      assert int(ring.positions[row, entry]) == place
      known = bool(ring.known[row, entry])
      assert known == (place >= int(state.prompt_length[row]) - 1)
      if known:
        law = log_law(TARGET, text[: place + 1])
        apart = np.abs(np.exp(ring.log_probs[row, entry]) - np.exp(law)).max()
        worst = max(worst, float(apart))
  return worst


@pytest.fixture(scope="module")
def decoded():
  """The state of each drafter after some rounds of ragged rows."""
  return {name: after_rounds(drafter) for name, drafter in DRAFTERS.items()}


@pytest.mark.parametrize("name", TREES)
def test_ring_holds_tokens_and_target_log_probs(decoded, name):
  """Of chains and paths, rows that ended early, prompts of any length."""
  state = decoded[name]
  assert ring_error(state, state.drafter_state.ring) < 1e-6
  accepted = np.asarray(state.counters.num_accepted)
  assert 0 < accepted.sum() < np.asarray(state.counters.num_drafted).sum()


def test_full_ring_keeps_the_newest_entries():
  state = after_rounds(make(entries=7), 12)
  assert int(state.drafter_state.ring.written.max()) > 14  # wrapped twice
  assert ring_error(state, state.drafter_state.ring) < 1e-6


def test_extended_row_tokens_are_stored_once():
  decoder = decoder_of(DRAFTERS["chain"])
  state = jax.jit(decoder.steps)(PARAMS, start(decoder), 6)
  more = np.array([4, 0, 9, 0, 0], np.int32)
  state = jax.jit(decoder.extend)(PARAMS, state, 4, more, 3, max_new_tokens=4)
  state = jax.jit(decoder.steps)(PARAMS, state, 2)
  ring = online.in_order(state.drafter_state.ring)
  count, length = int(ring.written[4]), int(state.length[4])
  assert count == length - 1
  assert ring.positions[4, :count].tolist() == list(range(count))
  assert ring.tokens[4, :count].tolist() == state.tokens[4, :count].tolist()


def small_ring(**changes):
  """One row with room for four entries, of three tokens each."""
  drafter = make(entries=4, vocab_size=3)
  return dataclasses.replace(drafter.init(PARAMS, 1, 8, None).ring, **changes)


def test_ring_floors_log_probs_and_marks_nan_entries_unknown():
  logits = jnp.array([[[jnp.nan, 0, 0], [1, -jnp.inf, 1], [5, 5, 5]]])
  commit = specjax.types.Commit(
    tokens=jnp.array([[2, 0, 1]]), start=jnp.array([6]),
    path=jnp.array([[0, 1, 2]]), length=jnp.array([9]),
    target_output=specjax.types.ModelOutput(logits=logits),
    num_refed=jnp.array([0]),
    newest=jnp.array([0]),
  )  # fmt: skip
  ring = online._written(small_ring(), commit, vocab_size=3)
  assert int(ring.written[0]) == 2
  assert ring.tokens.tolist() == [[2, 0, 0, 0]]
  assert ring.positions.tolist() == [[6, 7, 0, 0]]
  assert ring.known.tolist() == [[False, True, False, False]]
  half = np.log(0.5)
  expected = [[0, 0, 0], [half, online.FLOOR, half], [0, 0, 0], [0, 0, 0]]
  np.testing.assert_allclose(ring.log_probs[0], expected, rtol=1e-6)


# ------------------------------------------------------- what the draft says


def said_error(laws, params, ring, expected) -> float:
  """The largest error of what a draft says of the texts of a ring."""
  ring = online.in_order(ring)
  logits, said = jax.jit(laws)(params, ring)
  actual = np.asarray(jax.nn.log_softmax(logits))
  text, worst, counted = online.texts(ring), 0.0, 0
  for row, entry in np.argwhere(np.asarray(said)):
    mine = np.asarray(text[row]) == int(text[row, entry])
    mine &= np.arange(len(mine)) <= entry
    context = np.asarray(ring.tokens[row])[mine]
    want = log_law(expected, context)
    worst = max(worst, float(np.abs(actual[row, entry] - want).max()))
    counted += 1
  assert counted > 20
  return worst


def two_texts(state, drafter=DRAFTERS["chain"]):
  """Rings of two texts: those of a state, and prompts that were begun anew."""
  fresh = start(decoder_of(drafter)).drafter_state
  return jax.jit(online.carry)(fresh, state.drafter_state.ring).ring


def test_ring_replay_matches_draft_model_log_probs(decoded):
  """Each text of the ring is read as if it were alone."""
  ring = two_texts(decoded["chain"])
  both = np.asarray(online.texts(online.in_order(ring))).max(axis=1)
  assert (both >= 1).sum() > 2  # most rows have two
  assert said_error(MODEL_LOGITS, PARAMS.draft, ring, DRAFT) < 1e-5


def test_ring_replay_matches_head_log_probs():
  head = eagle(HEAD, tree=chain(2), **OF)
  drafter = online.online(head, num_features=LAYERS, **OF)
  ring = two_texts(after_rounds(drafter), drafter)
  laws = online.head_logits(HEAD, **OF)
  # The toy head has its table's law of the whole text if all it reads is right.
  assert said_error(laws, jnp.asarray(TARGET), ring, TARGET) < 1e-5


# ------------------------------------------------------------------ learning


def learned(ring, name="forward_kl", *, rate=3.0, count=30, first=None):
  """The draft's table after plain gradient descent on a ring."""
  of = learning.loss(MODEL_LOGITS, losses.get(name, block=2))
  gradient = jax.jit(jax.value_and_grad(of))
  table = PARAMS.draft if first is None else first
  begun, _ = gradient(table, ring)
  for _ in range(count):
    value, slope = gradient(table, ring)
    table = table - rate * slope
  value, _ = gradient(table, ring)
  return table, float(begun), float(value)


@pytest.mark.parametrize("name", sorted(set(losses.OBJECTIVES)))
def test_every_objective_decreases_on_ring_data(decoded, name):
  _, before, after = learned(decoded["chain"].drafter_state.ring, name)
  assert after < before - 0.005
  assert np.isfinite(after)


# ---------------------------------------------------------------- losslessness


def test_round_after_update_matches_target_distribution():
  """By enumeration, of every row, all of which taught the draft together."""
  vocab = 3
  with jax.enable_x64(True):
    # So few contexts that the next round's are among those learned.
    target = toys.table(vocab, seed=0, contexts=5).astype(np.float64)
    first = jnp.asarray(toys.near(target, noise=1.0, seed=1), jnp.float64)
    model = toys.table_model(vocab)
    inner = drafters.model(model, tree=chain(2), vocab_size=vocab)
    drafter = online.online(inner, entries=16, vocab_size=vocab)
    decoder = specjax.make_decoder(model, drafter=drafter, rule="token")
    params = specjax.Params(target=jnp.asarray(target), draft=first)
    state = decoder.init(
      params, np.array([[1, 0], [2, 1], [0, 0]]), [2, 1, 2],
      jax.random.key(0), buffer_length=24, max_new_tokens=20,
    )  # fmt: skip
    step = jax.jit(decoder.steps)
    of = jax.jit(
      jax.grad(
        learning.loss(
          online.model_logits(model, vocab_size=vocab), losses.forward_kl
        )
      )
    )
    moved = []
    for _ in range(2):
      state = step(params, state, 2)
      slope = of(params.draft, state.drafter_state.ring)
      new = dataclasses.replace(params, draft=params.draft - 4 * slope)
      moved.append(float(jnp.abs(new.draft - params.draft).max()))
      for row in range(3):
        alone = rows.pick(decoder.row_axes(state), state, np.array([row]))
        law, expected = exact.round_law(decoder, new, alone)
        assert np.abs(law.output - expected).max() < 1e-10
      params = new
  assert min(moved) > 0.1


# -------------------------------------------------------- a drafter like others


@pytest.mark.parametrize("name", TREES)
def test_reported_log_probs_match_drafting_distribution(name):
  actual = exact.check_drafter(
    DRAFTERS[name], PARAMS, MODEL, max_drafts=VOCAB**3, **OF
  )
  assert actual.method == {"chain": "exact", "paths": "sampled"}[name]


def test_admitted_row_resets_only_its_own_ring(decoded):
  decoder, state = decoder_of(DRAFTERS["chain"]), decoded["chain"]
  before = state.drafter_state.ring
  state = jax.jit(decoder.admit)(
    PARAMS, state, 4, PROMPTS[0], 3, jax.random.key(3), max_new_tokens=5
  )
  ring = state.drafter_state.ring
  assert int(ring.written[4]) == 2
  assert not bool(ring.known[4].any())
  kept = jax.tree.map(lambda x: np.asarray(x[:4]), ring)
  jax.tree.map(np.testing.assert_array_equal, kept,
               jax.tree.map(lambda x: np.asarray(x[:4]), before))  # fmt: skip
