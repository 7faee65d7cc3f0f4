"""Sizes, ids and parts that do not fit are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import LENGTHS, MODEL, PARAMS, PROMPTS, VOCAB, jitted, make, start

import specjax
from specjax import drafters
from specjax.runtime.mesh import MeshDecoder
from specjax.state import StopReason
from specjax.tree import chain
from specjax.warp import make_sampling


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(buffer_length=5), "6 tokens do not .* must hold prompt and new"),
    (
      dict(max_new_tokens=40),
      r"buffer_length \(40\), so it must be at least 46",
    ),
    (dict(max_new_tokens=-1), "max_new_tokens must be 0 or more"),
    (dict(max_new_tokens=[1, 2]), "be a scalar or have an entry"),
    (dict(prompts=PROMPTS[0]), "a row for each"),
    (dict(prompts=np.full((5, 6), -1)), r"tokens must be in 0\.\.10"),
    (dict(prompts=np.full((5, 6), VOCAB)), r"tokens must be in 0\.\.10"),
    (dict(lengths=3), "lengths must have an entry for each of 5 prompts"),
    (dict(lengths=np.arange(5)), r"lengths must be in 1\.\.6"),
    (dict(lengths=np.arange(3, 8)), r"lengths must be in 1\.\.6"),
    (dict(rng_key=jax.random.PRNGKey(0)), "must be a typed key"),
  ],
)
def test_init_rejects_invalid_prompts_and_sizes(changes, message):
  arguments = dict(
    params=PARAMS, prompts=PROMPTS, lengths=LENGTHS, rng_key=jax.random.key(0),
    buffer_length=40, max_new_tokens=3,
  ) | changes  # fmt: skip
  with pytest.raises(ValueError, match=message):
    make("model").init(**arguments)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(prompt=np.zeros(41, int)), "41 tokens do not fit into a buffer"),
    (dict(max_new_tokens=40), "must fit into buffer_length"),
    (dict(sampling=make_sampling(1, top_p=0.5)), "has no top_p"),
    (dict(row=5), r"row must be in 0\.\.4"),
    (dict(source=-1), r"source must be in 0\.\.4"),
    (dict(keep=1), r"keep must be in 0\.\.0"),
    (dict(source=1, keep=-1), r"keep must be in 0\.\."),
  ],
)
def test_admit_rejects_rows_that_do_not_fit(changes, message):
  state = jax.eval_shape(lambda: start(make("model")))
  arguments = dict(
    row=0, prompt=PROMPTS[0], length=1, rng_key=jax.random.key(0),
    max_new_tokens=1,
  ) | changes  # fmt: skip
  with pytest.raises(ValueError, match=message):
    make("model").admit(PARAMS, state, **arguments)


def test_invalid_inputs_under_jit_end_only_their_row():
  """Budgets at the end of the buffer, wrong lengths and unknown ids at once."""
  decoder = make("model")
  begin = lambda prompts, lengths, budget: jitted(decoder, "init")(
    PARAMS, jnp.asarray(prompts), jnp.asarray(lengths), jax.random.key(0),
    buffer_length=40, max_new_tokens=budget,
  )  # fmt: skip
  state = jitted(decoder, "generate")(PARAMS, begin(PROMPTS, LENGTHS, 99))
  assert state.length.tolist() == [40] * 5
  assert {*state.stop_reason.tolist()} == {StopReason.LENGTH}
  assert not begin(PROMPTS, LENGTHS, 3).stop_reason.any()
  wrong = np.array([0, PROMPTS.shape[1] + 1, *LENGTHS[2:]])
  state = begin(PROMPTS, wrong, 3)
  assert state.stop_reason.tolist() == [StopReason.LENGTH] * 2 + [0] * 3
  state = jax.jit(decoder.extend)(
    PARAMS, state, 2, jnp.array([1, 2]), 3, max_new_tokens=3
  )
  assert state.stop_reason.tolist() == [StopReason.LENGTH] * 3 + [0] * 2
  unknown = PROMPTS.copy()
  unknown[[1, 2], 0] = -1, VOCAB
  state = begin(unknown, LENGTHS, 3)
  reason = StopReason.UNKNOWN_TOKEN
  assert state.stop_reason.tolist() == [0, reason, reason, 0, 0]


def test_buffer_beyond_model_positions_is_rejected():
  short = toys.table_model(VOCAB, max_positions=32)
  decoder = specjax.make_decoder(short)
  with pytest.raises(ValueError, match="target model has 32 positions"):
    start(decoder)
  drafter = drafters.model(short, tree=chain(2), vocab_size=VOCAB)
  with pytest.raises(ValueError, match="draft model has 32 positions"):
    start(specjax.make_decoder(MODEL, drafter=drafter))


def test_incompatible_decoder_parts_are_rejected():
  with pytest.raises(TypeError, match="drafter must be made by"):
    specjax.make_decoder(MODEL, drafter="model")
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
  mapped = MeshDecoder.of(make("model"), jax.make_mesh((1,), ("data",)))
  for run in (make("model").generate, make("model").step, mapped.generate):
    with pytest.raises(ValueError, match=r"specjax\.Params, got DecodeState"):
      run(state, PARAMS)
