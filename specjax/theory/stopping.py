"""Optimal stopping of a draft, and the stopping rules that systems use.

A round drafts up to G tokens, one level after another. Token i is accepted
with probability a_i given that all before it were. The survival `S_k = a_1 ..
a_k` is the probability that token k is reached and kept, and a round of depth T
gives `N = 1 + S_1 + .. + S_T` tokens on average. After level k the *context*
x_k that token k was drawn in (such as the draft's confidence) is known, and
with it a_k; the next one is not. Contexts are a Markov chain (`Process`). A
stopping rule may use all of this, and decides before paying for the next level.

The objective is the long-run rate `E[N] / E[T]` (rounds are renewals).
Dinkelbach (1967): a rule maximizes the ratio exactly if it maximizes `E[N - r
T]` for the r that makes the maximum 0, and iterating `r <- E[N] / E[T]` of the
best rule for r finds it, always from below. For fixed r the best rule is a
dynamic program,

  V_k(S, x) = max(0, -r D_k + sum_x' P(x, x') (S a(x') + V_{k+1}(S a(x'), x'))),

with D_k the cost of level k + 1. V is convex and nondecreasing in S (by
induction: a maximum and a mean of such functions), so the best rule stops
exactly if **S is at or below a threshold of its level and context**: a
threshold on survival, not on the newest token's acceptance.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

# `(level, survival f64[n], context int[n]) -> bool[n]`: whether the next level
# is drafted, after `level` of them. Before the first the context is ROOT.
ContinueFn = Callable[[int, np.ndarray, np.ndarray], np.ndarray]

ROOT = -1
_SAME = 12  # decimals at which survivals count as equal
_MOST_STEPS = 100
_TINY = 1e-12  # gains up to this count as none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
  """Model of acceptance: a Markov chain over X contexts.

  Attributes:
    first: `f64[X]`, the law of the first token's context.
    transition: `f64[X, X]`, the law of the next token's context after each.
    acceptance: `f64[X]`, the probability that a token drawn in a context is
      accepted, given that all before it were.
  """

  first: np.ndarray
  transition: np.ndarray
  acceptance: np.ndarray

  def __post_init__(self):
    count = len(self.acceptance)
    laws = np.vstack([self.first, self.transition])
    if (
      laws.shape != (count + 1, count)
      or (laws < 0).any()
      or not np.allclose(laws.sum(axis=1), 1)
    ):
      raise ValueError(
        f"{count} contexts need laws that add up to 1, got {laws}"
      )
    if not ((self.acceptance >= 0) & (self.acceptance <= 1)).all():
      raise ValueError(
        f"acceptance must be in [0, 1], got {self.acceptance.tolist()}"
      )

  def next_law(self, context: np.ndarray) -> np.ndarray:
    """The law of the next token's context, `int[n] -> f64[n, X]`."""
    root = (context == ROOT)[:, None]
    return np.where(root, self.first, self.transition[np.maximum(context, 0)])


