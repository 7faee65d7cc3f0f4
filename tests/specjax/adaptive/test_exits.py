"""Draft and Verify's exits: where chains end, and how the threshold moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, exact
from specjax.adaptive import policies
from specjax.tree import chain
from specjax.warp import make_sampling

VOCAB, DEPTH = 3, 3
TARGET = toys.table(VOCAB, seed=0)
DRAFT = toys.near(TARGET, noise=1.0, seed=1)
MODEL = toys.table_model(VOCAB)
OF = dict(tree=chain(DEPTH), vocab_size=VOCAB)


def make(**options):
  return drafters.model(MODEL, **OF, policy=policies.exits(**options))


DRAFTER = make(threshold=0.5, acceptance=0.6)
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))


def test_tokens_follow_reported_distributions():
  actual = exact.check_drafter(DRAFTER, PARAMS, MODEL, vocab_size=VOCAB)
  assert actual.method == "exact"


ROWS = 4
PROMPTS = (
  np.random.default_rng(0).integers(0, VOCAB, (ROWS, 5)).astype(np.int32)
)
LENGTHS = np.array([1, 3, 5, 2], np.int32)


def start(decoder, some=slice(None), params=PARAMS):
  count = len(LENGTHS[some])
  ids = jnp.arange(ROWS)[some]
  return decoder.init(
    params, PROMPTS[some], LENGTHS[some],
    specjax.random.row_keys(jax.random.key(0), ids), buffer_length=60,
    max_new_tokens=50, sampling=make_sampling(count, temperature=0.8),
  )  # fmt: skip


def decode(drafter, rounds=12):
  """States and what happened, round by round."""
  decoder = specjax.make_decoder(MODEL, drafter=drafter)
  state, seen = start(decoder), []
  step = jax.jit(decoder.step)
  for _ in range(rounds):
    before = state
    state, info = step(PARAMS, state)
    seen.append((before, state, info))
  return seen


@pytest.fixture(scope="module")
def rounds():
  return decode(DRAFTER)


def draft_prob(row_text, token):
  logits = toys.context_logits(DRAFT, row_text)
  return float(np.asarray(jax.nn.softmax(logits))[token])


def test_chain_ends_after_first_token_below_threshold(rounds):
  """The draft's own law at temperature 1 counts, whatever was drawn from."""
  lengths = set()
  for before, _, info in rounds:
    for row in np.flatnonzero(~np.asarray(before.done)):
      text = np.asarray(before.tokens[row, : before.length[row]]).tolist()
      present = np.asarray(info.draft.parents[row]) >= 0
      drafted = np.asarray(info.draft.tokens[row])
      threshold = float(before.drafter_state.memory.threshold[row])
      expected, count = True, 0
      for level in range(1, DEPTH + 1):
        assert present[level] == expected
        count += expected
        sure = draft_prob(text, drafted[level])
        expected = expected and sure > threshold
        text.append(int(drafted[level]))
      lengths.add(count)
  assert lengths == {1, 2, 3}


def test_threshold_tracks_acceptance(rounds):
  moved = set()
  for before, after, info in rounds:
    old, new = (s.drafter_state.memory for s in (before, after))
    for row in range(ROWS):
      h, m = float(old.threshold[row]), float(old.matched[row])
      drafted = int((np.asarray(info.draft.parents[row]) >= 0).sum())
      if not before.done[row]:
        m = 0.5 * m + 0.5 * (int(info.num_emitted[row]) - 1) / drafted
        t = h + 0.01 if m < 0.6 else h if drafted == DEPTH else h - 0.01
        moved.add(np.sign(t - h))
        h = 0.9 * h + 0.1 * t
      np.testing.assert_allclose(new.threshold[row], h, atol=1e-6)
      np.testing.assert_allclose(new.matched[row], m, atol=1e-6)
  assert moved == {-1, 0, 1}


def test_extend_resets_the_threshold():
  decoder = specjax.make_decoder(MODEL, drafter=DRAFTER)
  state = jax.jit(decoder.steps)(PARAMS, start(decoder, slice(2, 3)), 5)
  assert state.drafter_state.memory.threshold.tolist() != [0.5]
  state = jax.jit(decoder.extend)(
    PARAMS, state, 0, jnp.array([1, 0]), 2, max_new_tokens=5
  )
  assert state.drafter_state.memory.threshold.tolist() == [0.5]
