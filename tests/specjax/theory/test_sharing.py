"""A batch's drafts: hand values, and every split of small batches."""

import itertools

import numpy as np
import pytest

from specjax.theory import sharing

TWO_ROWS = np.array([[0.9], [0.5]]) ** np.arange(1, 13)
VERIFY = lambda fed: 1 + 0.05 * fed


def test_a_sure_and_a_doubtful_row():
  shared = sharing.shared_depth(TWO_ROWS, 0.1, VERIFY)
  assert shared.rate == pytest.approx(3.1751, abs=5e-5)
  assert shared.lengths.tolist() == [4, 4]
  ragged = sharing.ragged(TWO_ROWS, 0.1, VERIFY)
  assert ragged.rate == pytest.approx(3.3176, abs=5e-5)
  assert ragged.lengths.tolist() == [6, 2]


def test_a_row_with_a_promise_makes_the_depth_its_own():
  depth = [
    sharing.shared_depth(TWO_ROWS, 0.1, VERIFY, weights=[1, w]).lengths[0]
    for w in (1, 2, 4)
  ]
  assert depth == [4, 3, 2]


def test_no_split_of_a_small_batch_is_better():
  rng = np.random.default_rng(0)
  for _ in range(5):
    survival = np.cumprod(rng.random((3, 3)) ** 0.3, axis=1)
    best = 0.0
    for lengths in itertools.product(range(4), repeat=3):
      tokens = 3 + sum(survival[b, :n].sum() for b, n in enumerate(lengths))
      seconds = max(lengths) * 0.1 + VERIFY(3 + sum(lengths))
      best = max(best, tokens / seconds)
    assert sharing.ragged(survival, 0.1, VERIFY).rate == pytest.approx(best)


def test_survival_that_rises_is_refused():
  with pytest.raises(ValueError, match="must not rise"):
    sharing.ragged(np.array([[0.5, 0.6]]), 0.1, VERIFY)
