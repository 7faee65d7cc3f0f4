"""A text that repeats itself is read on, and all else is drafted as before."""

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, exact
from specjax.adaptive import policies
from specjax.drafters.families import repeats
from specjax.tree import Tree, bound, chain
from specjax.types import MarginalModel
from specjax.warp import make_sampling

VOCAB, DEPTH = 3, 2
TARGET = toys.table(VOCAB, seed=0)
NEAR = toys.near(TARGET, noise=1.0, seed=1)
LAYERS = 3
TOY = toys.table_model(VOCAB, layers=LAYERS)
HEAD = toys.feature_model(VOCAB, num_features=LAYERS)
# The last two tokens have occurred before, or have not.
AGAIN, ANEW = [2, 1, 0, 2, 1], [0, 0, 1, 0, 2]


def head(*, deep=DEPTH, policy=None):
  return drafters.eagle(HEAD, tree=chain(deep), vocab_size=VOCAB, policy=policy)


def dynamic_head():
  return drafters.eagle(HEAD, tree=bound(3, DEPTH, 2), vocab_size=VOCAB)


def reading_on(inner=None, **more):
  return repeats.repeats(
    head() if inner is None else inner, **({"min_match": 2} | more)
  )


def begun(decoder, draft, texts, *, budget=30, temperature=1.0):
  """Parameters, and a state of some texts."""
  params = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(draft))
  texts = np.array(texts)
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    params, texts, np.full(len(texts), texts.shape[1]), jax.random.key(0),
    buffer_length=48, max_new_tokens=budget,
    sampling=make_sampling(len(texts), temperature=temperature),
  )  # fmt: skip
  return params, state


def error(drafter, rule, text) -> float:
  """Of the law of a round's tokens, over all that may be drafted."""
  wide = lambda table: np.asarray(table, np.float64)
  with jax.enable_x64(True):
    return exact_cases.round_error(
      drafter, rule, model=TOY, target=wide(TARGET), draft=wide(NEAR), text=text
    )


@pytest.mark.parametrize(
  ("rule", "policy"),
  [
    ("token", None), ("block", "1"),
    *(
      pytest.param(rule, "confidence(threshold=0.5)", marks=pytest.mark.slow)
      for rule in ("recursive", "traversal", "kseq")
    ),
  ],
)  # fmt: skip
@pytest.mark.parametrize("text", [AGAIN, ANEW], ids=["again", "anew"])
def test_round_output_matches_target_distribution(text, rule, policy):
  inner = head(policy=policy and policies.get(policy))
  assert error(reading_on(inner), rule, text) < 1e-10


def marginals(params, features):
  """Medusa's heads: the law of a table by the token that was read."""
  token = features[:, 0].astype(jnp.int32)
  return jnp.stack([params[token], params[(token + 1) % VOCAB]], axis=1)


OTHERS = {
  "medusa": drafters.medusa(
    MarginalModel(
      vocab_size=VOCAB, num_features=LAYERS, num_depths=DEPTH, apply=marginals
    ),
    tokens=DEPTH,
  ),
  "layer_skip": drafters.layer_skip(
    TOY, tree=chain(DEPTH), vocab_size=VOCAB, policy=policies.get("1")
  ),
}  # fmt: skip


@pytest.mark.parametrize("inner", OTHERS)
def test_other_inner_drafters_match_target_distribution(inner):
  for text, tokens in ((AGAIN, None), (ANEW, 3)):
    drafter = reading_on(OTHERS[inner], tokens=tokens)
    assert error(drafter, "token", text) < 1e-10


@pytest.mark.parametrize("tokens", [None, 3])
def test_dynamic_tree_round_matches_target_distribution(tokens):
  drafter = reading_on(dynamic_head(), tokens=tokens)
  for text in (AGAIN, ANEW):
    assert error(drafter, "match", text) < 1e-10


def test_reported_log_probs_match_drafting_distribution():
  params = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(NEAR))
  drafter = reading_on(min_match=1)
  actual = exact.check_drafter(drafter, params, TOY, vocab_size=VOCAB)
  assert actual.method == "exact"


