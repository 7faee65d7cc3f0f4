"""Depth policies in the loop: what they draft, save, remember, and leave."""

import dataclasses
import functools

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import DRAFT, MODEL, PARAMS, TARGET, VOCAB, rows_of

import specjax
from specjax import drafters, random
from specjax.adaptive import estimates, policies
from specjax.drafters.families import model
from specjax.tree import chain, paths
from specjax.types import LanguageModel

DEPTH = 4


def of_model(policy, draft: LanguageModel = MODEL, tree=None):
  return drafters.model(
    draft, tree=tree or chain(DEPTH), vocab_size=VOCAB, policy=policy
  )


@functools.cache
def make(policy: str, family="model"):
  drafter = getattr(drafters, family)(
    MODEL, tree=chain(DEPTH), vocab_size=VOCAB, policy=policies.get(policy)
  )
  return specjax.make_decoder(MODEL, drafter=drafter)


SURVIVAL = "survival(threshold=0.45)"


# ------------------------------------------------------ a row depends on itself


def test_admitted_row_starts_with_fresh_policy_memory():
  decoder = make(SURVIVAL)
  state = decoding.start(
    decoder, max_new_tokens=np.array([6, 21, 9, 5, 3], np.int32)
  )
  steps = decoding.jitted(decoder, "steps")
  state = steps(PARAMS, state, jnp.int32(6), num_idle=jnp.int32(5))
  assert state.done[4]
  undisturbed = rows_of(decoding.decode(decoder, state))
  key = random.row_keys(jax.random.key(7), jnp.array([1]))[0]
  after = decoding.jitted(decoder, "admit")(
    PARAMS, state, jnp.int32(4), jnp.asarray(decoding.PROMPTS[1]),
    jnp.int32(3), key, max_new_tokens=jnp.int32(17),
    sampling=specjax.make_sampling(1, temperature=1.0),
  )  # fmt: skip
  actual = rows_of(decoding.decode(decoder, after))
  copies = decoding.start(
    decoder, rows=[1] * 5, key=7, max_new_tokens=np.full(5, 17, np.int32)
  )
  assert actual.pop(4) == rows_of(decoding.decode(decoder, copies))[0]
  assert actual == undisturbed[:4]


def test_done_rows_do_not_update_policy_memory():
  """A row that is done makes rounds, and must not learn from them."""
  decoder = make(SURVIVAL)
  state = decoding.start(decoder)
  steps = decoding.jitted(decoder, "steps")
  ended = steps(PARAMS, state, jnp.int32(100), num_idle=jnp.int32(3))
  later = decoding.decode(decoder, ended)
  memory_of = lambda s: s.drafter_state.memory
  done = np.asarray(ended.done)
  assert 3 <= done.sum() < 5
  for name in ("accepted", "seen", "tokens", "seconds"):
    old, new = (np.asarray(getattr(memory_of(s), name)) for s in (ended, later))
    np.testing.assert_array_equal(old[done], new[done])
    assert (old[~done] != new[~done]).any()


# -------------------------------------------------------- passes that are saved


@pytest.mark.parametrize("policy", ["2", "confidence(threshold=0.3)"])
def test_draft_passes_stop_when_no_row_continues(policy):
  counts = []
  drafter = of_model(policies.get(policy), toys.counted(MODEL, counts))
  decoder = specjax.make_decoder(MODEL, drafter=drafter)
  state = decoding.jitted(decoder, "init")(
    PARAMS, decoding.PROMPTS[:2], decoding.LENGTHS[:2], jax.random.key(0),
    buffer_length=40, max_new_tokens=30,
  )  # fmt: skip
  jax.effects_barrier()
  counts.clear()
  step = jax.jit(decoder.step)
  expected = 0
  for _ in range(6):
    state, info = step(PARAMS, state)
    jax.effects_barrier()
    depths = np.asarray(info.draft.topology().present.sum(axis=1) - 1)
    expected += depths.max()
    assert len(counts) == expected
  assert 6 <= expected < 6 * DEPTH
  assert set(counts) == {1, 2}
  if policy == "2":
    assert expected == 12


# ------------------------------------------------- a draft that has to catch up


def law_after(text, params=DRAFT):
  logits = toys.context_logits(params, text).astype(np.float64)
  return np.exp(logits - np.logaddexp.reduce(logits))


@pytest.mark.parametrize(
  "family", ["model", pytest.param("layer_skip", marks=pytest.mark.slow)]
)
def test_draft_cache_catches_up_after_undrafted_rounds(family):
  """One row drafts while others do not; then none does; then all do."""
  decoder = make("4", family)
  state = decoding.jitted(decoder, "init")(
    PARAMS, jnp.asarray(decoding.PROMPTS[:3]),
    jnp.asarray(decoding.LENGTHS[:3]), jax.random.key(1), buffer_length=70,
    max_new_tokens=jnp.full(3, 60), sampling=specjax.make_sampling(3),
  )  # fmt: skip
  step = decoding.jitted(decoder, "step")
  plan = [(0, 0, 1)] * 4 + [(0, 0, 0)] * 20 + [(0, 3, 0), (4, 0, 1), (4, 3, 2)]
  for wanted in plan:
    state = dataclasses.replace(state, max_depth=jnp.array(wanted, jnp.int32))
    texts = rows_of(state)
    state, info = step(PARAMS, state)
    present = np.asarray(info.draft.topology().present)
    assert tuple((present.sum(axis=1) - 1).tolist()) == wanted
    for row in range(3):
      for level in range(wanted[row]):
        drafted = np.asarray(info.draft.tokens[row, 1 : level + 1]).tolist()
        said = np.exp(np.asarray(info.draft.log_probs[row, level + 1]))
        params = DRAFT if family == "model" else TARGET
        np.testing.assert_allclose(
          said, law_after(texts[row] + drafted, params), atol=1e-5
        )
    if family == "model":
      held = state.drafter_state.inner
      for row, text in enumerate(rows_of(state)):
        count = int(held.length[row])
        tokens = np.asarray(held.keys[0][row, 0, :count, 0]).astype(int)
        assert count < len(text)
        assert tokens.tolist() == text[:count]
  assert model._CHUNK == 16


