"""Batches of prompts."""

import numpy as np
import pytest

from launch.decoding.prompts import Prompt, make_batches


def prompts(lengths):
  return [
    Prompt(i, f"id{i}", "text", tuple(range(1, n + 1)))
    for i, n in enumerate(lengths)
  ]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_every_prompt_is_in_exactly_one_batch(batch_size):
  lengths = np.random.default_rng(0).integers(1, 200, 37)
  batches = make_batches(prompts(lengths), batch_size=batch_size, max_width=200)
  indices = [p.index for batch in batches for p in batch.prompts]
  assert sorted(indices) == list(range(37))
  assert {batch.rows for batch in batches} == {min(batch_size, 37)}
  for batch in batches:
    longest = max(len(p.token_ids) for p in batch.prompts)
    assert longest <= batch.width <= 200
    assert batch.width in (32, 64, 128, 200)


def test_arrays_are_right_padded_and_filled():
  (batch,) = make_batches(prompts([2, 5]), batch_size=2, max_width=99)
  tokens, lengths, rows = batch.arrays()
  assert tokens.shape == (2, 32)
  np.testing.assert_array_equal(lengths, [2, 5])
  np.testing.assert_array_equal(rows, [0, 1])
  np.testing.assert_array_equal(tokens[0, :3], [1, 2, 0])


def test_the_last_batch_is_filled_with_a_real_prompt():
  batches = make_batches(prompts([3, 4, 5]), batch_size=2, max_width=99)
  tokens, lengths, _ = batches[-1].arrays()
  assert len(batches[-1].prompts) == 1
  np.testing.assert_array_equal(tokens[0], tokens[1])
  np.testing.assert_array_equal(lengths, [5, 5])
