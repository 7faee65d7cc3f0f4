"""Metrics for Prometheus, by vLLM's names.

`vllm bench serve` and dashboards that are made for vLLM find here what they
look for: a draft is a verification of a row that drafted, positions count from
0. One thread writes; any may read.
"""

import numpy as np
import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from launch.serving.control import Report
from launch.serving.scheduler import Finish, Ticket

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
# Upper ends of the histograms' buckets, in seconds.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTERS = {
  "spec_decode_num_drafts": "Drafts.",
  "spec_decode_num_draft_tokens": "Drafted tokens.",
  "spec_decode_num_accepted_tokens": "Accepted tokens.",
  "prompt_tokens": "Tokens of admitted prompts.",
  "prefix_cache_queries": "Prompts' tokens that slots might have.",
  "prefix_cache_hits": "Prompts' tokens that slots had.",
  "generation_tokens": "Emitted tokens.",
}
_GAUGES = {
  "num_requests_running": "Slots in use.",
  "num_requests_waiting": "Requests in the queue.",
  "kv_cache_usage_perc": "Share of slots in use.",
}
_TIMES = {
  "time_to_first_token": ("To the first token.", _LONG),
  "inter_token_latency": ("Between iterations that emitted, by token.", _SHORT),
  "e2e_request_latency": ("To the last token.", _LONG),
  "request_queue_time": ("In the queue.", _LONG),
}
# Counters with one more label.
_LABELED = {
  "spec_decode_num_accepted_tokens_per_pos": (
    "Accepted tokens by their place in the draft.", "position",
  ),
  "request_success": ("Completions.", "finished_reason"),
  "request_failure": ("Failed completions.", "reason"),
  "request_objective": ("Completions with an objective, met or not.", "met"),
}  # fmt: skip


class Metrics:
  """Counters, gauges and histograms."""

  def __init__(self, *, model: str, num_slots: int, depth: int):
    """Sets everything to zero.

    Args:
      model: its name, a label of every metric.
      num_slots: B.
      depth: G, positions of the deepest draft.
    """
    self._model, self._num_slots = model, num_slots
    self.registry = prometheus_client.CollectorRegistry()
    prometheus_client.disable_created_metrics()
    make = lambda kind, name, text, more=(), **options: kind(
      f"vllm:{name}", text, ["model_name", *more], registry=self.registry,
      **options,
    )  # fmt: skip
    self._one = {
      name: make(kind, name, text).labels(model)
      for kind, names in ((Counter, _COUNTERS), (Gauge, _GAUGES))
      for name, text in names.items()
    } | {
      name: make(Histogram, f"{name}_seconds", text, buckets=ends).labels(model)
      for name, (text, ends) in _TIMES.items()
    }
    self._labeled = {
      name: make(Counter, name, text, [label])
      for name, (text, label) in _LABELED.items()
    }
    for place in range(depth):
      self._of("spec_decode_num_accepted_tokens_per_pos", place)
    for why in Finish:
      self._of(_outcome(why), why.value)

  def _of(self, name: str, value) -> Counter:
    return self._labeled[name].labels(self._model, str(value).lower())

  def waiting(self, count: int) -> None:
    """Sets the number of waiting requests."""
    self._one["num_requests_waiting"].set(count)

  def running(self, count: int) -> None:
    """Sets the number of slots in use."""
    self._one["num_requests_running"].set(count)
    self._one["kv_cache_usage_perc"].set(count / self._num_slots)

  def began(self, ticket: Ticket) -> None:
    """Counts a ticket that was admitted."""
    waited = (ticket.began or 0.0) - ticket.arrived
    self._one["request_queue_time"].observe(waited)
    for name in ("prompt_tokens", "prefix_cache_queries"):
      self._one[name].inc(len(ticket.asked.token_ids))

  def worked(self, ticket: Ticket, report: Report, row: int) -> None:
    """Counts the rounds that an iteration made for a ticket."""
    cached = int(report.cached[row])
    self._one["prefix_cache_hits"].inc(cached - ticket.cached)
    ticket.cached = cached
    counts = report.accept_counts[row]
    new = counts - np.array(ticket.accept_counts or np.zeros_like(counts))
    ticket.accept_counts = counts.tolist()
    drafted = int(report.num_drafted[row]) - ticket.drafted
    drafts = int(report.num_drafts[row]) - ticket.drafts
    ticket.drafted += drafted
    ticket.drafts += drafts
    if not drafted:
      return
    reached = np.cumsum(new[::-1])[::-1][1:]  # accepted at least 1, 2, ..
    self._one["spec_decode_num_drafts"].inc(drafts)
    self._one["spec_decode_num_draft_tokens"].inc(drafted)
    self._one["spec_decode_num_accepted_tokens"].inc(int(reached.sum()))
    for place, count in enumerate(reached.tolist()):
      self._of("spec_decode_num_accepted_tokens_per_pos", place).inc(count)

  def emitted(self, ticket: Ticket, count: int, now: float) -> None:
    """Counts tokens that a ticket got."""
    self._one["generation_tokens"].inc(count)
    if ticket.first is None:
      ticket.first = now
      self._one["time_to_first_token"].observe(now - ticket.arrived)
    else:
      gap = now - (ticket.last or now)
      for _ in range(count):
        self._one["inter_token_latency"].observe(gap / count)
    ticket.last = now
    ticket.num_tokens += count

  def finished(self, ticket: Ticket, why: Finish | None, now: float) -> None:
    """Counts a ticket that ended."""
    assert why is not None
    self._of(_outcome(why), why.value).inc()
    if _outcome(why) == "request_failure":
      return
    self._one["e2e_request_latency"].observe(now - ticket.arrived)
    taken = seconds_a_token(ticket)
    if ticket.objective is not None and taken is not None:
      self._of("request_objective", taken <= ticket.objective).inc()

  def text(self) -> bytes:
    """The metrics in Prometheus's text format."""
    return prometheus_client.generate_latest(self.registry)


def _outcome(why: Finish) -> str:
  is_answer = why in (Finish.STOP, Finish.LENGTH)
  return "request_success" if is_answer else "request_failure"


def seconds_a_token(ticket: Ticket) -> float | None:
  """Time per token after the first, as load tests count; None of fewer."""
  if ticket.num_tokens < 2 or ticket.first is None or ticket.last is None:
    return None
  return (ticket.last - ticket.first) / (ticket.num_tokens - 1)
