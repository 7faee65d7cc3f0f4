"""Programs that read a number of slots, and no more, as on GPUs.

The toys see no slot of a text that a program does not read: a row that is read
by too small a program emits other tokens.
"""

import dataclasses

import decoding
import pytest

from specjax import cache as cache_lib
from specjax.runtime import sized
from specjax.runtime.engine import Engine
from specjax.runtime.requests import Settings


@pytest.fixture
def sizes(monkeypatch):
  """From 8 slots on; those that were taken, in order."""
  taken, real = [], sized.smallest

  def least(sizes, slots):
    taken.append(real(sizes, slots))
    return taken[-1]

  monkeypatch.setattr(cache_lib, "_LEAST", 8)
  monkeypatch.setattr(sized, "reads_fixed_slots", lambda params: True)
  monkeypatch.setattr(sized, "smallest", least)
  return taken


@pytest.mark.parametrize(
  ("drafter", "rule"),
  [("plain", "token"), ("model", "token"), ("paths", "match")],
)
def test_program_size_grows_before_a_row_needs_it(drafter, rule, request):
  """Rows of other lengths, of which one ends early, in calls of some rounds."""
  engine = Engine(
    decoder=decoding.make(drafter, rule), params=decoding.PARAMS,
    max_new_tokens=100, max_length=128,
  )  # fmt: skip
  prompts = [[1, 2, 3], [4, 1, 2, 5, 0, 3, 2], [2]]
  settings = [Settings(max_new_tokens=n) for n in (100, 20, 90)]
  expected = engine.complete(prompts, settings)
  sizes = request.getfixturevalue("sizes")
  engine = dataclasses.replace(engine, programs={})
  assert engine.complete(prompts, settings) == expected
  assert list(dict.fromkeys(sizes))[-2:] == [64, None]
  assert [
    token.token_id for token in engine.stream(prompts[:1]) if token.prompt == 0
  ] == expected[0].token_ids
