"""Orders to the device for one iteration (`Control`), and its `Report`.

Of several processes the leader decides, and every one does the same: a
`Control` becomes one array of fixed size that is sent to all.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from launch.prompt_lines import MOST_BIASES, MOST_STOP_IDS
from specjax.penalties import NONE

MOST_LIKELIEST = 20  # tokens in an emitted one's place, as OpenAI's chats have
MOST_SCORED = 5  # in the place of each of a prompt's, as its completions have
# Fields of `Asked` by how they are sent: as `i32`, `u32` and `f32`.
_WHOLE = (
  "max_new_tokens", "top_k", "ignore_stop", "min_tokens", "num_likeliest",
)  # fmt: skip
_WORDS = ("seed", "stream")
_REAL = (
  "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
  "repetition_penalty",
)  # fmt: skip
_SINGLE = 1 + len(_WHOLE) + len(_WORDS) + len(_REAL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """A requested completion.

  Attributes:
    token_ids: the prompt, at least one token.
    seed, stream: it draws from `fold_in(key(seed), stream)`, both `u32`.
    max_new_tokens: at least 1.
    temperature, top_k, top_p, min_p: the warp, see `specjax.types.Sampling`.
    ignore_stop: whether it goes on after a stop token, to its budget.
    scored: whether the target's law is read at every token of the prompt
      first (`Scores`); such a one may ask for 0 new tokens. Not sent to other
      processes.
    num_likeliest: tokens that are told in the place of each emitted one, at
      most `MOST_LIKELIEST`.
    presence_penalty, frequency_penalty, repetition_penalty, logit_bias,
      min_tokens, stop_token_ids: see `specjax.runtime.requests.Settings`.
  """

  token_ids: tuple[int, ...]
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
  logit_bias: tuple[tuple[int, float], ...] = ()
  min_tokens: int = 0
  stop_token_ids: tuple[int, ...] = ()

  def warp(self) -> np.ndarray:
    """`f32[6]`: temperature, top-p, min-p, and the three penalties."""
    return np.array(self._values(_REAL), np.float32)

  def _values(self, names: Sequence[str]) -> list:
    return [getattr(self, name) for name in names]

  def lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Biased tokens and biases, `[300]` each, and stop ids, `i32[64]`."""
    tokens = np.full(MOST_BIASES, NONE, np.int32)
    biases = np.zeros(MOST_BIASES, np.float32)
    stops = np.full(MOST_STOP_IDS, NONE, np.int32)
    for place, (token, bias) in enumerate(self.logit_bias):
      tokens[place], biases[place] = token, bias
    stops[: len(self.stop_token_ids)] = self.stop_token_ids
    return tokens, biases, stops

  def numbers(self) -> np.ndarray:
    """All but the tokens as `i32[n]`; floats and `u32` as their bits."""
    tokens, biases, stops = self.lists()
    return np.concatenate(
      [
        np.array([len(self.token_ids), *self._values(_WHOLE)]),
        np.array(self._values(_WORDS), np.uint32).view(np.int32),
        self.warp().view(np.int32),
        tokens,
        biases.view(np.int32),
        stops,
      ]
    ).astype(np.int32)

  @classmethod
  def of(cls, numbers: np.ndarray, tokens: np.ndarray) -> "Asked":
    """The request of `numbers` and padded tokens `i32[P]`."""
    sizes = [1, len(_WHOLE), len(_WORDS), len(_REAL), MOST_BIASES, MOST_BIASES]
    length, whole, words, real, biased, biases, stops = np.split(
      numbers, np.cumsum(sizes)
    )
    settings = dict(zip(_WHOLE, whole.tolist(), strict=True))
    settings |= zip(_WORDS, words.view(np.uint32).tolist(), strict=True)
    settings |= zip(_REAL, real.view(np.float32).tolist(), strict=True)
    return cls(
      token_ids=tuple(tokens[: length[0]].tolist()),
      **settings | {"ignore_stop": bool(settings["ignore_stop"])},
      logit_bias=tuple(
        (int(token), float(bias))
        for token, bias in zip(biased, biases.view(np.float32), strict=True)
        if token != NONE
      ),
      stop_token_ids=tuple(int(x) for x in stops if x != NONE),
    )


