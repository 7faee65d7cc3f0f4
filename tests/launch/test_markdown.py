"""± means one thing, and every number that has one says so."""

import pathlib

from launch import markdown


def test_plus_minus_is_a_95_percent_interval():
  assert markdown.plus_minus(2.5, 0.1, 3) == "2.500 ± 0.196"
  assert "95%" in markdown.PLUS_MINUS


def test_nobody_else_writes_it():
  with_it = {
    path.name
    for path in pathlib.Path("launch").rglob("*.py")
    if "±" in path.read_text("utf-8")
  }
  assert with_it == {"markdown.py"}
