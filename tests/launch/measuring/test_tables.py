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
    (dict(hf_identical_completions=0.5), "(**other texts**: 50% alike)"),
    (dict(hf_identical_completions=1.0), None),
    (dict(hf_identical_completions=None), None),
  ],
)
def test_predictions_have_errors_and_other_texts_are_called_so(
  changes, words, tmp_path
):
  source = pathlib.Path("docs/measurements/embedded-greedy.json")
  result = json.loads(source.read_text("utf-8")) | changes
  (tmp_path / "run.json").write_text(json.dumps(result))
  text = tables.table(str(tmp_path))
  assert (words or "| 116 |") in text
  assert ("other texts" in text) == ("other" in (words or ""))
