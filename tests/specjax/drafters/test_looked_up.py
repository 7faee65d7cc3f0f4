"""Drafters that look up: honest, lossless, row by row; and what breaks them."""

import dataclasses

import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import exact, random
from specjax.drafters import lookahead, rest, suffix
from specjax.drafters.families import rasd
from specjax.drafters.shared import corpus
from specjax.siblings import IID, TOP_K, WITHOUT_REPLACEMENT
from specjax.tree import Tree, chain
from specjax.warp import make_sampling

LIMIT, VOCAB = 1e-10, 3
MODEL = toys.table_model(VOCAB)
# Laws of few contexts: what is guessed comes again.
TARGET = toys.table(VOCAB, seed=0, contexts=5).astype(np.float64)
DRAFT = toys.near(TARGET, noise=1.0, seed=1).astype(np.float64)
CORPUS = corpus.build(np.random.default_rng(0).integers(0, 3, (4, 9)).tolist())
FAMILY = Tree((-1, 0, 0, 1))
RETRIEVAL = dict(vocab_size=VOCAB, max_match=3, max_hits=9, min_prob=0)


def of_rasd(siblings, tree=FAMILY, **options):
  return rasd.rasd(
    MODEL, tree=tree, siblings=siblings, nodes=7, tokens=3,
    num_retrieved=6, nodes_per_match=9, corpus=True, **RETRIEVAL,
    **options,
  )  # fmt: skip


DRAFTERS = {
  "lookahead": lookahead(
    window=2, tokens=2, num_guesses=2, pool_size=32, vocab_size=VOCAB
  ),
  "suffix": suffix(nodes=4, tokens=2, **RETRIEVAL),
  "both": suffix(nodes=4, tokens=2, corpus=True, **RETRIEVAL),
  "rest": rest(nodes=4, tokens=2, **RETRIEVAL),
  "rasd certain": of_rasd(TOP_K),
  "rasd mixed": of_rasd(IID),
  "rasd distinct": of_rasd(WITHOUT_REPLACEMENT),
}


def params_of(drafter, dtype=None):
  """Parameters of the pair, with what the drafter reads."""
  index = jax.tree.map(jnp.asarray, CORPUS)
  draft = index
  if drafter.name == "rasd":
    draft = rasd.Parts(model=jnp.asarray(DRAFT, dtype), corpus=index)
  return specjax.Params(target=jnp.asarray(TARGET, dtype), draft=draft)


# --------------------------------------------------------------- what they say


@pytest.mark.parametrize(
  "name",
  [
    "lookahead", "both", "rasd mixed",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("suffix", "rest", "rasd certain", "rasd distinct")
    ),
  ],
)  # fmt: skip
def test_reported_log_probs_are_honest_and_ignore_stale_state(name):
  drafter = DRAFTERS[name]
  actual = exact.check_drafter(
    drafter, params_of(drafter, np.float32), MODEL, vocab_size=VOCAB,
    prompts=np.array([[0, 1, 2, 0, 1, 2], [1, 1, 2, 1, 1, 0], [2] * 6]),
  )  # fmt: skip
  drawn = name in ("rasd mixed", "rasd distinct")
  assert actual.method == ("exact" if drawn else "deterministic")


def later(drafter, params):
  """A row after some rounds, float64, and how it was decoded."""
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule="match")
  state = decoder.init(
    params, np.array([[1, 0, 2, 0, 1, 0]]), [6], jax.random.key(3),
    buffer_length=40, max_new_tokens=30,
  )  # fmt: skip
  return jax.jit(decoder.steps)(params, state, 3)


def round_of(drafter, rule, state, params):
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule=rule)
  return exact.round_law(decoder, params, state)


@pytest.fixture(scope="module")
def begun():
  """`drafter -> (state, params)`, each made once."""
  made = {}

  def of(name):
    if name not in made:
      drafter = DRAFTERS[name]
      params = params_of(drafter)
      made[name] = later(drafter, params), params
    return made[name]

  return of


