"""Requests with settings of their own, and rows that the host ends."""

import dataclasses
import functools
import types

import decoding
import numpy as np
import penalizing
import pytest
import toys

import specjax
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Batch, Settings, make_batches

BUDGET = 24
# Greedy and sampled, truncated or not, with a budget or a seed of its own.
SETTINGS = [
  Settings(),
  Settings(temperature=0.0),
  Settings(temperature=0.7, top_p=0.8),
  Settings(top_k=1, max_new_tokens=9),
  Settings(temperature=1.3, min_p=0.1, seed=5),
]


def request(i, settings=Settings(), **others):  # noqa: B008
  tokens = decoding.PROMPTS[i, : decoding.LENGTHS[i]].tolist()
  fields = dict(token_ids=tokens, stream=10 + i, settings=settings, ends=None)
  return types.SimpleNamespace(**fields | others)


def ends_with(*wanted):
  """Ends a row with the last of some tokens in a row."""

  def look():
    seen = []

    def watch(tokens):
      for count, token in enumerate(tokens, start=1):
        seen.append(token)
        if tuple(seen[-len(wanted) :]) == wanted:
          return count
      return None

    return watch

  return look


@pytest.fixture(scope="module")
def one():
  return Engine(
    decoder=decoding.make(), params=decoding.PARAMS,
    stop_tokens=decoding.NO_STOP, max_new_tokens=BUDGET, max_length=256,
    temperature=1.0,
    top_k=0, top_p=1.0, min_p=0.0, seed=3,
    watch=lambda request: (ends := getattr(request, "ends", None)) and ends(),
  )  # fmt: skip


def run(one, *requests, rows=5):
  batch = Batch(tuple(requests), rows, 32)
  return one.run(batch)[0]


@pytest.fixture(scope="module")
def together(one):
  return run(one, *(request(i, s) for i, s in enumerate(SETTINGS)))


def test_row_settings_match_an_engine_with_those_settings(one, together):
  for i, settings in enumerate(SETTINGS):
    engine = dataclasses.replace(
      one, **{**settings.overrides(), "max_new_tokens": BUDGET}
    )
    budget = settings.max_new_tokens or BUDGET
    (alone,) = run(engine, request(i), rows=1)
    assert alone.token_ids[:budget] == together[i].token_ids
    assert len(together[i].token_ids) == budget
  sampled = run(one, *map(request, range(5)))
  assert [a == b for a, b in zip(sampled, together, strict=True)] == [
    True, False, False, False, False,
  ]  # fmt: skip


def test_per_request_seed_is_independent_of_row(one):
  wants = Settings(seed=2**32 - 1)
  first, again = (
    run(one, *([request(1)] * at), request(0, wants, stream=0))[at]
    for at in (0, 3)
  )
  assert first == again
  (other,) = run(one, request(0, wants, stream=1))
  assert first.token_ids != other.token_ids


def test_penalized_and_plain_rows_can_share_a_batch(one, together):
  """And they are what plain Python makes of what they want."""
  soon = together[1].token_ids[3]
  wanted = [
    dict(frequency_penalty=1.5, logit_bias={5: 2.0}),
    dict(repetition_penalty=0.5),
    dict(stop_token_ids=[soon], min_tokens=9),
  ]
  greedy = functools.partial(Settings, temperature=0.0)
  asked = [
    greedy(frequency_penalty=1.5, logit_bias=((5, 2.0),)),
    greedy(repetition_penalty=0.5),
    greedy(stop_token_ids=(soon,), min_tokens=9),
  ]
  rows = [request(1, settings) for settings in asked]
  actual = run(one, request(0), *rows, request(4, SETTINGS[4]))
  assert (actual[0], actual[4]) == (together[0], together[4])
  for wants, got in zip(wanted, actual[1:4], strict=True):
    assert got.token_ids == penalizing.decoded(
      decoding.TARGET, request(1).token_ids, wants, budget=BUDGET, ends=()
    )
  texts = {tuple(got.token_ids) for got in actual[1:4]}
  assert len(texts | {tuple(together[1].token_ids)}) == 4


def test_ignore_eos_row_runs_to_its_budget(one):
  ended = dataclasses.replace(one, stop_tokens=(2, 3), programs={})
  greedy = Settings(temperature=0.0)
  ignores = dataclasses.replace(greedy, ignore_eos=True)
  first, second = run(ended, request(1, greedy), request(1, ignores))
  assert first.stop_reason == "stop_token"
  assert second.stop_reason == "length"
  assert second.token_ids[: len(first.token_ids)] == first.token_ids


def test_watch_ends_its_row_without_affecting_others(one, together):
  whole = together[0].token_ids
  at = 11
  ends = ends_with(*whole[at - 2 : at])
  first = next(
    n for n in range(2, at + 1) if whole[n - 2 : n] == whole[at - 2 : at]
  )
  actual = run(
    one,
    request(0, SETTINGS[0], ends=ends),
    *(request(i, SETTINGS[i]) for i in range(1, 5)),
  )
  assert actual[0].stop_reason == "stop_string"
  assert actual[0].token_ids == whole[:first]
  assert actual[0].origins == together[0].origins[:first]
  assert actual[0].num_target_calls < together[0].num_target_calls
  assert actual[1:] == together[1:]  # neighbors see nothing of it