def independent(
  acceptance: Sequence[float], probs: Sequence[float] = (1.0,)
) -> Process:
  """Independent contexts, each with an acceptance and a probability."""
  law = np.asarray(probs, np.float64)
  return Process(
    first=law,
    transition=np.tile(law, (len(law), 1)),
    acceptance=np.asarray(acceptance, np.float64),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Costs of a round in seconds, or any unit of time.

  Attributes:
    draft: cost of drafting one more level.
    verify: cost of the target's pass, as a function of its tokens (drafts and
      root) or constant; `specjax.theory.throughput.verify_curve`.
  """

  draft: float
  verify: float | Callable[[int], float]

  def of_round(self, depth: int) -> float:
    """Seconds of a round that drafts `depth` levels."""
    verify = self.verify(depth + 1) if callable(self.verify) else self.verify
    return depth * self.draft + float(verify)

  def marginal(self, depth: int) -> np.ndarray:
    """D, the cost of each further level, `f64[depth]`."""
    return np.diff([self.of_round(k) for k in range(depth + 1)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """Mean tokens and seconds of a round under a stopping rule.

  Attributes:
    tokens: E[N] per round.
    seconds: E[T] per round.
    setting: the rule's depth, if it has one.
    rates: for the optimum and the myopic rule: the initial rate, then that of
      the rule of each Dinkelbach step.
    depth: mean number of drafted levels.
  """

  tokens: float
  seconds: float
  depth: float
  setting: dict[str, float] = dataclasses.field(default_factory=dict)
  rates: tuple[float, ...] = ()

  @property
  def rate(self) -> float:
    """Tokens per second."""
    return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Level:
  """The n distinguishable cases after a number of levels.

  `below`, `int[n, X]`, are those after another level, `probs` theirs.
  """

  survival: np.ndarray
  context: np.ndarray
  below: np.ndarray
  probs: np.ndarray


def _cases(process: Process, depth: int) -> list[_Level]:
  """The cases after 0..depth levels, equal ones joined."""
  count = len(process.acceptance)
  survival, context = np.ones(1), np.full(1, ROOT)
  levels = []
  for _ in range(depth + 1):
    reached = np.round(survival[:, None] * process.acceptance, _SAME)
    pairs = np.stack(
      [reached.ravel(), np.tile(np.arange(count), len(survival))], axis=1
    )
    unique, below = np.unique(pairs, axis=0, return_inverse=True)
    levels.append(
      _Level(
        survival=survival,
        context=context,
        below=below.reshape(-1, count),
        probs=process.next_law(context),
      )
    )
    survival, context = unique[:, 0], unique[:, 1].astype(int)
  return levels


def outcome(
  process: Process, costs: Costs, continues: ContinueFn, depth: int
) -> Outcome:
  """The exact means of a stopping rule with at most G levels."""
  levels = _cases(process, depth)
  go = [
    np.asarray(continues(k, level.survival, level.context), bool)
    for k, level in enumerate(levels[:-1])
  ]
  return _evaluate(levels, go, costs)


def _evaluate(levels: list[_Level], go: list[np.ndarray], costs: Costs):
  marginal = costs.marginal(len(go))
  mass = np.ones(1)
  tokens, seconds, depth = 1.0, costs.of_round(0), 0.0
  for k, continuing in enumerate(go):
    mass = np.where(continuing, mass, 0)
    seconds += marginal[k] * mass.sum()
    depth += mass.sum()
    further = np.zeros(len(levels[k + 1].survival))
    np.add.at(further, levels[k].below, mass[:, None] * levels[k].probs)
    mass = further
    tokens += mass @ levels[k + 1].survival
  return Outcome(tokens=tokens, seconds=seconds, depth=depth)


def _best_for(levels: list[_Level], costs: Costs, rate: float):
  """The rule that maximizes `E[N - rate T]`, over the cases."""
  marginal = costs.marginal(len(levels) - 1)
  worth = np.zeros(len(levels[-1].survival))
  go: list[np.ndarray] = []
  for k in range(len(levels) - 2, -1, -1):
    gain = levels[k + 1].survival + worth
    more = (levels[k].probs * gain[levels[k].below]).sum(axis=1)
    more -= rate * marginal[k]
    go.insert(0, more > _TINY)
    worth = np.maximum(more, 0)
  return go


def optimum(process: Process, costs: Costs, depth: int) -> Outcome:
  """The best of all stopping rules, by Dinkelbach's iteration.

  It starts from the rate of plain decoding. The last of G levels has `(G + X -
  1)` choose G cases in general.
  """
  levels = _cases(process, depth)
  return _iterate(
    lambda rate: _evaluate(levels, _best_for(levels, costs, rate), costs), costs
  )


def _iterate(step: Callable[[float], Outcome], costs: Costs) -> Outcome:
  rates = [1 / costs.of_round(0)]
  best = None
  for _ in range(_MOST_STEPS):
    candidate = step(rates[-1])
    if best is not None and candidate.rate <= best.rate * (1 + 1e-12):
      break
    best = candidate
    rates.append(candidate.rate)
  assert best is not None
  return dataclasses.replace(best, rates=tuple(rates))


# ------------------------------------------------- the rules that systems use


def static(process: Process, costs: Costs, depth: int) -> Outcome:
  """Always the same depth."""
  one = outcome(process, costs, lambda k, s, x: np.ones(len(s), bool), depth)
  return dataclasses.replace(one, setting={"depth": depth})


def best_static(process: Process, costs: Costs, depth: int) -> Outcome:
  """The best fixed depth of 0..G; ties go to the smallest."""
  options = [static(process, costs, k) for k in range(depth + 1)]
  most = max(one.rate for one in options)
  return next(one for one in options if one.rate >= most * (1 - 1e-12))


def myopic(process: Process, costs: Costs, depth: int) -> Outcome:
  """Continues if the next level alone pays off: `S_k E[a_k+1] > r D_k`.

  r is its own rate, found by the same iteration. It is optimal in the monotone
  case, in which no level that pays off follows one that does not.
  """
  marginal = costs.marginal(depth)

  def step(rate):
    def continues(k, s, x):
      gain = s * (process.next_law(x) @ process.acceptance)
      return gain > rate * marginal[k] + _TINY

    return outcome(process, costs, continues, depth)

  return _iterate(step, costs)
