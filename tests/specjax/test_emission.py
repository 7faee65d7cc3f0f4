"""Counters of a round, to the value."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from decoding import DRAFTERS, LENGTHS, MODEL, PARAMS, start

import specjax
from specjax import emission
from specjax.siblings import TOP_K
from specjax.tree import Tree
from specjax.types import Draft
from specjax.warp import make_sampling


def test_kept_depth_stops_at_first_stop_token_or_budget():
  """The last committed token is no stop: a prompt may end in one."""
  tree = Tree((-1, 0, 0, 1, 2, 3, 5))  # 0 -> 1 -> 3 -> 5 -> 6 and 0 -> 2 -> 4
  stop, room = 9, 4
  tokens = np.array(
    [
      [stop, 1, 2, 3, 4, 5, 6],
      [0, 1, 2, stop, 4, 5, 6],
      [0, stop, 2, 3, 4, stop, 6],
      [stop, 1, stop, 3, stop, 5, stop],
    ]
  )
  state = types.SimpleNamespace(
    stop_tokens=jnp.array([stop, 8]),
    ignores_stop=jnp.zeros(4, bool),
    sampling=make_sampling(4),
    length=jnp.full(4, 10),
    max_length=jnp.full(4, 10 + room),
  )
  draft = Draft(
    tree=tree, siblings=TOP_K, tokens=jnp.asarray(tokens), log_probs=None
  )
  now = types.SimpleNamespace(draft=draft, topology=draft.topology())
  kept = np.array(
    [
      [0, 1, 1, 2, 2, 3, 4],
      [0, 1, 1, 2, 2, 2, 2],
      [0, 1, 1, 1, 2, 1, 1],
      [0, 1, 1, 2, 1, 3, 4],
    ]
  )
  actual = emission.kept_depth(state, now)
  np.testing.assert_array_equal(actual, kept)
  state.max_length = jnp.full(4, 10 + 2)
  actual = emission.kept_depth(state, now)
  np.testing.assert_array_equal(actual, np.minimum(kept, 2))
  # Ids of the rows' own end them alike, also where those of all do not.
  per_row = make_sampling(4, stop_token_ids=[[8, stop], [], [stop], [stop]])
  state.sampling, state.ignores_stop = (
    per_row,
    jnp.array([True, False, True, True]),
  )
  actual = emission.kept_depth(state, now)
  np.testing.assert_array_equal(actual, np.minimum(kept, 2))
  state.ignores_stop = jnp.ones(4, bool)
  actual = emission.kept_depth(state, now)
  np.testing.assert_array_equal(actual[1], [0, 1, 1, 2, 2, 2, 2])
  state.max_length = jnp.full(4, 10 + room)
  actual = emission.kept_depth(state, now)
  np.testing.assert_array_equal(actual[1], [0, 1, 1, 2, 2, 3, 4])
  np.testing.assert_array_equal(actual[::2], kept[::2])


def test_total_variation_sums_over_emitted_tokens_only():
  decoder = specjax.make_decoder(
    MODEL, drafter=DRAFTERS["model"], rule="decoding_uno(epsilon=0.05)"
  )
  step = jax.jit(decoder.step)
  state = start(decoder, stop_tokens=(7, -1))
  expected, cut = np.zeros(len(LENGTHS)), 0
  while not state.done.all():
    done = np.asarray(state.done)
    state, info = step(PARAMS, state)
    distance = np.asarray(info.total_variation, np.float64)
    for row, count in enumerate(np.asarray(info.num_emitted)):
      # Of a chain token i was drawn after node i.
      expected[row] += distance[row, :count].sum()
      cut += not done[row] and distance[row, count:].sum() > 0
  assert cut >= 3  # rounds with a distance that must not count
  np.testing.assert_allclose(
    state.counters.total_variation, expected, rtol=1e-5
  )
