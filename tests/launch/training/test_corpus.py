"""Selection of Python files for the corpus, and their splits."""

import pytest

from launch.training import corpus


def test_splits_are_disjoint_and_exclude_tests_and_tables():
  files = corpus.python_files()
  assert len({f.text for f in files}) == len(files)
  names = {f.name for f in files}
  assert sum(name.startswith("rich/") for name in names) > 50
  assert not [name for name in names if "_unicode_data/unicode" in name]
  for name in names:
    parts = name.lower().split("/")
    assert not {"test", "tests", "_vendor", "site-packages"} & set(parts)
    assert not parts[-1].startswith("test_")
  splits = [
    {f.name for f in corpus.python_files(split=split)}
    for split in ("train", "validation", "test")
  ]
  assert all(splits)
  assert sum(map(len, splits)) == len(names)
  assert set.union(*splits) == names


def test_held_out_files_do_not_nearly_duplicate_training_files():
  files = corpus.python_files()
  learned = {
    line
    for file in files
    if file.split == "train"
    for line in corpus.long_lines(file.text)
  }
  shares = [corpus.shared(f.text, learned) for f in files if f.split != "train"]
  assert len(shares) > 40
  assert max(shares) <= 0.3
  # There are some that are, by the hash of their names.
  assert "distutils/_msvccompiler.py" not in {f.name for f in files}
  assert corpus.split_by_hash("distutils/_msvccompiler.py") == "test"


def test_held_out_prompts_come_from_the_test_split():
  prompts = corpus.held_out_prompts(200)
  assert prompts == corpus.held_out_prompts(200)
  assert len(set(prompts)) == 200
  files = {s: corpus.python_files(split=s) for s in ("train", "test")}
  whole = {s: "".join(f.text for f in files[s]) for s in files}
  assert all(p in whole["test"] for p in prompts)
  assert sum(p in whole["train"] for p in prompts) == 0
  assert all(p.count("\n") == 8 for p in prompts)
  with pytest.raises(ValueError, match="the test files only give"):
    corpus.held_out_prompts(100_000)
