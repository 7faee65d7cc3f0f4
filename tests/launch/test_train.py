"""`launch.train`: exact, restartable, the same on any mesh."""

import functools
import random
import signal
import subprocess
import sys

import commands
import jax
import numpy as np
import pytest
import several
from files import metrics
from flax import nnx

from configs import train_embedded
from launch import cli, train
from launch.training.run import Run, read_config
from models import tokenizers
from models.formats import huggingface, loading


def tiny(texts, pair=None, **changes):
  config = train_embedded.get_config("tiny")
  config.dataset = str(texts)
  config.num_steps = 12
  if pair:
    config.teacher = pair[0]
  config.update(changes)
  return config


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, nnx.state(a), nnx.state(b))


command_line = functools.partial(commands.execute, train.run)


def test_killed_run_resumes_to_bitwise_identical_weights(texts, pair, tmp_path):
  """SIGKILL at a random time, while it trains, saves or writes.

  It trains on the draft's own samples: their keys and the place in the data
  must come back too.
  """
  arguments = [
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    f"--config.teacher={pair[0]}", "--config.objective=acceptance",
    "--config.contexts=draft", "--config.prompt_length=8",
    "--config.num_steps=24", "--config.validate_every=10",
    "--config.log_every=1", "--config.checkpoint_every=4",
    "--config.export_dtype=float32",
  ]  # fmt: skip
  killed, whole = tmp_path / "killed", tmp_path / "whole"
  process = subprocess.Popen(
    [sys.executable, "-m", "launch.train", *arguments, f"--workdir={killed}"],
    stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  last = random.SystemRandom().randrange(5, 20)
  with several.limited([process]):
    for line in process.stderr:
      if line.startswith(f'{{"step": {last},'):
        break
  process.communicate()
  assert command_line(*arguments, f"--workdir={whole}") == 0
  # The folder alone goes on.
  assert command_line(f"--workdir={killed}", f"--export={tmp_path}/x") == 0
  steps = [r["step"] for r in metrics(killed, "acceptance_loss")]
  assert steps == list(range(1, 25)), f"killed at step {last}"
  expected, _ = Run(read_config(str(whole)), str(whole)).train()
  assert_equal(loading.load(huggingface.source(str(tmp_path / "x"))), expected)


def test_run_writes_metrics_config_and_checkpoints(texts, pair, tmp_path):
  config = tiny(texts, pair, objective="forward_kl", num_steps=20)
  run = Run(config, str(tmp_path))
  run.train()
  losses = metrics(tmp_path, "forward_kl_loss")
  assert [r["step"] for r in losses] == [5, 10, 15, 20]
  assert losses[-1]["forward_kl_loss"] < losses[0]["forward_kl_loss"]
  for record in losses:
    assert record["tokens"] == record["step"] * 4 * 32
    assert record["tokens_per_second"] > 0
  checks = metrics(tmp_path, "validation_next_token_loss")
  assert [r["step"] for r in checks] == [5, 10, 15, 20]
  for record in checks:
    assert 0 < record["validation_acceptance"] < 1
    bits = record["validation_next_token_loss"] / np.log(2)
    assert 0 < record["validation_bits_per_byte"] < bits
  assert read_config(str(tmp_path)).num_steps == 20
  kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert kept == {"15", "20"}


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(objective="forward_kl"), "needs a teacher"),
    (dict(contexts="target"), "needs a teacher"),
    (dict(batch_size=1000), "smaller than a batch"),
    (dict(teacher="/no/such/model"), "no such directory: /no/such/model"),
    (dict(contexts="draft", prompt_length=32), "prompt_length .* got 32"),
  ],
)
def test_invalid_configs_are_rejected_before_writing(
  texts, pair, tmp_path, changes, words
):
  with pytest.raises((ValueError, OSError), match=words):
    Run(tiny(texts, tokenizer=pair[0], **changes), str(tmp_path / "w"))
  assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def begun(texts, tmp_path_factory):
  """The folder of a run of three steps."""
  folder = tmp_path_factory.mktemp("begun")
  Run(tiny(texts, num_steps=3, validate_every=0), str(folder)).train()
  return folder


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--config.seed=1"], "has config.seed = 0, not 1"),
    (["--export=models/pretrained/target"], "exists already: --overwrite"),
    (["--workdir=README.md"], "README.md"),
  ],
)
def test_existing_runs_and_exports_are_not_overwritten(
  begun, texts, capsys, flags, message
):
  before = {p: p.stat().st_mtime_ns for p in begun.rglob("*")}
  assert command_line(
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    "--config.num_steps=3", "--config.validate_every=0",
    f"--workdir={begun}", *flags,
  ) == 2  # fmt: skip
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert before == {p: p.stat().st_mtime_ns for p in begun.rglob("*")}


