"""Documents from every kind of dataset, and batches of packed rows."""

import dataclasses
import functools
import itertools
import json

import jax
import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from launch.training import data
from models import tokenizers

SPLITS = ("train", "validation", "test")


def config(dataset):
  return ml_collections.ConfigDict(dict(dataset=str(dataset), text_features=()))


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize("name", ["lm1b", "wmt14_translate/de-en", "gsm8k"])
def test_tfds_datasets_are_read_by_name(name, tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  with tfds.testing.mock_data(num_examples=100):
    for split in SPLITS:
      texts = list(data.documents(config(name), split))
      assert texts
      assert all(isinstance(text, str) for text in texts)


def test_text_and_jsonl_folders_are_read_and_split(tmp_path):
  (tmp_path / "a.txt").write_text("first")
  rows = [json.dumps({"text": f"line {i}"}) for i in range(200)]
  (tmp_path / "b.jsonl").write_text("\n".join(rows) + "\n\n")
  (tmp_path / "c.md").write_text("of c")
  (tmp_path / "d.py").write_text("of d")
  (tmp_path / "e.json").write_text("not read")
  (tmp_path / ".venv").mkdir()
  (tmp_path / ".venv" / "f.py").write_text("not read")
  actual = {s: data.documents(config(tmp_path), s) for s in SPLITS}
  texts = list(itertools.chain(*actual.values()))
  whole = ["first", "of c", "of d"]
  assert sorted(texts) == sorted(whole + [f"line {i}" for i in range(200)])
  assert len(actual["train"]) > len(actual["test"]) > 0
  for split in SPLITS:  # subfolders decide, where there are any
    (tmp_path / split).mkdir()
    (tmp_path / split / "x.txt").write_text(f"of {split}")
    assert data.documents(config(tmp_path), split) == [f"of {split}"]


# ------------------------------------------------------------------ batches

TEXTS = [f"def f{i}(x):\n  return x + {i}\n" * (1 + i % 3) for i in range(23)]


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizers.load("models/pretrained/target")


def take(batches, count):
  return list(itertools.islice(iter(batches), count))


def stream(batches):
  return np.concatenate([b["tokens"][b["segments"] > 0] for b in batches])


def test_unshuffled_epoch_is_the_concatenated_documents(tokenizer):
  actual = data.batches(TEXTS, tokenizer, length=16, batch_size=2, seed=None)
  expected = np.concatenate(
    [[*tokenizer.encode(t), tokenizer.eos_token_id] for t in TEXTS]
  )
  got = stream(actual)
  assert len(expected) - len(got) < 32  # a batch that is not whole
  np.testing.assert_array_equal(got, expected[: len(got)])


def test_conversations_are_encoded_with_the_chat_template(tokenizer, tmp_path):
  talk = [
    {"role": "user", "content": "Say x."}, {"role": "assistant", "content": "x"}
  ]  # fmt: skip
  (tmp_path / "train").mkdir()
  (tmp_path / "train" / "a.jsonl").write_text(
    json.dumps({"messages": talk, "temperature": 1}) + "\n"
  )
  (actual,) = data.documents(config(tmp_path), "train")
  assert actual == talk
  template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
  chatty = dataclasses.replace(tokenizer, chat_template=template)
  expected = tokenizer.encode("<user>Say x.<assistant>x")
  end = tokenizer.eos_token_id
  assert data.token_ids(actual, chatty) == [*expected, end]
  assert data.token_ids("x", chatty) == [*tokenizer.encode("x"), end]
  batch = next(
    iter(data.batches([actual], chatty, length=8, batch_size=1, seed=None))
  )
  assert batch["tokens"][0].tolist() == [*expected, end][:8]
  with pytest.raises(ValueError, match="no chat template"):
    data.token_ids(actual, tokenizer)


def test_segments_and_positions_mark_document_boundaries(tokenizer):
  for batch in take(
    data.batches(TEXTS, tokenizer, length=40, batch_size=1, seed=0), 20
  ):
    tokens, segments, positions = (
      batch[name][0] for name in ("tokens", "segments", "positions")
    )
    ends = tokens[:-1] == tokenizer.eos_token_id
    assert (segments[0], positions[0]) == (1, 0)
    np.testing.assert_array_equal(np.diff(segments), ends)
    np.testing.assert_array_equal(
      positions[1:], np.where(ends, 0, positions[:-1] + 1)
    )


def test_epochs_are_reshuffled_without_losing_tokens(tokenizer):
  size = sum(len(tokenizer.encode(t)) + 1 for t in TEXTS)
  make = functools.partial(
    data.batches, TEXTS, tokenizer, length=1, batch_size=1, shuffle_rows=1
  )
  rows = take(make(seed=3), 2 * size)
  first, second = stream(rows)[:size], stream(rows)[size:]
  np.testing.assert_array_equal(np.sort(first), np.sort(second))
  assert not np.array_equal(first, second)
  np.testing.assert_array_equal(stream(take(make(seed=3), size)), first)
  assert not np.array_equal(stream(take(make(seed=4), size)), first)


@pytest.mark.parametrize("shuffle_rows", [1, 20])
@pytest.mark.parametrize("done", [0, 5, 7, 20])
def test_iterator_resumes_from_its_state(tokenizer, done, shuffle_rows):
  make = lambda: iter(
    data.batches(
      TEXTS, tokenizer, length=16, batch_size=3, seed=0,
      shuffle_rows=shuffle_rows,
    )
  )  # fmt: skip
  whole = make()
  for _ in range(done):
    next(whole)
  state = json.loads(json.dumps(whole.get_state()))  # as in a checkpoint
  again = make()
  next(again)
  again.set_state(state)
  for _ in range(30):  # over the end of the epoch
    np.testing.assert_array_equal(next(whole)["tokens"], next(again)["tokens"])


def test_processes_split_the_documents(tokenizer, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  seen = []
  for index in range(2):
    monkeypatch.setattr(jax, "process_index", lambda index=index: index)
    actual = data.batches(TEXTS, tokenizer, length=1, batch_size=2, seed=None)
    batches = list(actual)
    assert batches[0]["tokens"].shape == (1, 1)
    seen.append(stream(batches))
  expected = np.concatenate(
    [[*tokenizer.encode(t), tokenizer.eos_token_id] for t in TEXTS[::2]]
  )
  np.testing.assert_array_equal(seen[0], expected)
  everything = np.concatenate(seen)
  assert len(everything) == sum(len(tokenizer.encode(t)) + 1 for t in TEXTS)
  with pytest.raises(ValueError, match="multiple of the number of processes"):
    data.batches(TEXTS, tokenizer, length=1, batch_size=3, seed=0)