CASES = [
  ("lookahead", "match"), ("both", "match"), ("rasd mixed", "recursive"),
  *(
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
      ("lookahead", "traversal"), ("suffix", "match"), ("rest", "match"),
      ("rasd certain", "match"), ("rasd mixed", "traversal"),
      ("rasd distinct", "recursive"),
    )
  ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_round_output_matches_target_distribution(begun, name, rule):
  with jax.enable_x64(True):
    state, params = begun(name)
    law, expected = round_of(DRAFTERS[name], rule, state, params)
  assert np.abs(law.output - expected).max() < LIMIT
  assert law.expected_accepted > 0.02  # something was looked up


# -------------------------------------------------------------- in slots, ended


LOOPS = jnp.asarray(toys.table(decoding.VOCAB, seed=3, contexts=7))
OWN = toys.table_model(decoding.VOCAB)
SLOTS = {
  "lookahead": (
    lookahead(
      window=3, tokens=2, num_guesses=3, pool_size=40, vocab_size=decoding.VOCAB
    ),
    specjax.Params(target=LOOPS),
  ),
  "rasd": (
    rasd.rasd(
      OWN, tree=chain(2), siblings=IID, nodes=6, tokens=3,
      num_retrieved=32, vocab_size=decoding.VOCAB,
    ),
    specjax.Params(
      target=LOOPS,
      draft=rasd.Parts(
        model=jnp.asarray(toys.near(np.asarray(LOOPS), noise=0.8, seed=1))
      ),
    ),
  ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SLOTS)
def used(request):
  """A decoder of texts that repeat, its parameters, and rows of it in use."""
  drafter, params = SLOTS[request.param]
  decoder = specjax.make_decoder(OWN, drafter=drafter, rule="recursive")
  state = begin(decoder, params, decoding.PROMPTS, decoding.LENGTHS, keys(5))
  state = decoding.jitted(decoder, "steps")(params, state, jnp.int32(6))
  return decoder, params, state


def keys(count):
  return random.row_keys(jax.random.key(7), jnp.arange(count))


def begin(decoder, params, prompts, lengths, keys, temperature=0.4):
  return decoding.jitted(decoder, "init")(
    params, jnp.asarray(prompts), jnp.asarray(lengths), keys,
    buffer_length=40, max_new_tokens=jnp.int32(18),
    sampling=make_sampling(len(lengths), temperature=temperature),
  )  # fmt: skip


@pytest.mark.parametrize("used", ["lookahead"], indirect=True)
def test_extended_row_pools_ngrams_across_the_seam(used):
  """Of a row that is extended, the pool has all sequences across the seam."""
  decoder, params, state = used
  more = jnp.array([1, 2, 3, 0], jnp.int32)
  after = jax.jit(decoder.extend)(
    params, state, jnp.int32(2), more, jnp.int32(3), max_new_tokens=jnp.int32(5)
  )
  text = decoding.rows_of(after)[2]
  assert text[-3:] == [1, 2, 3]
  assert after.drafter_state.tail[2].tolist() == text[-3:-1]
  pool = after.drafter_state.pool
  held = np.asarray(pool.grams[2])[np.argsort(-np.asarray(pool.stamps[2]))]
  expected = [text[i : i + 3] for i in range(len(text) - 4, len(text) - 7, -1)]
  assert held[:3].tolist() == expected


def test_nan_logits_stop_the_same_rows_as_plain_decoding(used):
  """Those of lanes and of what was looked up harm nobody."""
  decoder, params, _ = used
  table = np.asarray(toys.table(decoding.VOCAB, seed=3)).copy()
  table[::40] = np.nan
  broken = dataclasses.replace(params, target=jnp.asarray(table))
  if params.draft is not None:
    draft = rasd.Parts(model=jnp.asarray(table))
    broken = dataclasses.replace(broken, draft=draft)

  def run(decoder):
    state = begin(
      decoder, broken, decoding.PROMPTS, decoding.LENGTHS, keys(5),
      temperature=0.0,
    )  # fmt: skip
    return decoding.jitted(decoder, "generate")(broken, state)

  actual, plain = run(decoder), run(specjax.make_decoder(OWN))
  for row, whole in zip(*map(decoding.rows_of, (actual, plain)), strict=True):
    assert row == whole[: len(row)]  # of a broken round nothing is emitted
  assert actual.stop_reason.tolist() == plain.stop_reason.tolist()
  assert len(set(plain.stop_reason.tolist())) == 2


def test_draft_model_log_probs_reflect_all_committed_tokens():
  """Rounds that commit nothing drafted, and all that can be."""
  drafter, params = SLOTS["rasd"]
  table = np.asarray(params.draft.model)
  decoder = specjax.make_decoder(OWN, drafter=drafter, rule="recursive")
  cold = 0.1
  state = begin(
    decoder, params, decoding.PROMPTS, decoding.LENGTHS, keys(5), cold
  )
  emitted = set()
  for _ in range(6):
    texts, running = decoding.rows_of(state), ~np.asarray(state.done)
    state, info = decoding.jitted(decoder, "step")(params, state)
    emitted |= set(np.asarray(info.num_emitted)[running].tolist())
    for row in np.flatnonzero(running):
      tokens = np.asarray(info.draft.tokens[row]).tolist()
      for node in (1, 2):  # drawn
        text = texts[row] + tokens[1:node]
        logits = toys.context_logits(table, text) / cold
        np.testing.assert_allclose(
          info.draft.log_probs[row, node], jax.nn.log_softmax(logits), atol=1e-3
        )
  assert {1, 3, 4} <= emitted
