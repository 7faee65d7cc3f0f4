"""`launch.train`: exact, restartable, the same on any mesh."""

import errno
import functools
import json
import os
import random
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import several
from absl.testing import flagsaver
from flax import nnx

from configs import train_embedded
from launch import cli, train
from launch.training import settings, step
from launch.training.run import Run
from models import tokenizers
from models.formats import huggingface

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def tiny(texts, pair=None, **changes):
  config = train_embedded.get_config("tiny")
  config.dataset = str(texts)
  config.num_steps = 12
  if pair:
    config.teacher = pair[0]
  config.update(changes)
  return config


def parameters(module):
  return nnx.state(module)


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, parameters(a), parameters(b))


def records(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


class KilledError(Exception):
  """Exception by which a test kills a run."""


def kill_at(monkeypatch, step_number, act):
  """`act()` before the training step after `step_number` steps, once."""
  real, count = step.place_batch, [0]

  def place(batch, mesh):
    if batch["tokens"].shape[0] == 4:
      count[0] += 1
    if count[0] == step_number + 1:
      count[0] += 1000
      act()
    return real(batch, mesh)

  monkeypatch.setattr(step, "place_batch", place)


def distil(**changes):
  return dict(
    objective="acceptance", contexts="draft", prompt_length=8,
    validate_every=100, sample_every=0, checkpoint_every=3, **changes
  )  # fmt: skip


def test_a_killed_run_goes_on_to_the_same_parameters(
  texts, pair, tmp_path, monkeypatch
):
  """Of the draft's own samples, whose keys must come back too."""
  config = tiny(texts, pair, **distil())
  whole, finished = Run(config, str(tmp_path / "whole")).train()
  assert finished

  def die():
    raise KilledError

  kill_at(monkeypatch, 7, die)
  with pytest.raises(KilledError):
    Run(config, str(tmp_path / "killed")).train()
  monkeypatch.undo()
  resumed, finished = Run(config, str(tmp_path / "killed")).train()
  assert finished
  assert_equal(whole, resumed)


@pytest.mark.parametrize(
  "number",
  [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.heavy)],
)
def test_a_signal_saves_and_the_run_goes_on(
  texts, tmp_path, monkeypatch, number
):
  config = tiny(texts, checkpoint_every=1000, validate_every=100)
  whole, _ = Run(config, str(tmp_path / "whole")).train()
  kill_at(monkeypatch, 5, lambda: os.kill(os.getpid(), number))
  before = signal.getsignal(number)
  _, finished = Run(config, str(tmp_path / "stopped")).train()
  assert not finished
  assert signal.getsignal(number) == before
  assert (tmp_path / "stopped" / "checkpoints" / "6").is_dir()
  monkeypatch.undo()
  resumed, finished = Run(config, str(tmp_path / "stopped")).train()
  assert finished
  assert_equal(whole, resumed)


def test_what_a_run_writes(texts, pair, tmp_path):
  config = tiny(texts, pair, objective="forward_kl", num_steps=20)
  run = Run(config, str(tmp_path))
  told = functools.partial(told_text, run.tokenizer)
  run.train()
  actual = records(tmp_path)
  losses = [r["forward_kl_loss"] for r in actual if "forward_kl_loss" in r]
  assert [r["step"] for r in actual if "forward_kl_loss" in r] == [
    5,
    10,
    15,
    20,
  ]
  assert losses[-1] < losses[0]
  for record in actual:
    assert record["tokens"] == record["step"] * 4 * 32
    if "forward_kl_loss" in record:
      assert record["tokens_per_second"] > 0
      assert 0 < record["mfu"] < 1
      assert record["peak_flops"] == "measured"
  checks = [r for r in actual if "validation_next_token_loss" in r]
  assert [r["step"] for r in checks] == [5, 10, 15, 20]
  tokens = sum(count for count, _ in map(told, run.validation))
  size = sum(len(text) for _, text in map(told, run.validation))
  for record in checks:
    assert 0 < record["validation_acceptance"] < 1
    bits = record["validation_next_token_loss"] / np.log(2) * tokens
    assert record["validation_bits_per_byte"] == pytest.approx(bits / size)
  lines = (tmp_path / "samples.jsonl").read_text().splitlines()
  assert {json.loads(line)["step"] for line in lines} == {10, 20}
  assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 20


def told_text(tokenizer, batch):
  """Number of predicted tokens of a batch, and of their bytes."""
  count, text = 0, b""
  for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
    for segment in range(1, segments.max() + 1):
      told = tokens[segments == segment][1:]
      count += len(told)
      text += tokenizer.decode(told).encode()
  return count, text


