"""The text of a row goes on: what is appended is read, and nothing again."""

import dataclasses
import functools

import decoding
import forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import MODEL, PARAMS, PROMPTS, VOCAB, decode, rows_of

import specjax
from specjax import drafters, prefill
from specjax.state import StopReason
from specjax.tree import Tree
from specjax.warp import make_sampling

BUDGETS = np.array([6, 9, 9, 5, 3], np.int32)
MORE = np.array([7, 1, 0, 10, 3, 3], np.int32)
WIDTH = 8
FEATURES = specjax.make_decoder(
  toys.table_model(VOCAB, layers=2), drafter=forms.feature_head(VOCAB)
)
DECODERS = {
  # A draft that lacks the last accepted token, one whose leaves are not fed,
  # one on the target's cache, none, and one that reads features.
  "model": decoding.make("model"),
  "paths": decoding.make("paths", "match"),
  "layer_skip": decoding.make("layer_skip"),
  "ngram": decoding.make("ngram", "match"),
  "plain": decoding.make("plain"),
  "features": FEATURES,
  # One whose cache lacks all tokens committed in the last round.
  "eagle": specjax.make_decoder(
    toys.table_model(VOCAB, layers=2),
    drafter=drafters.eagle(
      toys.feature_model(VOCAB, num_features=2),
      tree=Tree((-1, 0, 0, 1, 2, 3)),
      vocab_size=VOCAB,
    ),
    rule="recursive",
  ),
}
NAMES = [
  name if name in ("model", "eagle")
  else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS
]  # fmt: skip


def used(decoder):
  """A state whose rows have ended."""
  state = decoding.start(decoder, max_new_tokens=BUDGETS, stop_tokens=())
  return decode(decoder, state)


def extend(decoder, state, row, tokens=MORE, *, budget=5, **more):
  return decoding.extend(decoder, state, row, tokens, budget=budget, **more)


@pytest.mark.parametrize("name", NAMES)
def test_extended_row_matches_fresh_row_with_full_prompt(name):
  """And so does its drafter: it accepts as much. Neighbors stay."""
  decoder, before = DECODERS[name], rows_of(used(DECODERS[name]))
  for row in (0, 2):
    state = extend(decoder, used(decoder), row)
    assert rows_of(state)[row] == [*before[row], *MORE.tolist()]
    alone = decoding.alone(
      decoder, rows_of(state)[row], state.keys[row : row + 1], budget=5
    )
    together = decode(decoder, state)
    actual = rows_of(together)
    assert actual.pop(row) == rows_of(alone)[0]
    assert actual == before[:row] + before[row + 1 :]
    counted = lambda s, b: jax.tree.map(
      lambda x: np.asarray(x[b]).tolist(), vars(s.counters)
    )
    assert counted(together, row) == counted(alone, 0)
  assert decoding.jitted(decoder, "extend")._cache_size() == 1


def behind(decoder, state, row, source, keep, *, new=MORE, budget=7):
  """A row whose prompt begins as another row's text does."""
  padded = np.zeros(WIDTH, np.int32)
  padded[: len(new)] = new
  return decoding.admit(
    decoder, state, row, padded, len(new), state.keys[1], budget=budget,
    temperature=0.9, source=jnp.int32(source), keep=jnp.int32(keep),
  )  # fmt: skip


def alone_behind(decoder, text, state):
  """The same with all of it read."""
  return decoding.alone(
    decoder, text, state.keys[1:2], budget=7, temperature=0.9
  )


@pytest.mark.parametrize("name", NAMES)
def test_row_admitted_with_reused_prefix_matches_fresh_row(name):
  """From any length of it, its own row's too; neighbors stay."""
  decoder = DECODERS[name]
  before, state = rows_of(used(decoder)), used(decoder)
  # Of the last source more is asked for than its text.
  for row, source, keep in [(3, 0, 5), (0, 0, 3), (1, 2, 0), (1, 3, 30)]:
    begun = behind(decoder, used(decoder), row, source, keep)
    text = [*before[source][:keep], *MORE.tolist()]
    assert rows_of(begun)[row] == text
    alone = alone_behind(decoder, text, state)
    together = decode(decoder, begun)
    actual = rows_of(together)
    assert actual.pop(row) == rows_of(alone)[0]
    assert actual == before[:row] + before[row + 1 :]
    assert together.counters.num_accepted[row] == alone.counters.num_accepted[0]
  assert decoding.jitted(decoder, "admit")._cache_size() == 1


