"""Which Python files are read, and which split they are in."""

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


def test_every_package_has_a_licence():
  assert {f.package for f in corpus.python_files()} == set(corpus.LICENCES)
  assert all(corpus.LICENCES.values())


def test_held_out_prompts_come_from_the_test_split():
  prompts = corpus.held_out_prompts(30)
  assert prompts == corpus.held_out_prompts(30)
  texts = [f.text for f in corpus.python_files(("stdlib",), split="test")]
  assert all(any(p in text for text in texts) for p in prompts)


def test_an_unknown_package_is_refused():
  with pytest.raises(ValueError, match="not installed"):
    corpus.python_files(("no_such_package",))
