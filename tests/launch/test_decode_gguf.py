"""GGUF files at the command line: as a target, hashed, compared, damaged."""

import dataclasses
import hashlib
import json

import files
import ggufs
import numpy as np
import pytest
import references
import transformers

from configs import huggingface as experiments
from launch import decode, prompts, train
from launch.assembly import pair
from launch.evaluation import hf_reference
from models import checkpoints
from specjax.runtime.requests import make_batches

pytestmark = pytest.mark.usefixtures("quick_to_compile")
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
    output, summary = folder / f"{number}.jsonl", folder / f"{number}.json"
    code = cli(
      decode.run, f"--prompts={path}", f"--output={output}",
      f"--summary={summary}", "--config.drafter=ngram", "--nobaseline",
      "--config.max_new_tokens=12",
      config=f"configs/huggingface.py:target={target}",
    )  # fmt: skip
    assert code == 0
    actual[target] = files.read_jsonl(output), json.loads(summary.read_text())
  return actual


def test_a_file_decodes_as_its_model_in_a_directory_does(written, decoded):
  (rows, _), (expected, _) = (decoded[path] for path in written)
  ids = lambda rows: [row["token_ids"] for row in rows]
  assert ids(rows) == ids(expected)
  assert all(row["completion"] for row in rows)


def test_the_hash_of_a_file_is_told(written, decoded):
  path, _ = written
  sha256 = hashlib.sha256(open(path, "rb").read()).hexdigest()
  told = decoded[path][1]["provenance"]["checkpoints"]["target"]
  assert told == {"path": path, "sha256": sha256}
  assert [str(file) for file in checkpoints.files(path)] == [path]


def test_a_draft_is_distilled_from_a_file_and_drafts_for_it(
  written, decoded, cli, tmp_path
):
  path, _ = written
  (tmp_path / "texts").mkdir()
  for number in range(40):
    (tmp_path / f"texts/{number}.txt").write_text(f"def f_{number}(x):\n" * 9)
  export = tmp_path / "draft"
  code = cli(
    train.run, f"--config.teacher={path}", f"--config.tokenizer={path}",
    f"--config.dataset={tmp_path}/texts", "--config.objective=forward_kl",
    "--config.num_steps=2", f"--workdir={tmp_path}/w", f"--export={export}",
    config="configs/train_embedded.py:tiny",
  )  # fmt: skip
  assert code == 0
  asked = files.write_jsonl(tmp_path / "p.jsonl", PROMPTS)
  output = tmp_path / "o.jsonl"
  code = cli(
    decode.run, f"--prompts={asked}", f"--output={output}", "--nobaseline",
    f"--config.drafter=model('{export}')", "--config.max_new_tokens=12",
    config=f"configs/huggingface.py:target={path}",
  )  # fmt: skip
  assert code == 0
  rows = files.read_jsonl(output)
  ids = lambda rows: [row["token_ids"] for row in rows]
  assert ids(rows) == ids(decoded[path][0])
  told = decoded[path][1]["provenance"]["checkpoints"]["target"]
  assert told["sha256"] == hashlib.sha256(open(path, "rb").read()).hexdigest()


def test_a_file_is_no_output(written, cli, tmp_path, capsys):
  path, _ = written
  asked = files.write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}])
  code = cli(
    decode.run, f"--prompts={asked}", f"--output={path}", "--overwrite",
    "--config.drafter=ngram", config=f"configs/huggingface.py:target={path}",
  )  # fmt: skip
  assert code == 2
  assert "the target" in capsys.readouterr().err


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


def test_transformers_reads_the_same_file(written, monkeypatch):
  """Which asks for accelerate, and does without it on one CPU."""
  path, directory = written
  config = experiments.get_config(f"target={path}")
  config.update(drafter="ngram", max_new_tokens=8)
  monkeypatch.setattr(
    transformers.modeling_utils, "is_accelerate_available", lambda: True
  )
  models = pair.build(config)
  items = prompts.built_in(models.tokenizer, max_tokens=64)[:2]
  (batch,) = make_batches(items, batch_size=2, max_width=64)
  rows = {}
  for target in (path, directory):
    config.target = target
    reference = hf_reference.Reference(
      config, stop_tokens=models.stop_tokens,
      vocab_size=models.tokenizer.vocab_size,
    )  # fmt: skip
    rows[target] = reference.generate(batch).token_ids
    fuller = dataclasses.replace(batch, rows=4)
    assert reference.generate(fuller).token_ids == rows[target]
  assert rows[path] == rows[directory]
  assert all(rows[path])
  filling = hf_reference._Filling(2)
  ended = filling(np.zeros((4, 1)), None)
  assert ended.tolist() == [False, False, True, True]


def test_transformers_is_only_asked_for_what_it_understands(
  written, tmp_path, monkeypatch
):
  path, _ = written
  known = {"torch", "transformers", "accelerate"}
  monkeypatch.setattr(
    hf_reference.importlib.util, "find_spec", lambda n: n in known or None
  )
  assert hf_reference.is_available(path)
  known.remove("accelerate")
  assert not hf_reference.is_available(path)
  known.add("accelerate")
  for name, settings in {
    "llama": dict(attention_bias=True, num_key_value_heads=2),
    "gpt_neox": {},
  }.items():
    model = references.make(name, references.GATED | settings)
    path = str(ggufs.write(tmp_path / f"{name}.gguf", model))
    assert checkpoints.read_config(path).qkv_bias
    assert not hf_reference.is_available(path)
