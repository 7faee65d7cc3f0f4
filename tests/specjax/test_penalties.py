"""Penalties: their definitions, and rows that have them beside rows without."""

import dataclasses
import functools
from unittest import mock

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import penalizing
import pytest
import torch
import transformers

from specjax import penalties, random
from specjax.state import StopReason
from specjax.warp import make_sampling

END, OWN = 1, 9
BUDGET = 24
# One row for each setting; the first and the last ask for nothing.
ROWS = [
  {},
  dict(presence_penalty=1.5, repetition_penalty=1.3),
  dict(frequency_penalty=0.8, logit_bias={5: 3.0, 0: -100.0}),
  dict(min_tokens=9, stop_token_ids=[OWN], repetition_penalty=0.8),
  {},
]


def by_row(rows, temperature=0.0):
  """Sampling of five rows in one shape: each shape is a program."""
  filled = [penalizing.NEUTRAL | row for row in (*rows, *ROWS)]
  columns = {name: [row[name] for row in filled] for name in filled[0]}
  built = make_sampling(len(rows) + 5, **columns)
  return dataclasses.replace(
    make_sampling(len(rows), temperature=temperature),
    penalties=jax.tree.map(lambda x: x[: len(rows)], built.penalties),
  )


def decoded(prompt, settings, *, budget=BUDGET, ends=(END,)):
  return penalizing.decoded(
    decoding.TARGET, prompt, settings, budget=budget, ends=ends
  )


def begun(decoder, sampling, *, ends=(END,), **more):
  return decoding.jitted(decoder, "init")(
    decoding.PARAMS, jnp.asarray(decoding.PROMPTS),
    jnp.asarray(decoding.LENGTHS),
    random.row_keys(jax.random.key(0), jnp.arange(5)), buffer_length=40,
    max_new_tokens=jnp.full(5, BUDGET), sampling=sampling,
    stop_tokens=jnp.asarray(ends), **more,
  )  # fmt: skip


def emitted(state):
  return [
    np.asarray(state.tokens[b, state.prompt_length[b] : n]).tolist()
    for b, n in enumerate(state.length)
  ]


PROMPTS = [
  decoding.PROMPTS[b, :n].tolist() for b, n in enumerate(decoding.LENGTHS)
]


@functools.cache
def whole(drafter, rule, temperature=0.0, penalized=True):
  """All rows decoded to their ends: their tokens, and the state."""
  decoder = decoding.make(drafter, rule)
  sampling = make_sampling(5, temperature=temperature)
  if penalized:
    sampling = by_row(ROWS, temperature)
  state = decoding.decode(decoder, begun(decoder, sampling))
  return emitted(state), state


@pytest.mark.parametrize(
  ("drafter", "rule"),
  [
    ("model", "token"),
    ("paths", "match"),
    ("plain", "token"),
    pytest.param("ngram", "match", marks=pytest.mark.slow),
    pytest.param("layer_skip_paths", "match", marks=pytest.mark.slow),
  ],
)
def test_penalized_greedy_tokens_match_plain_python(drafter, rule):
  actual, _ = whole(drafter, rule)
  for tokens, prompt, settings in zip(actual, PROMPTS, ROWS, strict=True):
    assert tokens == decoded(prompt, settings)
  # Every setting changes something: it is seen in each of these rows.
  for at in (1, 2, 3):
    assert actual[at] != decoded(PROMPTS[at], {})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neutral_rows_match_decoding_without_penalties(temperature):
  """Among rows that ask, and where no row does."""
  among, _ = whole("model", "token", temperature)
  without, _ = whole("model", "token", temperature, penalized=False)
  assert [among[b] for b in (0, 4)] == [without[b] for b in (0, 4)]
  decoder = decoding.make("model", "token")
  neutral = by_row([{}] * 5, temperature)
  state = decoding.decode(decoder, begun(decoder, neutral))
  assert emitted(state) == without


def test_program_without_penalties_omits_their_ops():
  """Nothing of their module is called, and the step is what it was."""
  decoder = decoding.make("model", "token")
  state = begun(decoder, make_sampling(5))
  usual = jax.make_jaxpr(decoder.step)(decoding.PARAMS, state)
  broken = mock.Mock(side_effect=AssertionError)
  with (
    mock.patch.object(penalties, "penalized", broken),
    mock.patch.object(penalties, "path_tokens", broken),
  ):
    alone = jax.make_jaxpr(decoder.step)(decoding.PARAMS, state)
  assert str(alone) == str(usual)
  some = begun(decoder, by_row(ROWS))
  more = jax.make_jaxpr(decoder.step)(decoding.PARAMS, some)
  assert len(more.eqns) > len(usual.eqns)
  broken.assert_not_called()


