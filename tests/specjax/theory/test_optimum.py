"""Edges of the acceptances; `tests/specjax/rules` holds rules against them."""

import acceptances
import numpy as np
import pytest
from instances import P, Q

from specjax.theory import optimum


def test_no_draft_is_no_number_of_drafts():
  with pytest.raises(ValueError, match="number of drafts must be >= 1, got 0"):
    optimum.iid_optimum(P, Q, 0)


@pytest.mark.parametrize(
  "acceptance",
  [optimum.iid_optimum, acceptances.recursive, acceptances.kseq],
)
def test_one_draft_accepts_what_laws_share(acceptance):
  assert acceptance(P, Q, 1) == pytest.approx(0.7, abs=1e-12)


def test_laws_that_share_next_to_nothing_have_a_scale():
  p, q = np.array([1.0, 1e-16]), np.array([0.0, 1.0])
  assert acceptances.kseq_scale(p, q, 2) == pytest.approx(2.0)
  assert acceptances.kseq(p, q, 2) == pytest.approx(2e-16, rel=0.2)
