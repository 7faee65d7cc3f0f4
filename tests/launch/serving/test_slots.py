"""Slots: long prompts are read in chunks, while other rows decode."""

import dataclasses

import decoding
import numpy as np
import pytest
import served

from launch.serving.control import Control, Request
from launch.serving.prefixes import Texts
from launch.serving.slots import Slots
from specjax.state import StopReason

DECODER = decoding.make("model", "token")


@pytest.fixture(scope="module")
def compiled():
  actual = Slots(
    {3: DECODER}, decoding.PARAMS, num_slots=2, widths=(4, 8), longest=30,
    max_length=served.MAX_LENGTH, stop_tokens=(), max_rounds=4,
  )  # fmt: skip
  output = []
  actual.compile(output.append)
  assert len(output) == 2
  actual.compile_rest(output.append)
  assert len(output) == len({*output}) == 3
  return actual


@pytest.fixture
def slots(compiled):
  """All rows idle, and no text remembered."""
  yield compiled
  iteration(compiled, ended=[0, 1], rounds=0)
  compiled.texts.forget([0, 1])


def make_request(length, *, seed=0, budget=16):
  tokens = np.random.default_rng(seed).integers(0, decoding.VOCAB, length)
  return Request(
    token_ids=tuple(tokens.tolist()), seed=seed, max_new_tokens=budget,
    temperature=1.0,
  )  # fmt: skip


def iteration(slots, **changes):
  """One iteration, and what it emitted in each row."""
  usual = dict(depth=3, rounds=4, shares={4: 1.0})
  report = slots.iterate(Control(**usual | changes))
  ids = [
    report.tokens[row, : report.length[row] - report.start[row]].tolist()
    for row in range(slots.num_slots)
  ]
  return report, ids


def test_chunked_prefill_is_exact_and_lets_other_rows_decode(slots):
  """Each iteration reads four tokens of one prompt and makes one round."""
  short, long = make_request(3, seed=1, budget=40), make_request(29, seed=2)
  _, (begun, _) = iteration(slots, admissions=[(0, short)])
  texts, iterations = [begun, []], 0
  report, new = iteration(slots, admissions=[(1, long)])
  while not new[1]:  # 4 tokens an iteration, in the first too
    assert report.reason[1] == StopReason.RUNNING
    assert report.rounds == 1
    assert new[0]
    texts[0] += new[0]
    iterations += 1
    report, new = iteration(slots)
  assert iterations == 7
  for _ in range(40):
    texts = [old + more for old, more in zip(texts, new, strict=True)]
    if (report.reason != StopReason.RUNNING).all():
      break
    report, new = iteration(slots)
  without_stop = served.alone(DECODER, short, width=32, stop=())
  assert texts[0] == without_stop
  assert texts[1] == served.alone(DECODER, long, width=32, stop=())


def test_cancelled_prefill_stops_and_frees_its_row(slots):
  """And its row is free at once, for another that is read from its start."""
  iteration(slots, admissions=[(0, make_request(28, seed=4))])
  report, _ = iteration(slots, ended=[0])
  assert report.reason[0] != StopReason.RUNNING
  other = make_request(5, seed=5, budget=3)
  _, (text, _) = iteration(slots, admissions=[(0, other)])
  assert text == served.alone(DECODER, other, width=32, stop=())


@pytest.mark.parametrize(
  ("shares", "expected"),
  [({4: 1, 8: 1.5}, 8), ({4: 0.6, 8: 1}, 4), ({4: 0.3, 8: 0.6}, 3),
   ({4: 0.1, 8: 0.1}, 1)],
)  # fmt: skip
def test_prefill_per_iteration_respects_its_share_while_decoding(
  slots, shares, expected
):
  iteration(slots, admissions=[(0, make_request(2, seed=51, budget=40))])
  long = make_request(30, seed=52, budget=1)
  report, (new, _) = iteration(slots, admissions=[(1, long)], shares=shares)
  iterations = 1  # until its only token
  while report.reason[1] == StopReason.RUNNING:
    assert (new, report.rounds) != ([], 1)
    report, (new, _) = iteration(slots, shares=shares)
    iterations += 1
  # Chunks of 4, of 8, of 8 and 4, and of all.
  assert iterations == expected


def test_greedy_text_is_unaffected_by_depth_or_pending_compiles():
  """Wider prompts are read in chunks, narrower ones padded; drafts deeper."""
  few = Slots(
    {1: decoding.make("model1"), 3: DECODER},
    decoding.PARAMS, num_slots=2, widths=(4, 8, 40), longest=40,
    max_length=served.MAX_LENGTH, stop_tokens=(), max_rounds=4,
  )  # fmt: skip
  few.compile()
  request = dataclasses.replace(make_request(30, seed=55), temperature=0.0)
  shallow = dict(depth=1, admissions=[(0, request)])
  text, report = finished(few, 0, **shallow)
  assert (text, report.depth) == (expected(request), 3)
  few.texts.forget([0])
  few.compile_rest()
  report, (text, _) = iteration(few, **shallow)
  depths = [report.depth]
  while report.reason[0] == StopReason.RUNNING:
    report, (new, _) = iteration(few, depth=4 - depths[-1], rounds=1)
    text, depths = text + new, [*depths, report.depth]
  assert text == expected(request)
  assert depths[:3] == [1, 3, 1]


