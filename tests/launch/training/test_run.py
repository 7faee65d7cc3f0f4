"""`launch.training.run`: a run goes on on another mesh."""

import jax
import numpy as np
import several
from files import read_jsonl
from flax import nnx

from configs import train_embedded
from launch.training.run import Run


def config_of(texts, **changes):
  config = train_embedded.get_config("tiny")
  config.update(dict(
    dataset=str(texts), tokenizer="models/pretrained/target", num_steps=6,
    checkpoint_every=3, validate_every=100, log_every=100,
    teacher="models/pretrained/target", objective="forward_kl", **changes,
  ))  # fmt: skip
  config.model.update(vocab_size=4096, num_layers=2, num_heads=4)
  return config


# Runs on (2, 2) devices, and goes on from the middle on (4, 1).
_ON_FOUR_DEVICES = """
import shutil, sys
import jax, numpy as np
sys.path[:0] = ["tests", "tests/launch/training"]
from test_run import config_of
from flax import nnx
from launch.training.run import Run

texts, out = sys.argv[1:]
first = out + "/first"
whole, _ = Run(config_of(texts, mesh=(2, 2)), first).train()
second = shutil.copytree(first, out + "/second")
shutil.rmtree(second + "/checkpoints/6")
resumed, _ = Run(config_of(texts, mesh=(4, 1)), second).train()
for name, module in (("whole", whole), ("resumed", resumed)):
  np.savez(f"{out}/{name}.npz", *jax.tree.leaves(nnx.state(module)))
"""


def test_training_resumes_on_a_different_mesh(texts, tmp_path):
  """And comes to what one device does."""
  started = several.start(
    [["-c", _ON_FOUR_DEVICES, texts, tmp_path]], devices=4
  )
  ((code, _, errors),) = several.finish(started)
  assert code == 0, errors[-3000:]
  whole, resumed = (
    np.load(tmp_path / f"{x}.npz") for x in ("whole", "resumed")
  )
  alone, _ = Run(config_of(texts), str(tmp_path / "alone")).train()
  leaves = jax.tree.leaves(nnx.state(alone))
  for name, leaf in zip(whole.files, leaves, strict=True):
    np.testing.assert_allclose(resumed[name], whole[name], atol=2e-3)
    np.testing.assert_allclose(leaf, whole[name], atol=2e-3)
  lines = read_jsonl(tmp_path / "second" / "metrics.jsonl")
  assert lines[-1]["step"] == 6