def test_prefix_reuse_resets_all_other_row_state():
  """With none of what the host asked of that row, or of this one before."""
  decoder = decoding.make("model", with_log_probs=True, num_likeliest=2)
  state = used(decoder)
  row, source, keep = 1, 2, 4
  state = dataclasses.replace(
    state,
    max_depth=jnp.ones_like(state.max_depth),
    ignores_stop=jnp.ones_like(state.ignores_stop),
    likeliest=dataclasses.replace(
      state.likeliest, wanted=jnp.zeros_like(state.likeliest.wanted)
    ),
  )
  text = [*rows_of(state)[source][:keep], *MORE.tolist()]
  alone = alone_behind(decoder, text, state)
  ended = decode(decoder, behind(decoder, state, row, source, keep))
  one = specjax.rows.pick(decoder.row_axes(ended), ended, jnp.array([row]))
  fields = {f.name for f in dataclasses.fields(one)}
  fields -= {"tokens", "target_cache", "drafter_state"}
  fields -= {"stop_tokens", "num_steps"}  # which all rows share
  for name in sorted(fields):
    jax.tree.map(
      np.testing.assert_array_equal,
      *(jax.tree.map(as_numbers, getattr(s, name)) for s in (one, alone)),
    )


def as_numbers(x):
  """Keys as what they are made of."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x


@pytest.mark.parametrize("count, budget", [(4, 2), (6, 0)])
def test_extend_works_up_to_the_end_of_the_buffer(count, budget):
  """There the window that is read begins before the newest token."""
  decoder = DECODERS["model"]
  state = decoding.start(
    decoder, max_new_tokens=np.array([33, 9, 9, 9, 9]), stop_tokens=()
  )
  state = decode(decoder, state)
  assert state.length[0] == 34
  state = extend(decoder, state, 0, MORE[:count], budget=budget)
  text = rows_of(state)[0]
  actual = rows_of(decode(decoder, state))[0]
  prompt = jnp.asarray(np.pad(text, (0, 40 - len(text)))[None])
  alone = decoder.init(
    PARAMS, prompt, jnp.array([len(text)]), state.keys[:1], buffer_length=40,
    max_new_tokens=budget,
  )  # fmt: skip
  assert actual == rows_of(decode(decoder, alone))[0]
  assert len(actual) == 34 + count + budget


def test_oversized_extension_ends_row_and_keeps_its_text():
  decoder = DECODERS["model"]
  state = decoding.start(
    decoder, max_new_tokens=np.array([34, 9, 9, 9, 9]), stop_tokens=()
  )
  state = decode(decoder, state)
  after = extend(decoder, state, 0)  # 35 + 6 tokens, of 40
  assert rows_of(after) == rows_of(state)
  assert after.stop_reason[0] == StopReason.LENGTH
  with pytest.raises(ValueError, match=r"must fit into buffer_length \(40\)"):
    decoder.extend(PARAMS, state, 0, MORE, 6, max_new_tokens=0)
  with pytest.raises(ValueError, match="row must be in 0"):
    decoder.extend(PARAMS, state, 5, MORE, 6, max_new_tokens=0)


def test_extend_can_change_temperature():
  decoder = DECODERS["model"]
  state = extend(
    decoder, used(decoder), 0, sampling=make_sampling(1, temperature=0.0)
  )
  greedy = decoding.alone(
    decoder, rows_of(state)[0], state.keys[:1], budget=5, temperature=0.0
  )
  assert rows_of(decode(decoder, state))[0] == rows_of(greedy)[0]
  assert state.sampling.temperature.tolist() == [0, 1, 1, 1, 1]


def test_extend_counts_each_token_once_in_shared_state():
  decoder = specjax.make_decoder(
    MODEL, drafter=forms.shared_counts(VOCAB), rule="match"
  )
  before = used(decoder)
  state = extend(decoder, before, 2)
  text = rows_of(state)[2]
  first = int(before.length[2]) - 1  # the newest token was not counted
  expected = np.zeros((VOCAB, VOCAB), np.int32)
  np.add.at(expected, (text[first - 1 : -2], text[first:-1]), 1)
  added = state.drafter_state["counts"] - before.drafter_state["counts"]
  np.testing.assert_array_equal(added, expected)


def test_extend_keeps_encoder_inputs_of_its_row():
  """The encoder's output is kept beside the row, and not made again."""
  decoder = specjax.make_decoder(
    toys.table_model(VOCAB, layers=2, with_inputs=True),
    drafter=forms.feature_head(VOCAB),
  )
  inputs = jnp.arange(5, dtype=jnp.int32)
  begin = lambda rows: jax.jit(
    lambda rows: decoder.init(
      PARAMS, jnp.asarray(PROMPTS)[rows], jnp.full(len(rows), 4),
      jax.vmap(jax.random.key)(rows), buffer_length=30, max_new_tokens=5,
      inputs=inputs[rows],
    )
  )(jnp.asarray(rows))  # fmt: skip
  state = extend(decoder, decode(decoder, begin([0, 1, 2, 3, 4])), 3)
  alone = extend(decoder, decode(decoder, begin([3])), 0)
  other = dataclasses.replace(
    alone, target_cache=alone.target_cache.replace(context=inputs[:1])
  )
  expected = rows_of(decode(decoder, alone))[0]
  assert rows_of(decode(decoder, state))[3] == expected
  assert rows_of(decode(decoder, other))[0] != expected


