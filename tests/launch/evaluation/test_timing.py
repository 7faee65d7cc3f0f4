"""Timing of loops, and what the loops do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys

import specjax
from launch.evaluation import timing
from specjax import random


def test_an_empty_call_that_was_held_up_makes_no_time_negative(monkeypatch):
  """The first call of the loop, and one that finds nothing to do, take long."""
  times = iter([0.0, 5.0, 5.0, 5.6])  # 5 s without a repeat, 0.6 s with all
  monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
  seconds, _ = timing.per_repeat(lambda params, carry, count: carry, None, 0)
  assert seconds == pytest.approx(0.6 / timing.REPEATS)


def test_a_loop_of_passes_makes_all_of_them_where_the_cache_ends():
  model = toys.table_model(5)
  caches = {
    who: model.init_cache(2, 9).replace(length=jnp.full((2,), 3 + place))
    for place, who in enumerate(("target", "draft"))
  }
  loop = timing.passes_loop(
    {"target": (model, "target"), "draft": (model, "draft")},
    (("draft", 2), ("target", 4)),
  )
  params = dict.fromkeys(caches, toys.table(5, seed=0, scale=1.0) + 9)
  for repeats, written in ((0, 0), (1, 1)):
    copies = {who: cache.replace() for who, cache in caches.items()}
    actual = loop(params, copies, repeats)
    for place, (who, fed) in enumerate((("target", 4), ("draft", 2))):
      np.testing.assert_array_equal(actual[who].length, 3 + place)
      places = np.asarray(actual[who].positions[0]) > 0
      assert places.sum() == written * fed
      assert places[3 + place : 3 + place + fed * written].all()
    caches = actual
  # The draft was fed from token 0 on, and the target from what came of it, both
  # different tokens.
  fed = lambda who, row: actual[who].keys[0][row, 0, :, 0].astype(int)
  np.testing.assert_array_equal(fed("draft", 0)[4:6], [0, 2])
  np.testing.assert_array_equal(fed("draft", 1)[4:6], [4, 1])
  np.testing.assert_array_equal(fed("target", 0)[3:7], [1, 3, 0, 2])


@pytest.mark.parametrize("name", ["eagle, drawn chain", "medusa, best tree"])
def test_a_loop_of_drafts_makes_all_of_them(name):
  """Each after the token and the state that the one before led to."""
  vocab = 5
  decoder = specjax.make_decoder(
    toy_heads.target(vocab),
    drafter=toy_heads.make(name, vocab),
    rule=toy_heads.RULES[name][0],
  )
  table = jnp.asarray(toys.table(vocab, seed=0))
  params = specjax.Params(target=table, draft=table)
  state = decoder.init(
    params, jnp.array([[1, 2, 3], [4, 0, 1]]), jnp.array([3, 2]),
    jax.random.key(0), buffer_length=9, max_new_tokens=4,
  )  # fmt: skip
  loop, newest, states = timing.proposals_loop(decoder), [], []
  for repeats in (0, 1, 2):
    carry = (state.tokens, state.drafter_state, state.target_cache)
    carry = jax.tree.map(jnp.copy, carry)
    tokens, drafter_state, cache = loop(params, carry, repeats, state)
    newest.append([int(tokens[row, n - 1]) for row, n in enumerate((3, 2))])
    states.append(
      dataclasses.replace(
        state, tokens=tokens, drafter_state=drafter_state, target_cache=cache
      )
    )
    assert jax.tree.structure(drafter_state) == jax.tree.structure(
      state.drafter_state
    )
    np.testing.assert_array_equal(cache.length, state.target_cache.length)
  assert newest[0] == [3, 0]
  for index, expected in enumerate(newest[1:]):
    keys = random.step_keys(state.keys, state.length - 1 + index)
    now = dataclasses.replace(states[index], keys=keys)
    draft, *_ = decoder.propose(params, now)
    total = draft.tokens.sum(1)
    if draft.log_probs is not None:
      total += (draft.log_probs[:, 1:].max(-1) > -1).any(1)
    assert (total % vocab).tolist() == expected
