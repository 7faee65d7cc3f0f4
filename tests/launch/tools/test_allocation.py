"""launch.tools.allocation: what allocated slots cost, as a ratio."""

import json

import pytest
from absl.testing import flagsaver

from launch import cli
from launch.tools import allocation

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def execute(*args, code=0):
  with flagsaver.flagsaver():
    arguments = ["test", "--config=configs/embedded.py", *args]
    assert cli.execute(allocation.run, arguments) == code


def test_rounds_and_prompts_are_compared_over_the_first_size(tmp_path):
  output = tmp_path / "A.json"
  execute(
    "--config.drafter=plain", "--batches=2", "--allocated=64,128",
    "--text_tokens=20", "--iterations=2", "--prompt_tokens=30",
    "--buffers=64,128", f"--output={output}",
  )  # fmt: skip
  record = json.loads(output.read_text())
  (rounds,) = record["rounds"]
  assert (rounds["rows"], rounds["text"]) == (2, 20)
  sizes = ("64", "128")
  for measured in (rounds, record["prompts"]):
    assert tuple(measured["seconds"]) == sizes
    assert measured["ratios"][sizes[0]] == 1
    first, last = (measured["seconds"][size] for size in sizes)
    assert measured["ratios"][sizes[1]] == pytest.approx(last / first)
  assert record["provenance"]["checkpoints"]


@pytest.mark.parametrize(
  ("args", "words"),
  [
    (["--allocated=32"], "do not fit into 32"),
    (["--prompt_tokens=64", "--buffers=64"], "larger than --prompt_tokens"),
    (["--output=README.md"], "README.md is there, and does not say"),
  ],
)
def test_sizes_that_hold_no_text_are_one_line(args, words, tmp_path, capsys):
  execute(f"--output={tmp_path / 'A.json'}", *args, code=2)
  assert words in capsys.readouterr().err
