"""The orders for one iteration, its report, and estimates of its duration.

With several processes the leader decides and sends each `Control` as JSON in an
array of fixed size.
"""

import collections
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from launch.prompts import MOST_BIASES, MOST_STOP_IDS

MAX_TOP = 20  # top log-probabilities of an emitted token, as in chats
MAX_TOP_SCORED = 5  # of a prompt's token, as in completions
_LONGEST_NUMBER = 26  # bytes of a float and its separator in JSON


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A requested completion.

  Other fields are as in `specjax.runtime.requests.Settings`.

  Attributes:
    token_ids: the prompt, at least one token.
    seed, stream: draws are from `fold_in(key(seed), stream)`, both `u32`.
    max_new_tokens: at least 1; 0 is allowed if `scored`.
    ignore_stop: whether it continues after a stop token, to its budget.
    scored: whether to return the prompt's log-probabilities (`Scores`).
    num_likeliest: top log-probabilities of each emitted token, at most
      `MAX_TOP`.
  """

  token_ids: Sequence[int]
  seed: int
  stream: int = 0
  max_new_tokens: int
  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  ignore_stop: bool = False
  scored: bool = False
  num_likeliest: int = 0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  logit_bias: Sequence[tuple[int, float]] = ()
  min_tokens: int = 0
  stop_token_ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
  """The orders for one iteration: rows to end, rows to start, and rounds.

  Attributes:
    admissions: rows and their new requests; prompts are prefilled in this
      order.
    ended: rows that the host ends.
    depth: draft length.
    rounds: maximum rounds; the iteration ends once another row is done.
    shares: by width, the share of the prefill time budget that a pass takes
      while rows decode. The narrowest pass is always made, unless this is
      empty.
    is_last: whether this is the last iteration, which does nothing.
  """

  admissions: Sequence[tuple[int, Request]] = ()
  ended: Sequence[int] = ()
  depth: int
  rounds: int
  shares: Mapping[int, float] = dataclasses.field(default_factory=dict)
  is_last: bool = False

  def encode(self, size: int) -> np.ndarray:
    """Encodes as `u8[size]`: the length of the JSON, `u32`, and the JSON."""
    text = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
    array = np.zeros(size, np.uint8)
    array[:4] = np.array([len(text)], "<u4").view(np.uint8)
    array[4 : 4 + len(text)] = np.frombuffer(text, np.uint8)
    return array

  @classmethod
  def decode(cls, array: np.ndarray) -> "Control":
    """Decodes a control from its array."""
    length = int(np.asarray(array[:4], np.uint8).view("<u4")[0])
    record = json.loads(bytes(array[4 : 4 + length]))
    record["admissions"] = [(i, Request(**x)) for i, x in record["admissions"]]
    record["shares"] = {int(w): x for w, x in record["shares"].items()}
    return cls(**record)


def most_bytes(num_slots: int, longest: int) -> int:
  """Bytes of the longest control: the longest prompt admitted to every slot."""
  numbers = 64 + longest + 2 * MOST_BIASES + MOST_STOP_IDS
  return (1 + num_slots) * numbers * _LONGEST_NUMBER


@dataclasses.dataclass(frozen=True)
class Scores:
  """The target's log-probabilities of a prompt's tokens except the first.

  Attributes:
    log_probs: `f32[P - 1]`, each token's, given those before it.
    likeliest: `i32[P - 1, K]`, the top K = `MAX_TOP_SCORED` tokens there.
    likeliest_log_probs: `f32[P - 1, K]`, those tokens'.
  """

  log_probs: np.ndarray
  likeliest: np.ndarray
  likeliest_log_probs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Results of an iteration.

  Attributes:
    start, length: `i32[B]`, committed tokens before and after its rounds.
    tokens, origins: `i32[B, W]`, emitted tokens, from `start` on.
    log_probs: `f32[B, W]`, the target's.
    likeliest: `[B, W, K]`, top tokens and their log-probabilities, in rows that
      asked for them; None if no row did.
    reason: `i32[B]`, a `StopReason`.
    num_drafts, num_drafted: `i32[B]`, see `specjax.state.Counters`, since the
      row was admitted.
    accept_counts: `i32[B, G + 1]`, likewise.
    cached: `i32[B]`, tokens of the row's prompt from the prefix cache.
    scores: scores of the rows whose prompts were scored in this iteration.
    widths: widths of its prefill passes.
    depth, rounds: draft length and number of its rounds.
    seconds: duration of the iteration.
  """

  start: np.ndarray
  length: np.ndarray
  tokens: np.ndarray
  origins: np.ndarray
  log_probs: np.ndarray
  likeliest: tuple[np.ndarray, np.ndarray] | None = None
  reason: np.ndarray
  num_drafts: np.ndarray
  num_drafted: np.ndarray
  accept_counts: np.ndarray
  cached: np.ndarray
  scores: Mapping[int, Scores] = dataclasses.field(default_factory=dict)
  widths: Sequence[int] = ()
  depth: int = 0
  rounds: int
  seconds: float = 0.0


_WINDOW = 5  # measurements per median
_LIFE = 128  # iterations after which a measurement is dropped
_ALONE = 16  # iterations with prefill before one without
_GAP = 2.5  # rounds that an iteration takes if it prefills while rows decode
_LEAST = 0.1  # passes do not suddenly take less than this share


class CostModel:
  """Estimates how long rounds and prefill passes take.

  The estimates are low medians of the last few measurements, since other work
  on the machine only adds time. Iterations that prefill while rows decode take
  `_GAP` rounds, if the narrowest pass allows it.
  """

  def __init__(
    self,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    fed: int,
    seconds: float,
  ):
    """Starts with a guess of a round's seconds."""
    made = lambda keys: {key: collections.deque(maxlen=_WINDOW) for key in keys}
    self._rounds, self._passes = made(depths), made(widths)
    self._fed, self._guess = fed, seconds
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
    if report.rounds and ratio < _LEAST:  # rounds are faster than estimated
      ratio = report.seconds / (decoding + reading)
      add(self._rounds[report.depth], ratio * each)
    for width, seconds in passes.items():
      add(self._passes[width], ratio * seconds)

  def seconds_of_round(self, depth: int) -> float:
    """Seconds of a round.

    A depth not measured lately gets an optimistic guess, so that it is tried:
    as long as a shallower round, or in proportion to a deeper one.
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
    """Seconds of a prefill pass, or a guess from rounds by tokens fed."""
    guess = self.seconds_of_round(max(self._rounds)) * width / self._fed
    return self._lately(self._passes).get(width, guess)

  def shares(self, depth: int) -> dict[int, float]:
    """`Control.shares` for rounds of a depth.

    Sometimes empty, so that rounds are measured alone.
    """
    if self._now - self._last_alone >= _ALONE:
      return {}
    room = (_GAP - 1) * self.seconds_of_round(depth)
    return {width: self.seconds_of_pass(width) / room for width in self._passes}

  def _lately(self, measured) -> dict[int, float]:
    young = {
      key: [seconds for then, seconds in one if self._now - then < _LIFE]
      for key, one in measured.items()
    }
    return {k: statistics.median_low(x) for k, x in young.items() if x}
