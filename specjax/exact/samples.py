"""Tests of sampled drafts: tokens follow their laws, independent of all else.

A token must follow its law not only over all drafts, but also given any outcome
of the loop's own coins, of an earlier node, or of the round before. If two
draws share a coin, each follows its law, and the text not the target's.
"""

import jax.numpy as jnp
import numpy as np
from scipy import special

from specjax import random
from specjax.state import DecodeState
from specjax.types import Draft

_ALPHA = 1e-6
_BINS = 4  # outcomes are put into so many


def check_nodes(draft: Draft) -> float:
  """Raises ValueError unless every node is drawn from the law that it has.

  Args:
    draft: R drafts.

  Returns:
    The least p-value of the nodes.
  """
  least = 1.0
  for node, here, laws, tokens in _nodes(draft):
    if (laws[here, tokens[here]] == 0).any():
      raise ValueError(f"node {node} drew a token that its law gives nothing")
    p_value, said = _test(laws, tokens, here)
    least = min(least, p_value)
    if p_value < _ALPHA:
      raise ValueError(
        f"node {node} is not drawn from the law that the draft says: {said}"
      )
  return least


def check_pairs(draft: Draft) -> None:
  """Raises ValueError if a node is drawn with a coin of a node before it."""
  tokens = np.asarray(draft.tokens)
  present = np.broadcast_to(draft.topology().present, tokens.shape)
  for before in range(1, draft.tree.num_nodes - 1):
    outcome = np.where(present[:, before], tokens[:, before] % _BINS, -1)
    _check_given(
      draft,
      outcome,
      f"is drawn with a coin of node {before}: each needs its own, as "
      "Context.draw has it",
      first=before + 1,
    )


def check_coins(many: DecodeState, draft: Draft) -> None:
  """Raises ValueError if what was drawn depends on coins of the loop's own.

  Args:
    many: rows that are alike but for their keys.
    draft: what they drafted.
  """
  keys = random.step_keys(many.keys, many.length)
  coins = np.asarray(random.verification_numbers(keys, jnp.float32))
  coins = coins.reshape(len(keys), -1)
  for coin in np.minimum((coins * _BINS).astype(int), _BINS - 1).T:
    _check_given(
      draft,
      coin,
      "is drawn with coins of the loop's own, which verify it: draw by "
      "Context.draw, or with Context.keys",
    )


def check_rounds(emitted: np.ndarray, draft: Draft) -> None:
  """Raises ValueError if a draft is drawn with coins of the round before.

  Args:
    emitted: `i32[R]`, the first token of the round before.
    draft: R drafts after it.
  """
  _check_given(
    draft,
    np.asarray(emitted) % _BINS,
    "is drawn with a coin of the round before, of which the text knows: "
    "Context.keys are new in every round, row_keys are not",
  )


def _check_given(
  draft: Draft, outcome: np.ndarray, words: str, *, first: int = 1
) -> None:
  """Raises ValueError unless nodes follow their laws for each outcome.

  `outcome`, `int[R]`, has been decided elsewhere; `words` say what is so if
  nodes from `first` on do not follow.
  """
  for node, here, laws, tokens in _nodes(draft, first):
    for part in np.unique(outcome):
      p_value, said = _test(laws, tokens, here & (outcome == part))
      if p_value < _ALPHA:
        raise ValueError(f"node {node} {words} ({said})")


def _nodes(draft: Draft, first: int = 1):
  """Each node's number, mask of drafts, laws `f64[R, V]` and tokens."""
  tokens, log_probs = np.asarray(draft.tokens), np.asarray(draft.log_probs)
  present = np.broadcast_to(draft.topology().present, tokens.shape)
  for node in range(first, draft.tree.num_nodes):
    laws = np.exp(np.asarray(log_probs[:, node], np.float64))
    yield node, present[:, node], laws, tokens[:, node]


def _test(
  laws: np.ndarray, tokens: np.ndarray, here: np.ndarray
) -> tuple[float, str]:
  """A p-value of tokens `i32[R]` under laws `f64[R, V]`, and the test in words.

  Chi-squared over the tokens that are expected five times or more; how often
  all others come is Poisson's at most, however few are expected. Rows that are
  not `here` do not count.
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
  said = (
    f"chi-squared {statistic:.0f} for {freedom} degrees of freedom, {count} "
    f"rare tokens for {rest:.3g}, over {int(here.sum())} drafts"
  )
  return min(common, rare), said
