"""What a load test found, in the words of vLLM's benchmark.

Time to first token (TTFT) ends with the first chunk that has text; time per
output token (TPOT) is the rest of an answer by its tokens but one; inter-token
latency (ITL) is the time between chunks, of which speculation makes one a
visit, with several tokens each. Goodput is finished requests a second that meet
every objective, which is not SmartSpec's goodput (tokens a second).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from launch.loading.client import Timed

_PERCENTILES = (50, 90, 99)


def time_to_first(one: Timed) -> float:
  """Seconds; of an answer without any text, to its end."""
  return (one.chunks[0] if one.chunks else one.ended) - one.sent


def time_per_token(one: Timed) -> float | None:
  """Seconds; None of an answer of one token."""
  if one.num_tokens < 2:
    return None
  return (one.ended - one.sent - time_to_first(one)) / (one.num_tokens - 1)


def meets(one: Timed, *, ttft: float | None, tpot: float | None) -> bool:
  """Whether an answer keeps the objectives, in seconds, that there are."""
  taken = time_per_token(one)
  return (
    one.error is None
    and (ttft is None or time_to_first(one) <= ttft)
    and (tpot is None or taken is None or taken <= tpot)
  )


def summarize(
  found: Sequence[Timed],
  *,
  ttft: float | None = None,
  tpot: float | None = None,
) -> dict[str, Any]:
  """The numbers of one load.

  Args:
    found: all requests, at least one.
    ttft, tpot: objectives in seconds, or None.

  Returns:
    Counts, rates a second, and milliseconds; None where nothing was finished.
  """
  good = [one for one in found if one.error is None]
  start = min(one.sent for one in found)
  seconds = max(one.ended for one in found) - start
  gaps = [b - a for one in good for a, b in zip(one.chunks, one.chunks[1:])]  # noqa: B905
  per_token = [t for one in good if (t := time_per_token(one)) is not None]
  tokens = sum(one.num_tokens for one in good)
  keep = [one for one in good if meets(one, ttft=ttft, tpot=tpot)]
  errors: dict[str, int] = {}
  for one in found:
    if one.error is not None:
      errors[one.error] = errors.get(one.error, 0) + 1
  return {
    "num_requests": len(found),
    "num_finished": len(good),
    "errors": errors,
    "seconds": seconds,
    "requests_per_second": len(good) / seconds,
    "tokens_per_second": tokens / seconds,
    "num_tokens": tokens,
    "ttft_ms": _spread([time_to_first(one) for one in good]),
    "tpot_ms": _spread(per_token),
    "itl_ms": _spread(gaps),
    "e2el_ms": _spread([one.ended - one.sent for one in good]),
    "attainment": len(keep) / len(found),
    "goodput": len(keep) / seconds,
  }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
  """Mean and percentiles, in milliseconds."""
  if not seconds:
    return None
  values = 1000 * np.array(seconds)
  return {
    "mean": float(values.mean()),
    **{f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES},
  }


def acceptance(before: str, after: str) -> dict[str, Any] | None:
  """What was drafted and accepted between two readings of `/metrics`.

  Args:
    before, after: Prometheus' text.

  Returns:
    The share of drafted tokens that was accepted, tokens a draft with the one
    after it, and the share of each position; None if nothing was drafted.
  """
  one, other = _counters(before), _counters(after)
  grown = {name: value - one.get(name, 0.0) for name, value in other.items()}
  total = lambda name: sum(
    v
    for n, v in grown.items()
    if n.startswith(f"vllm:spec_decode_{name}_total")
  )
  drafts, drafted = total("num_drafts"), total("num_draft_tokens")
  if not drafts:
    return None
  accepted = total("num_accepted_tokens")
  places = {
    int(name.split('position="')[1].split('"')[0]): value / drafts
    for name, value in grown.items()
    if "num_accepted_tokens_per_pos_total" in name
  }
  return {
    "acceptance": accepted / drafted,
    "block_efficiency": 1 + accepted / drafts,
    "by_position": [places[place] for place in sorted(places)],
  }


def _counters(text: str) -> dict[str, float]:
  lines = [x for x in text.splitlines() if x.startswith("vllm:spec_decode")]
  return {
    name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)
  }
