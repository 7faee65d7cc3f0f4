"""Corpora on disk, and what is looked up in them."""

import json

import jax
import numpy as np
import pytest
from commands import execute

from launch import decode
from launch.assembly import files
from launch.tools import corpus_index
from models import tokenizers
from specjax.drafters.shared import corpus

EMBEDDED = "configs/embedded.py"
TARGET = "models/pretrained/target"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A folder of texts, and its index."""
  root = tmp_path_factory.mktemp("corpus")
  (root / "in" / "below").mkdir(parents=True)
  (root / "in" / "a.py").write_text("import os\nimport sys\n")
  (root / "in" / "below" / "b.txt").write_text("def main():\n  pass\n")
  (root / "in" / "image.bin").write_bytes(b"\xff\xfe\x00")
  (root / "in" / ".hidden").write_text("nobody")
  output = root / "index.safetensors"
  flags = (f"--target={TARGET}", f"--output={output}")
  assert execute(corpus_index.run, f"--input={root / 'in'}", *flags) == 0
  return root, output


def test_index_contains_every_text_file_in_a_folder(made):
  _, output = made
  tokenizer = tokenizers.load(TARGET)
  actual = files.read_index(str(output), tokenizer)
  texts = ["import os\nimport sys\n", "def main():\n  pass\n"]
  expected = corpus.build([tokenizer.encode_text(t) for t in texts])
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
  "drafter",
  [
    pytest.param(
      "lookahead(tokens=3, window=3, num_guesses=2)", marks=pytest.mark.slow
    ),
    pytest.param('rest("INDEX", tokens=3)', marks=pytest.mark.slow),
    'rasd(nodes=8, tokens=3, siblings=top_k, corpus="INDEX")',
  ],
)
def test_greedy_text_matches_plain_decoding(drafter, cli, made, tmp_path):
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"id": 0, "prompt": "import os\\nimport"}\n')
  texts = []
  for number, one in enumerate([drafter, "plain"]):
    out, summary = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.json"
    code = cli(
      decode.run, f"--config.drafter={one.replace('INDEX', str(made[1]))}",
      "--config.rule=match", "--config.max_new_tokens=16", "--nobaseline",
      f"--prompts={prompts}", f"--output={out}", f"--summary={summary}",
      config=EMBEDDED,
    )  # fmt: skip
    assert code == 0
    texts.append(json.loads(out.read_text())["completion"])
  assert texts[0] == texts[1]