def test_repeated_text_drafts_its_earlier_continuation():
  decoder = specjax.make_decoder(TOY, drafter=reading_on())
  params, state = begun(decoder, NEAR, [AGAIN, ANEW])
  draft, *_ = decoder.propose(params, state)
  assert draft.tokens[0].tolist() == [1, 0, 2]
  np.testing.assert_array_equal(np.exp(draft.log_probs[0, 1, :]), [1, 0, 0])
  alone = specjax.make_decoder(TOY, drafter=head())
  expected, *_ = alone.propose(*begun(alone, NEAR, [AGAIN, ANEW]))
  assert draft.tokens[1].tolist() == expected.tokens[1].tolist()
  np.testing.assert_array_equal(draft.log_probs[1], expected.log_probs[1])


def test_head_state_stays_correct_after_copied_rounds():
  """With the target's own law all that it drafts is accepted, after any round.

  Rounds commit more tokens than its policy ever lets it draft.
  """
  drafter = reading_on(head(deep=4, policy=policies.get("1")), min_match=1)
  decoder = specjax.make_decoder(
    TOY, drafter=drafter, rule="token", widths=(2,)
  )
  texts = np.random.default_rng(0).integers(0, VOCAB, (256, 5))
  params, state = begun(decoder, TARGET, texts)
  step = jax.jit(decoder.step)
  before, judged = np.zeros(len(texts), int), 0
  for _ in range(6):
    running = ~np.asarray(state.done)
    state, info = step(params, state)
    present = np.asarray(info.draft.topology().present).sum(1) - 1
    after_more = running & (present == 1) & (before > 2)
    probability = np.asarray(info.node_probs)[after_more, 1]
    assert np.all(probability > 1 - 1e-5)
    judged += len(probability)
    before = np.asarray(info.num_emitted)
  assert judged > 5


def test_longest_match_wins_over_the_newest():
  decoder = specjax.make_decoder(TOY, drafter=reading_on())
  text = [0, 2, 1, 2, 1, 2, 1, 0, 0, 2, 1]  # ends as it begins
  draft, *_ = decoder.propose(*begun(decoder, NEAR, [text]))
  assert draft.tokens.tolist() == [[1, 2, 1]]


def test_draft_passes_are_skipped_when_every_row_copies():
  counts = []
  inner = drafters.eagle(
    toys.counted(HEAD, counts), tree=chain(DEPTH), vocab_size=VOCAB,
    policy=policies.get("2"),
  )  # fmt: skip
  decoder = specjax.make_decoder(TOY, drafter=reading_on(inner))
  for texts, fed in (([AGAIN, AGAIN], 0), ([AGAIN, ANEW], DEPTH - 1)):
    params, state = begun(decoder, NEAR, texts)
    jax.effects_barrier()
    counts.clear()
    draft, *_ = decoder.propose(params, state)
    jax.effects_barrier()
    assert len(counts) == fed
    assert draft.topology().present.sum(1).tolist() == [DEPTH + 1] * 2


@pytest.mark.parametrize("said", ["by a policy", "by tokens"])
def test_draft_depth_limits_drafting_but_not_copying(said):
  if said == "by tokens":
    drafter = reading_on(head(deep=1), tokens=3)
  else:
    drafter = reading_on(head(deep=3, policy=policies.get("1")))
  decoder = specjax.make_decoder(TOY, drafter=drafter)
  params, state = begun(decoder, NEAR, [AGAIN, ANEW])
  draft, *_ = decoder.propose(params, state)
  assert draft.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]


@pytest.mark.parametrize(
  ("inner", "more", "message"),
  [
    (drafters.model(TOY, tree=chain(2), vocab_size=VOCAB), {},
     "whose state depends on committed"),
    (head(policy=policies.get("optimal(cost=0.4)")), {},
     "learns from its drafts"),
    (drafters.eagle(HEAD, tree=Tree((-1, 0, 0)), vocab_size=VOCAB), {},
     "of a chain or dynamic tree"),
    (head(), dict(tokens=1), "must be >= the inner drafter's 2"),
    (head(), dict(min_match=9), "min_match must be"),
  ],
  ids=["a draft model", "a policy that learns", "a tree", "fewer", "longer"],
)  # fmt: skip
def test_incompatible_inner_drafters_and_sizes_are_rejected(
  inner, more, message
):
  with pytest.raises(ValueError, match=message):
    reading_on(inner, **more)
