"""`launch.decode` as its users call it."""

import json
import shutil

import fallback
import pytest
from files import read_jsonl, write_jsonl

from launch import decode
from models import tokenizers

pytestmark = pytest.mark.usefixtures("quick_to_compile")
SMALL = ("--config.max_new_tokens=12", "--config.drafter=model(tokens=3)")
THREE = "--config.batch_size=3"  # of one size, so of the same programs
TEXTS = ["def f(x):\n", "import os", "class A:\n  x = 1\n\n  def", "x", "for"]


@pytest.fixture
def prompts(tmp_path):
  records = [{"id": f"p{i}", "prompt": t} for i, t in enumerate(TEXTS)]
  return write_jsonl(tmp_path / "in.jsonl", records)


def test_rows_come_back_in_order_with_the_documented_keys(
  cli, tmp_path, prompts, pair
):
  out, summary = tmp_path / "out.jsonl", tmp_path / "s.json"
  code = cli(
    decode.run, *SMALL, THREE, f"--prompts={prompts}", f"--output={out}",
    f"--summary={summary}",
  )  # fmt: skip
  assert code == 0
  rows = read_jsonl(out)
  assert [r["id"] for r in rows] == [f"p{i}" for i in range(len(TEXTS))]
  tokenizer = tokenizers.load(pair[0])
  for row in rows:
    assert set(row) == {
      "id", "completion", "token_ids", "stop_reason", "num_target_calls",
      "num_drafted", "num_accepted", "accept_counts",
    }  # fmt: skip
    assert row["completion"] == tokenizer.decode(row["token_ids"])
    assert row["stop_reason"] in ("length", "stop_token")
    assert len(row["token_ids"]) <= 12
    assert sum(row["accept_counts"]) == row["num_target_calls"]
    assert row["num_drafted"] == 3 * row["num_target_calls"]
  numbers = json.loads(summary.read_text())
  for name in (
    "block_efficiency", "acceptance_rate", "expected_acceptance_rate",
    "num_tokens", "tokens_per_second", "baseline_tokens_per_second",
    "speedup",
  ):  # fmt: skip
    assert numbers[name] is not None
  assert numbers["speedup_ci"] is None  # two batches say nothing of a spread
  assert numbers["num_tokens"] == sum(len(r["token_ids"]) for r in rows)


@pytest.fixture(scope="module")
def plain(cli, tmp_path_factory):
  """The greedy completions without a draft."""
  folder = tmp_path_factory.mktemp("plain")
  return greedy(cli, folder, "--config.drafter=plain")


def greedy(cli, folder, *settings):
  records = [{"id": f"p{i}", "prompt": t} for i, t in enumerate(TEXTS)]
  out, source = folder / "out.jsonl", folder / "in.jsonl"
  source = write_jsonl(source, records)
  assert cli(
    decode.run, *SMALL, *settings, THREE, "--nobaseline",
    f"--prompts={source}", f"--output={out}",
  ) == 0  # fmt: skip
  return [r["token_ids"] for r in read_jsonl(out)]


@pytest.mark.parametrize(
  "settings",
  [
    ("--config.drafter=model(tokens=3)",),
    pytest.param(
      ("--config.drafter=ngram(tokens=3)",), marks=pytest.mark.heavy
    ),
    ("--config.drafter=layer_skip('SET', tokens=3)",),
    pytest.param(
      (
        "--config.rule=match",
        "--config.drafter=model(tokens=3, tree=paths(2))",
      ),
      marks=pytest.mark.heavy,
    ),
  ],
)
def test_greedy_completions_are_the_same_for_every_drafter(
  cli, tmp_path, plain, settings
):
  skipped = tmp_path / "skip.json"
  skipped.write_text('{"skip_attention": [], "skip_mlp": [1]}')
  settings = [text.replace("SET", str(skipped)) for text in settings]
  assert greedy(cli, tmp_path, *settings) == plain


