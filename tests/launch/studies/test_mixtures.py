"""The study of published mixtures: result, page and example."""

import json
import pathlib
import re

import matplotlib.pyplot as plt
import pytest
from absl.testing import flagsaver

from launch import cli
from launch.studies import mixtures as study

RESULT = "docs/mixtures/pays.json"
PAGE = pathlib.Path("docs/mixtures.md").read_text("utf-8")


def test_the_example_prints_what_the_page_says(capsys):
  (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
  exec(compile(code, "docs/mixtures.md", "exec"), {})
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == 4
  assert all(f"    {line}\n" in PAGE for line in printed)


def test_a_study_makes_its_folder(monkeypatch, tmp_path):
  monkeypatch.setattr(study, "study", list)
  monkeypatch.setattr(study, "pays", lambda result: plt.figure())
  folder = tmp_path / "new"
  with flagsaver.flagsaver():
    assert cli.execute(study.run, ["test", f"--workdir={folder}"]) == 0
  assert {path.name for path in folder.iterdir()} == {"pays.json", "pays.svg"}


def test_the_committed_result_is_what_the_study_finds(monkeypatch):
  """Of one model and slice."""
  monkeypatch.setattr(study, "TARGETS", {"gpt-oss-20b": (None,)})
  monkeypatch.setattr(study, "TOPOLOGIES", ("v6e-8",))
  (actual,) = study.study()
  lines = json.loads(pathlib.Path(RESULT).read_text("utf-8"))["lines"]
  (expected,) = [
    line
    for line in lines
    if (line["target"], line["topology"]) == ("gpt-oss-20b", "v6e-8")
  ]
  pairs = zip(actual["by_batch_size"], expected["by_batch_size"], strict=True)
  for mine, theirs in pairs:
    assert mine["experts_busiest"] == pytest.approx(theirs["experts_busiest"])
    assert mine["pays_from"] == theirs["pays_from"]
    for one, other in zip(mine["at"], theirs["at"], strict=True):
      assert one["lengths"] == other["lengths"]
      assert one["speedup"] == pytest.approx(other["speedup"])
