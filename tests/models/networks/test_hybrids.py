"""Targets with recurrent layers in the decoding loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx

import specjax
from models.networks import eagle, gated_delta, mtp, stacked
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.rope import Rope
from models.networks.transformer import FINAL, Transformer, as_language_model
from specjax import drafters, exact, prefill, rules
from specjax.adaptive import policies
from specjax.state import StopReason
from specjax.tree import Tree, chain, k_ary, paths

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, ROWS = 2, 3
TREE = Tree((-1, 0, 0, 1, 1))
DRAFT = toys.table(VOCAB, seed=3)


@functools.cache
def hybrid():
  """Two layers and two; laws that depend on all of the text."""
  block = DenseSpec(width=8)
  delta = LayerSpec(
    attention=DeltaSpec(
      num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=3, kernel=3
    ),
    feed_forward=block,
  )
  full = LayerSpec(
    attention=AttentionSpec(
      num_heads=2, num_kv_heads=1, head_dim=4, output_gate=True,
      rope=Rope(theta=50.0, dim=2),
    ),
    feed_forward=block,
  )  # fmt: skip
  config = TransformerConfig(
    layers=(delta, full) * 2, vocab_size=VOCAB, embed_dim=6, norm_eps=1e-5,
    max_positions=99, tied_embeddings=False,
  )  # fmt: skip
  return random(Transformer(config, dtype=jnp.float64, rngs=nnx.Rngs(0)))


def random(module):
  """A module none of whose parameters could be left out unnoticed."""
  graphdef, state = nnx.split(module)
  rng = np.random.default_rng(5)
  state = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.7), state
  )
  return nnx.merge(graphdef, state)


def decoder_of(
  tree, rule, *, siblings="iid", scanned=True, num_refed=2, **options
):
  model, params = as_language_model(hybrid())
  if scanned:
    model = stacked.as_language_model(hybrid().config, dtype=jnp.float64)
    params = stacked.stack(hybrid())
  drafter = drafters.model(
    toys.table_model(VOCAB), tree=tree, siblings=siblings, vocab_size=VOCAB
  )
  drafter = dataclasses.replace(drafter, num_refed=num_refed)
  decoder = specjax.make_decoder(model, drafter=drafter, rule=rule, **options)
  params = specjax.Params(target=params, draft=jnp.asarray(DRAFT, jnp.float64))
  return decoder, params


# Each lossless rule but that on shared noise, which no sum is over.
DRAWN = {
  "token": (chain(2), "iid"),
  "block": (chain(2), "iid"),
  "match": (TREE, "iid"),
  "recursive": (TREE, "without_replacement"),
  "batch": (paths(2, 2), "iid"),
  "kseq": (TREE, "iid"),
  "transport": (TREE, "iid"),
  "greedy_draft": (TREE, "greedy"),
  "hub": (TREE, "hub"),
  "traversal": (TREE, "iid"),
  "score_block": (k_ary(2, 1), "without_replacement"),
  "multipath_block": (paths(2, 2), "iid"),
  "block_transport": (TREE, "iid"),
}


def after_three_rounds(decoder, params):
  """A state, and the law that the next round's tokens have there.

  Asserts that they have the target's.
  """
  state = decoder.init(
    params, np.array([[1, 0, 1, 1]]), [4], jax.random.key(0),
    buffer_length=20, max_new_tokens=16,
  )  # fmt: skip
  state = jax.jit(decoder.steps)(params, state, 3)
  assert not state.done.any()
  law, expected = exact.round_law(decoder, params, state)
  assert law.output.sum() == pytest.approx(1, abs=1e-9)
  assert np.abs(law.output - expected).max() < 1e-10
  return state, expected


def test_every_lossless_rule_is_covered():
  every = map(rules.get, rules.RULES)
  summed = {r.name for r in every if r.lossless and not r.with_noise}
  assert {*DRAWN} == summed


@pytest.mark.parametrize(
  "rule",
  [
    rule if rule == "token" else pytest.param(rule, marks=pytest.mark.slow)
    for rule in DRAWN
  ],
)
def test_round_output_matches_target_distribution(rule):
  tree, siblings = DRAWN[rule]
  decoder, params = decoder_of(tree, rule, siblings=siblings)
  state, expected = after_three_rounds(decoder, params)
  assert state.length[0] > 7
  # And the state's idea of the text is that of one pass over all of it.
  text = np.concatenate([state.tokens[0, : state.length[0]], [0] * 2])
  logits = forward(text[None])[0, state.length[0] - 1]
  first = expected.sum(axis=tuple(range(1, expected.ndim)))
  np.testing.assert_allclose(first, jax.nn.softmax(logits), atol=1e-12)


@pytest.mark.parametrize(
  ("tree", "rule", "num_depths"),
  [
    (TREE, "recursive", 1),
    pytest.param(TREE, "traversal", 2, marks=pytest.mark.slow),
  ],
)
def test_mtp_round_output_matches_target_distribution(tree, rule, num_depths):
  model = stacked.as_language_model(
    hybrid().config, dtype=jnp.float64, features=(FINAL,)
  )
  target = stacked.stack(hybrid())
  head = random(mtp.Mtp(
    mtp.config_of(hybrid().config, num_depths=num_depths),
    dtype=jnp.float64, rngs=nnx.Rngs(0),
  ))  # fmt: skip
  functions, head_params = eagle.as_feature_model(head)
  decoder = specjax.make_decoder(
    model,
    drafter=drafters.mtp(functions, tree=tree, vocab_size=VOCAB),
    rule=rule,
  )
  params = specjax.Params(target=target, draft=head_params)
  state, _ = after_three_rounds(decoder, params)
  assert state.counters.num_accepted[0] > 0


def forward(tokens):
  """Logits of whole rows, without a cache."""
  _, params = nnx.split(hybrid())
  return np.asarray(_forward(params, jnp.asarray(tokens)), np.float64)


@jax.jit
def _forward(params, tokens):
  return nnx.merge(nnx.graphdef(hybrid()), params)(tokens)[0].logits


PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, 11))


def ragged(decoder, params, *, length, budgets):
  return decoder.init(
    params, PROMPTS, np.array([11, 1, 6]), jax.random.key(1),
    buffer_length=length, max_new_tokens=np.array(budgets),
  )  # fmt: skip


def refilled(decoder, params, state, *, more):
  """Row 1 has another text, and row 0 goes on for `more` tokens."""
  state = decoder.admit(
    params, state, 1, PROMPTS[0, :9], 7, jax.random.key(2), max_new_tokens=8
  )
  return decoder.extend(
    params, state, 0, np.array([1, 0]), 2, max_new_tokens=more
  )


def error_of_rows(state):
  """Distance of recorded log-probabilities from those of one whole pass."""
  laws = jax.nn.log_softmax(forward(state.tokens), axis=-1)
  worst = 0.0
  for row, tokens in enumerate(np.asarray(state.tokens)):
    emitted = np.arange(state.prompt_length[row], state.length[row])
    assert len(emitted)
    expected = laws[row, emitted - 1, tokens[emitted]]
    apart = np.abs(expected - state.log_probs[row, emitted])
    worst = max(worst, float(apart.max()))
  return worst


@pytest.mark.parametrize(
  ("tree", "scanned"),
  [(TREE, True), pytest.param(chain(3), False, marks=pytest.mark.slow)],
)
def test_ragged_refilled_and_extended_rows_match_full_forward(
  monkeypatch, tree, scanned
):
  """A row's laws are its text's, with any past and any neighbors."""
  monkeypatch.setattr(prefill, "_CHUNK", 4)  # of prompts; rows end apart
  monkeypatch.setattr(gated_delta, "_CHUNK", 3)  # of those
  decoder, params = decoder_of(
    tree, "token" if tree.is_chain else "recursive", scanned=scanned,
    with_log_probs=True, num_refed=4,
  )  # fmt: skip

  @jax.jit
  def begin(params):
    state = ragged(decoder, params, length=24, budgets=(9, 3, 13))
    return decoder.generate(params, state)

  state = begin(params)
  assert error_of_rows(state) < 1e-10

  @jax.jit
  def go_on(params, state):
    return decoder.generate(params, refilled(decoder, params, state, more=2))

  state = go_on(params, state)
  assert [int(n) for n in state.prompt_length] == [22, 7, 6]
  assert error_of_rows(state) < 1e-10


def test_row_extended_near_buffer_end_matches_full_forward():
  """No window of states begins before what they hold."""
  decoder, params = decoder_of(chain(2), "token", with_log_probs=True)
  prompt = np.random.default_rng(3).integers(0, VOCAB, (1, 20))

  def run(params):
    state = decoder.init(
      params, prompt, [20], jax.random.key(1), buffer_length=26,
      max_new_tokens=0,
    )  # fmt: skip
    tokens = jnp.zeros(16, jnp.int32)
    state = decoder.extend(params, state, 0, tokens, 2, max_new_tokens=4)
    return decoder.generate(params, state)

  state = jax.jit(run)(params)
  assert int(state.length[0]) == 26
  assert error_of_rows(state) < 1e-10


@pytest.mark.slow
def test_admission_reuses_all_or_none_of_a_row():
  """States in between are gone: such a row ends, and says so."""
  decoder, params = decoder_of(chain(2), "token", with_log_probs=True)
  prompt = np.array([1, 0, 1, 1, 0, 1])

  def run(params, keep):
    state = decoder.init(
      params, prompt[None], [6], jax.random.key(1), buffer_length=30,
      max_new_tokens=8,
    )  # fmt: skip
    state = decoder.generate(params, state)
    state = decoder.admit(
      params, state, 0, prompt, 4, jax.random.key(2), max_new_tokens=6,
      source=0, keep=keep,
    )  # fmt: skip
    return decoder.generate(params, state)

  run = jax.jit(run)
  for keep in (0, 14):
    state = run(params, keep)
    assert int(state.length[0]) == keep + 10
    assert error_of_rows(state) < 1e-10
  assert int(run(params, 7).stop_reason[0]) == StopReason.NAN_LOGITS


def drafting_with_states(scale):
  """A decoder whose draft is the target, but for the size of its weights."""
  model = stacked.as_language_model(hybrid().config, dtype=jnp.float64)
  target = stacked.stack(hybrid())
  decoder = specjax.make_decoder(
    model,
    drafter=drafters.model(model, tree=chain(2), vocab_size=VOCAB),
    rule="token",
  )
  draft = jax.tree.map(lambda x: scale * x, target)
  return decoder, specjax.Params(target=target, draft=draft)


def test_recurrent_draft_round_matches_target_distribution():
  decoder, params = drafting_with_states(0.5)
  state, _ = after_three_rounds(decoder, params)
  accepted = state.counters.rank_accepted[0, 0]
  assert 0 < accepted < state.counters.num_drafted[0] - 0.01


def test_recurrent_self_draft_is_accepted_after_rollbacks(monkeypatch):
  """Also after tokens are taken back: all of the target's own is accepted."""
  monkeypatch.setattr(prefill, "_CHUNK", 4)
  decoder, params = drafting_with_states(1.0)

  def run(params):
    state = ragged(decoder, params, length=60, budgets=(12, 3, 16))
    state = decoder.generate(params, state)
    return decoder.steps(params, refilled(decoder, params, state, more=20), 3)

  state = jax.jit(run)(params)
  counters = state.counters
  assert (counters.num_drafted > 0).all()
  np.testing.assert_allclose(counters.rank_accepted[:, 0], counters.num_drafted)


def test_unsupported_recurrent_rollbacks_are_rejected():
  model, _ = as_language_model(hybrid())
  with pytest.raises(ValueError, match="draft with a model without them"):
    drafters.model(model, tree=TREE, vocab_size=VOCAB)
  with pytest.raises(ValueError, match="roll back only one"):
    drafters.model(
      model, tree=chain(2), vocab_size=VOCAB, policy=policies.survival()
    )
  with pytest.raises(ValueError, match="target rolls back several passes"):
    drafters.layer_skip(model, tree=chain(2), vocab_size=VOCAB)