def test_a_run_begins_with_the_model_it_is_given(texts, tmp_path):
  first, _ = Run(tiny(texts, num_steps=2), str(tmp_path / "first")).train()
  config = tiny(texts, num_steps=2, init_from=str(tmp_path / "first"), seed=1)
  run = Run(config, str(tmp_path / "second"))
  assert_equal(run.task.first, first)
  last = [
    r for r in records(tmp_path / "first") if "validation_next_token_loss" in r
  ][-1]
  trained, _ = run.train()
  here = [
    r for r in records(tmp_path / "second") if "validation_next_token_loss" in r
  ]
  assert [r["step"] for r in here] == [0, 2]
  assert here[0]["validation_next_token_loss"] == pytest.approx(
    last["validation_next_token_loss"]
  )
  with pytest.raises(AssertionError):
    assert_equal(trained, first)
  # Begun runs go on from their own checkpoint.
  again, _ = Run(config, str(tmp_path / "second")).train()
  assert_equal(again, trained)


def test_a_model_of_another_shape_is_refused(texts, pair, tmp_path):
  with pytest.raises(ValueError, match="another shape than"):
    Run(tiny(texts, init_from=pair[0]), str(tmp_path))


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(objective="forward_kl"), "needs a teacher"),
    (dict(seed=2**70), "config.seed must be in 0..4294967295"),
    (dict(data_seed=-1), "config.data_seed must be in"),
    (dict(contexts="target"), "needs a teacher"),
    (dict(objective="best"), "unknown objective 'best'"),
    (dict(contexts="ours"), "contexts must be one of"),
    (dict(mesh=(3, 1)), "mesh \\(3, 1\\) takes 3 devices"),
    (dict(dataset="no_such_set"), "unknown dataset"),
    (dict(dataset="/no/such/folder"), "no such folder"),
    (dict(dataset="README.md"), "README.md is a file"),
    (dict(acceptance_block=0), "acceptance_block must be >= 1"),
    (dict(objective="acceptance", acceptance_block=33), "longer than"),
    (dict(batch_size=0), "config.batch_size must be >= 1, got 0"),
    (dict(num_steps=-1), "config.num_steps must be >= 0, got -1"),
    (dict(validation_batches=-1), "config.validation_batches must be >= 0"),
    (dict(learning_rate=float("nan")), "config.learning_rate must be > 0"),
    (dict(weight_decay=-1.0), "config.weight_decay must be >= 0"),
    (dict(export_dtype="bf16"), "export_dtype must be one of .* got 'bf16'"),
    (
      dict(sample_prompts=("x", "")),
      r"prompts must have .* got \[1, 0\]",
    ),
    (dict(model=dict(max_positions=50)), r"must have 1 to 2 tokens"),
    (dict(init_from="/no/such/model"), "no directory '/no/such/model'"),
    (dict(teacher="/no/such/model"), "no such directory: /no/such/model"),
    (dict(tokenizer="README.md/x"), "README.md is a file"),
    (
      dict(contexts="draft", prompt_length=32),
      r"here \[1, 32\), got 32",
    ),
    (dict(model=dict(vocab_size=300)), "less than the 4096 tokens"),
  ],
)
def test_mistakes_in_the_config(texts, tmp_path, changes, words):
  if changes.get("model", {}).get("vocab_size") != 300:  # of a tokenizer
    changes = {"tokenizer": str(tmp_path / "tokenizer"), **changes}
  with pytest.raises((ValueError, OSError), match=words):
    Run(tiny(texts, **changes), str(tmp_path / "w"))
  assert not list(tmp_path.iterdir())


