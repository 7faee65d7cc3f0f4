"""`launch.decode` of encoder-decoders."""

import json

import pytest
import t5s
import torch
from files import read_jsonl, write_jsonl

from launch import decode, evaluate

RECORDS = [
  {"id": "a", "input": "turn left at the old mill, then walk on."},
  {"id": "b", "input": "x", "prompt": "so "},
  {"id": 3, "input": "one 2 three", "max_new_tokens": 5},
  {"id": "d", "input": "nothing. " * 9},
]
SMALL = (
  "--config.max_new_tokens=12", "--config.drafter=model(tokens=3)",
  "--config.batch_size=2", "--config.max_length=128",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Directories of a T5 and of a draft for it, and the T5 of transformers."""
  root = tmp_path_factory.mktemp("t5")
  big = dict(d_kv=8, feed_forward_proj="gated-gelu")
  for name in ("target", "draft"):
    (root / name).mkdir()
    t5s.save_tokenizer(root / name)
  _, theirs = t5s.save(root / "target", seed=1, **big)
  t5s.save(root / "draft", seed=1, vocab_size=80)
  return root / "target", root / "draft", theirs


@pytest.fixture(scope="module")
def t5(cli, saved):
  """Runs a command with the pair."""
  config = f"configs/t5.py:target={saved[0]},draft={saved[1]}"

  def run(command, *args, config=config):
    return cli(command, *SMALL, *args, config=config)

  return run


def expected(theirs, record):
  """Greedy completions of transformers' generate."""
  encode = lambda text: [3 + t5s.CHARACTERS.index(c) for c in text]
  prompt = [0, *encode(record.get("prompt", ""))]
  made = theirs.generate(
    input_ids=torch.tensor([[*encode(record["input"]), 1]]),
    attention_mask=torch.ones(1, len(record["input"]) + 1, dtype=torch.long),
    decoder_input_ids=torch.tensor([prompt]),
    max_new_tokens=record.get("max_new_tokens", 12),
    # As ours: what no token stands for is not said.
    suppress_tokens=list(range(3 + len(t5s.CHARACTERS), t5s.VOCAB)),
    do_sample=False, num_beams=1,
  )  # fmt: skip
  return made[0, len(prompt) :].tolist()


def test_greedy_rows_match_transformers_generate(t5, saved, tmp_path):
  source = write_jsonl(tmp_path / "in.jsonl", RECORDS)
  out = tmp_path / "out.jsonl"
  flags = ("--nobaseline", f"--prompts={source}", f"--output={out}")
  assert t5(decode.run, *flags) == 0
  rows = read_jsonl(out)
  assert [row["id"] for row in rows] == ["a", "b", 3, "d"]
  for row, record in zip(rows, RECORDS, strict=True):
    assert row["token_ids"] == expected(saved[2], record)


def test_evaluate_accepts_encoder_inputs_as_prompts(t5, tmp_path, capsys):
  source = write_jsonl(tmp_path / "in.jsonl", RECORDS[:2])
  out = tmp_path / "e.json"
  assert t5(evaluate.run, f"--prompts={source}", f"--output={out}") == 0
  record = json.loads(out.read_text())
  assert [r["speedup"] is None for r in record["runs"][:2]] == [True, False]
  assert record["runs"][1]["identical_to_plain"] == 1
  assert t5(evaluate.run, f"--output={out}.json") == 2
  assert "--prompts support these" in capsys.readouterr().err