@pytest.mark.parametrize("at", range(1, 9))
def test_watched_row_counters_cover_only_committed_tokens(one, together, at):
  """Wherever the end lies in its round."""
  seen = []

  def look():
    def watch(tokens):
      seen.extend(tokens)
      return at - len(seen) + len(tokens) if len(seen) >= at else None

    return watch

  (actual,) = run(one, request(0, ends=look))
  assert actual.token_ids == together[0].token_ids[:at]
  accepted = np.array(actual.accept_counts)
  assert accepted.sum() == actual.num_target_calls
  assert accepted @ np.arange(len(accepted)) == actual.num_accepted
  assert actual.num_accepted == actual.origins.count(1)


def of_lengths(lengths):
  return [
    types.SimpleNamespace(stream=i, token_ids=tuple(range(1, n + 1)))
    for i, n in enumerate(lengths)
  ]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_every_prompt_is_in_exactly_one_batch(batch_size):
  lengths = np.random.default_rng(0).integers(1, 200, 37)
  batches = make_batches(
    of_lengths(lengths), batch_size=batch_size, max_width=200
  )
  indices = [p.stream for batch in batches for p in batch.prompts]
  assert sorted(indices) == list(range(37))
  assert {batch.rows for batch in batches} == {min(batch_size, 37)}
  for batch in batches:
    longest = max(len(p.token_ids) for p in batch.prompts)
    assert longest <= batch.width <= 200
    assert batch.width in (32, 64, 128, 200)
    tokens, lengths, _ = batch.arrays()
    for row, one in enumerate(batch.row_requests()):
      assert tuple(tokens[row, : lengths[row]]) == one.token_ids


def test_remaining_prompts_form_the_same_batches():
  every = of_lengths([9, 1, 5, 40, 3, 2, 70])
  whole = make_batches(every, batch_size=2, max_width=200)
  done = {p.stream for batch in whole[:1] + whole[2:3] for p in batch.prompts}
  left = make_batches(
    [p for p in every if p.stream not in done],
    batch_size=2, max_width=200, total=len(every),
  )  # fmt: skip
  assert left == [whole[1], whole[3]]


def test_stream_matches_complete_and_interleaves_prompts(one):
  prompts = [request(i).token_ids for i in range(3)]
  settings = [Settings(), Settings(temperature=0.0), Settings(max_new_tokens=5)]
  whole = one.complete(prompts, settings)
  alone = run(one, *(request(i, s, stream=i) for i, s in enumerate(settings)))
  assert [c.token_ids for c in whole] == [c.token_ids for c in alone]
  streamed = list(one.stream(prompts, settings))
  for i, completion in enumerate(whole):
    tokens = [token for token in streamed if token.prompt == i]
    assert [token.token_id for token in tokens] == completion.token_ids
    assert [token.origin for token in tokens] == completion.origins
  # Rows take turns: no completion is kept back until it is whole.
  assert {token.prompt for token in streamed[:12]} == {0, 1, 2}


def test_completion_may_fill_all_model_positions():
  short = toys.table_model(11, max_positions=70)
  engine = Engine(
    decoder=specjax.make_decoder(short), params=decoding.PARAMS,
    max_new_tokens=8,
  )  # fmt: skip
  (completion,) = engine.complete([[1] * 62])
  assert len(completion.token_ids) == 8
  with pytest.raises(ValueError, match="63 tokens, but only 62 fit beside"):
    engine.complete([[1] * 63])


@pytest.mark.parametrize(
  ("prompts", "settings", "message"),
  [
    ([[1], []], None, "a prompt has no tokens"),
    ([[1] * 249], None, "249 tokens, but only"),
    ([[1]], Settings(max_new_tokens=-1), "ask for -1 to -1 new tokens"),
    ([[1], [2]], [Settings()], "got 2 prompts and 1 settings"),
    ([[1], [2, 11]], None, r"in 0\.\.10, got 11 in prompt 1: .* tokenizer"),
    ("def", None, r"got a string: encode it.*tokenizer\.encode"),
  ],
)
def test_invalid_prompts_are_rejected(one, prompts, settings, message):
  for run in (one.complete, lambda *x: list(one.stream(*x))):
    with pytest.raises((TypeError, ValueError), match=message):
      run(prompts, settings)


def test_watch_ends_stream_and_completion_at_same_token(one):
  prompt, greedy = [request(1).token_ids], Settings(temperature=0.0)
  (whole,) = one.complete(prompt, greedy)
  ends = ends_with(whole.token_ids[2])
  watched = dataclasses.replace(one, watch=lambda request: ends())
  (ended,) = watched.complete(prompt, greedy)
  streamed = [token.token_id for token in watched.stream(prompt, greedy)]
  assert streamed == ended.token_ids
  assert len(streamed) < len(whole.token_ids)
