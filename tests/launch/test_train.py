"""`launch.train` and its data."""

import json

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from configs import train_embedded
from launch import data, main, train
from models import huggingface, tokenizers


def test_splits_are_disjoint_and_do_not_depend_on_the_packages():
  files = data.python_files(("absl", "rich"))
  by_split = {}
  for file in files:
    by_split.setdefault(file.split, set()).add(file.name)
  assert set(by_split) == {"train", "validation", "test"}
  for split in by_split:
    alone = data.python_files(("absl", "rich"), split=split)
    assert {f.name for f in alone} == by_split[split]
  assert len({f.text for f in files}) == len(files)
  names = {f.name for f in data.python_files(("rich",))}
  assert names == {f.name for f in files if f.package == "rich"}


def test_tests_and_vendored_files_are_left_out():
  for file in data.python_files():
    parts = file.name.lower().split("/")
    assert not {"test", "tests", "_vendor", "site-packages"} & set(parts)
    assert not parts[-1].startswith("test_")


def test_held_out_prompts_come_from_the_test_split():
  prompts = data.held_out_prompts(30)
  assert prompts == data.held_out_prompts(30)
  texts = [f.text for f in data.python_files(("stdlib",), split="test")]
  assert all(any(p in text for text in texts) for p in prompts)


def test_an_unknown_package_is_refused():
  with pytest.raises(ValueError, match="not installed"):
    data.python_files(("no_such_package",))


def test_rows_hold_the_documents_in_some_order_with_separators():
  documents = [[1, 2, 3], [4, 5], [6]]
  rows = data.pack(documents, length=2, separator=0, seed=0)
  assert rows.shape == (4, 2)
  text = rows.ravel().tolist()
  for document in documents:
    if document[-1] in text:
      at = text.index(document[0])
      assert text[at : at + len(document)] == document
  assert text.count(0) >= 2  # a separator after every whole document


def test_every_row_is_seen_once_an_epoch():
  rows = np.arange(10)[:, None]
  for epoch in range(2):
    seen = [train.batch_at(rows, epoch * 3 + i, 3, 0) for i in range(3)]
    assert len(np.unique(seen)) == 9
  first, second = (train.batch_at(rows, i, 3, 0) for i in (0, 3))
  assert not np.array_equal(first, second)


def test_distillation_loss_is_the_cross_entropy_under_the_teacher():
  rng = np.random.default_rng(0)
  student, teacher = rng.standard_normal((2, 1, 3, 5))
  tokens = np.array([[1, 4, 0]])
  log_p = jax.nn.log_softmax(student)
  q = jax.nn.softmax(teacher)
  np.testing.assert_allclose(
    train.cross_entropy(student, tokens, teacher),
    -(q * log_p).sum(-1).mean(),
    rtol=1e-5,
  )
  np.testing.assert_allclose(
    train.cross_entropy(student, tokens),
    -np.mean([log_p[0, i, t] for i, t in enumerate(tokens[0])]),
    rtol=1e-5,
  )


def tiny_config(tmp_path, **changes):
  config = train_embedded.get_config("tiny")
  config.tokenizer = str(tmp_path / "tokenizer")
  config.update(changes)
  return config


def test_a_run_stopped_and_resumed_gives_the_same_parameters(tmp_path):
  whole = train.train(tiny_config(tmp_path), str(tmp_path / "whole"))
  part = tiny_config(tmp_path)
  part.num_steps = 20
  stopped = tmp_path / "stopped"

  class StopError(Exception):
    pass

  real, calls = train.batch_at, []

  def stops(rows, step, *args):
    if len(rows) > 4 and step == 12:
      calls.append(step)
      if len(calls) == 1:
        raise StopError
    return real(rows, step, *args)

  train.batch_at = stops
  try:
    with pytest.raises(StopError):
      train.train(part, str(stopped))
    resumed = train.train(part, str(stopped))
  finally:
    train.batch_at = real
  assert len(calls) == 2
  from flax import nnx

  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(whole), nnx.state(resumed)
  )
  records = [
    json.loads(line)
    for line in (stopped / "metrics.jsonl").read_text().splitlines()
  ]
  assert records[-1]["step"] == 20
  assert records[-1]["loss"] < records[0]["loss"]


def test_the_command_trains_distils_and_exports(tmp_path, pair):
  """With a teacher, through the command line, to a loadable checkpoint."""
  workdir, export = tmp_path / "work", tmp_path / "model"
  with flagsaver.flagsaver():
    code = main.execute(
      train.run,
      ["train", "--config=configs/train_embedded.py:tiny",
       f"--config.teacher={pair[0]}", "--config.model.vocab_size=4096",
       "--config.tokenizer=models/pretrained/target",
       "--config.num_steps=2", f"--workdir={workdir}", f"--export={export}"],
    )  # fmt: skip
  assert code == 0
  module = huggingface.load(str(export))
  assert module.config.embed_dim == 32
  assert tokenizers.load(str(export)).vocab_size == 4096
