"""Orders to the device for one iteration (`Control`), and its `Report`.

Of several processes the leader decides and all do the same: it sends them each
`Control` as JSON in an array of one size.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from launch.prompts import MOST_BIASES, MOST_STOP_IDS

MOST_LIKELIEST = 20  # top log-probabilities of an emitted token, as in chats
MOST_SCORED = 5  # of a prompt's token, as in completions
_LONGEST_NUMBER = 26  # bytes of a float in JSON, and what separates it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A requested completion.

  Attributes:
    token_ids: the prompt, at least one token.
    seed, stream: it draws from `fold_in(key(seed), stream)`, both `u32`.
    max_new_tokens: at least 1, or 0 if `scored`.
    temperature, top_k, top_p, min_p: the warp, see `specjax.types.Sampling`.
    ignore_stop: whether it goes on after a stop token, to its budget.
    scored: whether the prompt's own log-probabilities are wanted (`Scores`).
    num_likeliest: top log-probabilities of each emitted token, at most
      `MOST_LIKELIEST`.
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias,
      min_tokens, stop_token_ids: see `specjax.runtime.requests.Settings`.
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
  """Orders for one iteration: rows end, rows begin, rounds are made.

  Attributes:
    admissions: rows, and what each of them decodes from now on; prompts are
      read in this order.
    ended: rows that the host ends.
    depth: of the drafts.
    rounds: at most so many; fewer once one more row is done.
    shares: by width, what part of the time for reading beside rows that decode
      a pass over a prompt takes. The narrowest is made in any case, unless this
      is empty.
    is_last: whether nothing comes after it, and nothing is done.
  """

  admissions: Sequence[tuple[int, Asked]] = ()
  ended: Sequence[int] = ()
  depth: int
  rounds: int
  shares: Mapping[int, float] = dataclasses.field(default_factory=dict)
  is_last: bool = False

  def encode(self, size: int) -> np.ndarray:
    """As `u8[size]`: the length of a text of JSON, `u32`, and the text."""
    text = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
    array = np.zeros(size, np.uint8)
    array[:4] = np.array([len(text)], "<u4").view(np.uint8)
    array[4 : 4 + len(text)] = np.frombuffer(text, np.uint8)
    return array

  @classmethod
  def decode(cls, array: np.ndarray) -> "Control":
    """The control from its array."""
    length = int(np.asarray(array[:4], np.uint8).view("<u4")[0])
    record = json.loads(bytes(array[4 : 4 + length]))
    record["admissions"] = [(i, Asked(**x)) for i, x in record["admissions"]]
    record["shares"] = {int(w): x for w, x in record["shares"].items()}
    return cls(**record)


def most_bytes(num_slots: int, longest: int) -> int:
  """The most bytes of a control that admits to each slot a longest prompt."""
  numbers = 64 + longest + 2 * MOST_BIASES + MOST_STOP_IDS
  return (1 + num_slots) * numbers * _LONGEST_NUMBER


@dataclasses.dataclass(frozen=True)
class Scores:
  """The target's own distribution at the tokens of a prompt but the first.

  Attributes:
    log_probs: `f32[P - 1]`, of each token given those before it.
    likeliest: `i32[P - 1, K]`, the K = `MOST_SCORED` likeliest in its place.
    likeliest_log_probs: `f32[P - 1, K]`, of those.
  """

  log_probs: np.ndarray
  likeliest: np.ndarray
  likeliest_log_probs: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Results of an iteration.

  Attributes:
    start, length: `i32[B]`, committed tokens before its rounds and after.
    tokens, origins: `i32[B, W]`, what was emitted, from `start` on.
    log_probs: `f32[B, W]`, the target's own of each token.
    likeliest: `[B, W, K]`, the tokens of the top log-probabilities of each in
      rows that asked for them, and these; None where no row did.
    reason: `i32[B]`, a `StopReason`.
    num_drafts, num_drafted: `i32[B]`, see `specjax.state.Counters`, of all
      rounds since the row was admitted.
    accept_counts: `i32[B, G + 1]`, as these.
    cached: `i32[B]`, tokens of the row's prompt that were not read, since a row
      had them.
    scores: of rows whose prompts were scored to their end in this iteration.
    widths: of the passes that read prompts.
    depth, rounds: of the rounds that were made, and their number.
    seconds: the iteration took.
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