def test_rounds_over_running_rows_match_solo_decoding():
  """Rows come and go, and each text is that of it alone."""
  few = served.make_slots(
    DECODER, num_slots=6, widths=(16,), stop_tokens=(), by_running=True
  )
  requests = served.requests(9, vocab=decoding.VOCAB, budget=20)
  waiting, texts, rows, used = list(range(9)), {}, {}, []
  make = few._rows_for
  few._rows_for = lambda count: used.append(count) or make(count)
  while waiting or rows:
    free = [row for row in (4, 1, 5, 0, 2, 3) if row not in rows]
    begun = [(row, waiting.pop(0)) for row in free[:2] if waiting]
    rows |= dict(begun)
    texts |= {number: [] for _, number in begun}
    report, new = iteration(
      few, admissions=[(row, requests[n]) for row, n in begun],
      shares={16: 0.1}, rounds=2,
    )  # fmt: skip
    for row, number in list(rows.items()):
      texts[number] += new[row]
      if report.reason[row] != StopReason.RUNNING:
        del rows[row]
  assert {*used} >= {1, 2, 4}
  for number, request in enumerate(requests):
    assert texts[number] == served.alone(DECODER, request, stop=())


# --------------------------------------------------- what a row has is not read


def finished(slots, row, request=None, **changes):
  """A request served to its end in a row, and its last report."""
  begun = changes.pop("admissions", [(row, request)])
  report, new = iteration(slots, admissions=begun, **changes)
  text = list(new[row])
  while report.reason[row] == StopReason.RUNNING:
    report, new = iteration(slots, **changes)
    text += new[row]
  return text, report


def going_on(request, text, *, budget=6, **more):
  """A second turn: the prompt, its answer, and three tokens."""
  return dataclasses.replace(
    request, token_ids=(*request.token_ids, *text, 1, 2, 7), seed=9,
    max_new_tokens=budget, **more,
  )  # fmt: skip


def expected(request):
  return served.alone(DECODER, request, width=46, stop=())


def test_second_turn_prefills_only_new_tokens(slots):
  """And a row that branches off earlier what is new to it, in another row."""
  first = make_request(20, seed=21, budget=8)
  text, report = finished(slots, 0, first)
  assert report.cached[0] == 0
  second = going_on(first, text)
  assert slots.texts.place([1, 0], second) == 0  # nothing is lost
  actual, report = finished(slots, 0, second)
  assert report.cached[0] == 28
  assert actual == expected(second)
  other = dataclasses.replace(
    first, token_ids=(*first.token_ids[:15], 8, 8), max_new_tokens=5
  )
  assert slots.texts.place([0, 1], other) == 1  # the other's end is kept
  actual, report = finished(slots, 1, other)
  assert report.cached[1] == 15
  assert actual == expected(other)


def test_requests_admitted_together_prefill_a_shared_prefix_once(slots):
  """Each goes on from where the other is; whom the order has first is first."""
  start = make_request(22, seed=23).token_ids
  pair = [
    Request(
      token_ids=(*start, *more), seed=row, max_new_tokens=4, temperature=1.0
    )
    for row, more in enumerate([(1, 2) * 3, (5, 6, 7)])
  ]
  report, new = iteration(slots, admissions=[(1, pair[1]), (0, pair[0])])
  texts, began = {0: new[0], 1: new[1]}, []
  while (report.reason == StopReason.RUNNING).any():
    report, new = iteration(slots)
    texts = {row: texts[row] + new[row] for row in texts}
    began += [row for row in (0, 1) if new[row] and row not in began]
  assert began == [1, 0]
  assert texts == {row: expected(pair[row]) for row in texts}
  assert report.cached.sum() == 22


@pytest.mark.parametrize("share", [True, False])
def test_prefix_sharing_can_be_disabled(share):
  texts = Texts(2, served.MAX_LENGTH, share=share)
  request = make_request(15, seed=24)
  texts.record(0, request, 15)
  texts.begin(1)
  assert texts.source(1, request) == ((0, 14) if share else (1, 0))
  assert texts.cached[1] == (14 if share else 0)


def test_rows_with_nan_logits_are_not_reused_as_prefixes(slots):
  """States that a NaN has reached are not copied."""
  texts = Texts(2, served.MAX_LENGTH)
  request = make_request(9, seed=25)
  texts.record(0, request, 9)
  report, _ = iteration(slots)
  nan = np.array([StopReason.NAN_LOGITS, StopReason.RUNNING])
  texts.extend(dataclasses.replace(report, reason=nan), np.zeros(2, bool))
  texts.begin(1)
  assert texts.source(1, request) == (1, 0)


def test_least_recently_used_idle_row_is_evicted(slots):
  texts = Texts(3, served.MAX_LENGTH)
  for row in (1, 0, 2):
    texts.record(row, make_request(5, seed=30 + row), 5)
  assert texts.place([0, 1, 2], make_request(5, seed=40)) == 1
  assert texts.place([0, 2], make_request(5, seed=40)) == 0


def test_prefixes_are_not_copied_across_devices():
  """A prompt is given a row beside the text that it begins as."""
  texts = Texts(4, served.MAX_LENGTH, groups=2)
  request = make_request(20, seed=50)
  texts.record(3, request, 20)
  assert texts.place([0, 1, 2], request) == 2
  assert texts.source(2, request) == (3, 19)
  assert texts.source(1, request) == (1, 0)


def test_recurrent_states_are_reused_only_as_whole_prefixes():
  texts = Texts(2, served.MAX_LENGTH, only_whole=True)
  request = make_request(20, seed=50)
  for length, expected in ((12, (0, 12)), (20, (1, 0))):
    texts.record(0, request, length)
    texts.begin(1)
    assert texts.source(1, request) == expected