def test_min_tokens_delays_stops_and_row_stop_ids_end_rows():
  actual, state = whole("model", "token", 1.0)
  assert len(actual[3]) >= 9
  assert not {END, OWN} & set(actual[3][:8])
  for tokens, reason, stops in zip(
    actual, state.stop_reason, ({END}, {END}, {END}, {END, OWN}, {END}),
    strict=True,
  ):  # fmt: skip
    assert not stops & set(tokens[:-1])
    assert (tokens[-1] in stops) == (reason == StopReason.STOP_TOKEN)
  assert any(reason == StopReason.STOP_TOKEN for reason in state.stop_reason)


def test_refilled_row_counts_only_its_own_tokens():
  decoder = decoding.make("model", "token")
  _, state = whole("model", "token")
  admit = jax.jit(decoder.admit)
  row = make_sampling(1, temperature=0.0, **ROWS[1])
  for at, prompt in ((2, [4, 4, 1]), (0, [9])):
    state = admit(
      decoding.PARAMS, state, at, np.resize(prompt, 3), len(prompt),
      jax.random.key(1), max_new_tokens=BUDGET, sampling=row,
    )  # fmt: skip
  actual = emitted(decoding.decode(decoder, state))
  assert actual[2] == decoded([4, 4, 1], ROWS[1])
  assert actual[0] == decoded([9], ROWS[1])


def test_extended_row_counts_previous_output_as_prompt():
  decoder = decoding.make("model", "token")
  actual, state = whole("model", "token")
  state = jax.jit(decoder.extend)(
    decoding.PARAMS, state, 1, np.array([2, 6]), 2, max_new_tokens=8
  )
  again = emitted(decoding.decode(decoder, state))[1]
  prompt = [*PROMPTS[1], *actual[1], 2, 6]
  assert again == decoded(prompt, ROWS[1], budget=8)


@pytest.mark.parametrize("least", [3, 4])  # of a completion of three tokens
def test_penalty_order_matches_transformers_processors(least):
  """Biases, then repetition; ends that come too soon are none."""
  vocab, text = 50, [4, 8, 8, 15, 4]
  logits = 3 * np.random.default_rng(0).standard_normal((1, 1, vocab))
  logits = logits.astype(np.float32)
  bias = {4: -2.5, 15: 4.0, 16: 1.0}
  scores, ids = torch.tensor(logits[0]), torch.tensor([text])
  for processor in (
    transformers.SequenceBiasLogitsProcessor(
      {(k,): v for k, v in bias.items()}
    ),
    transformers.RepetitionPenaltyLogitsProcessor(1.7),
    transformers.MinNewTokensLengthLogitsProcessor(2, least, [3, 23]),
  ):
    scores = processor(ids, scores)
  state = mock.Mock(
    tokens=jnp.asarray([[*text, 8]]), prompt_length=jnp.array([2]),
    length=jnp.array([5]), stop_tokens=jnp.array([3]), done=jnp.array([False]),
    ignores_stop=jnp.array([False]),
    sampling=make_sampling(
      1, repetition_penalty=1.7, logit_bias=bias, min_tokens=least,
      stop_token_ids=[23],
    ),
  )  # fmt: skip
  nothing = jnp.zeros((1, 1, 0), jnp.int32)
  got = penalties.penalized(jnp.asarray(logits), state, nothing)
  np.testing.assert_allclose(got[0], scores.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(presence_penalty=np.nan), "presence_penalty must be finite"),
    (dict(repetition_penalty=0.0), "repetition_penalty must be finite and > 0"),
    (dict(min_tokens=-1), "min_tokens must be >= 0"),
    (dict(logit_bias={-1: 1.0}), "logit_bias must be token ids"),
    (dict(stop_token_ids=[2**31]), "stop_token_ids must be token ids"),
  ],
)
def test_out_of_range_settings_are_rejected(settings, message):
  with pytest.raises(ValueError, match=message):
    make_sampling(2, **settings)


def test_admit_rejects_penalties_beyond_program_capacity():
  decoder = decoding.make("model", "token")
  ask = lambda state, **row: decoder.admit(
    decoding.PARAMS, state, 0, np.array([1]), 1, jax.random.key(0),
    max_new_tokens=1, sampling=make_sampling(1, **row),
  )  # fmt: skip
  with pytest.raises(ValueError, match="has no penalties"):
    ask(begun(decoder, make_sampling(5)), presence_penalty=1.0)
  many = dict.fromkeys(range(9), 1.0)
  with pytest.raises(ValueError, match="room for 4 bias_tokens"):
    ask(begun(decoder, by_row(ROWS)), logit_bias=many)