def test_sampled_rows_do_not_depend_on_the_batch_size(cli, tmp_path, prompts):
  outs, summary = [], tmp_path / "s.json"
  for size in (1, 3):
    out = tmp_path / f"{size}.jsonl"
    assert cli(
      decode.run, *SMALL, "--config.temperature=0.9", "--nobaseline",
      f"--config.batch_size={size}", f"--prompts={prompts}", f"--output={out}",
      f"--summary={summary}", "--overwrite",
    ) == 0  # fmt: skip
    outs.append([r["token_ids"] for r in read_jsonl(out)])
  assert outs[0] == outs[1]
  numbers = json.loads(summary.read_text())  # without a baseline
  assert numbers["baseline_tokens_per_second"] is None
  assert numbers["speedup"] is None


def test_bad_lines_are_named_and_the_others_decoded(cli, tmp_path, capsys):
  source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  source.write_bytes(
    b'{"id": 1, "prompt": "def f"}\n'
    b'{"id": 2, "prompt": "def\n'
    b"\n"
    b'{"id": 3, "prompt": ""}\n'
    b'{"id": 4}\n'
    b"[5]\n"
    b'{"id": 6, "prompt": "' + b"x = 1; " * 300 + b'"}\n'
    b'{"id": 7, "prompt": "\xff"}\n'
    b'{"id": 8, "prompt": "import"}\n'
    b'{"id": 9, "prompt": "\\ud800"}\n' + b"[" * 100_000 + b"\n"
  )
  code = cli(
    decode.run, *SMALL, THREE, "--nobaseline", f"--prompts={source}",
    f"--output={out}",
  )  # fmt: skip
  assert code == 2
  assert [r["id"] for r in read_jsonl(out)] == [1, 8]
  err = capsys.readouterr().err
  for number, text in (
    (2, "not JSON"), (4, "the prompt is empty"), (5, "no such key"),
    (6, "got list"), (7, "tokens, but only"), (8, "not UTF-8"), (10, ""),
    (11, "nested too deeply"),
  ):  # fmt: skip
    assert f"in.jsonl:{number}: " in err
    assert text in err
  assert "Traceback" not in err


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("--config.rule=tokens",), "unknown rule 'tokens'"),
    (("--config.drafter=modl",), "unknown drafter 'modl'"),
    (("--config.gama=3",), "gama"),
    (("--config.drafter=model(tokens=-1)",), "must be >= 1, got -1"),
    (("--config.drafter=model(tokens=x)",), "expected int or None, got x"),
    (("--config.max_new_tokens=256",), "leaves no room for a prompt"),
    (("--config.top_p=0.0",), "top_p must be in (0, 1]"),
    (("--config.temperature=-1.0",), "temperature must be finite and >= 0"),
    (("--prompts=/nowhere/in.jsonl",), "no such prompts file"),
    (("--summary=/nowhere/s.json",), "no such folder"),
    (("--config.dtype=float33",), "dtype must be"),
    (("--config.temperature=1", "2"), "settings are written --name=value"),
    (("--output=/nowhere/out.jsonl",), "no such folder"),
    (("--config.drafter=layer_skip('no.json')",), "no such file of layers"),
    (("--config.drafter=eagle3('/nowhere')",), "there is no /nowhere"),
    (("--config.drafter=layer_skip",), "needs a checkpoint: layer_skip("),
  ],
)  # fmt: skip
def test_bad_settings_are_one_line_and_exit_code_2(
  cli, capsys, tmp_path, flags, message
):
  if not any(flag.startswith("--output") for flag in flags):
    flags = (f"--output={tmp_path / 'out.jsonl'}", *flags)
  assert cli(decode.run, *flags) == 2
  assert not list(tmp_path.iterdir())  # nothing half-written
  err = capsys.readouterr().err.strip()
  assert message in err
  assert err.startswith("error: ")
  assert "\n" not in err


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (
      "configs/huggingface.py:target=meta-llama/Llama-3.2-1B,draft=a/b",
      "is no path here, and is not to be had from the Hugging Face Hub",
    ),
    ("configs/huggingface.py:target=", "expected configs/huggingface.py"),
    ("configs/huggingface.py:model=x", "expected configs/huggingface.py"),
    ("configs/nowhere.py", "nowhere"),
  ],
)
def test_bad_configs_are_one_line_and_exit_code_2(cli, capsys, config, message):
  assert cli(decode.run, "--config.drafter=ngram", config=config) == 2
  err = capsys.readouterr().err.strip()
  assert message in err
  assert err.count("\n") == 0


