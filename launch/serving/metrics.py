"""Metrics for Prometheus, by vLLM's names, and for the page.

`vllm bench serve` and dashboards that are made for vLLM find here what they
look for: a draft is a verification of a row that drafted, positions count from
0. One thread writes; any may read.
"""

import collections
import time
from collections.abc import Callable

import numpy as np
import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from launch.serving.control import Report
from launch.serving.scheduler import Finish, Ticket

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
# Seconds that the live rates look back.
_WINDOW = 10.0
# Upper ends of the histograms' buckets, in seconds.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
  """Counters, histograms and a short memory."""

  def __init__(
    self,
    *,
    model: str,
    num_slots: int,
    depth: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Sets everything to zero.

    Args:
      model: its name, a label of every metric.
      num_slots: B.
      depth: G, positions of the deepest draft.
      clock: seconds, the scheduler's.
    """
    self._clock, self._num_slots = clock, num_slots
    self._recent: collections.deque = collections.deque()
    self._busy, self._since = False, clock()
    self.registry = registry = prometheus_client.CollectorRegistry()
    prometheus_client.disable_created_metrics()
    labels = ["model_name"]

    def of(kind, name, text, more=(), **options):
      metric = kind(
        f"vllm:{name}", text, [*labels, *more], registry=registry, **options
      )
      return metric if more else metric.labels(model)

    self._drafts = of(Counter, "spec_decode_num_drafts", "Drafts.")
    self._draft_tokens = of(
      Counter, "spec_decode_num_draft_tokens", "Drafted tokens."
    )
    self._accepted = of(
      Counter, "spec_decode_num_accepted_tokens", "Accepted tokens."
    )
    per_position = of(
      Counter,
      "spec_decode_num_accepted_tokens_per_pos",
      "Accepted tokens by their place in the draft.",
      ["position"],
    )
    self._per_position = [
      per_position.labels(model, str(place)) for place in range(depth)
    ]
    self._running = of(Gauge, "num_requests_running", "Slots in use.")
    self._waiting = of(Gauge, "num_requests_waiting", "Requests in the queue.")
    self._used = of(Gauge, "kv_cache_usage_perc", "Share of slots in use.")
    self._prompt = of(Counter, "prompt_tokens", "Tokens of admitted prompts.")
    self._asked = of(
      Counter, "prefix_cache_queries", "Prompts' tokens that slots might have."
    )
    self._cached = of(
      Counter, "prefix_cache_hits", "Prompts' tokens that slots had."
    )
    self._generated = of(Counter, "generation_tokens", "Emitted tokens.")
    success = of(
      Counter, "request_success", "Completions.", ["finished_reason"]
    )
    self._finished = {
      why: success.labels(model, why.value)
      for why in (Finish.STOP, Finish.LENGTH)
    }
    failure = of(Counter, "request_failure", "No completions.", ["reason"])
    self._finished |= {
      why: failure.labels(model, why.value)
      for why in Finish
      if why not in self._finished
    }
    objective = of(
      Counter,
      "request_objective",
      "Completions with an objective, by whether they met it.",
      ["met"],
    )
    self._objective = {
      met: objective.labels(model, str(met).lower()) for met in (True, False)
    }
    time_to = lambda name, text, buckets: of(
      Histogram, f"{name}_seconds", text, buckets=buckets
    )
    self._first = time_to("time_to_first_token", "To the first token.", _LONG)
    self._between = time_to(
      "inter_token_latency",
      "Between iterations that emitted, by token.",
      _SHORT,
    )
    self._whole = time_to("e2e_request_latency", "To the last token.", _LONG)
    self._queued = time_to("request_queue_time", "In the queue.", _LONG)

  # ------------------------------------------------------ the scheduler's calls

  def waiting(self, count: int) -> None:
    """Sets the number of waiting requests."""
    self._waiting.set(count)

  def running(self, count: int) -> None:
    """Sets the number of slots in use."""
    if count and not self._busy:
      self._since = self._clock()
    self._busy = count > 0
    self._running.set(count)
    self._used.set(count / self._num_slots)

  def began(self, ticket: Ticket) -> None:
    """Counts a ticket that was admitted."""
    self._queued.observe((ticket.began or 0.0) - ticket.arrived)
    self._prompt.inc(len(ticket.asked.token_ids))
    self._asked.inc(len(ticket.asked.token_ids))

  def iterated(self, report: Report) -> None:
    """Counts an iteration."""
    now = self._clock()
    self._recent.append([now, 0, 0, 0, report.rounds])
    while self._recent and self._recent[0][0] < now - _WINDOW:
      self._recent.popleft()

  def worked(self, ticket: Ticket, report: Report, row: int) -> None:
    """Counts the rounds that an iteration made for a ticket."""
    cached = int(report.cached[row])
    self._cached.inc(cached - ticket.cached)
    ticket.cached = cached
    counts = report.accept_counts[row]
    old = np.array(ticket.accept_counts or np.zeros_like(counts))
    new = counts - old
    ticket.accept_counts = counts.tolist()
    drafted = int(report.num_drafted[row]) - ticket.drafted
    drafts = int(report.num_drafts[row]) - ticket.drafts
    ticket.drafted += drafted
    ticket.drafts += drafts
    if drafted:
      self._drafts.inc(drafts)
      self._draft_tokens.inc(drafted)
      reached = np.cumsum(new[::-1])[::-1][1:]  # accepted at least 1, 2, ..
      self._accepted.inc(int(reached.sum()))
      for place, count in zip(self._per_position, reached, strict=True):
        place.inc(int(count))
      self._recent[-1][2] += drafted
      self._recent[-1][3] += int(reached.sum())

  def emitted(self, ticket: Ticket, count: int, now: float) -> None:
    """Counts tokens that a ticket got."""
    self._generated.inc(count)
    self._recent[-1][1] += count
    if ticket.first is None:
      ticket.first = now
      self._first.observe(now - ticket.arrived)
    else:
      gap = now - (ticket.last or now)
      for _ in range(count):
        self._between.observe(gap / count)
    ticket.last = now
    ticket.num_tokens += count

  def finished(self, ticket: Ticket, why: Finish | None, now: float) -> None:
    """Counts a ticket that ended."""
    assert why is not None
    self._finished[why].inc()
    if why not in (Finish.STOP, Finish.LENGTH):
      return
    self._whole.observe(now - ticket.arrived)
    taken = seconds_a_token(ticket)
    if ticket.objective is not None and taken is not None:
      self._objective[taken <= ticket.objective].inc()

  # --------------------------------------------------------------- who reads it

  def text(self) -> bytes:
    """The metrics in Prometheus's text format."""
    return prometheus_client.generate_latest(self.registry)

  def live(self) -> dict:
    """Rates of the last seconds, for the page.

    After a pause they are of the seconds since work began again.
    """
    now = self._clock()
    since = max(now - _WINDOW, self._since)
    recent = [x for x in self._recent.copy() if x[0] >= since]
    tokens, drafted, accepted = (sum(x[i] for x in recent) for i in (1, 2, 3))
    return {
      "tokens_per_second": tokens / (now - since) if now > since else 0.0,
      "acceptance": accepted / drafted if drafted else None,
    }


def seconds_a_token(ticket: Ticket) -> float | None:
  """Time per token after the first, as load tests count; None of fewer."""
  if ticket.num_tokens < 2 or ticket.first is None or ticket.last is None:
    return None
  return (ticket.last - ticket.first) / (ticket.num_tokens - 1)
