"""launch.tools.passes: what passes of a shape cost on the device here."""

import json

import pytest
from absl.testing import flagsaver

from configs import shapes
from launch import cli
from launch.tools import passes

TINY = dict(
  model_type="llama", vocab_size=64, hidden_size=16, num_hidden_layers=2,
  num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
  rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip


def test_a_line_is_written_for_each_width(monkeypatch, tmp_path):
  monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
  monkeypatch.setattr(passes, "_TURNS", 1)
  output = tmp_path / "P.json"
  with flagsaver.flagsaver():
    arguments = [
      "test", "--target=tiny", "--batch_sizes=1,2", "--widths=1,3",
      "--text=24", f"--output={output}",
    ]  # fmt: skip
    assert cli.execute(passes.run, arguments) == 0
  record = json.loads(output.read_text())
  lines = {(x["rows"], x["tokens"]): x for x in record["passes"]}
  assert set(lines) == {(1, 1), (1, 3), (2, 1), (2, 3)}
  for (rows, width), line in lines.items():
    one = lines[rows, 1]["milliseconds"]
    assert line["cost"] == pytest.approx(line["milliseconds"] / one)
    assert width > 1 or line["cost"] == 1
