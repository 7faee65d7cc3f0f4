"""launch.tools.request_costs: rounds with settings over rounds without."""

import json

import pytest
from absl.testing import flagsaver

from launch import cli
from launch.tools import request_costs

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def test_every_case_is_compared_with_a_program_that_has_none(tmp_path):
  output = tmp_path / "R.json"
  with flagsaver.flagsaver():
    arguments = [
      "test", "--config=configs/embedded.py", "--config.drafter=plain",
      "--batches=2", "--text_tokens=6", "--iterations=2", f"--output={output}",
    ]  # fmt: skip
    assert cli.execute(request_costs.run, arguments) == 0
  record = json.loads(output.read_text())
  (rounds,) = record["rounds"]
  assert (rounds["rows"], rounds["text"], rounds["nodes"]) == (2, 6, 1)
  names = ["absent", *request_costs.CASES]
  assert list(rounds["seconds"]) == list(rounds["ratios"]) == names
  assert rounds["ratios"]["absent"] == 1
  for name in names:
    ratio = rounds["seconds"][name] / rounds["seconds"]["absent"]
    assert rounds["ratios"][name] == pytest.approx(ratio)
  assert record["provenance"]["checkpoints"]
