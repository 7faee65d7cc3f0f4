"""The core without HTTP: slots, a queue, and one thread."""

import dataclasses
import random
import threading
import time

import decoding
import jax.numpy as jnp
import numpy as np
import pytest
import served

import specjax
from launch.prompts import MOST_BIASES, MOST_STOP_IDS
from launch.serving.control import Control, Request, most_bytes
from launch.serving.scheduler import Finish, rounds_of_iteration
from specjax.state import Origin

DECODER = decoding.make("model", "token")
ASKED = served.requests(24, vocab=decoding.VOCAB)
# Its forty tokens hold no stop token.
LONG = Request(token_ids=(1, 2), seed=0, max_new_tokens=40, temperature=1.0)


@pytest.fixture(scope="module")
def slots():
  return served.make_slots(DECODER)


@pytest.fixture(scope="module")
def expected():
  return [served.alone(DECODER, request) for request in ASKED]


@pytest.fixture
def running(slots):
  """A scheduler at work, and what it counts; it must end with nothing left."""
  scheduler, metrics = served.make_scheduler(slots)
  scheduler.start()
  yield scheduler, metrics
  scheduler.close()
  assert scheduler.join(served.PATIENCE)
  assert scheduler.error is None
  assert scheduler.load() == (0, 0)


def value(metrics, name, **labels):
  labels = {"model_name": "toy", **labels}
  return metrics.registry.get_sample_value(f"vllm:{name}", labels)


def test_tokens_match_generate_at_any_concurrency(running, expected):
  """Greedy ones alone, all 24 at once, and in another order with pauses."""
  scheduler, _ = running
  greedy = [i for i, request in enumerate(ASKED) if not request.temperature]
  assert len(greedy) > 4
  for i in greedy:
    heard = served.Heard(ASKED[i])
    scheduler.submit([heard.ticket])
    assert heard.wait().tokens == expected[i]
  heard = [served.Heard(request) for request in ASKED]
  scheduler.submit([h.ticket for h in heard])
  assert [h.wait().tokens for h in heard] == expected
  order = random.Random(1).sample(range(len(ASKED)), len(ASKED))
  later = {}
  for i in order:
    later[i] = served.Heard(ASKED[i])
    scheduler.submit([later[i].ticket])
    time.sleep(random.Random(i).choice([0, 0.002, 0.01]))
  assert [later[i].wait().tokens for i in range(len(ASKED))] == expected
  # Cases are worth something: rows end in both ways, at many lengths.
  assert {h.finish for h in heard} == {Finish.STOP, Finish.LENGTH}
  assert len({len(tokens) for tokens in expected}) > 8