_HEAD = 5  # numbers of a row of a `Control`
_NUMBERS = _SINGLE + 2 * MOST_BIASES + MOST_STOP_IDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
  """Orders for one iteration: rows end, rows begin, rounds are made.

  Attributes:
    admissions: rows, and what each of them decodes from now on; their prompts
      are read in this order.
    ended: `bool[B]`, rows that the host ends; none that is admitted.
    max_depth: `i32[B]`, how deep each row may draft.
    rounds: at most so many; fewer once one more row is done. None are made
      where it is 0.
    is_last: whether nothing comes after it, and nothing is done.
  """

  admissions: Sequence[tuple[int, Asked]] = ()
  ended: np.ndarray
  max_depth: np.ndarray
  rounds: int
  is_last: bool = False

  def encode(self, max_width: int) -> np.ndarray:
    """As `i32[B, n]`, where n follows from the longest prompt there may be."""
    count = len(self.ended)
    array = np.zeros((count, _HEAD + _NUMBERS + max_width), np.int32)
    array[:, 0] = self.ended
    array[:, 1] = self.max_depth
    array[0, 2], array[1 % count, 3] = self.rounds, self.is_last
    start = _HEAD + _NUMBERS
    for place, (row, asked) in enumerate(self.admissions):
      array[row, 4] = place
      array[row, _HEAD:start] = asked.numbers()
      array[row, start : start + len(asked.token_ids)] = asked.token_ids
    return array

  @classmethod
  def decode(cls, array: np.ndarray) -> "Control":
    """The control from its array."""
    parts = np.split(
      np.asarray(array, np.int32), [_HEAD, _HEAD + _NUMBERS], axis=1
    )
    head, numbers, tokens = (np.ascontiguousarray(x) for x in parts)
    return cls(
      admissions=[
        (row, Asked.of(numbers[row], tokens[row]))
        for row in map(int, np.argsort(head[:, 4], kind="stable"))
        if numbers[row, 0]
      ],
      ended=head[:, 0].astype(bool),
      max_depth=head[:, 1],
      rounds=int(head[0, 2]),
      is_last=bool(head[1 % len(head), 3]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
  """The target's own law at the tokens of a prompt but the first.

  Attributes:
    log_probs: `f32[P - 1]`, of each token given those before it.
    likeliest: `i32[P - 1, K]`, the likeliest tokens in its place, of K =
      `MOST_SCORED`.
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
    likeliest, likeliest_log_probs: `[B, W, K]`, the likeliest tokens in the
      place of each, of rows that asked for them; None where no row did.
    reason: `i32[B]`, a `StopReason`.
    num_drafts, num_drafted: `i32[B]`, see `specjax.state.Counters`, of
      all rounds since the row was admitted.
    accept_counts: `i32[B, G + 1]`, as these.
    cached: `i32[B]`, tokens of the row's prompt that were not read, since a row
      had them.
    scores: of rows whose prompts were scored to their end in this iteration.
    rounds: how many were made.
    seconds: the iteration took, what it admitted included.
  """

  start: np.ndarray
  length: np.ndarray
  tokens: np.ndarray
  origins: np.ndarray
  log_probs: np.ndarray
  likeliest: np.ndarray | None = None
  likeliest_log_probs: np.ndarray | None = None
  reason: np.ndarray
  num_drafts: np.ndarray
  num_drafted: np.ndarray
  accept_counts: np.ndarray
  cached: np.ndarray
  scores: Mapping[int, Scores] = dataclasses.field(default_factory=dict)
  rounds: int
  seconds: float = 0.0
