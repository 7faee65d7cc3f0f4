"""Sizes, ids and parts that do not fit are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import (
  LENGTHS,
  MODEL,
  PARAMS,
  PROMPTS,
  VOCAB,
  jitted,
  make,
  start,
)
from flax import nnx

import specjax
from specjax import drafters
from specjax.runtime.mesh import MeshDecoder
from specjax.tree import chain


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(buffer_length=5), "6 tokens do not .* must hold prompt and new"),
    (dict(max_new_tokens=40), r"buffer_length \(40\), so it must be 46"),
    (dict(max_new_tokens=-1), "max_new_tokens must be 0 or more"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
  options = {"buffer_length": 40, "max_new_tokens": 3} | options
  with pytest.raises(ValueError, match=message):
    make("model").init(
      PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0), **options
    )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(prompts=PROMPTS[0]), "a row for each"),
    (dict(lengths=3), "lengths must have an entry for each of 5 prompts"),
    (dict(rng_key=jax.random.PRNGKey(0)), "must be a typed key"),
    (dict(max_new_tokens=[1, 2]), "be one, or have an entry"),
  ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(changes, message):
  arguments = dict(
    params=PARAMS, prompts=PROMPTS, lengths=LENGTHS, rng_key=jax.random.key(0),
    buffer_length=40, max_new_tokens=3,
  ) | changes  # fmt: skip
  with pytest.raises(ValueError, match=message) as error:
    make("model").init(**arguments)
  assert "\n" not in str(error.value)


def test_under_jit_a_budget_that_does_not_fit_ends_with_the_buffer():
  state = jitted(make("model"), "init")(
    PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
    buffer_length=40, max_new_tokens=99,
  )  # fmt: skip
  state = jitted(make("model"), "generate")(PARAMS, state)
  assert state.length.tolist() == [40] * 5
  assert {*state.stop_reason.tolist()} == {specjax.StopReason.LENGTH}


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    (dict(drafter="model"), "drafter must be made by"),
    (dict(target=nnx.Module()), "got a Module"),
    (dict(rule=print), "rule must be"),
  ],
)
def test_parts_that_are_something_else_are_refused(parts, message):
  with pytest.raises(TypeError, match=message) as error:
    specjax.make_decoder(**{"target": MODEL} | parts)
  assert "\n" not in str(error.value)


def test_a_state_in_the_place_of_parameters_is_refused():
  state = jax.eval_shape(lambda: start(make("model")))
  mapped = MeshDecoder.of(make("model"), jax.make_mesh((1,), ("data",)))
  for run in (make("model").generate, make("model").step, mapped.generate):
    with pytest.raises(ValueError, match=r"specjax\.Params, got DecodeState"):
      run(state, PARAMS)


def test_ids_that_are_no_tokens_are_refused():
  for wrong in (-1, VOCAB):
    prompts = PROMPTS.copy()
    prompts[1, 2] = wrong
    with pytest.raises(ValueError, match=r"tokens must be in 0\.\.10"):
      make("model").init(
        PARAMS, jnp.asarray(prompts), LENGTHS, jax.random.key(0),
        buffer_length=40, max_new_tokens=3,
      )  # fmt: skip


@pytest.mark.parametrize("lengths", [[0, 1, 2, 3, 4], [7, 1, 1, 1, 1]])
def test_empty_prompts_and_wrong_lengths_are_refused(lengths):
  with pytest.raises(ValueError, match=r"lengths must be in 1\.\.6"):
    make("model").init(
      PARAMS, jnp.asarray(PROMPTS), np.array(lengths), jax.random.key(0),
      buffer_length=40, max_new_tokens=3,
    )  # fmt: skip


def test_under_jit_a_row_of_a_wrong_length_ends_at_once():
  """And its neighbors do not."""
  right = jnp.asarray(LENGTHS)
  wrong = right.at[0].set(0).at[1].set(PROMPTS.shape[1] + 1)
  decoder = make("model")
  for lengths, expected in ((right, [0] * 5), (wrong, [2, 2, 0, 0, 0])):
    state = jitted(decoder, "init")(
      PARAMS, jnp.asarray(PROMPTS), lengths, jax.random.key(0),
      buffer_length=40, max_new_tokens=3,
    )  # fmt: skip
    assert state.stop_reason.tolist() == expected
  state = jitted(decoder, "extend")(
    PARAMS, state, 2, jnp.array([1, 2]), 3, max_new_tokens=3
  )
  assert state.stop_reason.tolist() == [2, 2, 2, 0, 0]


def test_a_buffer_beyond_the_models_positions_is_refused():
  short = toys.table_model(VOCAB, max_positions=32)
  decoder = specjax.make_decoder(short)
  with pytest.raises(ValueError, match="target model has 32 positions"):
    start(decoder)
  drafter = drafters.model(short, tree=chain(2), vocab_size=VOCAB)
  with pytest.raises(ValueError, match="draft model has 32 positions"):
    start(specjax.make_decoder(MODEL, drafter=drafter))


def test_parts_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="unknown rule 'tokens'"):
    make("model", "tokens")
  with pytest.raises(ValueError, match="verifies a single path"):
    make("paths", "token")
  with pytest.raises(ValueError, match="target's vocabulary must hold 12"):
    specjax.make_decoder(MODEL, vocab_size=12)
  small = drafters.model(MODEL, tree=chain(2), vocab_size=7)
  decoder = specjax.make_decoder(MODEL, drafter=small)
  state = start(decoder)
  with pytest.raises(ValueError, match="must return log_probs of shape"):
    decoder.step(PARAMS, state)
