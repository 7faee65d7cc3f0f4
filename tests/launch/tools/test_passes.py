"""launch.tools.passes: what passes of a shape cost on the device here."""

import json
import re

import commands
import pytest

from configs import shapes
from launch.tools import passes

TINY = dict(
  model_type="llama", vocab_size=64, hidden_size=16, num_hidden_layers=2,
  num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
  rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture
def execute(monkeypatch):
  monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
  monkeypatch.setattr(passes, "_TURNS", 1)

  def run(*args):
    assert commands.execute(passes.run, "--target=tiny", *args) == 0

  return run


@pytest.mark.parametrize("form", ["separate", "stacked"])
def test_timings_are_written_for_each_batch_size_and_width(
  execute, form, tmp_path
):
  output = tmp_path / "P.json"
  execute(
    "--batch_sizes=1,2", "--widths=1,3", "--text=24", f"--output={output}",
    "--layers=1", f"--stacked={form == 'stacked'}",
  )  # fmt: skip
  record = json.loads(output.read_text())
  assert record["layers"] == 1
  assert {x["form"] for x in record["passes"]} == {form}
  lines = {(x["rows"], x["tokens"]): x for x in record["passes"]}
  assert set(lines) == {(1, 1), (1, 3), (2, 1), (2, 3)}
  for (rows, width), line in lines.items():
    one = lines[rows, 1]["milliseconds"]
    assert line["cost"] == pytest.approx(line["milliseconds"] / one)
    assert width > 1 or line["cost"] == 1


def test_profile_counts_kernels_by_kind(execute, tmp_path, capsys):
  execute(
    "--widths=1", f"--profile={tmp_path}/T",
    f"--output={tmp_path}/P.json",
  )  # fmt: skip
  said = capsys.readouterr().out
  assert "1x1, of a pass:" in said
  counts = re.findall(r"\d ms, +(\d+\.\d) of [a-z_-]+", said)
  assert max(map(float, counts)) >= 2  # once a layer, or more