def test_run_can_be_extended_or_overwritten(begun, texts, tmp_path, capsys):
  assert command_line(f"--workdir={tmp_path / 'none'}") == 2
  assert "give --config" in capsys.readouterr().err
  flags = [
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    "--config.validate_every=0", "--config.log_every=1", f"--workdir={begun}",
  ]  # fmt: skip
  assert command_line(*flags, "--config.num_steps=5") == 0
  assert [r["step"] for r in metrics(begun)] == [3, 4, 5]
  assert command_line(
    *flags, "--config.num_steps=2", "--config.seed=1", "--overwrite"
  ) == 0  # fmt: skip
  assert [r["step"] for r in metrics(begun)] == [1, 2]
  assert read_config(str(begun)).seed == 1


def test_train_command_distills_and_exports(texts, tmp_path, pair):
  """To a directory that gives the very same weights, and logits anywhere."""
  import torch
  import transformers

  export = tmp_path / "model"
  assert command_line(
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    f"--config.teacher={pair[0]}", "--config.objective=total_variation",
    "--config.contexts=target", "--config.prompt_length=8",
    "--config.export_dtype=float32", "--config.num_steps=2",
    f"--workdir={tmp_path}/w", f"--export={export}",
  ) == 0  # fmt: skip
  exported = loading.load(huggingface.source(str(export)))
  assert tokenizers.load(str(export)).vocab_size == 4096
  workdir = str(tmp_path / "w")
  trained, _ = Run(read_config(workdir), workdir).train()  # is at its end
  assert_equal(exported, trained)
  tokens = np.random.default_rng(0).integers(4096, size=(2, 16))
  elsewhere = transformers.AutoModelForCausalLM.from_pretrained(
    str(export), dtype="float32"
  )
  with torch.no_grad():
    expected = elsewhere(torch.tensor(tokens)).logits.numpy()
  ours = trained(np.asarray(tokens))[0].logits
  np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())


def test_sigterm_to_one_process_stops_both_at_the_same_step(texts, tmp_path):
  command = [
    "-m", "launch.train",
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    f"--config.tokenizer={tmp_path}/tokenizer",
    "--config.model.vocab_size=300", "--config.num_steps=100000",
    "--config.validate_every=2", "--config.log_every=1",
    f"--workdir={tmp_path}/w", f"--export={tmp_path}/x",
  ]  # fmt: skip
  first, second = started = several.start([command] * 2)
  lines = []
  with several.limited(started):
    for line in first.stderr:
      lines.append(line)
      if line.startswith('{"step": 5,'):
        second.send_signal(signal.SIGTERM)
    (code, _, _), (second_code, _, second_err) = several.finish(started)
  assert cli.UNFINISHED == 75
  assert (code, second_code) == (75, 75), (lines, second_err)
  assert "the same command continues" in lines[-1]
  folder = tmp_path / "w" / "checkpoints"
  saved = max(int(p.name) for p in folder.glob("[0-9]*"))
  steps = [record["step"] for record in metrics(tmp_path / "w")]
  assert steps == sorted(steps)
  assert steps[-1] == saved >= 5
  assert not (tmp_path / "x").exists()