def test_metrics_count_tokens_drafts_and_requests(running, expected):
  scheduler, metrics = running
  heard = [served.Heard(request) for request in ASKED]
  scheduler.submit([h.ticket for h in heard])
  for h in heard:
    h.wait()
  count = lambda name, **labels: value(metrics, name, **labels)
  emitted = sum(map(len, expected))
  assert count("generation_tokens_total") == emitted
  assert count("prompt_tokens_total") == sum(len(a.token_ids) for a in ASKED)
  drafts = count("spec_decode_num_drafts_total")
  assert count("spec_decode_num_draft_tokens_total") == 3 * drafts
  per_position = [
    count("spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
    for i in range(3)
  ]
  accepted = count("spec_decode_num_accepted_tokens_total")
  assert sum(per_position) == accepted > 0
  assert [drafts, *per_position] == sorted([drafts, *per_position])[::-1]
  origins = [x for h in heard for news in h.news for x in news.origins]
  assert (len(origins), origins.count(Origin.ACCEPTED)) == (emitted, accepted)
  assert len(ASKED) == sum(
    count("request_success_total", finished_reason=why)
    for why in ("stop", "length")
  )
  assert count("time_to_first_token_seconds_count") == len(ASKED)
  served.until(lambda: count("num_requests_running") == 0)
  assert count("num_requests_waiting") == 0


def test_watch_ends_one_row_and_the_others_continue(slots, expected):
  """Its tokens are cut where it says, and the device is told to end it."""
  at = max(range(len(ASKED)), key=lambda i: len(expected[i]))
  seen, ended = [], []

  def watch(tokens):
    seen.extend(tokens)
    return 7 - (len(seen) - len(tokens)) if len(seen) >= 7 else None

  def iterate(control):
    ended.extend(control.ended)
    return slots.iterate(control)

  scheduler, _ = served.make_scheduler(slots, iterate)
  stopped = served.Heard(ASKED[at], watch=watch)
  others = [served.Heard(LONG) for _ in range(2)]
  scheduler.submit([h.ticket for h in (stopped, *others)])
  scheduler.start()
  assert stopped.wait().tokens == expected[at][:7]
  assert stopped.finish is Finish.STOP
  assert stopped.news[-1].cut
  alone = served.alone(DECODER, LONG)
  assert [h.wait().tokens for h in others] == [alone, alone]
  scheduler.close()
  assert scheduler.join(served.PATIENCE)
  assert len(ended) == 1


def test_cancelled_or_late_requests_free_their_slots(slots, expected):
  now = [0.0]
  scheduler, metrics = served.make_scheduler(slots, clock=lambda: now[0])
  late = served.Heard(LONG, deadline=5.0)
  unwanted = [served.Heard(LONG) for _ in range(2)]
  waiting = [served.Heard(LONG, deadline=5.0), served.Heard(ASKED[0])]
  gone = threading.Event()

  def hear(news):
    unwanted[0].__class__.hear(unwanted[0], news)
    if not gone.is_set():  # once it has begun
      gone.set()
      now[0] = 6.0
      scheduler.cancel([h.ticket for h in unwanted])

  unwanted[0].ticket.deliver = hear
  everybody = [late, *unwanted, *waiting]
  scheduler.submit([h.ticket for h in everybody])
  scheduler.start()
  finishes = [h.wait().finish for h in everybody]
  scheduler.close()
  assert scheduler.join(served.PATIENCE)
  assert finishes[:4] == [
    Finish.LATE, Finish.CANCELLED, Finish.CANCELLED, Finish.LATE,
  ]  # fmt: skip
  assert not waiting[0].tokens
  assert waiting[1].tokens == expected[0]
  assert value(metrics, "request_failure_total", reason="late") == 2


def test_nan_logits_end_only_their_own_request():
  """Its neighbors, and who gets the slot next, are as ever."""
  broken = decoding.TARGET.copy()
  rng = np.random.default_rng(0)
  broken[rng.integers(len(broken), size=6)] = np.nan
  params = specjax.Params(
    target=jnp.asarray(broken), draft=decoding.PARAMS.draft
  )
  slots = served.make_slots(DECODER, params, num_slots=2)
  expected = [served.alone(DECODER, request, params) for request in ASKED]
  scheduler, metrics = served.make_scheduler(slots)
  heard = [served.Heard(request) for request in ASKED]
  scheduler.submit([h.ticket for h in heard])
  scheduler.start()
  assert [h.wait().tokens for h in heard] == expected
  finishes = {h.finish for h in heard}
  scheduler.close()
  assert scheduler.join(served.PATIENCE)
  assert finishes == {Finish.STOP, Finish.LENGTH, Finish.NAN}
  assert value(metrics, "request_failure_total", reason="nan") == sum(
    h.finish is Finish.NAN for h in heard
  )


@pytest.mark.parametrize(
  ("free", "waiting", "rounds", "expected"),
  [(0, 3, 8, 8), (0, 0, 8, 4), (2, 0, 8, 1), (0, 0, 1, 1)],
)
def test_rounds_per_iteration_depend_on_load(free, waiting, rounds, expected):
  """None waits for a free slot, and who has one is not kept waiting."""
  most = rounds_of_iteration(free=free, waiting=waiting, max_rounds=rounds)
  assert most == expected


def test_control_round_trips_through_its_byte_encoding():
  """The longest that there may be fits."""
  most = 2**31 - 1
  request = dataclasses.replace(
    ASKED[1], token_ids=(most,) * 16, seed=2**32 - 1, temperature=1 / 3,
    logit_bias=((most, -1.2345678901234567e-100),) * MOST_BIASES,
    stop_token_ids=(most,) * MOST_STOP_IDS,
  )  # fmt: skip
  control = Control(
    admissions=[(row, request) for row in (2, 0, 1)], ended=[1], depth=3,
    rounds=4, shares={8: 1 / 3, 16: 0.5}, is_last=True,
  )  # fmt: skip
  array = control.encode(most_bytes(3, 16))
  assert array.dtype == np.uint8
  back = Control.decode(array)
  assert [row for row, _ in back.admissions] == [2, 0, 1]
  assert back.shares == control.shares
  np.testing.assert_array_equal(back.encode(len(array)), array)


def test_failing_watch_ends_only_its_own_request(running):
  scheduler, _ = running

  def watch(ids):
    raise RuntimeError("no text")

  bad = served.Heard(LONG, watch=watch)
  good = served.Heard(LONG)
  scheduler.submit([bad.ticket, good.ticket])
  assert bad.wait().finish == Finish.UNREADABLE
  assert good.wait().tokens == served.alone(DECODER, LONG)
  assert scheduler.is_alive()
