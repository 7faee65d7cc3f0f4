"""Batches of prompts."""

import numpy as np
import pytest

from launch import prompts as prompts_lib
from launch.prompts import Prompt, read_jsonl
from models import tokenizers
from specjax.runtime.requests import make_batches


def prompts(lengths):
  return [
    Prompt(i, f"id{i}", "text", tuple(range(1, n + 1)))
    for i, n in enumerate(lengths)
  ]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_every_prompt_is_in_exactly_one_batch(batch_size):
  lengths = np.random.default_rng(0).integers(1, 200, 37)
  batches = make_batches(prompts(lengths), batch_size=batch_size, max_width=200)
  indices = [p.stream for batch in batches for p in batch.prompts]
  assert sorted(indices) == list(range(37))
  assert {batch.rows for batch in batches} == {min(batch_size, 37)}
  for batch in batches:
    longest = max(len(p.token_ids) for p in batch.prompts)
    assert longest <= batch.width <= 200
    assert batch.width in (32, 64, 128, 200)


def test_long_prompts_are_padded_by_a_quarter_at_most():
  def width(length):
    (batch,) = make_batches(prompts([length]), batch_size=1, max_width=4096)
    return batch.width

  widths = {length: width(length) for length in range(1, 2049)}
  for length, actual in widths.items():
    most = 2 * length if length <= 256 else 1.25 * length
    assert length <= actual <= max(most, 32)
  assert sorted(set(widths.values())) == [
    32, 64, 128, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536,
    1792, 2048,
  ]  # fmt: skip


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


@pytest.fixture
def read(tmp_path):
  """Reads lines: the prompts, and what is wrong."""
  tokenizer = tokenizers.load("models/pretrained/target")

  def lines(*lines):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_jsonl(str(path), tokenizer, max_tokens=50)

  return lines


def test_a_line_without_an_id_gets_its_number(read):
  actual, problems = read(
    '{"prompt": "a"}', "", "[]", '{"prompt": "b", "id": null}',
    '{"prompt": "c", "id": "x"}', '{"prompt": "d"}',
  )  # fmt: skip
  assert [p.id for p in actual] == [1, 4, "x", 6]
  assert len(problems) == 1


def test_an_id_that_was_there_before_is_refused_with_both_lines(read):
  actual, problems = read(
    '{"prompt": "a", "id": [1, {"b": 2, "a": 1}]}', '{"prompt": "b", "id": 3}',
    '{"prompt": "c"}', '{"prompt": "d", "id": [1, {"a": 1, "b": 2}]}',
    '{"prompt": "e", "id": "3"}', '{"prompt": "f", "id": 3}',
  )  # fmt: skip
  assert [p.text for p in actual] == ["a", "b", "e"]
  assert [line.partition("in.jsonl")[2] for line in problems] == [
    ":3: the id 3 is that of line 2 already (a line without an id has its "
    "number)",
    ':4: the id [1, {"a": 1, "b": 2}] is that of line 1 already',
    ":6: the id 3 is that of line 2 already",
  ]


def test_what_a_prompt_draws_follows_from_its_id_alone(read):
  lines = [
    '{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": 7}',
    '{"prompt": "c", "id": -1}', '{"prompt": "d", "id": true}',
  ]  # fmt: skip
  streams = {p.text: p.stream for p in read(*lines)[0]}
  assert streams == {p.text: p.stream for p in read(*lines[::-1])[0]}
  assert streams["b"] == 7
  assert len(set(streams.values())) == 4
  assert all(1 << 31 <= streams[text] < 1 << 32 for text in "acd")
  keys = [p.key for p in read(*lines, '{"prompt": "e", "id": "y"}')[0]]
  assert len(set(keys)) == 5
  assert keys[:4] == [p.key for p in read(*lines)[0]]
  assert read('{"prompt": "z", "id": "x"}')[0][0].key not in keys


def test_no_two_prompts_draw_from_one_stream(read, monkeypatch):
  monkeypatch.setattr(prompts_lib, "_HALF", 4)  # ids beyond share 4 streams
  actual, _ = read(*(f'{{"prompt": "a", "id": "{i}"}}' for i in range(4)))
  assert sorted(p.stream for p in actual) == [4, 5, 6, 7]


def test_batches_of_what_is_left_are_those_of_the_whole():
  every = prompts([9, 1, 5, 40, 3, 2, 70])
  whole = make_batches(every, batch_size=2, max_width=200)
  done = {p.id for batch in whole[:1] + whole[2:3] for p in batch.prompts}
  left = make_batches(
    [p for p in every if p.id not in done],
    batch_size=2, max_width=200, among=len(every),
  )  # fmt: skip
  assert left == [whole[1], whole[3]]
  (one,) = make_batches(every[:1], batch_size=2, max_width=200, among=7)
  assert one.rows == 2
  assert make_batches([], batch_size=2, max_width=200, among=7) == []
