"""± means one thing, and every number that has one says so."""

import importlib
import pathlib

import pytest

from launch import report, tables


def test_plus_minus_is_a_95_percent_interval():
  assert report.plus_minus(2.5, 0.1, 3) == "2.500 ± 0.196"
  assert "95%" in report.PLUS_MINUS


def test_nobody_else_writes_it():
  with_it = {
    path.name
    for path in pathlib.Path("launch").rglob("*.py")
    if "±" in path.read_text("utf-8")
  }
  assert with_it == {"report.py"}


def plain(argv):
  return tables.main(["tables", *argv])


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_is_made_by_a_function_that_is_there(name):
  module, _, function = tables.TABLES[name].partition(":")
  assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
  "args, words",
  [
    ((), "usage"),
    (("pies", "x.json"), "usage"),
    (("quality", "no.json"), "no such file: no.json"),
    (("quality", "docs/theory/single.json"), "no results for quality"),
    (("speed", "docs/theory/single.json"), "no results for speed"),
  ],
)
def test_mistakes_are_told(args, words, capsys):
  assert plain(args) == 2
  assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]\n", "{}\n", "[" * 99_999 + "\n"])
def test_a_file_of_something_else_is_told(text, tmp_path, capsys):
  path = tmp_path / "metrics.jsonl"
  path.write_text(text)
  assert plain(["drafts", str(path)]) == 2
  error = capsys.readouterr().err
  assert f"error: {path} hold no results for drafts" in error
  assert error.count("\n") == 2