def test_a_missing_draft_says_what_to_do(cli, capsys, pair):
  config = f"configs/huggingface.py:target={pair[0]}"
  assert cli(decode.run, config=config) == 2
  assert "needs a checkpoint: model(" in capsys.readouterr().err


def test_tokenizers_that_differ_are_refused(cli, tmp_path, pair, capsys):
  other = tmp_path / "draft"
  shutil.copytree(pair[1], other)
  file = other / "tokenizer.json"
  data = json.loads(file.read_text())
  vocab = data["model"]["vocab"]
  first, second = list(vocab)[300:302]
  vocab[first], vocab[second] = vocab[second], vocab[first]
  file.write_text(json.dumps(data))
  config = f"configs/huggingface.py:target={pair[0]},draft={other}"
  assert cli(decode.run, config=config) == 2
  assert "must share a tokenizer" in capsys.readouterr().err


def test_truncated_safetensors_are_one_line(cli, tmp_path, pair, capsys):
  broken = tmp_path / "target"
  shutil.copytree(pair[0], broken)
  file = broken / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-1000])
  config = f"configs/huggingface.py:target={broken},draft={pair[1]}"
  assert cli(decode.run, config=config) == 2
  err = capsys.readouterr().err.strip()
  assert err.startswith("error: ")
  assert "model.safetensors" in err


def test_nan_weights_end_rows_with_a_reason(
  cli, tmp_path, prompts, pair, capsys
):
  """A NaN embedding: prompts with that token stop, the others go on."""
  from safetensors.numpy import load_file, save_file

  broken = tmp_path / "target"
  shutil.copytree(pair[0], broken)
  file = broken / "model.safetensors"
  tensors = dict(load_file(file))
  tokenizer = tokenizers.load(pair[0])
  (token,) = tokenizer.encode("x")
  embedding = tensors["model.embed_tokens.weight"].copy()
  embedding[token] = float("nan")
  tensors["model.embed_tokens.weight"] = embedding
  save_file(tensors, file, metadata={"format": "pt"})
  out = tmp_path / "out.jsonl"
  code = cli(
    decode.run, *SMALL, THREE, "--nobaseline", f"--prompts={prompts}",
    f"--output={out}",
    config=f"configs/huggingface.py:target={broken},draft={pair[1]}",
  )  # fmt: skip
  assert code == 2
  reasons = {r["id"]: r["stop_reason"] for r in read_jsonl(out)}
  assert reasons["p3"] == "nan_logits"  # the prompt "x"
  assert "length" in reasons.values()
  assert "NaN logits ended the rows" in capsys.readouterr().err


def test_a_completion_begins_with_its_space_and_ends_before_one(
  cli, pair, tmp_path
):
  """Where a tokenizer drops the space that a whole text begins with."""
  tokenizer = fallback.numbered(4096)
  target = shutil.copytree(pair[0], tmp_path / "target")
  tokenizers.save(tokenizer, target)
  source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
  run = lambda record: cli(
    decode.run, *SMALL, "--nobaseline", "--overwrite", f"--output={out}",
    f"--prompts={write_jsonl(source, [record])}",
    "--config.drafter=plain",
    config=f"configs/huggingface.py:target={target}",
  )  # fmt: skip
  assert run({"prompt": "w5 w6"}) == 0
  (row,) = read_jsonl(out)
  ids = row["token_ids"]
  assert row["completion"] == fallback.said(ids, tokenizer)
  stop = f" w{ids[2]}"
  assert run({"prompt": "w5 w6", "stop": stop}) == 0
  (row,) = read_jsonl(out)
  assert row["completion"] == fallback.said(ids, tokenizer).partition(stop)[0]
  assert row["token_ids"] == ids[: 1 + ids.index(ids[2])]
