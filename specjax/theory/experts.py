"""Cost of verification on a mixture of experts: the weights that a pass reads.

A token is routed to k of E experts per layer. If the choice were uniform and
independent of other tokens', a pass over t tokens would touch

  E (1 - (1 - k / E)^t)

of them on average (a token misses an expert with probability 1 - k / E).
Reading their weights takes most of the time of a pass over few tokens. So,
unlike on a dense model, verifying a draft costs more than one token: from k
experts up to E, with diminishing increments. Real routers are neither uniform
nor independent: neighboring tokens share experts, so a pass touches fewer.
Measured counts can replace the formula.

Deeper levels cost less: the first may not pay off although many together do. So
the myopic rule (`specjax.theory.stopping.myopic`), optimal if levels never get
cheaper, is not optimal here. With many rows nearly all E are touched anyway,
and verification costs as much as on a dense model, until arithmetic takes
longer than reading (MoESD, arXiv 2505.19645, measures both).
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import stats

Number = float | np.ndarray


def expected_distinct(
  tokens: Number, num_experts: int, num_chosen: int
) -> np.ndarray:
  """Experts that a pass touches under uniform routing, E (1 - (1 - k/E)^t).

  Args:
    tokens: t >= 0, tokens in the pass, or an array of such numbers.
    num_experts: E.
    num_chosen: k.

  Returns:
    `f64[...]`, in 0..E; k for one token.

  Raises:
    ValueError: for numbers out of range.
  """
  if not 1 <= num_chosen <= num_experts:
    raise ValueError(
      f"num_chosen must be in 1..{num_experts}, got {num_chosen}"
    )
  tokens = np.asarray(tokens, float)
  if not (np.isfinite(tokens) & (tokens >= 0)).all():
    raise ValueError(f"tokens must be finite and >= 0, got {tokens.tolist()}")
  return num_experts * (1 - (1 - num_chosen / num_experts) ** tokens)


def busiest(distinct: Number, num_experts: int, devices: int) -> np.ndarray:
  """Expected experts that a pass touches on the busiest of equal devices.

  Assumes that each of E experts is touched independently, with probability
  distinct / E; within 3% of simulated uniform routing.

  Args:
    distinct: experts that the pass touches, 0..E.
    num_experts: E.
    devices: number of devices, a divisor of E.

  Returns:
    `f64[...]`, at least distinct / devices.
  """
  if num_experts % devices:
    raise ValueError(f"{devices} devices cannot split {num_experts} experts")
  each = num_experts // devices
  share = np.asarray(distinct, float)[..., None] / num_experts
  most = stats.binom.cdf(np.arange(each), each, np.clip(share, 0, 1)) ** devices
  return each - most.sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
  """Bytes that a pass over a mixture reads.

  Attributes:
    others: bytes of the weights that every pass reads: attention, routers,
      shared experts, dense layers, output projection (not the embedding, of
      which a pass reads only its tokens' rows).
    expert: bytes of one expert of one layer.
    num_layers: layers with experts.
    num_experts: E, per layer.
    num_chosen: k.
  """

  others: float
  expert: float
  num_layers: int
  num_experts: int
  num_chosen: int

  def bytes_of(
    self, tokens: Number, distinct: Callable[[Number], Number] | None = None
  ) -> np.ndarray:
    """Bytes that a pass over t tokens reads, `f64[...]`.

    Args:
      tokens: t.
      distinct: measured experts per layer that a pass over t tokens touches; by
        default `expected_distinct`.
    """
    if distinct is None:
      experts = expected_distinct(tokens, self.num_experts, self.num_chosen)
    else:
      experts = np.asarray(distinct(tokens), float)
    return self.others + self.num_layers * self.expert * experts

  def verify(
    self, rows: int = 1, distinct: Callable[[Number], Number] | None = None
  ) -> Callable[[Number], np.ndarray]:
    """Time of a verification pass, relative to one over a token per row.

    Assumes that reading weights takes all the time, which holds for few tokens,
    before arithmetic or the cached text takes longer. For
    `specjax.theory.stopping.Costs` and `specjax.theory.throughput`.

    Args:
      rows: B, rows decoded together.
      distinct: as in `bytes_of`.

    Returns:
      `tokens fed per row -> time`; 1 for one token.

    Raises:
      ValueError: for fewer than one row.
    """
    if rows < 1:
      raise ValueError(f"rows must be >= 1, got {rows}")
    plain = self.bytes_of(rows, distinct)
    return lambda fed: self.bytes_of(rows * np.asarray(fed), distinct) / plain
