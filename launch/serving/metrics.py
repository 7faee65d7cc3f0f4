"""Metrics for Prometheus, under vLLM's names.

They work with `vllm bench serve` and vLLM's dashboards: a draft is a
verification of a row with drafted tokens, and positions count from 0. One
thread writes; any may read.
"""

from typing import Any

import numpy as np
import prometheus_client
from prometheus_client import Counter, Gauge, Histogram

from launch.serving.control import Report
from launch.serving.scheduler import Finish, Ticket

# Upper ends of the histograms' buckets, in seconds.
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SUCCESS = (Finish.STOP, Finish.LENGTH)
_ACCEPTED = "spec_decode_num_accepted_tokens"
# Names, descriptions and additional labels.
_COUNTERS = {
  "spec_decode_num_drafts": ("Drafts.",),
  "spec_decode_num_draft_tokens": ("Drafted tokens.",),
  _ACCEPTED: ("Accepted tokens.",),
  f"{_ACCEPTED}_per_pos": ("Accepted tokens by draft position.", "position"),
  "prompt_tokens": ("Tokens of admitted prompts.",),
  "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.",),
  "prefix_cache_hits": ("Prompt tokens found in the prefix cache.",),
  "generation_tokens": ("Emitted tokens.",),
  "request_success": ("Completions.", "finished_reason"),
  "request_failure": ("Failed completions.", "reason"),
  "request_objective": ("Completions with an objective.", "met"),
}
_GAUGES = {
  "num_requests_running": "Slots in use.",
  "num_requests_waiting": "Requests in the queue.",
  "kv_cache_usage_perc": "Share of slots in use.",
}
_TIMES = {
  "time_to_first_token": ("Time to the first token.", _LONG),
  "inter_token_latency": ("Time per token between iterations.", _SHORT),
  "e2e_request_latency": ("Time to the last token.", _LONG),
  "request_queue_time": ("Time in the queue.", _LONG),
}


class Metrics:
  """Counters, gauges and histograms, initially zero.

  Args:
    model: the model's name, a label of every metric.
    num_slots: B.
    depth: G, positions of the deepest draft.
  """

  def __init__(self, *, model: str, num_slots: int, depth: int):
    self._model, self._num_slots = model, num_slots
    self.registry = prometheus_client.CollectorRegistry()
    prometheus_client.disable_created_metrics()
    self._metrics: dict[str, Any] = {}
    for name, (text, *labels) in _COUNTERS.items():
      self._make(Counter, name, text, *labels)
    for name, text in _GAUGES.items():
      self._make(Gauge, name, text)
    for name, (text, ends) in _TIMES.items():
      self._make(Histogram, f"{name}_seconds", text, buckets=ends)
    # Creates them with value 0.
    for place in range(depth):
      self._of(f"{_ACCEPTED}_per_pos", place)
    for finish in Finish:
      self._outcome(finish)

  def _make(self, kind, name: str, text: str, *labels: str, **options) -> None:
    self._metrics[name] = kind(
      f"vllm:{name}", text, ["model_name", *labels], registry=self.registry,
      **options,
    )  # fmt: skip
    if not labels:
      self._of(name)

  def _of(self, name: str, *labels) -> Any:
    return self._metrics[name].labels(self._model, *labels)

  def _outcome(self, finish: Finish) -> Any:
    name = "request_success" if finish in _SUCCESS else "request_failure"
    return self._of(name, finish.value)

  def set_waiting(self, count: int) -> None:
    """Sets the number of waiting requests."""
    self._of("num_requests_waiting").set(count)

  def set_running(self, count: int) -> None:
    """Sets the number of slots in use."""
    self._of("num_requests_running").set(count)
    self._of("kv_cache_usage_perc").set(count / self._num_slots)

  def count_admission(self, ticket: Ticket) -> None:
    """Counts an admitted ticket."""
    self._of("request_queue_time_seconds").observe(
      (ticket.admitted or 0.0) - ticket.arrived
    )
    self._of("prompt_tokens").inc(len(ticket.request.token_ids))
    self._of("prefix_cache_queries").inc(len(ticket.request.token_ids))

  def count_rounds(self, ticket: Ticket, report: Report, row: int) -> None:
    """Counts an iteration's rounds for a ticket."""
    cached = int(report.cached[row])
    self._of("prefix_cache_hits").inc(cached - ticket.cached)
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
    self._of("spec_decode_num_drafts").inc(drafts)
    self._of("spec_decode_num_draft_tokens").inc(drafted)
    self._of(_ACCEPTED).inc(int(reached.sum()))
    for place, count in enumerate(reached.tolist()):
      self._of(f"{_ACCEPTED}_per_pos", place).inc(count)

  def count_tokens(self, ticket: Ticket, count: int, now: float) -> None:
    """Counts a ticket's new tokens."""
    self._of("generation_tokens").inc(count)
    if ticket.first is None:
      ticket.first = now
      self._of("time_to_first_token_seconds").observe(now - ticket.arrived)
    else:
      gap = now - (ticket.last or now)
      for _ in range(count):
        self._of("inter_token_latency_seconds").observe(gap / count)
    ticket.last = now
    ticket.num_tokens += count

  def count_finish(self, ticket: Ticket, finish: Finish, now: float) -> None:
    """Counts a finished ticket."""
    self._outcome(finish).inc()
    if finish not in _SUCCESS:
      return
    self._of("e2e_request_latency_seconds").observe(now - ticket.arrived)
    if ticket.objective is not None and ticket.num_tokens > 1:
      # Without the first token, as load tests count.
      taken = (ticket.last - ticket.first) / (ticket.num_tokens - 1)
      met = str(taken <= ticket.objective).lower()
      self._of("request_objective", met).inc()