# ----------------------------------------------------------------- what is said


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("-1", "depth must be >= 0"),
    ("confidence(threshold=2)", "threshold must be in"),
    ("optimal(cost=-1)", "cost must be >= 0"),
  ],
)
def test_invalid_policies_are_rejected(text, message):
  with pytest.raises(ValueError, match=message):
    policies.get(text)


def test_policies_require_a_single_path():
  with pytest.raises(ValueError, match="needs one path"):
    of_model(policies.get("survival"), tree=paths(2, 2))


def test_fixed_policy_never_exceeds_its_depth():
  goes = []
  for level in range(4):
    seen = policies.PolicyContext(
      level=level, bins=jnp.zeros(1, jnp.int32), confidence=jnp.ones(1),
      survival=jnp.ones(1), memory=(),
    )  # fmt: skip
    goes += policies.fixed(2).continues(seen, jnp.ones(1, bool)).tolist()
  assert goes == [True, True, False, False]


def test_optimal_policy_assumes_typical_neighbors_in_batches():
  """By hand: with many rows a level pays by the row's mean, not by this one."""
  rows, bins = 1, jnp.zeros(1, jnp.int32)
  known = dataclasses.replace(
    estimates.Estimates.zeros(rows),
    accepted=jnp.full((1, 2, estimates.BINS + 1), 600.0),
    seen=jnp.full((1, 2, estimates.BINS + 1), 1000.0),
    tokens=jnp.full(1, 2000.0), seconds=jnp.full(1, 1000.0),
  )  # fmt: skip

  def goes(level, survival, rows):
    seen = policies.PolicyContext(
      level=level, bins=bins, confidence=jnp.ones(1),
      survival=jnp.full(1, survival), memory=known,
    )  # fmt: skip
    policy = policies.optimal(cost=0.15, rows=rows)  # 0.3 tokens a level
    return bool(policy.continues(seen, jnp.ones(1, bool))[0])

  # Alone: 0.6 of the survival, against 0.3. Of many rows: 0.6 ** (level + 1).
  assert [goes(1, s, 1) for s in (0.45, 0.55)] == [False, True]
  assert [goes(1, s, 100) for s in (0.01, 1.0)] == [True, True]  # 0.36
  assert [goes(2, s, 100) for s in (0.01, 1.0)] == [False, False]  # 0.216
  # Two: (0.6 s + 0.36) / 2 against 0.3.
  assert [goes(1, s, 2) for s in (0.35, 0.45)] == [False, True]


def test_policies_see_unwarped_draft_probabilities():
  """The bin of its largest probability, and a product, as in plain Python."""
  odd = policies.Policy(
    name="odd",
    gain=lambda seen: seen.survival * (seen.bins % 2),
    price=lambda seen: jnp.full_like(seen.survival, 0.4),
    accepts=lambda memory, token: jnp.full_like(token.top, 0.7),
  )  # 0.7 ** 2 is enough, and 0.7 ** 3 is not
  decoder = specjax.make_decoder(MODEL, drafter=of_model(odd), rule="token")
  state = decoding.start(decoder, temperature=0.3)
  depths = set()
  for _ in range(4):
    running, texts = ~np.asarray(state.done), rows_of(state)
    state, info = decoding.jitted(decoder, "step")(PARAMS, state)
    present = np.asarray(info.draft.topology().present).sum(axis=1) - 1
    tokens = np.asarray(info.draft.tokens)
    for row in np.flatnonzero(running):
      text, expected = texts[row], 0
      while True:
        top, expected = law_after(text).max(), expected + 1
        text = [*text, int(tokens[row, expected])]
        if (
          expected == 3
          or not np.searchsorted(estimates.EDGES, top, side="right") % 2
        ):
          break
      assert present[row] == expected
      depths.add(expected)
  assert len(depths) > 2


def test_policy_receives_finished_round_statistics():
  """What it is given: laws, acceptances and counts of each row."""
  recording = policies.Policy(
    name="recording",
    gain=lambda seen: seen.survival,
    price=lambda seen: jnp.zeros_like(seen.survival),
    begin=estimates.FinishedRound.zeros,
    learn=lambda memory, round_: round_,
  )
  decoder = specjax.make_decoder(MODEL, drafter=of_model(recording))
  state = decoding.start(decoder, temperature=0.7)
  before = rows_of(state)
  state, info = jax.jit(decoder.step)(PARAMS, state)
  actual = state.drafter_state.memory
  tokens = np.asarray(info.draft.tokens)
  for row, text in enumerate(before):
    for level in range(DEPTH):
      drafted = int(tokens[row, level + 1])
      p = law_after(text)
      q = law_after(text, TARGET)
      near = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4)
      near(actual.top[row, level], p.max())
      near(actual.confidence[row, level], p[drafted])
      warped = [law ** (1 / 0.7) / (law ** (1 / 0.7)).sum() for law in (p, q)]
      drawn_from, verified = (law[drafted] for law in warped)
      near(actual.accept[row, level], min(1, verified / drawn_from))
      text = [*text, drafted]
  assert actual.drafted.tolist() == [DEPTH] * 5
  assert actual.kept.tolist() == (np.asarray(info.num_emitted) - 1).tolist()
