"""The loop: exact, ragged, one program, and honest about its ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from scipy import stats

import specjax
from specjax import drafters, exact, rules, sampling, siblings
from specjax import tree as tree_lib
from specjax.tree import chain, k_ary, paths
from specjax.types import Origin, StopReason
from specjax.warp import make_sampling, warp

VOCAB = 11
TARGET = toys.table(VOCAB, seed=0)
DRAFT = toys.near(TARGET, noise=0.8, seed=1)
MODEL = toys.table_model(VOCAB)
PARAMS = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (5, 6)).astype(np.int32)
LENGTHS = np.array([1, 3, 6, 2, 5], np.int32)
BUDGETS = np.array([30, 21, 34, 5, 1], np.int32)


def make_drafters(**common):
  model = drafters.model.drafter
  return {
    "plain": drafters.plain.drafter(vocab_size=VOCAB),
    "model": model(MODEL, tree=chain(3), **common),
    "model1": model(MODEL, tree=chain(1), **common),
    "paths": model(MODEL, tree=paths(3, 3), **common),
    "ngram": drafters.ngram.drafter(num_speculative_tokens=3, **common),
    "layer_skip": drafters.layer_skip.drafter(MODEL, tree=chain(3), **common),
    "layer_skip_paths": drafters.layer_skip.drafter(
      MODEL, tree=paths(2, 2), **common
    ),
  }


DRAFTERS = make_drafters(vocab_size=VOCAB)
PAIRS = [
  (rule, name)
  for rule in ("token", "match")
  for name, drafter in DRAFTERS.items()
  if rule != "token" or drafter.tree.is_chain
]
NO_STOP = (-1, -1)


@functools.cache
def make(drafter="model", rule="token", with_log_probs=False):
  """One decoder per combination, so that its programs are compiled once."""
  return specjax.make_decoder(
    MODEL, drafter=DRAFTERS[drafter], rule=rule, with_log_probs=with_log_probs
  )


@functools.cache
def jitted(decoder, name):
  function = getattr(decoder, name)
  static = "buffer_length" if name == "init" else None
  return jax.jit(function, static_argnames=static)


def start(
  decoder,
  *,
  rows=slice(None),
  key=0,
  prompts=PROMPTS,
  temperature=1.0,
  max_new_tokens=BUDGETS,
  stop_tokens=NO_STOP,
):
  ids = np.arange(len(PROMPTS))[rows]
  return jitted(decoder, "init")(
    PARAMS,
    jnp.asarray(prompts[rows]),
    jnp.asarray(LENGTHS[rows]),
    sampling.row_keys(jax.random.key(key), jnp.asarray(ids)),
    buffer_length=40,
    max_new_tokens=jnp.asarray(max_new_tokens[rows]),
    sampling=make_sampling(len(ids), temperature=temperature),
    stop_tokens=jnp.asarray(stop_tokens),
  )


def decode(decoder, state, params=PARAMS):
  return jitted(decoder, "generate")(params, state)


def rows_of(state):
  """The committed tokens of every row."""
  return [
    np.asarray(state.tokens[b, : state.length[b]]).tolist()
    for b in range(state.tokens.shape[0])
  ]


def greedy_reference(prompt, count):
  context = list(prompt)
  for _ in range(count):
    context.append(int(np.argmax(toys.context_logits(TARGET, context))))
  return context


# ---------------------------------------------------------------- exactness


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_greedy_rows_equal_a_plain_python_argmax(rule, drafter):
  decoder = make(drafter, rule)
  state = decode(decoder, start(decoder, temperature=0.0))
  for b, row in enumerate(rows_of(state)):
    assert row == greedy_reference(PROMPTS[b, : LENGTHS[b]], BUDGETS[b])


LOOP_TREES = {
  ("without_replacement", k_ary(2, 2)): ("recursive", "traversal"),
  ("top_k", k_ary(2, 2)): ("typical(epsilon=0.5, delta=1.0)",),
  ("greedy", k_ary(2, 1)): ("greedy_draft",),
  ("hub", k_ary(2, 2)): ("hub",),
  ("shared_noise", paths(2, 2)): ("gumbel_list",),
  ("iid", paths(2, 2)): (
    "batch",
    "kseq",
    "bucketed",
    "transport",
    "canonical",
    "multipath_block",
  ),
  ("iid", chain(3)): ("block", "decoding_opt"),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
  ("how", "tree", "rule"),
  [(*key, rule) for key, names in LOOP_TREES.items() for rule in names],
  ids=lambda x: x if isinstance(x, str) else "tree",
)
def test_every_rule_decodes_greedily_and_counts(how, tree, rule):
  """At temperature 0 lossless rules, in the loop, give the argmax text."""
  drafter = drafters.model.drafter(
    MODEL, tree=tree, siblings=siblings.get(how), vocab_size=VOCAB
  )
  decoder = specjax.make_decoder(MODEL, drafter=drafter, rule=rule)
  rows = len(PROMPTS)
  state = decoder.init(
    PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
    buffer_length=26, max_new_tokens=20,
    sampling=make_sampling(rows, temperature=[0.0, 0.0, 0.0, 0.8, 0.8]),
  )  # fmt: skip
  state = jax.jit(decoder.generate)(PARAMS, state)
  counters = state.counters
  distance = np.asarray(counters.total_variation)
  if decoder.rule.lossless:
    assert (distance == 0).all()
    for b, row in enumerate(rows_of(state)[:3]):
      assert row == greedy_reference(PROMPTS[b, : LENGTHS[b]], 20)
  else:
    assert (distance[3:] > 0).all()
  # Every visited node offers its children; those taken were offered.
  assert (counters.rank_accepted <= counters.rank_offered + 1e-4).all()
  assert int(counters.num_accepted.sum()) > 0


def small_drafters(model, vocab_size):
  common = dict(tree=chain(2), vocab_size=vocab_size)
  return {
    "plain": drafters.plain.drafter(vocab_size=vocab_size),
    "model": drafters.model.drafter(model, **common),
    "paths": drafters.model.drafter(
      model, tree=paths(2, 2), vocab_size=vocab_size
    ),
    "ngram": drafters.ngram.drafter(
      num_speculative_tokens=2, vocab_size=vocab_size
    ),
    "layer_skip": drafters.layer_skip.drafter(model, **common),
  }


@pytest.mark.heavy
@pytest.mark.parametrize(
  ("rule", "drafter"),
  [
    ("token", "plain"),
    ("token", "model"),
    ("token", "ngram"),
    ("token", "layer_skip"),
    ("match", "paths"),
  ],
)
def test_sampled_blocks_follow_the_targets_joint_law(rule, drafter):
  """A chi-squared test through the shipped loop, with its power asserted."""
  runs, alpha, length, vocab = 60_000, 1e-6, 3, 3
  target, prefix = toys.table(vocab, seed=3, scale=0.7), (1, 2, 1, 2)
  model = toys.table_model(vocab)
  decoder = specjax.make_decoder(
    model, drafter=small_drafters(model, vocab)[drafter], rule=rule
  )
  params = specjax.Params(
    target=jnp.asarray(target),
    draft=jnp.asarray(toys.near(target, noise=1.0, seed=4)),
  )
  settings = make_sampling(1, temperature=0.9)

  @jax.jit
  def run(key):
    state = decoder.init(
      params,
      jnp.broadcast_to(jnp.asarray(prefix), (runs, len(prefix))),
      jnp.full((runs,), len(prefix)),
      key,
      buffer_length=len(prefix) + length,
      max_new_tokens=length,
      sampling=make_sampling(runs, temperature=0.9),
    )
    return decoder.generate(params, state).tokens

  drawn = np.asarray(run(jax.random.key(7)))[:, len(prefix) :][:, :length]
  counts = np.bincount(drawn @ [vocab**2, vocab, 1], minlength=vocab**length)
  law = toys.context_law(
    target,
    lambda x: np.exp(
      np.asarray(warp(jnp.asarray(x)[None], settings)[0], np.float64)
    ),
  )
  expected = exact.target_block_law(law, length=length, prefix=prefix).ravel()
  expected *= runs / expected.sum()
  assert expected.min() > 5
  cells = vocab**length
  limit = stats.chi2.isf(alpha, cells - 1)
  # An even shift of total variation 0.02 over these cells would be seen.
  shift = runs * (2 * 0.02 / cells) ** 2 * (runs / expected).sum()
  assert stats.ncx2.sf(limit, cells - 1, shift) > 0.99
  assert ((counts - expected) ** 2 / expected).sum() < limit


@pytest.mark.gpu
def test_a_step_draws_node_and_token_from_the_rules_laws():
  """Over many rows, counts agree with the summed laws of the very step."""
  runs = 40_000
  decoder = make("model", "token")
  init = jax.jit(
    lambda key: decoder.init(
      PARAMS, jnp.full((runs, 2), 3), jnp.full((runs,), 2), key,
      buffer_length=9, max_new_tokens=7,
    )
  )  # fmt: skip
  _, info = jax.jit(decoder.step)(PARAMS, init(jax.random.key(3)))
  verification = decoder.rule.verify(
    decoder.drafter.tree,
    decoder.drafter.siblings,
    info.draft,
    info.target_log_probs,
  )
  np.testing.assert_allclose(
    verification.node_probs, info.node_probs, rtol=1e-5, atol=1e-6
  )
  after = np.exp(np.asarray(verification.next_log_probs(info.node)))
  token = np.take_along_axis(
    np.asarray(info.tokens), np.asarray(info.num_emitted)[:, None] - 1, 1
  )[:, 0]
  for laws, drawn in ((info.node_probs, info.node), (after, token)):
    laws = np.asarray(laws, np.float64)
    counts = np.bincount(drawn, minlength=laws.shape[1])
    spread = np.sqrt((laws * (1 - laws)).sum(0))
    assert (np.abs(counts - laws.sum(0)) <= 6 * spread + 1e-9).all()
    assert spread.max() < 0.01 * runs  # so a shift of 6% would be seen


def test_reported_draft_law_is_the_law_sampled_from():
  """Drafted tokens, pooled over many rows, follow the reported law."""
  runs = 40_000
  decoder = make("model1")
  init = jax.jit(
    lambda key: decoder.init(
      PARAMS, jnp.full((runs, 2), 3), jnp.full((runs,), 2), key,
      buffer_length=4, max_new_tokens=2,
      sampling=make_sampling(runs, temperature=0.7, top_p=0.9),
    )
  )  # fmt: skip
  _, info = jax.jit(decoder.step)(PARAMS, init(jax.random.key(0)))
  law = np.exp(np.asarray(info.draft.log_probs[0, 0], np.float64))
  counts = np.bincount(info.draft.tokens[:, 1], minlength=VOCAB)
  assert (counts[law == 0] == 0).all()
  some = law > 0
  spread = np.sqrt(runs * law * (1 - law))
  assert (np.abs(counts - runs * law)[some] < 6 * spread[some]).all()


@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d != "plain"])
def test_expected_acceptance_agrees_with_realised_acceptance(drafter):
  runs = 4000
  decoder = make(drafter, "match")
  init = jax.jit(
    lambda key: decoder.init(
      PARAMS, jnp.full((runs, 3), 2), jnp.full((runs,), 3), key,
      buffer_length=14, max_new_tokens=11, stop_tokens=(4,),
    )
  )  # fmt: skip
  c = jax.jit(decoder.generate)(PARAMS, init(jax.random.key(1))).counters
  gap = np.asarray(c.num_accepted) - np.asarray(c.expected_accepted)
  assert abs(gap.mean()) < 5 * gap.std() / np.sqrt(runs)


# ------------------------------------------------- one program, ragged batches


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_while_loop_equals_a_python_loop_over_step(rule, drafter):
  decoder = make(drafter, rule)
  state = start(decoder)
  step = jitted(decoder, "step")
  while not bool(state.done.all()):
    state, _ = step(PARAMS, state)
  whole = decode(decoder, start(decoder))
  assert rows_of(whole) == rows_of(state)
  # Sums of probabilities may be rounded apart by two programs; counts may not.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  jax.tree.map(close, whole.counters, state.counters)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_a_row_does_not_depend_on_its_batch(rule, drafter, temperature):
  decoder = make(drafter, rule)
  options = dict(temperature=temperature, stop_tokens=(7,))
  together = rows_of(decode(decoder, start(decoder, **options)))
  order = np.array([3, 0, 4, 2, 1])
  shuffled = rows_of(decode(decoder, start(decoder, rows=order, **options)))
  assert shuffled == [together[i] for i in order]
  for b in range(len(PROMPTS)):
    alone = decode(decoder, start(decoder, rows=slice(b, b + 1), **options))
    assert rows_of(alone) == together[b : b + 1]


def test_a_row_does_not_depend_on_what_its_prompt_is_padded_with():
  decoder = make("paths", "match")
  other = np.where(np.arange(6) < LENGTHS[:, None], PROMPTS, 9)
  wider = np.pad(other, ((0, 0), (0, 7)), constant_values=5)
  expected = rows_of(decode(decoder, start(decoder)))
  assert rows_of(decode(decoder, start(decoder, prompts=other))) == expected
  assert rows_of(decode(decoder, start(decoder, prompts=wider))) == expected


@pytest.mark.gpu
def test_nine_rows_take_the_scatter_path_to_the_same_tokens():
  decoder = make("paths", "match")
  rows = np.array([0, 1, 2, 3, 4, 4, 3, 2, 1])
  expected = rows_of(decode(decoder, start(decoder)))
  many = rows_of(decode(decoder, start(decoder, rows=rows)))
  assert many == [expected[i] for i in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["model", "paths", "ngram", "layer_skip"])
def test_one_trace_for_all_prompts_lengths_settings_and_budgets(drafter):
  decoder = make(drafter, "match")
  traces = []

  @jax.jit
  def run(prompts, lengths, keys, budgets, settings, stops):
    traces.append(1)
    state = decoder.init(
      PARAMS, prompts, lengths, keys, buffer_length=40,
      max_new_tokens=budgets, sampling=settings, stop_tokens=stops,
    )  # fmt: skip
    return decoder.generate(PARAMS, state).tokens

  for seed in range(3):
    rng = np.random.default_rng(seed)
    run(
      jnp.asarray(rng.integers(0, VOCAB, (5, 6))),
      jnp.asarray(rng.integers(1, 7, 5)),
      sampling.row_keys(jax.random.key(seed), jnp.arange(5)),
      jnp.asarray(rng.integers(1, 30, 5)),
      make_sampling(5, temperature=seed * 0.5, top_p=1 - seed / 4),
      jnp.array([seed]),
    )
  assert len(traces) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_generate_keeps_the_host_out(rule, drafter):
  """No callback, infeed or outfeed in the program of the whole loop."""
  decoder = make(drafter, rule)
  program = jitted(decoder, "generate").lower(PARAMS, start(decoder)).as_text()
  assert "while" in program
  for word in ("callback", "infeed", "outfeed", "send", "recv"):
    assert word not in program


@pytest.mark.gpu
def test_steps_can_be_taken_a_few_at_a_time():
  decoder = make("model")
  expected = rows_of(decode(decoder, start(decoder)))
  state = start(decoder)
  run = jitted(decoder, "steps")
  seen = np.asarray(state.length)
  while not bool(state.done.all()):
    state = run(PARAMS, state, 2)
    assert (np.asarray(state.length) >= seen).all()
    seen = np.asarray(state.length)
  assert rows_of(state) == expected


@pytest.mark.gpu
def test_the_callers_arrays_survive_donation():
  decoder = make("model")
  prompts, lengths = jnp.asarray(PROMPTS), jnp.asarray(LENGTHS)
  keys = sampling.row_keys(jax.random.key(0), jnp.arange(5))
  settings = make_sampling(5)
  stops, budget = jnp.array([3]), jnp.full(5, 4)
  state = decoder.init(
    PARAMS, prompts, lengths, keys, buffer_length=16, max_new_tokens=budget,
    sampling=settings, stop_tokens=stops,
  )  # fmt: skip
  jax.jit(decoder.generate, donate_argnums=1)(PARAMS, state)
  assert state.target_cache.keys[0].is_deleted()
  for x in jax.tree.leaves((prompts, lengths, settings, stops, budget, PARAMS)):
    assert not x.is_deleted()
  assert not keys.is_deleted()


# ----------------------------------------------------- ends, counts, log-probs


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
def test_counts_add_up(rule, drafter):
  decoder = make(drafter, rule)
  state = decode(decoder, start(decoder, stop_tokens=(2,)))
  c, tree = jax.device_get(state.counters), decoder.drafter.tree
  emitted = np.asarray(state.length - state.prompt_length)
  assert (emitted <= BUDGETS).all()
  assert (c.accept_counts.sum(1) == c.num_target_calls).all()
  depths = np.arange(tree.max_depth + 1)
  assert (c.accept_counts @ depths == c.num_accepted).all()
  assert (c.num_drafted == c.num_target_calls * tree.num_drafted).all()
  # A call emits its accepted tokens and one more, unless the row ends first.
  short = c.num_accepted + c.num_target_calls - emitted
  assert set(short.tolist()) <= {0, 1}
  for b, row in enumerate(np.asarray(state.origins)):
    new = row[LENGTHS[b] : state.length[b]]
    assert (row[: LENGTHS[b]] == Origin.PROMPT).all()
    assert (new == Origin.ACCEPTED).sum() == c.num_accepted[b]
    assert (new != Origin.PROMPT).all()


def test_a_budget_of_zero_emits_nothing():
  decoder = make("model")
  budgets = np.array([3, 0, 2, 0, 1])
  state = decode(decoder, start(decoder, max_new_tokens=budgets))
  np.testing.assert_array_equal(state.length - LENGTHS, budgets)
  assert (state.stop_reason == StopReason.LENGTH).all()
  assert state.counters.num_target_calls[1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_decoding_works_with_x64_enabled(drafter):
  with jax.enable_x64(True):
    decoder = specjax.make_decoder(
      MODEL, drafter=make_drafters(vocab_size=VOCAB)[drafter], rule="match"
    )
    state = start(decoder, temperature=0.0)
    state = jax.jit(decoder.generate)(PARAMS, state)
    for b, row in enumerate(rows_of(state)):
      assert row == greedy_reference(PROMPTS[b, : LENGTHS[b]], BUDGETS[b])


def test_a_sampling_batch_of_another_size_is_refused():
  with pytest.raises(ValueError, match="sampling must have 5 rows"):
    make("model").init(
      PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0),
      buffer_length=40, max_new_tokens=3, sampling=make_sampling(2),
    )  # fmt: skip


@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_log_probs_are_the_unwarped_targets(rule, drafter):
  decoder = make(drafter, rule, with_log_probs=True)
  state = decode(decoder, start(decoder, temperature=0.5))
  for b, row in enumerate(rows_of(state)):
    for i in range(LENGTHS[b], len(row)):
      logits = toys.context_logits(TARGET, row[:i]).astype(np.float64)
      expected = logits[row[i]] - np.log(np.exp(logits).sum())
      assert state.log_probs[b, i] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("part", "after"), [("target", 4), ("draft", 0)])
def test_nan_logits_end_their_row_and_no_other(part, after):
  """One poisoned table row; rows that never read it are untouched."""
  decoder = make("model")
  clean = rows_of(decode(decoder, start(decoder, temperature=0.0)))
  victim = 2
  context = clean[victim][: LENGTHS[victim] + after]
  index = sum(
    (t + 1) * int(toys._PRIMES[i % len(toys._PRIMES)])
    for i, t in enumerate(context)
  ) % len(TARGET)  # fmt: skip
  table = {"target": TARGET, "draft": DRAFT}[part].copy()
  table[index] = np.nan
  params = dataclasses.replace(PARAMS, **{part: jnp.asarray(table)})
  state = start(decoder, temperature=0.0)
  state = decode(decoder, state, params)
  assert state.stop_reason[victim] == StopReason.NAN_LOGITS
  for b, row in enumerate(rows_of(state)):
    assert row == clean[b][: len(row)]
    if state.stop_reason[b] != StopReason.NAN_LOGITS:
      assert row == clean[b]
  assert (np.asarray(state.stop_reason) == StopReason.LENGTH).any()


def test_nan_on_nodes_that_are_not_reached_costs_nothing():
  """Greedy rows end with NaN exactly if plain decoding meets it too."""
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
    for row, whole in zip(rows_of(state), rows_of(clean), strict=True):
      assert row == whole[: len(row)]
  assert hit > 5


def test_rows_keep_their_own_sampling_settings():
  decoder = make("model")
  mixed = np.array([0.0, 1.0, 0.0, 1.0, 0.0])
  state = rows_of(decode(decoder, start(decoder, temperature=mixed)))
  greedy = rows_of(decode(decoder, start(decoder, temperature=0.0)))
  sampled = rows_of(decode(decoder, start(decoder, temperature=1.0)))
  for b, temperature in enumerate(mixed):
    assert state[b] == (greedy if temperature == 0 else sampled)[b]


def test_seeds_change_samples_and_repeat_them():
  decoder = make("model")
  first = rows_of(decode(decoder, start(decoder, key=1)))
  assert first == rows_of(decode(decoder, start(decoder, key=1)))
  assert first != rows_of(decode(decoder, start(decoder, key=2)))


def test_gradients_with_respect_to_the_draft_are_finite():
  """Rules are differentiable, zero probabilities included."""
  rng = np.random.default_rng(0)
  tree = tree_lib.chain(2)
  logits = jnp.asarray(rng.standard_normal((2, 3, 5)), jnp.float32)
  target = jax.nn.log_softmax(logits.at[0, 0, 1].set(-jnp.inf))
  tokens = jnp.array([[0, 1, 2], [0, 3, 4]])

  def expected_accepted(draft_logits):
    law = jax.nn.log_softmax(draft_logits)
    draft = specjax.Draft(tokens=tokens, log_probs=law)
    found = rules.get("token").verify(tree, siblings.IID, draft, target)
    after = jnp.exp(found.next_log_probs(jnp.array([0, 1])))
    return found.node_probs @ jnp.arange(3.0) @ jnp.ones(2) + after[0, 0]

  grad = jax.grad(expected_accepted)(
    jnp.asarray(rng.standard_normal((2, 3, 5)), jnp.float32)
  )
  assert np.isfinite(grad).all()
  assert np.abs(grad).max() > 0


def test_vocabularies_may_be_padded_differently():
  wide = toys.table_model(VOCAB + 3)
  padded = jnp.pad(PARAMS.draft, ((0, 0), (0, 3)), constant_values=50.0)
  drafter = drafters.model.drafter(wide, tree=chain(3), vocab_size=VOCAB)
  decoder = specjax.make_decoder(MODEL, drafter=drafter)
  params = dataclasses.replace(PARAMS, draft=padded)
  state = decode(decoder, start(decoder), params)
  assert rows_of(state) == rows_of(decode(make("model"), start(make("model"))))


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(buffer_length=5), "prompts of 6 tokens do not fit"),
    (dict(max_new_tokens=40), "must fit into buffer_length"),
    (dict(max_new_tokens=-1), "must fit into buffer_length"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
  options = {"buffer_length": 40, "max_new_tokens": 3} | options
  with pytest.raises(ValueError, match=message):
    make("model").init(
      PARAMS, jnp.asarray(PROMPTS), LENGTHS, jax.random.key(0), **options
    )


def test_ids_that_are_no_tokens_are_refused():
  for wrong in (-1, VOCAB):
    prompts = PROMPTS.copy()
    prompts[1, 2] = wrong
    with pytest.raises(ValueError, match=r"prompt tokens must be in 0\.\.10"):
      make("model").init(
        PARAMS, jnp.asarray(prompts), LENGTHS, jax.random.key(0),
        buffer_length=40, max_new_tokens=3,
      )  # fmt: skip


@pytest.mark.parametrize("lengths", [[0, 1, 2, 3, 4], [7, 1, 1, 1, 1]])
def test_empty_prompts_and_wrong_lengths_are_refused(lengths):
  with pytest.raises(ValueError, match="prompt lengths must be in"):
    make("model").init(
      PARAMS, jnp.asarray(PROMPTS), np.array(lengths), jax.random.key(0),
      buffer_length=40, max_new_tokens=3,
    )  # fmt: skip


def test_a_buffer_beyond_the_models_positions_is_refused():
  short = toys.table_model(VOCAB, max_positions=32)
  decoder = specjax.make_decoder(short)
  with pytest.raises(ValueError, match="target model has 32 positions"):
    start(decoder)
  drafter = drafters.model.drafter(short, tree=chain(2), vocab_size=VOCAB)
  with pytest.raises(ValueError, match="draft model has 32 positions"):
    start(specjax.make_decoder(MODEL, drafter=drafter))


def test_parts_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="unknown rule 'tokens'"):
    make("model", "tokens")
  with pytest.raises(ValueError, match="verifies a single path"):
    make("paths", "token")
  with pytest.raises(ValueError, match="target's vocabulary must hold 12"):
    specjax.make_decoder(MODEL, vocab_size=12)
  with pytest.raises(ValueError, match="draft's vocabulary must hold 12"):
    drafters.model.drafter(MODEL, tree=chain(1), vocab_size=12)
  small = drafters.ngram.drafter(num_speculative_tokens=2, vocab_size=7)
  decoder = specjax.make_decoder(MODEL, drafter=small)
  state = start(decoder)
  with pytest.raises(ValueError, match="must return log_probs of shape"):
    decoder.step(PARAMS, state)
  with pytest.raises(ValueError, match="num_speculative_tokens >= 1"):
    drafters.model.drafter(MODEL, tree=chain(0), vocab_size=VOCAB)
  with pytest.raises(ValueError, match="num_speculative_tokens must be >= 0"):
    drafters.ngram.drafter(num_speculative_tokens=-1, vocab_size=VOCAB)
  with pytest.raises(ValueError, match="at most 2 a node"):
    drafters.layer_skip.drafter(
      MODEL, tree=k_ary(3), siblings=siblings.HUB, vocab_size=VOCAB
    )
  with pytest.raises(ValueError, match="12 children of one node for 11"):
    drafters.layer_skip.drafter(
      MODEL, tree=k_ary(12), siblings=siblings.TOP_K, vocab_size=VOCAB
    )
  with pytest.raises(ValueError, match="separate paths of equal length"):
    drafters.layer_skip.drafter(
      MODEL,
      tree=k_ary(2, 2),
      siblings=siblings.SHARED_NOISE,
      vocab_size=VOCAB,
    )


def test_a_target_that_returns_the_wrong_shape_is_named():
  broken = dataclasses.replace(MODEL, vocab_size=VOCAB + 1)
  decoder = specjax.make_decoder(broken, vocab_size=VOCAB)
  state = start(decoder)
  with pytest.raises(ValueError, match="must return logits of shape"):
    decoder.step(PARAMS, state)


def test_the_empty_tree_proposes_nothing():
  assert DRAFTERS["plain"].tree == tree_lib.chain(0)
