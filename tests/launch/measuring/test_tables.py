"""What the README's table says of a run beside its rates."""

import json
import pathlib

import pytest

from launch.measuring import tables


@pytest.mark.parametrize(
  "changes, words",
  [
    (
      dict(prediction_error=-0.0125, prediction_error_ci=[-0.03, 0.006]),
      ", -1.2% (-3.0% to +0.6%)",
    ),
    (dict(prediction_error=0.05, prediction_error_ci=None), ", +5.0% |"),
    (dict(lossless=True, total_variation=0.0), "), lossless |"),
    (
      dict(lossless=False, total_variation=0.1254),
      "), lossy, total variation 0.125 |",
    ),
    (dict(hf_identical_completions=0.5), "(**other texts**: 50% alike)"),
    (dict(hf_identical_completions=1.0), None),
    (dict(hf_identical_completions=None), None),
  ],
)
def test_a_row_says_what_its_numbers_are_worth(
  changes, words, tmp_path
):
  source = pathlib.Path("docs/measurements/embedded-greedy.json")
  result = json.loads(source.read_text("utf-8")) | changes
  (tmp_path / "run.json").write_text(json.dumps(result))
  text = tables.table(str(tmp_path))
  assert (words or "| 116 |") in text
  assert ("loss" in text) == ("lossless" in changes)
  assert ("other texts" in text) == ("other" in (words or ""))
