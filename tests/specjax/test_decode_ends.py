"""Ends of rows, counters, and independence of rows."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import (
  BUDGETS,
  FEWEST_PAIRS,
  LENGTHS,
  MODEL,
  PAIRS,
  PARAMS,
  PROMPTS,
  TARGET,
  VOCAB,
  decode,
  jitted,
  make,
  rows_of,
  start,
)

import specjax
from specjax import drafters
from specjax.state import Origin, StopReason
from specjax.tree import chain


@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_rows_end_at_the_first_stop_token(rule, drafter):
  decoder = make(drafter, rule)
  free = rows_of(decode(decoder, start(decoder, temperature=0.0)))
  stops = (2, 8)
  state = decode(decoder, start(decoder, temperature=0.0, stop_tokens=stops))
  for b, row in enumerate(rows_of(state)):
    new = free[b][LENGTHS[b] :]
    at = next((i for i, t in enumerate(new) if t in stops), None)
    expected = new if at is None else new[: at + 1]
    assert row[LENGTHS[b] :] == expected
    reason = StopReason.LENGTH if at is None else StopReason.STOP_TOKEN
    assert state.stop_reason[b] == reason


@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_counters_are_consistent_with_emitted_tokens(rule, drafter):
  decoder = make(drafter, rule)
  state = decode(decoder, start(decoder, stop_tokens=(2, 2)))
  c, tree = jax.device_get(state.counters), decoder.drafter.tree
  emitted = np.asarray(state.length - state.prompt_length)
  assert (emitted <= BUDGETS).all()
  assert (c.accept_counts.sum(1) == c.num_target_calls).all()
  depths = np.arange(tree.max_depth + 1)
  assert (c.accept_counts @ depths == c.num_accepted).all()
  assert (c.num_drafted == c.num_target_calls * tree.num_drafted).all()
  assert (c.num_drafts == c.num_target_calls * (tree.num_drafted > 0)).all()
  # A call emits its accepted tokens and one more, unless the row ends first.
  short = c.num_accepted + c.num_target_calls - emitted
  assert set(short.tolist()) <= {0, 1}
  for b, row in enumerate(np.asarray(state.origins)):
    new = row[LENGTHS[b] : state.length[b]]
    assert (row[: LENGTHS[b]] == Origin.PROMPT).all()
    assert (new == Origin.ACCEPTED).sum() == c.num_accepted[b]
    assert (new != Origin.PROMPT).all()


def test_zero_budget_emits_nothing():
  decoder = make("model")
  budgets = np.array([3, 0, 2, 0, 1])
  state = decode(decoder, start(decoder, max_new_tokens=budgets))
  np.testing.assert_array_equal(state.length - LENGTHS, budgets)
  assert (state.stop_reason == StopReason.LENGTH).all()
  assert state.counters.num_target_calls[1] == 0


@pytest.mark.parametrize(("rule", "drafter"), FEWEST_PAIRS)
def test_log_probs_come_from_unwarped_target(rule, drafter):
  """Of emitted tokens, and of the likeliest in their places if wanted."""
  decoder = make(drafter, rule, with_log_probs=True, num_likeliest=4)
  state = start(decoder, temperature=0.5)
  wanted = np.array([True, False, True, True, True])
  state = dataclasses.replace(
    state, likeliest=dataclasses.replace(state.likeliest, wanted=wanted)
  )
  state = decode(decoder, state)
  told = jax.device_get(state.likeliest)
  for b, row in enumerate(rows_of(state)):
    for i in range(LENGTHS[b], len(row)):
      logits = toys.context_logits(TARGET, row[:i]).astype(np.float64)
      laws = logits - np.log(np.exp(logits).sum())
      assert state.log_probs[b, i] == pytest.approx(laws[row[i]], abs=1e-5)
      if wanted[b]:
        best = np.argsort(-laws, kind="stable")[:4]
        assert told.tokens[b, i].tolist() == best.tolist()
        assert told.log_probs[b, i] == pytest.approx(laws[best], abs=1e-5)


def test_top_log_probs_are_skipped_when_no_row_wants_them():
  decoder = make("model", "token", with_log_probs=True, num_likeliest=4)
  state = start(decoder, temperature=0.5)
  nobody = dataclasses.replace(state.likeliest, wanted=np.zeros(5, bool))
  state = dataclasses.replace(state, likeliest=nobody)
  # The compiler has not moved the work out of the one branch that there is.
  program = jitted(decoder, "generate").lower(PARAMS, state).compile().as_text()
  (branches,) = re.findall(r"branch_computations=\{(.*?)\}", program)
  homes = [
    part.split()[0] for part in program.split("\n\n") if '"TopK"' in part
  ]
  assert homes
  assert set(homes) <= {*branches.split(", ")}
  state = decode(decoder, state)
  assert (state.length > LENGTHS).all()
  assert not np.asarray(state.likeliest.log_probs).any()
  with pytest.raises(ValueError, match=r"num_likeliest must be in 0\.\.11"):
    make("model", "token", num_likeliest=12)


def test_greedy_rows_end_on_nan_only_where_plain_decoding_does():
  """Greedy rows end with NaN exactly if plain decoding meets it too.

  Rows that meet none are untouched.
  """
  decoder, plain = make("model"), make("plain")
  clean = decode(plain, start(plain, temperature=0.0))
  hit = 0
  for index in range(0, len(TARGET), 4):
    table = TARGET.copy()
    table[index] = np.nan
    params = dataclasses.replace(PARAMS, target=jnp.asarray(table))
    expected = decode(plain, start(plain, temperature=0.0), params)
    state = decode(decoder, start(decoder, temperature=0.0), params)
    np.testing.assert_array_equal(state.stop_reason, expected.stop_reason)
    hit += int((expected.stop_reason == StopReason.NAN_LOGITS).sum())
    broken = expected.stop_reason == StopReason.NAN_LOGITS
    for row, whole, cut in zip(
      rows_of(state), rows_of(clean), broken, strict=True
    ):
      assert row == (whole[: len(row)] if cut else whole)
  assert hit > 5


def test_draft_and_target_vocab_padding_may_differ():
  wide = toys.table_model(VOCAB + 3)
  padded = jnp.pad(PARAMS.draft, ((0, 0), (0, 3)), constant_values=50.0)
  drafter = drafters.model(wide, tree=chain(3), vocab_size=VOCAB)
  decoder = specjax.make_decoder(MODEL, drafter=drafter)
  params = dataclasses.replace(PARAMS, draft=padded)
  state = decode(decoder, start(decoder), params)
  assert rows_of(state) == rows_of(decode(make("model"), start(make("model"))))


def test_int32_max_budget_and_steps_do_not_overflow():
  """Sums with them would wrap around, and end a row or a loop at once."""
  decoder, most = make("model"), np.int32(2**31 - 1)
  short = start(decoder, max_new_tokens=np.full(5, 40) - LENGTHS)
  endless = jax.jit(
    lambda budgets: decoder.init(
      PARAMS, PROMPTS, LENGTHS, jax.random.key(0), buffer_length=40,
      max_new_tokens=budgets,
    )
  )(jnp.full(5, most))  # fmt: skip
  np.testing.assert_array_equal(endless.max_length, short.max_length)
  sizes = dict(buffer_length=40, max_new_tokens=most)
  with pytest.raises(ValueError, match="must fit into buffer_length"):
    decoder.init(PARAMS, PROMPTS, LENGTHS, jax.random.key(0), **sizes)
  steps = jax.jit(decoder.steps)
  state = steps(PARAMS, short, 2)
  state = steps(PARAMS, state, most)
  assert state.done.all()


def test_ended_rows_are_idle_in_target_cache_passes():
  """And in no state between rounds."""
  seen = []

  def apply(params, tokens, cache, **more):
    seen.append(cache.idle)
    return MODEL.apply(params, tokens, cache, **more)

  model = dataclasses.replace(MODEL, apply=apply)
  drafter = drafters.layer_skip(model, tree=chain(2), vocab_size=VOCAB)
  decoder = specjax.make_decoder(model, drafter=drafter)
  state = start(decoder, max_new_tokens=np.array([9, 0, 9, 0, 9]))
  seen.clear()
  after, _ = decoder.step(PARAMS, state)
  assert len(seen) >= 2
  for idle in seen:
    assert idle.tolist() == [False, True, False, True, False]
  assert after.target_cache.idle is None
