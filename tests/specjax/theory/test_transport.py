"""Edges of the acceptances; `tests/specjax/rules` holds rules against them."""

import numpy as np
import pytest
from instances import P, Q

from specjax.theory import transport

ACCEPTANCES = (
  transport.iid_optimum,
  transport.recursive_acceptance,
  transport.kseq_acceptance,
  transport.match_acceptance,
)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_no_draft_is_no_number_of_drafts(acceptance):
  with pytest.raises(ValueError, match="number of drafts must be >= 1, got 0"):
    acceptance(P, Q, 0)


@pytest.mark.parametrize("acceptance", ACCEPTANCES[:3])
def test_one_draft_accepts_what_laws_share(acceptance):
  assert acceptance(P, Q, 1) == pytest.approx(0.7, abs=1e-12)


def test_laws_that_share_next_to_nothing_have_a_scale():
  p, q = np.array([1.0, 1e-16]), np.array([0.0, 1.0])
  assert transport.kseq_scale(p, q, 2) == pytest.approx(2.0)
  assert transport.kseq_acceptance(p, q, 2) == pytest.approx(2e-16, rel=0.2)
