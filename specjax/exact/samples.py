"""Tests of sampled drafts: tokens follow their laws, independently.

A token must follow its law not only over all drafts, but also given any outcome
of the loop's own draws, of an earlier node, or of the round before. If two
draws share a random number, each follows its law, but the text does not follow
the target's.
"""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from scipy import special

from specjax import random
from specjax.state import DecodeState
from specjax.types import Draft

_ALPHA = 1e-6
_BINS = 4  # bins of outcomes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
  """The nodes of R drafts, as NumPy arrays with R rows.

  Attributes:
    tokens: `int[R, N + 1]`.
    laws: `f64[R, N + 1, V]`, probabilities.
    present, parents, depth: as in `specjax.tree.Topology`, `[R, N + 1]`.
    paths: `int[R, N + 1, G + 1]`.
    drawn: `bool[R, N + 1]`: present, and not the root.
  """

  tokens: np.ndarray
  laws: np.ndarray
  present: np.ndarray
  parents: np.ndarray
  depth: np.ndarray
  paths: np.ndarray
  drawn: np.ndarray

  @classmethod
  def of(cls, draft: Draft) -> "Nodes":
    """The nodes of a draft; masked ones do not count as drawn."""
    nodes, form = draft.tree.num_nodes, draft.topology()
    whole = lambda x: np.broadcast_to(x, (len(draft.tokens), *x.shape[1:]))
    present = whole(form.present)[:, :nodes]
    return cls(
      tokens=np.asarray(draft.tokens)[:, :nodes],
      laws=np.exp(np.asarray(draft.log_probs, np.float64)),
      present=present,
      parents=whole(form.parents)[:, :nodes],
      depth=whole(form.depth)[:, :nodes],
      paths=whole(form.paths),
      drawn=present & (np.arange(nodes) > 0),
    )

  def token_probs(self) -> np.ndarray:
    """`f64[R, N + 1]`, each token's probability under its law."""
    each = np.take_along_axis(self.laws, self.tokens[..., None], axis=-1)
    return each[..., 0]

  def each(self, first: int = 1) -> Iterator[tuple[int, tuple]]:
    """Yields nodes from `first` on, with their laws, tokens and masks."""
    for node in range(first, self.tokens.shape[1]):
      of = self.laws[:, node], self.tokens[:, node], self.present[:, node]
      yield node, of


def check_nodes(draft: Nodes) -> float:
  """The least p-value of nodes' tokens under their laws.

  Raises:
    ValueError: if a node was not drawn from its law.
  """
  least = 1.0
  impossible = (draft.token_probs() == 0) & draft.drawn
  for node, of in draft.each():
    p_value, summary = _test(*of)
    least = min(least, p_value)
    if p_value < _ALPHA or impossible[:, node].any():
      raise ValueError(
        f"node {node} is not drawn from the law of the draft: {summary}"
      )
  return least


def check_pairs(draft: Nodes) -> None:
  """Raises ValueError if a node shares a random number with an earlier one."""
  outcome = np.where(draft.present, draft.tokens % _BINS, -1)
  for before in range(1, outcome.shape[1] - 1):
    _check_given(
      draft,
      outcome[:, before],
      f"shares a random number with node {before}: each node needs its own, "
      "as from Context.draw",
      first=before + 1,
    )


def check_coins(many: DecodeState, draft: Nodes) -> None:
  """Raises ValueError if draws share random numbers with the loop's own.

  Args:
    many: rows that differ only in their keys.
    draft: their drafts.
  """
  keys = random.step_keys(many.keys, many.length)
  coins = np.asarray(random.verification_numbers(keys, jnp.float32))
  coins = coins.reshape(len(keys), -1)
  for coin in np.minimum((coins * _BINS).astype(int), _BINS - 1).T:
    _check_given(
      draft,
      coin,
      "shares random numbers with its verification: draw by Context.draw, or "
      "with Context.keys",
    )


def check_rounds(emitted: np.ndarray, draft: Nodes) -> None:
  """Raises ValueError if a draft shares random numbers with the round before.

  Args:
    emitted: `i32[R]`, the first token of the round before.
    draft: R drafts after it.
  """
  _check_given(
    draft,
    emitted % _BINS,
    "shares a random number with the round before, which the text depends on: "
    "Context.keys are new in every round, row_keys are not",
  )


def _check_given(
  draft: Nodes, outcome: np.ndarray, message: str, *, first: int = 1
) -> None:
  """Raises ValueError unless nodes follow their laws for each outcome.

  `outcome`, `int[R]`, was decided elsewhere; `message` is the error message if
  nodes from `first` on fail.
  """
  for node, (laws, tokens, here) in draft.each(first):
    for part in np.unique(outcome):
      p_value, summary = _test(laws, tokens, here & (outcome == part))
      if p_value < _ALPHA:
        raise ValueError(f"node {node} {message} ({summary})")


def _test(
  laws: np.ndarray, tokens: np.ndarray, here: np.ndarray
) -> tuple[float, str]:
  """A p-value of tokens `i32[R]` under laws `f64[R, V]`, and a summary.

  Chi-squared over tokens expected five times or more; the count of all others
  is bounded by a Poisson test, however rare they are. Rows not in `here` do not
  count.
  """
  expected = laws[here].sum(axis=0)
  counted = np.bincount(tokens[here], minlength=len(expected))
  often = expected >= 5
  e, c = expected[often], counted[often]
  rest, count = float(expected[~often].sum()), int(counted[~often].sum())
  rare = float(special.pdtrc(count - 1, rest)) if count else 1.0
  if rest >= 5:
    e, c = np.append(e, rest), np.append(c, count)
  statistic = float(((c - e) ** 2 / e).sum())
  freedom = max(len(e) - 1, 1)
  common = float(special.chdtrc(freedom, statistic)) if len(e) else 1.0
  summary = (
    f"chi-squared {statistic:.0f} for {freedom} degrees of freedom, {count} "
    f"rare tokens for {rest:.3g}, over {int(here.sum())} drafts"
  )
  return min(common, rare), summary
