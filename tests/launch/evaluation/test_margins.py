"""Places where greedy completions part, and the margins there."""

import numpy as np

from launch.evaluation import margins


def test_margin_is_the_logit_gap_at_the_first_differing_token():
  asked = []

  def next_logits(tokens):
    asked.append(tokens)
    return np.array([0.0, 1.0, 4.5, 3.0])

  actual = margins.difference((7, 8), [1, 3, 0], [1, 2], next_logits)
  assert actual == {
    "place": 1, "token": 3, "reference_token": 2, "margin": 1.5,
  }  # fmt: skip
  assert asked == [(7, 8, 1)]
  assert margins.difference((7,), [1, 2], [1, 2], next_logits) is None
  for one, other, place in (([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0)):
    ended = margins.difference((7,), one, other, next_logits)
    assert (ended["place"], ended["margin"]) == (place, None)
  assert len(asked) == 1
  nobody = margins.difference((7,), [1], [2], None)
  assert nobody["margin"] is None
