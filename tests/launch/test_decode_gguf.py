"""GGUF files at the command line: as a target and a teacher, and damaged."""

import files
import ggufs
import pytest

from launch import decode

PROMPTS = [{"prompt": "import os\n"}, {"prompt": "def f(x):\n  return"}]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """A GGUF file of the directory's model and tokenizer, and the directory."""
  folder = tmp_path_factory.mktemp("gguf")
  directory = files.make_checkpoint(folder / "model")
  path = ggufs.write_directory(folder / "model.gguf", directory)
  return str(path), directory


@pytest.fixture(scope="module")
def decoded(written, cli, tmp_path_factory):
  """Output of `launch.decode` with the file, and with the directory."""
  folder, actual = tmp_path_factory.mktemp("out"), {}
  path = files.write_jsonl(folder / "prompts.jsonl", PROMPTS)
  for number, target in enumerate(written):
    output = folder / f"{number}.jsonl"
    code = cli(
      decode.run, f"--prompts={path}", f"--output={output}",
      "--config.drafter=ngram", "--nobaseline", "--config.max_new_tokens=12",
      config=f"configs/huggingface.py:target={target}",
    )  # fmt: skip
    assert code == 0
    actual[target] = files.read_jsonl(output)
  return actual


def test_a_file_decodes_as_its_model_in_a_directory_does(written, decoded):
  rows, expected = (decoded[path] for path in written)
  ids = lambda rows: [row["token_ids"] for row in rows]
  assert ids(rows) == ids(expected)
  assert all(row["completion"] for row in rows)


def test_a_damaged_file_is_one_line_and_exit_code_2(
  written, cli, tmp_path, capsys
):
  data = open(written[0], "rb").read()
  torn = tmp_path / "torn.gguf"
  asked = files.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}])
  wrong_rows = data.replace(b"blk.1.ffn_up", b"blk.1.ffn_no")
  for contents in (data[:50], data[:-5000], b"", wrong_rows):
    torn.write_bytes(contents)
    code = cli(
      decode.run, f"--prompts={asked}", "--config.drafter=ngram",
      config=f"configs/huggingface.py:target={torn}",
    )  # fmt: skip
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(torn) in line
