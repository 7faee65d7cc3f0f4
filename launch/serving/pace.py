"""How long rounds and passes take, by running medians of all iterations.

A server that shared its machine for a while is soon right again. The median is
the lower one of the last few: other work only adds to what is measured.
"""

import collections
import statistics
from collections.abc import Sequence

from launch.serving.control import Report

_WINDOW = 5  # measurements that a median is of
_LIFE = 128  # iterations after which one is forgotten
_ALONE = 16  # iterations beside prompts after which one reads nothing
_LEAST = 0.1  # of what passes took; they do not become faster at once


class Pace:
  """Running medians, and what fits beside rows that decode.

  Iterations that read prompts while rows decode take `gap` rounds, where the
  narrowest pass allows it.
  """

  def __init__(
    self,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    fed: int,
    seconds: float,
    gap: float = 2.5,
  ):
    """Begins with a first guess."""
    made = lambda keys: {key: collections.deque(maxlen=_WINDOW) for key in keys}
    self._rounds, self._passes = made(depths), made(widths)
    self._fed, self._gap, self._guess = fed, gap, seconds
    self._now = self._last_alone = 0

  def learn(self, report: Report) -> None:
    """Learns from an iteration."""
    if not (report.widths or report.rounds):
      return
    self._now += 1
    add = lambda measured, seconds: measured.append((self._now, seconds))
    each = self.seconds_of_round(report.depth)
    decoding = report.rounds * each
    if not report.widths:
      self._last_alone = self._now
      add(self._rounds[report.depth], report.seconds / report.rounds)
      return
    passes = {width: self.seconds_of_pass(width) for width in report.widths}
    reading = sum(passes[width] for width in report.widths)
    ratio = (report.seconds - decoding) / reading
    if report.rounds and ratio < _LEAST:  # rounds are faster than was thought
      ratio = report.seconds / (decoding + reading)
      add(self._rounds[report.depth], ratio * each)
    for width, seconds in passes.items():
      add(self._passes[width], ratio * seconds)

  def seconds_of_round(self, depth: int) -> float:
    """Seconds of a round.

    What was not measured lately is guessed to be as cheap as can be, so that it
    is tried: as a shallower one, or as a deeper one by its length.
    """
    lately = self._lately(self._rounds)
    if depth in lately:
      return lately[depth]
    bounds = [
      seconds * min(1.0, (1 + depth) / (1 + other))
      for other, seconds in lately.items()
    ]
    return max(bounds, default=self._guess)

  def seconds_of_pass(self, width: int) -> float:
    """Seconds of a pass over a prompt, or a guess from rounds by tokens fed."""
    guess = self.seconds_of_round(max(self._rounds)) * width / self._fed
    return self._lately(self._passes).get(width, guess)

  def shares(self, depth: int) -> dict[int, float]:
    """`Control.shares` beside rounds of a depth.

    Now and then there are none, so that rounds are measured alone.
    """
    if self._now - self._last_alone >= _ALONE:
      return {}
    room = (self._gap - 1) * self.seconds_of_round(depth)
    return {width: self.seconds_of_pass(width) / room for width in self._passes}

  def _lately(self, measured) -> dict[int, float]:
    young = {
      key: [seconds for then, seconds in one if self._now - then < _LIFE]
      for key, one in measured.items()
    }
    return {k: statistics.median_low(x) for k, x in young.items() if x}
