"""Tables of what guidellm measured."""

import json

import pytest

from launch import tables


def measured(**strategy):
  """The parts of a result of guidellm's that are read."""
  seen = dict(mean=1.5, median=20.0, percentiles={"p95": 30.4})
  names = (
    "requests_per_second", "request_goodput", "output_tokens_per_second",
    "time_to_first_token_ms", "inter_token_latency_ms",
  )  # fmt: skip
  metrics: dict = {name: {"successful": seen} for name in names}
  metrics["request_totals"] = {"successful": 7, "total": 8}
  return {"config": {"strategy": strategy}, "metrics": metrics}


def test_every_load_of_every_file_is_a_row(tmp_path, capsys):
  closed = measured(type_="concurrent", streams=4)
  opened = measured(type_="poisson", rate=0.5)
  opened["metrics"]["request_goodput"] = None
  path = tmp_path / "ours.json"
  path.write_text(json.dumps({"benchmarks": [closed, opened]}))
  assert tables.main(["tables", "loads", str(path)]) == 0
  rows = capsys.readouterr().out.splitlines()[2:]
  same = "7 of 8 | 1.50"
  end = "1.50 | 20 / 30 | 20 / 30 |"
  assert rows == [
    f"| ours | 4 clients | {same} | 1.50 | {end}",
    f"| ours | 0.5 a second | {same} | – | {end}",
  ]


@pytest.mark.parametrize("content", ["{}", "[]", '{"benchmarks": [1]}'])
def test_files_of_others_are_one_line(content, tmp_path, capsys):
  path = tmp_path / "X.json"
  path.write_text(content)
  assert tables.main(["tables", "loads", str(path)]) == 2
  assert "hold no results for loads" in capsys.readouterr().err
