"""`launch.serving.metrics`: the rates that the page shows."""

import types

import pytest

from launch.serving.metrics import Metrics


def test_the_live_rate_is_of_the_last_seconds_since_work_began():
  now = [100.0]
  metrics = Metrics(model="m", num_slots=1, depth=1, clock=lambda: now[0])
  ticket = types.SimpleNamespace(
    first=None, last=None, arrived=150.0, num_tokens=0
  )

  def rate_at(second):
    now[0] = second
    return metrics.live()["tokens_per_second"]

  def emit(second, count):
    now[0] = second
    metrics.iterated(types.SimpleNamespace(rounds=1))
    metrics.emitted(ticket, count, second)

  assert rate_at(150.0) == 0
  metrics.running(1)
  emit(150.5, 20)
  assert rate_at(151.0) == pytest.approx(20)  # and not 2
  emit(159.0, 60)
  metrics.running(1)  # another one began beside it
  assert rate_at(160.0) == pytest.approx(80 / 10)
  assert rate_at(165.0) == pytest.approx(60 / 10)
  metrics.running(0)
  assert rate_at(180.0) == 0
