"""Stored features: as computed on the fly, and of whose text."""

import json

import jax
import numpy as np
import pytest
from commands import execute
from flax import nnx

from configs import train_head
from launch.tools import features as store
from launch.training import data, features, head_loss
from launch.training.head_loss import Loss, Vocabulary
from models import checkpoints, head_starts

V, WORDS, DEPTH, LENGTH = 4096, 64, 2, 24


@pytest.fixture(scope="module")
def stored(texts, target, tmp_path_factory):
  folder = tmp_path_factory.mktemp("stored") / "features"
  assert execute(
    store.run, "--config=configs/train_head.py:eagle3",
    f"--config.target={target}", f"--config.dataset={texts}",
    "--config.head.layers=(0,1)", f"--config.sequence_length={LENGTH}",
    "--config.batch_size=4", f"--output={folder}",
  ) == 0  # fmt: skip
  return folder


def settings(texts, target, stored, kind="eagle3", batch_size=4):
  """Those of heads that are trained on the stored features."""
  config = train_head.get_config(kind)
  config.target, config.dataset = target, str(texts)
  config.sequence_length, config.batch_size = LENGTH, batch_size
  config.features = str(stored)
  if kind == "eagle3":
    config.head.layers = (0, 1)
  return config


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_stored_features_give_the_same_loss_as_computed_ones(
  stored, texts, target, kind
):
  """What differs is the rounding to bfloat16."""
  module = checkpoints.load_module(target)
  config = settings(texts, target, stored, kind)
  layers = features.layers_read(config, 2)
  if kind == "eagle3":
    ids = np.arange(100, 100 + WORDS)
    head = head_starts.eagle3(
      module, layers=layers, draft_vocab=ids, rngs=nnx.Rngs(0)
    )
  else:
    ids = np.arange(V)
    head = head_starts.eagle1(module, rngs=nnx.Rngs(0))
  batch = next(iter(features.batches_of(config, 2)("train", seed=3)))
  loss = Loss(
    objective="total_variation", depth=DEPTH, decay=0.8,
    feature_weight=float(kind == "eagle"), first=0,
  )  # fmt: skip
  rows = lambda params: head_starts.output_rows(module)

  def of(watch):
    shared = (loss, watch, rows, Vocabulary(ids, V))
    return jax.jit(
      lambda batch: (
        head_loss.make_loss(*shared)(head, nnx.state(module), batch),
        head_loss.make_measure(*shared)(head, nnx.state(module), batch),
      )
    )(batch)

  actual, measured = of(features.reader(layers))
  expected, fresh = of(head_loss.make_pass(module, layers))
  np.testing.assert_allclose(actual, expected, rtol=0.01)
  assert actual > 0.01
  for name, value in fresh.items():
    np.testing.assert_allclose(measured[name], value, rtol=0.02, atol=3)


def test_every_epoch_contains_each_row_once(stored, texts, target):
  config = settings(texts, target, stored, batch_size=1)
  of_text = data.batches_of(config, checkpoints.load_tokenizer(target))
  wanted = [row["tokens"].tobytes() for row in of_text("train", seed=None)]
  actual = iter(features.batches_of(config, 2)("train", seed=0))
  count = json.loads((stored / "features.json").read_text())["rows"]["train"]
  assert count == len(wanted) // 4 * 4  # an incomplete batch is dropped
  told = [next(actual)["tokens"].tobytes() for _ in range(2 * count)]
  assert sorted(told[:count]) == sorted(told[count:]) == sorted(wanted[:count])
  assert told[:count] != told[count:]