# --------------------------------------------------- prompts read in chunks

LONGEST, CHUNK = 29, 5
LENGTHS = np.array([1, 29, 6, 5, 14], np.int32)
TEXTS = np.random.default_rng(3).integers(0, VOCAB, (5, LONGEST))
READERS = {
  **DECODERS,
  "lookahead": specjax.make_decoder(
    MODEL,
    drafter=drafters.lookahead(
      window=4, tokens=2, num_guesses=4, vocab_size=VOCAB
    ),
    rule="match",
  ),
}


def begun(decoder, chunk, monkeypatch, rows=slice(None), temperature=1.0):
  """A state that has read the prompts in chunks of so many tokens."""
  monkeypatch.setattr(prefill, "_CHUNK", chunk)
  begin = functools.partial(
    decoder.init, buffer_length=48, max_new_tokens=12,
    sampling=make_sampling(len(LENGTHS[rows]), temperature=temperature),
  )  # fmt: skip
  keys = jax.vmap(jax.random.key)(np.arange(len(LENGTHS))[rows])
  return jax.jit(lambda *a: begin(*a))(PARAMS, TEXTS[rows], LENGTHS[rows], keys)


def outcome(decoder, state):
  end = decode(decoder, state)
  return rows_of(end), end.counters.num_accepted.tolist()


@pytest.mark.parametrize(
  "name",
  [n if n in ("eagle", "lookahead")
   else pytest.param(n, marks=pytest.mark.slow) for n in READERS],
)  # fmt: skip
def test_chunked_prefill_matches_single_pass_prefill(name, monkeypatch):
  """Caches, features across the chunks' borders, and what is then decoded."""
  decoder = READERS[name]
  # Where lookahead begins to guess is in the first chunk: it drafts otherwise.
  how = dict(temperature=0.0 if name == "lookahead" else 1.0)
  whole = begun(decoder, LONGEST, monkeypatch, **how)
  parts = begun(decoder, CHUNK, monkeypatch, **how)
  np.testing.assert_array_equal(
    parts.target_cache.length, whole.target_cache.length
  )
  seen = np.arange(LONGEST) < whole.target_cache.length[:, None]
  for one, other in zip(
    whole.target_cache.keys, parts.target_cache.keys, strict=True
  ):
    np.testing.assert_array_equal(
      np.where(seen, one[:, 0, :LONGEST, 0], 0),
      np.where(seen, other[:, 0, :LONGEST, 0], 0),
    )
  actual, expected = outcome(decoder, parts), outcome(decoder, whole)
  assert actual[0] == expected[0]
  assert actual[1] == expected[1] or name == "lookahead"


def test_prefill_chunk_count_follows_longest_prompt(monkeypatch):
  """The unused part of a wide array of prompts costs nothing."""
  model, turns = MODEL, []

  def apply(params, tokens, cache, **how):
    jax.debug.callback(lambda: turns.append(1))
    return model.apply(params, tokens, cache, **how)

  decoder = specjax.make_decoder(dataclasses.replace(model, apply=apply))
  state = begun(decoder, CHUNK, monkeypatch, slice(2, 4))  # 6 and 5 tokens
  jax.block_until_ready(state)
  jax.effects_barrier()
  assert len(turns) == 1  # of 7 tokens, two of which would be fed again
  begun(decoder, CHUNK, monkeypatch)
  jax.effects_barrier()
  assert len(turns) == 1 + 6  # 7, and five more a turn: 12, 17, 22, 27, 29
