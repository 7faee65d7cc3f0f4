"""launch.tools.waits: gaps of a stream and second turns, as ratios."""

import json
import statistics

import pytest
from absl.testing import flagsaver

from launch import cli
from launch.tools import waits

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def execute(*args, code=0):
  with flagsaver.flagsaver():
    arguments = ["test", "--config=configs/embedded.py", *args]
    assert cli.execute(waits.run, arguments) == code


def test_gaps_are_over_rounds_and_second_turns_over_their_reading(tmp_path):
  output = tmp_path / "W.json"
  execute(
    "--config.drafter=plain", "--config.max_new_tokens=52",
    "--arrivals=1", "--arriving_tokens=70", "--turn_tokens=60",
    f"--output={output}",
  )  # fmt: skip
  record = json.loads(output.read_text())
  for one, streams in zip(record["gaps"], (1, 2), strict=True):
    assert one["streams"] == streams
    assert one["alone"]["median"] == pytest.approx(1)
    for spread in (one["alone"], one["gaps"]):
      assert 0 < spread["median"] <= spread["p99"] <= spread["longest"]
    assert one["whole"] > 0
  turns = record["turns"]
  held, read = turns["held_seconds"], turns["read_seconds"]
  assert turns["first_token"] == pytest.approx(
    statistics.median(held) / statistics.median(read)
  )
  assert record["provenance"]["checkpoints"]


def test_prompts_without_room_are_one_line(tmp_path, capsys):
  output = tmp_path / "W.json"
  execute("--arriving_tokens=9000", f"--output={output}", code=2)
  assert "has room for prompts of" in capsys.readouterr().err
