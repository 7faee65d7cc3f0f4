"""Features that are kept on disk: as made on the fly, and of whose text."""

import json
import shutil

import files
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver
from flax import nnx

from configs import train_head
from launch import cli
from launch.tools import features as command
from launch.training import (
  data,
  features,
  head_features,
  head_loss,
  step,
)
from launch.training.features import halved, restored
from launch.training.head_loss import Loss, Words
from launch.training.run import Run
from models import checkpoints, head_starts
from models.networks.transformer import FINAL

pytestmark = pytest.mark.usefixtures("quick_to_compile")
V, WORDS, DEPTH, LENGTH = 4096, 64, 2, 24
LAYERS = (0, 1)


class KilledError(Exception):
  """Exception by which a test kills a run."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return files.make_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def some(texts, tmp_path_factory):
  """A part of the texts, that may change."""
  folder = tmp_path_factory.mktemp("some")
  for split, count in (("train", 12), ("validation", 4)):
    (folder / split).mkdir()
    for i in range(count):
      shutil.copy(texts / split / f"{i}.txt", folder / split / f"{i:02}.txt")
  return folder


def settings(texts, target, kind="eagle3", **changes):
  config = train_head.get_config(kind)
  config.target, config.dataset = target, str(texts)
  config.sequence_length, config.batch_size = LENGTH, 4
  config.num_steps, config.warmup_steps, config.learning_rate = 8, 1, 3e-3
  config.log_every = config.checkpoint_every = 4
  config.validate_every, config.validation_batches = 8, 1
  config.head.depth = DEPTH
  if kind == "eagle3":
    config.head.draft_vocab_size, config.head.layers = WORDS, LAYERS
  config.update(changes)
  return config


def make(config, folder, *args):
  """The command, in shards of eight rows; its exit code."""
  text = folder.parent / f"{folder.name}.py"
  text.write_text(
    "import json, ml_collections\n"
    "def get_config():\n"
    f"  text = {config.to_json_best_effort()!r}\n"
    "  return ml_collections.ConfigDict(json.loads(text))\n"
  )
  row = features.record_bytes(
    features.Settings(
      target="", layers=(*LAYERS, FINAL), width=32, sequence_length=LENGTH,
      dataset="",
    )
  )  # fmt: skip
  with flagsaver.flagsaver(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(command, "_SHARD_BYTES", 8 * row)
    return cli.execute(
      command.run,
      ["test", f"--config={text}", f"--output={folder}", *args],
    )


def shards(folder):
  return {p.name: p.read_bytes() for p in folder.glob("*.array_record")}


@pytest.fixture(scope="module")
def stored(some, target, tmp_path_factory):
  """Features of the texts, in several shards."""
  folder = tmp_path_factory.mktemp("stored") / "features"
  assert make(settings(some, target), folder) == 0
  return folder


# ---------------------------------------------------------------- the numbers


def test_halves_keep_eleven_bits_of_whatever_size():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(7, 64)).astype(np.float32)
  x *= 10.0 ** np.array([[-30], [-6], [-1], [0], [4], [9], [30]])
  x[3, 5], x[4, 7] = 3e5, 65519.0  # beyond float16, and what rounds to beyond
  x[2] = 0
  halves, exponents = jax.jit(halved)(x)
  assert halves.dtype == jnp.float16
  assert exponents.dtype == jnp.int8
  actual = np.asarray(jax.jit(restored)(halves, exponents))
  largest = np.abs(x).max(axis=-1, keepdims=True)
  allowed = np.maximum(np.abs(x) * 2.0**-11, largest * 2.0**-39)
  assert (np.abs(actual - x) <= allowed).all()


def test_a_record_has_the_law_of_the_state_that_it_keeps(stored, target):
  actual = features.read(str(stored))
  layers = (*LAYERS, FINAL)
  batch = next(iter(
    features.batches(actual, "train", layers, batch_size=4, seed=None)
  ))  # fmt: skip
  assert batch["parts"].shape == (4, LENGTH, 3, 32)
  final = batch["parts"][:, :, -1].astype(np.float64)
  final *= 2.0 ** batch["exponents"][:, :, -1:]
  output = np.asarray(head_starts.output_rows(checkpoints.load_module(target)))
  logits = final @ output[:V].astype(np.float64).T
  whole = np.log(np.exp(logits).sum(-1))
  np.testing.assert_allclose(batch["normalisers"], whole, rtol=1e-5)
  np.testing.assert_array_equal(batch["likeliest"], logits.argmax(-1))


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_the_loss_is_the_one_that_is_made_on_the_fly(stored, target, kind):
  """Of laws over a draft vocabulary and of whole ones, and what is measured.

  Rows of the cache are given to the target again; what differs is the
  rounding.
  """
  module = checkpoints.load_module(target)
  if kind == "eagle3":
    layers, ids = LAYERS, np.arange(100, 100 + WORDS)
    head = head_starts.eagle3(
      module, layers=layers, draft_vocab=ids, rngs=nnx.Rngs(0)
    )
  else:
    layers, ids = (FINAL,), np.arange(V)
    head = head_starts.eagle1(module, rngs=nnx.Rngs(0))
  batch = next(iter(features.batches(
    features.read(str(stored)), "train", features.all_layers(layers),
    batch_size=4, seed=3,
  )))  # fmt: skip
  rows = lambda params: head_starts.output_rows(module)
  words = Words.of(ids, V)

  def of(watch):
    results = []
    for objective in ("forward_kl", "total_variation"):
      loss = Loss(
        objective=objective, depth=DEPTH, decay=0.8,
        feature_weight=float(kind == "eagle"), first=0,
      )  # fmt: skip
      shared = (loss, watch, rows, words)
      results.append(head_loss.make_loss(*shared))
    measure = head_loss.make_measure(*shared)
    return jax.jit(
      lambda batch: (
        [one(head, nnx.state(module), batch) for one in results],
        measure(head, nnx.state(module), batch),
      )
    )(batch)

  told, measured = of(head_loss.reader(layers))
  fresh, fresh_measured = of(head_loss.watcher(module, layers))
  np.testing.assert_allclose(told, fresh, rtol=2e-3)
  assert told[0] > 0.01  # of something
  for name, value in fresh_measured.items():
    np.testing.assert_allclose(measured[name], value, rtol=5e-3, atol=2)


# ------------------------------------------------------------------- the files


def test_a_killed_run_is_gone_on_with_to_the_same_bytes(
  stored, some, target, tmp_path
):
  folder, count = tmp_path / "killed", [0]
  real = command.encode

  def encode(row):
    count[0] += 1
    if count[0] == 13:  # within the second shard
      raise KilledError
    return real(row)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(command, "encode", encode)
    with pytest.raises(KilledError):
      make(settings(some, target), folder)
  (begun,) = shards(folder)
  torn = folder / f".{begun}.1.tmp"
  torn.write_bytes(b"what a killed process leaves")
  with pytest.raises(ValueError, match="goes on with it"):
    features.read(str(folder))
  assert make(settings(some, target), folder) == 0
  assert shards(folder) == shards(stored)
  assert len(shards(stored)) > 4
  assert not torn.exists()
  count[0] = -1000  # nothing is made again
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(command, "make_seer", None)
    assert make(settings(some, target), folder) == 0


def test_every_token_of_the_text_is_there_once(stored, some, target):
  actual = features.read(str(stored))
  config = settings(some, target)
  tokenizer = checkpoints.load_tokenizer(target)
  wanted = [
    token for text in data.documents(config, "train")
    for token in data.token_ids(text, tokenizer)
  ]  # fmt: skip
  paths = [str(stored / shard.name) for shard in actual.of("train")]
  rows = [
    features.decode(record, [0])
    for record in grain.sources.ArrayRecordDataSource(paths)
  ]
  told = np.concatenate([row["tokens"][row["segments"] > 0] for row in rows])
  assert told.tolist() == wanted
  assert sum(shard.tokens for shard in actual.of("train")) == len(wanted)
  assert sum(shard.rows for shard in actual.of("train")) == len(rows)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(stored):
  actual = features.read(str(stored))
  count = sum(shard.rows for shard in actual.of("train"))

  def rows(seed):
    every = iter(
      features.batches(actual, "train", (FINAL,), batch_size=1, seed=seed)
    )
    return [next(every)["parts"].tobytes() for _ in range(2 * count)]

  one, other = rows(0), rows(1)
  epochs = (one[:count], one[count:], other[:count])
  wanted = iter(
    features.batches(actual, "train", (FINAL,), batch_size=1, seed=None)
  )
  in_order = [row["parts"].tobytes() for row in wanted]
  assert len({*in_order}) == count
  assert all(sorted(rows) == sorted(in_order) for rows in epochs)
  assert len({tuple(rows) for rows in (in_order, *epochs)}) == 4


def test_what_was_added_to_the_text_is_added(stored, some, target, tmp_path):
  folder, more = tmp_path / "grown", tmp_path / "more"
  shutil.copytree(stored, folder)
  shutil.copytree(some, more)
  config = settings(some, target)
  (more / "train" / "99.txt").write_text("y = 3\n" * 60)
  moved = json.loads((folder / "settings.json").read_text())
  moved["dataset"] = config.dataset = str(more)
  (folder / "settings.json").write_text(json.dumps(moved))
  before = shards(folder)
  assert make(config, folder) == 0
  after = shards(folder)
  gone = before.keys() - after.keys()
  assert len(gone) == 1  # the last one of the training text, which was not full
  assert len(after) >= len(before)
  assert all(after[name] == before[name] for name in before.keys() - gone)


def test_a_part_of_the_text(some, target, stored, tmp_path):
  """Beside what is there of all of it: that took hours."""
  folder = tmp_path / "part"
  shutil.copytree(stored, folder)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      command, "write_shard", lambda path, *a, **k: path.write_bytes(b"")
    )
    assert make(settings(some, target), folder, "--first_tokens=300") == 0
  actual, whole = (features.read(str(x)) for x in (folder, stored))
  beyond = whole.of("train")[len(actual.of("train")) :]
  assert beyond
  assert all((folder / shard.name).is_file() for shard in beyond)
  assert actual.of("train")[0] == whole.of("train")[0]
  tokens = sum(shard.tokens for shard in actual.of("train"))
  assert 300 <= tokens < sum(shard.tokens for shard in whole.of("train"))


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(sequence_length=16), "another sequence_length .24, not 16"),
    (dict(head=dict(layers=(1,))), "another layers"),
    (dict(dataset="python_source"), "another dataset"),
  ],
)
def test_features_of_something_else_stay(
  stored, some, target, capsys, changes, message
):
  before = shards(stored)
  assert make(settings(some, target, **changes), stored) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert message in error.replace("(", ".")
  assert shards(stored) == before


def test_overwrite_begins_anew(stored, some, target, tmp_path):
  folder = tmp_path / "anew"
  shutil.copytree(stored, folder)
  config = settings(some, target, head=dict(layers=(1,)))
  assert make(config, folder, "--overwrite") == 0
  actual = features.read(str(folder))
  assert actual.settings["layers"] == [1, FINAL]
  assert shards(folder).keys() == {shard.name for shard in actual.shards}


def test_other_files_are_not_touched(some, target, tmp_path, capsys):
  (tmp_path / "x.array_record").write_bytes(b"another's")
  assert make(settings(some, target), tmp_path) == 2
  assert "holds something else" in capsys.readouterr().err
  assert (tmp_path / "x.array_record").read_bytes() == b"another's"


def test_a_disk_that_is_too_small_is_told_before(
  some, target, tmp_path, capsys, monkeypatch
):
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(command.shutil, "disk_usage", lambda folder: usage)
  assert make(settings(some, target), tmp_path / "full") == 2
  assert "the disk is too small: 0.0" in capsys.readouterr().err
  assert not shards(tmp_path / "full")


# ----------------------------------------------------------------- the training


@pytest.mark.parametrize(
  "changes, message",
  [
    ({}, None),
    (dict(batch_size=3), None),
    (dict(features="nowhere"), "there is no nowhere/features.json"),
    (dict(contexts="target", prompt_length=8), "draws new ones in every step"),
    (dict(sequence_length=16), "their sequence_length is 24, not 16"),
    (dict(head=dict(layers=(1, 2))), "of the layers 0,1,final, .* reads 2 too"),
    (dict(target=files.EMBEDDED), "their target is '"),
    (dict(dataset="other"), "are of other documents than those of "),
  ],
)
def test_a_training_that_does_not_fit_is_refused(
  stored, some, texts, target, tmp_path, changes, message
):
  config = settings(some, target, features=str(stored))
  if changes.get("dataset"):
    changes = dict(dataset=str(texts))
  config.update(changes)
  read = tuple(config.head.layers)
  shape = checkpoints.read_config(target)
  documents = data.documents(config, "train")
  of = lambda: head_features.stored(config, read, shape, documents, tmp_path)
  if message is None:
    assert of().sum == features.read(str(stored)).sum
    return
  with pytest.raises(ValueError, match=message):
    of()


@pytest.mark.parametrize("kind", ["medusa", "eagle", "blockwise", "dflash"])
def test_one_cache_serves_every_kind_that_reads_its_layers(
  stored, some, target, kind, tmp_path
):
  config = settings(some, target, kind, features=str(stored))
  if kind == "dflash":
    config.head.layers = (1,)
  shape = checkpoints.read_config(target)
  read = head_features.layers_read(config, shape.num_layers)
  documents = data.documents(config, "train")
  actual = head_features.stored(config, read, shape, documents, tmp_path)
  batch = next(
    iter(head_features.batches(config, actual, read)("train", seed=1))
  )
  whole = next(iter(
    features.batches(
      actual, "train", (*LAYERS, FINAL), batch_size=config.batch_size, seed=1
    )
  ))  # fmt: skip
  places = [1, 2] if kind == "dflash" else [2]
  np.testing.assert_array_equal(batch["parts"], whole["parts"][:, :, places])


def test_a_killed_training_goes_on_to_the_same_head(
  stored, some, target, tmp_path
):
  """In the middle of its second epoch, and from no pass of the target."""
  config = settings(some, target, features=str(stored), batch_size=24)
  config.validate_every = 0
  rows = sum(s.rows for s in features.read(str(stored)).of("train"))
  assert 2 * 24 < rows < 4 * 24  # before the checkpoint is gone on from
  whole, finished = Run(config, str(tmp_path / "whole")).train()
  assert finished
  real, count, seen = step.place_batch, [0], []

  def place(batch, mesh):
    count[0] += 1
    if count[0] == 6:
      raise KilledError
    seen.append(batch["tokens"])
    return real(batch, mesh)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(step, "place_batch", place)
    with pytest.raises(KilledError):
      Run(config, str(tmp_path / "killed")).train()
  resumed, finished = Run(config, str(tmp_path / "killed")).train()
  assert finished
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(whole), nnx.state(resumed)
  )
  lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
  losses = [json.loads(line)["forward_kl_loss"] for line in lines]
  assert losses[-1] < losses[0]
  names = [{r.tobytes() for r in batch} for batch in seen]
  assert names[0].isdisjoint(names[1])  # of one epoch
  (tmp_path / "killed" / "features.json").write_text('{"sum": "other"}')
  with pytest.raises(ValueError, match="take another --workdir"):
    Run(config, str(tmp_path / "killed"))
