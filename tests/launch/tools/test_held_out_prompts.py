"""The command that writes prompts nobody was trained on."""

from absl.testing import flagsaver
from files import read_jsonl

from launch import cli, prompts
from launch.tools import held_out_prompts
from launch.training import corpus
from models import tokenizers


def execute(*args):
  with flagsaver.flagsaver():
    return cli.execute(held_out_prompts.run, ["test", *args])


def test_prompts_are_of_held_out_files_and_are_read_back(tmp_path, capsys):
  path = tmp_path / "prompts.jsonl"
  assert execute(f"--output={path}", "--count=9", "--num_lines=5") == 0
  assert "9 prompts" in capsys.readouterr().out
  rows = read_jsonl(path)
  assert [r["id"] for r in rows] == list(range(9))
  texts = [f.text for f in corpus.python_files(split="test")]
  for row in rows:
    assert 1 <= len(row["prompt"].splitlines()) <= 5
    assert any(row["prompt"] in text for text in texts)
  tokenizer = tokenizers.load("models/pretrained/target")
  items = prompts.all_of(str(path), tokenizer, max_tokens=2000)
  assert [p.text for p in items] == [r["prompt"] for r in rows]
