"""launch.tools.passes: what passes of a shape cost on the device here."""

import json

import pytest
from absl.testing import flagsaver

from configs import shapes
from launch import cli
from launch.tools import passes

pytestmark = pytest.mark.usefixtures("quick_to_compile")
TINY = dict(
  model_type="llama", vocab_size=64, hidden_size=16, num_hidden_layers=2,
  num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
  rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=64,
)  # fmt: skip
HYBRID = TINY | dict(
  model_type="qwen3_5_text", head_dim=8, linear_num_key_heads=1,
  linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
  linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
# Of both layers and the output projection; the embedding is looked up.
WEIGHTS = 2 * (16 * 8 * 6 + 3 * 16 * 32 + 2 * 16) + 16 + 64 * 16


@pytest.fixture
def execute(monkeypatch):
  monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
  monkeypatch.setattr(passes, "_COPIED", 2**16)

  def run(*args, code=0):
    with flagsaver.flagsaver():
      assert cli.execute(passes.run, ["test", *args]) == code

  return run


def test_a_line_is_written_for_each_width_with_the_bytes_it_reads(
  execute, tmp_path
):
  output = tmp_path / "P.json"
  execute(
    "--target=tiny", "--batch_sizes=1,2", "--widths=1,3", "--text=24",
    "--turns=1", f"--output={output}",
  )  # fmt: skip
  record = json.loads(output.read_text())
  # Slots of the one block, layers, a head of eight, keys and values.
  cached = (24 + 3) * 2 * 8 * 2
  bytes_of = {(x["rows"], x["tokens"]): x["bytes"] for x in record["passes"]}
  assert bytes_of == {
    (rows, width): 2 * (WEIGHTS + rows * cached)
    for rows in (1, 2)
    for width in (1, 3)
  }
  assert [x["cost"] for x in record["passes"] if x["tokens"] == 1] == [1, 1]
  assert len(passes.table({"": record}).splitlines()) == 4


def test_a_result_on_stdout_is_alone_there(execute, capsys):
  execute("--target=tiny", "--widths=1", "--text=24", "--turns=1", "--output=-")
  assert json.loads(capsys.readouterr().out)["target"] == "tiny"


@pytest.mark.heavy
def test_passes_over_recurrent_states_read_and_write_them(
  execute, tmp_path, monkeypatch
):
  monkeypatch.setitem(shapes.SHAPES, "tiny", HYBRID)
  output = tmp_path / "P.json"
  execute(
    "--target=tiny", "--batch_sizes=2", "--widths=1,3", "--text=24",
    "--turns=1", f"--output={output}",
  )  # fmt: skip
  one, three = json.loads(output.read_text())["passes"]
  # Of a token a key and two updates of eight and two gates in float32, and what
  # is convolved, queries, keys and values, in bfloat16: twice in each row.
  token = 4 * (8 + 2 * 8 + 2) + 2 * (8 + 8 + 2 * 8)
  assert three["bytes"] - one["bytes"] == 2 * 2 * 2 * token


@pytest.mark.parametrize(
  ("given", "told"),
  [
    (["--target=nobody"], "unknown shape 'nobody'"),
    (["--target=tiny", "--widths=2,4"], "--widths must hold 1"),
    (["--target=tiny", "--batch_sizes=0"], "--batch_sizes must be positive"),
  ],
)
def test_what_cannot_be_timed_is_refused(execute, capsys, given, told):
  execute(*given, code=2)
  assert told in capsys.readouterr().err
