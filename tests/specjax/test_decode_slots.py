"""A row that ended is given another prompt in a running state."""

import dataclasses

import decoding
import forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import LENGTHS, MODEL, PARAMS, PROMPTS, VOCAB, decode, rows_of

import specjax
from specjax import random
from specjax.runtime.mesh import MeshDecoder
from specjax.tree import paths

BUDGETS = np.array([6, 21, 9, 5, 3], np.int32)
DECODER = specjax.make_decoder(
  MODEL, drafter=forms.table_drafter(VOCAB, paths(2, 2)), rule="recursive"
)
SHARED = specjax.make_decoder(
  MODEL, drafter=forms.shared_counts(VOCAB), rule="match"
)


def keys_of(ids):
  return random.row_keys(jax.random.key(7), jnp.asarray(ids))


ASKED = dict(budget=11, temperature=0.8)


def admit(decoder, state, row, prompt, length, *, ignore_stop=False):
  return decoding.admit(
    decoder, state, row, prompt, length, keys_of([9])[0],
    ignore_stop=jnp.bool_(ignore_stop), **ASKED,
  )  # fmt: skip


def alone(decoder, prompt, length):
  """The same request in a state of its own."""
  state = decoding.alone(decoder, prompt[:length], keys_of([9]), **ASKED)
  return rows_of(state)[0]


def used(decoder):
  """A state in which some rows have ended and others go on."""
  state = decoding.start(decoder, max_new_tokens=BUDGETS)
  state = decoding.jitted(decoder, "steps")(PARAMS, state, jnp.int32(5))
  assert state.done[4]
  assert not state.done.all()
  return state


def test_admitted_row_matches_decoding_alone():
  """And its neighbors what they do without it; in one program."""
  state = used(DECODER)
  undisturbed = rows_of(decode(DECODER, state))
  for row, request in ((4, 2), (0, 1)):
    prompt, length = PROMPTS[request], LENGTHS[request]
    actual = rows_of(
      decode(DECODER, admit(DECODER, state, row, prompt, length))
    )
    assert actual.pop(row) == alone(DECODER, prompt, length)
    assert actual == undisturbed[:row] + undisturbed[row + 1 :]
  assert decoding.jitted(DECODER, "admit")._cache_size() == 1


@pytest.mark.parametrize("on_mesh", [False, True])
def test_ignore_stop_applies_only_to_its_row(on_mesh):
  """Until its slot is another's; the rows beside it end where they would."""
  prompt, length = PROMPTS[2], LENGTHS[2]
  whole = alone(DECODER, prompt, length)
  stop = whole[length + 4]
  cut = whole[: whole.index(stop, length) + 1]
  state = used(DECODER)
  state = dataclasses.replace(
    state, stop_tokens=jnp.full_like(state.stop_tokens, stop)
  )
  undisturbed = rows_of(decode(DECODER, state))
  decoder = DECODER
  if on_mesh:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
    decoder = MeshDecoder.of(DECODER, mesh=mesh)
  for ignore_stop, expected in ((True, whole), (False, cut)):
    admitted = admit(decoder, state, 4, prompt, length, ignore_stop=ignore_stop)
    state = decode(DECODER, admitted)
    actual = rows_of(state)
    assert actual.pop(4) == expected
    assert actual == undisturbed[:4]


def test_admit_resets_row_counters_but_not_step_count():
  state = used(DECODER)
  after = admit(DECODER, state, 4, PROMPTS[1], LENGTHS[1])
  assert after.counters.num_target_calls.tolist() == [
    *state.counters.num_target_calls[:4].tolist(), 0
  ]  # fmt: skip
  assert after.num_steps == state.num_steps
  assert after.length[4] == LENGTHS[1]
  assert not after.done[4]


def test_admit_updates_shared_drafter_state_incrementally():
  state = used(SHARED)
  after = admit(SHARED, state, 4, PROMPTS[2], 6)
  new = np.asarray(
    after.drafter_state["counts"] - state.drafter_state["counts"]
  )
  expected = np.zeros_like(new)
  np.add.at(expected, (PROMPTS[2][:4], PROMPTS[2][1:5]), 1)
  np.testing.assert_array_equal(new, expected)
  assert after.drafter_state["last"][4] == PROMPTS[2][4]


def test_steps_return_once_num_idle_rows_are_done():
  state = decoding.start(DECODER, max_new_tokens=BUDGETS, stop_tokens=())
  steps = decoding.jitted(DECODER, "steps")
  for idle in (1, 3):
    state = steps(PARAMS, state, jnp.int32(100), num_idle=jnp.int32(idle))
    assert state.done.sum() >= idle
    assert not state.done.all()


def test_max_depth_limits_draft_length_per_row():
  """A tree that is not fixed is cut there: fewer drafted, the same law."""
  drafter = forms.masked(
    forms.table_drafter(VOCAB, paths(2, 2)),
    lambda draft, context: jnp.ones(draft.tokens.shape, bool),
  )
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule="recursive")
  state = decoding.start(decoder, max_new_tokens=BUDGETS)
  state = dataclasses.replace(state, max_depth=jnp.array([0, 1, 2, 0, 1]))
  state, info = decoding.jitted(decoder, "step")(PARAMS, state)
  assert state.counters.num_drafted.tolist() == [0, 2, 4, 0, 2]
  assert info.num_emitted[0] == info.num_emitted[3] == 1
  assert (info.node_probs[:, 3:].sum(1)[np.array([0, 1, 3, 4])] == 0).all()
  np.testing.assert_allclose(info.node_probs.sum(1), 1, rtol=1e-6)
