"""Selection of Python files for the corpus, and their splits."""

import pytest

from launch.training import corpus


def test_splits_are_disjoint_and_do_not_depend_on_the_packages():
  files = corpus.python_files(("absl", "rich"))
  by_split = {}
  for file in files:
    by_split.setdefault(file.split, set()).add(file.name)
  assert set(by_split) == {"train", "validation", "test"}
  for split in by_split:
    alone = corpus.python_files(("absl", "rich"), split=split)
    assert {f.name for f in alone} == by_split[split]
  assert len({f.text for f in files}) == len(files)
  names = {f.name for f in corpus.python_files(("rich",))}
  assert names == {f.name for f in files if f.package == "rich"}


def test_tests_and_vendored_files_are_left_out():
  for file in corpus.python_files():
    parts = file.name.lower().split("/")
    assert not {"test", "tests", "_vendor", "site-packages"} & set(parts)
    assert not parts[-1].startswith("test_")


def test_generated_tables_are_left_out():
  names = {f.name for f in corpus.python_files()}
  assert sum(name.startswith("rich/") for name in names) > 50
  assert not [name for name in names if "_unicode_data/unicode" in name]


def test_held_out_files_are_no_near_duplicates_of_training_files():
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


def test_what_two_files_share():
  text = "x = some_function(argument)\nshort\n# a comment that is long enough\n"
  (line,) = corpus.long_lines(text)
  assert corpus.shared(text, {line}) == 1
  assert corpus.shared(text + "y = some_function(argument)\n", {line}) == 0.5
  assert corpus.shared("short\n", {line}) == 0


def test_every_package_has_a_licence():
  assert {f.package for f in corpus.python_files()} == set(corpus.LICENCES)
  assert all(corpus.LICENCES.values())


def test_held_out_prompts_come_from_the_test_split():
  prompts = corpus.held_out_prompts(200)
  assert prompts == corpus.held_out_prompts(200)
  assert len(set(prompts)) == 200
  files = {s: corpus.python_files(split=s) for s in ("train", "test")}
  whole = {s: "".join(f.text for f in files[s]) for s in files}
  assert all(p in whole["test"] for p in prompts)
  assert sum(p in whole["train"] for p in prompts) == 0
  assert all(p.count("\n") == 8 for p in prompts)
  validation = corpus.held_out_prompts(32, split="validation")
  assert not set(validation) & set(prompts)
  assert not any(p in whole["train"] for p in validation)


def test_more_prompts_than_there_are_lines_are_an_error():
  with pytest.raises(ValueError, match="prompts of 8 lines, not 100000"):
    corpus.held_out_prompts(100_000)


def test_an_unknown_package_is_refused():
  with pytest.raises(ValueError, match="not installed"):
    corpus.python_files(("no_such_package",))
