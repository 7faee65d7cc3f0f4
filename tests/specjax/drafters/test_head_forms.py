"""The contract of drafters with the loop, for heads in all of their forms.

Their laws, the law of what a round gives, rows whose text goes on, features
that are NaN or missing.
"""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_heads
import toys
from decoding import BUDGETS, LENGTHS, PROMPTS, TARGET, VOCAB, rows_of
from toy_heads import FEW_DRAFT, FEW_TARGET, WORDS, error

import specjax
from specjax import exact, random
from specjax.state import StopReason
from specjax.warp import make_sampling

LIMIT = 1e-10
PARAMS = toys.pair(TARGET, noise=0.8, seed=1)
# One of each family and each way of drafting in every run.
USUAL = (
  "eagle, dynamic tree", "medusa, distinct", "dflash, drawn chain",
  "dspark, cut chain", "dflash2, drawn paths",
  "assistant, dynamic tree",
)  # fmt: skip
ALSO = ("eagle, drawn tree", "medusa, best tree", "mtp, distinct")
slow = lambda value, fast: (
  value if fast else pytest.param(value, marks=pytest.mark.slow)
)


def names(*usual):
  return [slow(name, name in usual) for name in toy_heads.RULES]


# ---------------------------------------------------------- the laws of a round


CASES = [
  slow((name, rule), name in USUAL + ALSO and not place)
  for name, some in toy_heads.RULES.items()
  for place, rule in enumerate(some)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_round_output_matches_target_distribution(case):
  """One that comes after another, at a temperature."""
  name, rule = case
  drafter = toy_heads.make(name, WORDS)
  assert error(drafter, rule, rounds=1, temperature=0.7) < LIMIT


@pytest.mark.parametrize(
  "name", names("dflash, drawn chain", "assistant, dynamic tree")
)
def test_reported_log_probs_match_drafting_distribution(name):
  """And a draft depends on its own row, and on nothing that is stale."""
  table = lambda x: jnp.asarray(x, jnp.float32)
  actual = exact.check_drafter(
    toy_heads.make(name, WORDS),
    specjax.Params(target=table(FEW_TARGET), draft=table(FEW_DRAFT)),
    toy_heads.target(WORDS),
    vocab_size=WORDS,
  )
  certain = any(
    word in name for word in ("certain", "best", "dynamic", "families")
  )
  assert actual.method == ("deterministic" if certain else "exact")


# ---------------------------------------------------------------- rows, batches


@functools.cache
def decoder_of(name):
  return specjax.make_decoder(
    toy_heads.target(VOCAB),
    drafter=toy_heads.make(name, VOCAB),
    rule=toy_heads.RULES[name][0],
  )


def key_of(request):
  return random.row_keys(jax.random.key(0), jnp.asarray([request]))


HOW = dict(temperature=0.8, params=PARAMS)


def start(name, rows):
  return decoding.start(decoder_of(name), rows=list(rows), **HOW)


@functools.cache
def emitted(name, *rows):
  state = start(name, rows)
  return rows_of(decoding.decode(decoder_of(name), state, PARAMS))


@pytest.mark.parametrize(
  "name", names("eagle, dynamic tree", "dflash, drawn chain")
)
def test_extended_row_matches_one_longer_prompt(name):
  """A row's head reads the same of one longer prompt and of two."""
  decoder = decoder_of(name)
  steps = decoding.jitted(decoder, "steps")
  state = steps(PARAMS, start(name, range(5)), 3)
  longer = decoding.extend(decoder, state, 2, [4, 1], budget=9, params=PARAMS)
  text = rows_of(longer)[2]
  assert text[-2:] == [4, 1]
  actual = rows_of(decoding.decode(decoder, longer, PARAMS))[2]
  expected = decoding.alone(decoder, text, key_of(2), budget=9, **HOW)
  assert [actual] == rows_of(expected)


@pytest.mark.parametrize(
  "name", names("eagle, dynamic tree", "dflash, drawn chain")
)
def test_nan_features_stay_in_their_row_and_keep_greedy_text(name):
  """A head that knows nothing slows its row down; the text stays lawful."""
  decoder = decoder_of(name)

  def apply(params, tokens, cache, **options):
    output, cache = decoder.target.apply(params, tokens, cache, **options)
    is_first_row = jnp.arange(len(tokens))[:, None, None] == 0
    features = jnp.where(is_first_row, jnp.nan, output.features)
    return dataclasses.replace(output, features=features), cache

  broken = dataclasses.replace(
    decoder, target=dataclasses.replace(decoder.target, apply=apply)
  )
  rows = [2, 1, 0]
  state = jax.jit(broken.init, static_argnames="buffer_length")(
    PARAMS, PROMPTS[rows], LENGTHS[rows],
    jnp.concatenate([key_of(r) for r in rows]),
    buffer_length=48, max_new_tokens=BUDGETS[rows],
    sampling=make_sampling(3, temperature=[0.0, 0.8, 0.8]),
  )  # fmt: skip
  state = jax.jit(broken.generate)(PARAMS, state)
  together = emitted(name, *range(5))
  assert rows_of(state)[1:] == [together[1], together[0]]
  text = rows_of(state)[0]
  assert (state.stop_reason == StopReason.LENGTH).all()
  for at in range(LENGTHS[2], len(text)):
    assert text[at] == np.argmax(toys.context_logits(TARGET, text[:at]))


@pytest.mark.parametrize(
  "family", ["eagle", "dflash", "mtp", "assistant", "medusa"]
)
def test_missing_target_features_are_rejected(family):
  drafter = toy_heads.make(f"{family}, drawn chain", VOCAB)
  for layers, given in ((0, "none"), (2, "2")):
    decoder = specjax.make_decoder(
      toys.table_model(VOCAB, layers=layers), drafter=drafter
    )
    with pytest.raises(ValueError, match=f"needs 3 .*got {given}"):
      decoder.init(
        PARAMS, PROMPTS, LENGTHS, jax.random.key(0), buffer_length=48,
        max_new_tokens=3,
      )  # fmt: skip