def test_a_new_tokenizer_is_written_when_training_begins(texts, tmp_path):
  config = tiny(
    texts, tokenizer=str(tmp_path / "tokenizer"), num_steps=1,
    validate_every=0, sample_every=0, model=dict(vocab_size=300),
  )  # fmt: skip
  run = Run(config, str(tmp_path / "w"))
  assert not list(tmp_path.iterdir())
  run.train()
  for folder in ("tokenizer", "w/tokenizer"):
    kept = tokenizers.load(str(tmp_path / folder))
    assert kept.fingerprint() == run.tokenizer.fingerprint()
    assert kept.eos_token_id == run.tokenizer.eos_token_id
  # It is the run's from then on, and stays what it is.
  before = (tmp_path / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
  again = Run(config, str(tmp_path / "other"))
  assert again.tokenizer.fingerprint() == run.tokenizer.fingerprint()
  again.train()
  after = (tmp_path / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
  assert before == after


def test_a_validation_text_that_fills_no_batch_counts_each_token_once(
  texts, tmp_path
):
  losses = []
  for name, batch_size in (("rows", 1), ("batch", 1000)):
    config = tiny(
      texts, batch_size=batch_size, num_steps=0, validation_batches=0,
      sample_every=0,
    )  # fmt: skip
    run = Run(config, str(tmp_path / name))
    params = run.steps.init(jax.random.key(0)).params
    losses.append(run.validate(params))
  assert len(run.validation) == 1
  assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_teacher_speaks_of_the_same_tokens(texts, pair, tmp_path):
  distilling = functools.partial(tiny, texts, pair, objective="forward_kl")
  other = distilling(tokenizer=str(tmp_path / "tokenizer"))
  with pytest.raises(ValueError, match=r"give config\.tokenizer="):
    Run(other, str(tmp_path / "a"))
  assert not list(tmp_path.iterdir())
  trained = tokenizers.train(["x = 1"], vocab_size=300)
  tokenizers.save(trained, other.tokenizer)
  with pytest.raises(ValueError, match="another tokenizer than"):
    Run(other, str(tmp_path / "a"))
  padded = distilling(model=dict(vocab_size=4100))
  with pytest.raises(ValueError, match=r"must be that of\s+config.teacher"):
    Run(padded, str(tmp_path / "b"))


def test_the_folder_of_another_run_is_refused(texts, tmp_path):
  kept = dict(num_steps=3, validate_every=0, sample_every=0)
  Run(tiny(texts, **kept), str(tmp_path)).train()
  before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
  for changes in (
    dict(seed=1),
    dict(batch_size=2),
    dict(model=dict(embed_dim=64)),
  ):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=f"has config.{name} = "):
      Run(tiny(texts, **kept, **changes), str(tmp_path))
  # And with another tokenizer, at the same path or at another one.
  other = str(tmp_path / "other")
  tokenizers.save(tokenizers.train(["x = 1"], vocab_size=300), other)
  kept_one = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
  with pytest.raises(ValueError, match="has another tokenizer"):
    Run(tiny(texts, **kept, tokenizer=other), str(tmp_path))
  assert (tmp_path / "tokenizer" / "tokenizer.json").read_bytes() == kept_one
  after = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
  assert before == after
  assert not list(tmp_path.glob("broken-*"))
  # What may change: here the run goes on for longer.
  longer = tiny(texts, **kept | dict(num_steps=4, log_every=1))
  assert Run(longer, str(tmp_path)).train()[1]
  # And a run beyond its end is over, and stays what it was.
  assert Run(tiny(texts, **kept), str(tmp_path)).train()[1]
  assert settings.read(str(tmp_path)).num_steps == 4


def command_line(*args):
  with flagsaver.flagsaver():
    return cli.execute(train.run, ["train", *args])


def test_the_folder_alone_goes_on(texts, tmp_path, capsys):
  folder = f"--workdir={tmp_path}/w"
  assert command_line(folder) == 2
  assert "a new one needs --config" in capsys.readouterr().err
  config = tiny(
    texts, num_steps=4, log_every=1, validate_every=0, sample_every=0
  )
  Run(config, str(tmp_path / "w")).train()
  path = tmp_path / "w" / "config.json"
  path.write_text(path.read_text().replace('"num_steps": 4', '"num_steps": 6'))
  assert command_line(folder, f"--export={tmp_path}/x") == 0
  assert [r["step"] for r in records(tmp_path / "w")] == [1, 2, 3, 4, 5, 6]
  config.num_steps = 6
  whole, _ = Run(config, str(tmp_path / "whole")).train()
  resumed, _ = Run(config, str(tmp_path / "w")).train()
  assert_equal(whole, resumed)
  assert (tmp_path / "x" / "model.safetensors").is_file()


def test_an_export_that_cannot_be_written_is_found_before_training(
  texts, tmp_path, capsys
):
  config = tiny(texts, num_steps=4, validate_every=0, sample_every=0)
  folder = tmp_path / "w"
  folder.mkdir()
  (folder / "config.json").write_text(config.to_json())
  (tmp_path / "x").write_text("a file")
  assert command_line(f"--workdir={folder}", f"--export={tmp_path}/x") == 2
  assert f"{tmp_path}/x is no writable folder" in capsys.readouterr().err
  assert not (folder / "metrics.jsonl").exists()


def test_a_full_disk_is_one_line_and_the_run_goes_on(
  texts, tmp_path, monkeypatch, capsys
):
  config = tiny(
    texts, num_steps=6, log_every=1, checkpoint_every=2, validate_every=0,
    sample_every=0,
  )  # fmt: skip
  tmp_path.joinpath("config.json").write_text(config.to_json())

  written = tmp_path / "metrics.jsonl"

  def full(number):
    if written.exists() and written.read_bytes().count(b"\n") >= 4:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  assert command_line(f"--workdir={tmp_path}") == 2
  *_, line = capsys.readouterr().err.splitlines()
  assert line == f"error: {written}: No space left on device"
  monkeypatch.undo()
  assert command_line(f"--workdir={tmp_path}") == 0
  assert [r["step"] for r in records(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_run_killed_at_any_moment_goes_on_to_the_same_bits(texts, tmp_path):
  """SIGKILL at a random time, while it trains, saves or writes."""
  arguments = [
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    "--config.num_steps=24", "--config.validate_every=10",
    "--config.sample_every=0", "--config.log_every=1",
    "--config.checkpoint_every=4", "--config.export_dtype=float32",
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
  assert command_line(f"--workdir={killed}", f"--export={tmp_path}/x") == 0
  steps = [r["step"] for r in records(killed) if "next_token_loss" in r]
  assert steps == list(range(1, 25)), f"killed at step {last}"
  config = settings.read(str(whole))
  expected, _ = Run(config, str(whole)).train()
  assert_equal(huggingface.load(str(tmp_path / "x")), expected)


def test_the_command_distils_and_exports(texts, tmp_path, pair):
  """To a directory that gives the very same weights, and logits anywhere."""
  import torch
  import transformers

  export = tmp_path / "model"
  with flagsaver.flagsaver():
    code = cli.execute(
      train.run,
      ["train", "--config=configs/train_embedded.py:tiny",
       f"--config.dataset={texts}", f"--config.teacher={pair[0]}",
       "--config.objective=total_variation", "--config.contexts=target",
       "--config.prompt_length=8",
       "--config.export_dtype=float32",
       "--config.num_steps=2", f"--workdir={tmp_path}/w",
       f"--export={export}"],
    )  # fmt: skip
  assert code == 0
  exported = huggingface.load(str(export))
  assert tokenizers.load(str(export)).vocab_size == 4096
  config = tiny(
    texts, pair, objective="total_variation", contexts="target",
    prompt_length=8, num_steps=2,
  )  # fmt: skip
  trained, _ = Run(config, str(tmp_path / "w")).train()  # is at its end
  assert_equal(exported, trained)
  tokens = np.random.default_rng(0).integers(4096, size=(2, 16))
  elsewhere = transformers.AutoModelForCausalLM.from_pretrained(
    str(export), dtype="float32"
  )
  with torch.no_grad():
    expected = elsewhere(torch.tensor(tokens)).logits.numpy()
  ours = trained(np.asarray(tokens))[0].logits
  np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())


_ON_A_MESH = """
import sys
from launch.training.run import Run
sys.path[:0] = ["tests", "tests/launch"]
import test_train
import json, numpy as np, jax
texts, teacher, data, model, out = sys.argv[1:]
config = test_train.tiny(texts, (teacher,), objective="forward_kl",
  validate_every=100, sample_every=0, mesh=(int(data), int(model)))
module, _ = Run(config, out).train()
np.savez(out + "/w.npz", *jax.tree.leaves(test_train.parameters(module)))
"""


@pytest.mark.heavy
def test_a_mesh_of_devices_trains_the_same_model(texts, pair, tmp_path):
  results = []
  for data, model in ((1, 1), (4, 1), (2, 2), (1, 4)):
    out = tmp_path / f"{data}x{model}"
    out.mkdir()
    subprocess.run(
      [sys.executable, "-c", _ON_A_MESH, str(texts), pair[0], str(data),
       str(model), str(out)],
      check=True, timeout=several.PATIENCE,
      env=os.environ | {"JAX_NUM_CPU_DEVICES": str(data * model)},
    )  # fmt: skip
    results.append(np.load(out / "w.npz"))
  first = [
    r["forward_kl_loss"]
    for r in records(tmp_path / "1x1")
    if "forward_kl_loss" in r
  ]
  assert len(first) > 1
  for other, shape in zip(results[1:], ("4x1", "2x2", "1x4"), strict=True):
    for name in results[0].files:
      np.testing.assert_allclose(other[name], results[0][name], atol=2e-3)
    losses = [
      r["forward_kl_loss"]
      for r in records(tmp_path / shape)
      if "forward_kl_loss" in r
    ]
    np.testing.assert_allclose(losses, first, rtol=1e-4)


def test_two_processes_stop_at_one_step_when_one_gets_sigterm(texts, tmp_path):
  command = [
    "-m", "launch.train",
    "--config=configs/train_embedded.py:tiny", f"--config.dataset={texts}",
    f"--config.tokenizer={tmp_path}/tokenizer",
    "--config.model.vocab_size=300", "--config.num_steps=100000",
    "--config.validate_every=2", "--config.sample_every=2",
    "--config.log_every=1", f"--workdir={tmp_path}/w", f"--export={tmp_path}/x",
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
  assert "the same command goes on" in lines[-1]
  folder = tmp_path / "w" / "checkpoints"
  saved = max(int(p.name) for p in folder.glob("[0-9]*"))
  steps = [record["step"] for record in records(tmp_path / "w")]
  assert steps == sorted(steps)
  assert steps[-1] == saved >= 5
  assert (tmp_path / "w" / "samples.jsonl").stat().st_size
  assert not (tmp_path / "x").exists()
