"""A text that repeats itself is read on, and all else is drafted as before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, exact
from specjax.drafters import depth, repeats
from specjax.tree import Tree, chain

pytestmark = pytest.mark.usefixtures("quick_to_compile")

VOCAB, DEPTH = 3, 2
TARGET = toys.table(VOCAB, seed=0)
NEAR = toys.near(TARGET, noise=1.0, seed=1)
LAYERS = 3
TOY = toys.table_model(VOCAB, layers=LAYERS)
HEAD = toys.feature_model(VOCAB, num_features=LAYERS)
# The last two tokens have occurred before, or have not.
AGAIN, ANEW = [2, 1, 0, 2, 1], [0, 0, 1, 0, 2]


def head(*, deep=DEPTH, policy=None):
  return drafters.eagle.drafter(
    HEAD, tree=chain(deep), vocab_size=VOCAB, depth=policy
  )


def reading_on(inner=None, **more):
  return repeats.drafter(
    head() if inner is None else inner, **({"least": 2} | more)
  )


def begun(decoder, draft, texts, *, dtype=jnp.float32, budget=30):
  """Parameters, and a state of some texts."""
  params = specjax.Params(
    target=jnp.asarray(TARGET, dtype), draft=jnp.asarray(draft, dtype)
  )
  texts = np.array(texts)
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    params,
    texts,
    np.full(len(texts), texts.shape[1]),
    jax.random.key(0),
    buffer_length=48,
    max_new_tokens=budget,
  )
  return params, state


def error(drafter, rule, text) -> float:
  """Of the law of a round's tokens, over all that may be drafted."""
  with jax.enable_x64(True):
    decoder = specjax.make_decoder(TOY, drafter=drafter, rule=rule)
    params, state = begun(decoder, NEAR, [text], dtype=jnp.float64)
    law, expected = exact.round_law(decoder, params, state)
    return float(np.abs(law.output - expected).max())


@pytest.mark.parametrize("policy", [None, "1"])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("text", [AGAIN, ANEW], ids=["again", "anew"])
def test_a_round_has_the_targets_law(text, rule, policy):
  inner = head(policy=policy and depth.get(policy))
  assert error(reading_on(inner), rule, text) < 1e-10


def test_a_looked_up_token_under_the_law_of_the_draft_is_caught(monkeypatch):
  """It was not drawn from it: p/q on a certain token is lossy."""
  chosen = repeats._chosen

  def claims(rows, found, drafted):
    draft = chosen(rows, found, drafted)
    return dataclasses.replace(draft, log_probs=drafted.log_probs)

  monkeypatch.setattr(repeats, "_chosen", claims)
  assert error(reading_on(), "token", AGAIN) > 1e-3


def test_what_followed_is_drafted_where_the_text_repeats_itself():
  decoder = specjax.make_decoder(TOY, drafter=reading_on())
  params, state = begun(decoder, NEAR, [AGAIN, ANEW])
  draft, *_ = decoder.propose(params, state)
  assert draft.tokens[0].tolist() == [1, 0, 2]
  np.testing.assert_array_equal(np.exp(draft.log_probs[0, 1, :]), [1, 0, 0])
  alone = specjax.make_decoder(TOY, drafter=head())
  expected, *_ = alone.propose(*begun(alone, NEAR, [AGAIN, ANEW]))
  assert draft.tokens[1].tolist() == expected.tokens[1].tolist()
  np.testing.assert_array_equal(draft.log_probs[1], expected.log_probs[1])


def test_the_head_knows_what_stands_after_texts_were_read_on():
  """With the target's own law all that it drafts stands, after any round."""
  drafter = reading_on(head(deep=3))
  decoder = specjax.make_decoder(TOY, drafter=drafter, rule="token")
  params, state = begun(decoder, TARGET, [AGAIN, ANEW, [1, 1, 2, 2, 0]])
  step, seen = jax.jit(decoder.step), {True: 0, False: 0}
  emitted_by_reading_on = 0
  for _ in range(8):
    running = ~np.asarray(state.done)
    state, info = step(params, state)
    certain = np.asarray(info.draft.log_probs[:, 1].max(-1) == 0)
    for row in np.flatnonzero(running):
      seen[bool(certain[row])] += 1
      if not certain[row]:
        assert info.node_probs[row, -1] > 1 - 1e-5
      else:
        emitted_by_reading_on += int(info.num_emitted[row]) - 1
  assert min(seen.values()) > 3
  assert emitted_by_reading_on > 3  # tokens that it had not drafted


def test_no_pass_is_made_for_rows_that_read_on():
  drafter = reading_on(head(policy=depth.get("2")))
  decoder = specjax.make_decoder(TOY, drafter=drafter)
  for texts, fed in (([AGAIN, AGAIN], 0), ([AGAIN, ANEW], DEPTH)):
    params, state = begun(decoder, NEAR, texts)
    draft, after, _ = decoder.propose(params, state)
    # The pass that reads what stands is made in any case.
    assert int(after.passes) == max(fed, 1)
    assert draft.topology().there.sum(1).tolist() == [DEPTH + 1] * 2


def test_a_depth_bounds_what_is_drafted_and_not_what_is_read_on():
  drafter = reading_on(head(deep=3, policy=depth.get("1")))
  decoder = specjax.make_decoder(TOY, drafter=drafter)
  params, state = begun(decoder, NEAR, [AGAIN, ANEW])
  draft, *_ = decoder.propose(params, state)
  assert draft.topology().there.sum(1).tolist() == [4, 2]


@pytest.mark.parametrize(
  ("inner", "more", "message"),
  [
    (
      drafters.model.drafter(TOY, tree=chain(2), vocab_size=VOCAB),
      {},
      "holds what it drafted",
    ),
    (
      drafters.eagle.drafter(
        HEAD, tree=Tree((-1, 0, 0)), vocab_size=VOCAB
      ),
      {},
      "one path",
    ),
    (head(), dict(least=0), "least must be"),
    (head(), dict(least=9), "least must be"),
  ],
  ids=["a draft model", "a tree", "no match", "longer than any"],
)  # fmt: skip
def test_what_cannot_give_way_is_refused(inner, more, message):
  with pytest.raises(ValueError, match=message):
    reading_on(inner, **more)
