"""A training run's checkpoints, on other meshes than the run's."""

import json

import jax
import numpy as np
import pytest
import several
from files import read_jsonl
from flax import nnx

from configs import train_embedded
from launch import decode
from launch.training.run import Run
from models import tokenizers
from models.formats import huggingface, trained


def config_of(texts, **changes):
  config = train_embedded.get_config("tiny")
  config.update(
    dict(
      dataset=str(texts),
      tokenizer="models/pretrained/target",
      num_steps=6,
      checkpoint_every=3,
      validate_every=100,
      log_every=100,
      teacher="models/pretrained/target",
      objective="forward_kl",
      **changes,
    )
  )
  config.model.update(vocab_size=4096, num_layers=2, num_heads=4)
  return config


# Runs on (2, 2) devices, goes on from the middle on (4, 1), and reads what
# came out onto other meshes. Its one key/value head is repeated there.
_ON_FOUR_DEVICES = """
import json, shutil, sys
import jax, numpy as np
sys.path[:0] = ["tests", "tests/launch/training"]
from test_trained import config_of
from flax import nnx
from launch.training.run import Run
from models.meshes import Layout
from models import sharding
from models.formats import trained
from models.networks import stacked

texts, out = sys.argv[1:]
first = out + "/first"
whole, _ = Run(config_of(texts, mesh=(2, 2)), first).train()
second = shutil.copytree(first, out + "/second")
shutil.rmtree(second + "/checkpoints/6")
resumed, _ = Run(config_of(texts, mesh=(4, 1)), second).train()
for name, module in (("whole", whole), ("resumed", resumed)):
  np.savez(f"{out}/{name}.npz", *jax.tree.leaves(nnx.state(module)))

found = {}
for data, model, draft in ((2, 2, 2), (1, 4, 2), (4, 1, 1)):
  layout = Layout(data=data, model=model, draft=draft)
  mesh = layout.mesh(jax.devices())
  for which, rules in zip(("target", "draft"), layout.shardings()):
    config, params = trained.load_stacked(
      first, mesh=mesh, sharding=rules, dtype=jax.numpy.float32
    )
    expected = sharding.repeat_kv_heads(
      stacked.stack(whole), whole.config, config
    )
    specs = sharding.named(mesh, sharding.param_specs(expected, rules))
    found[f"{data}x{model} {which}"] = {
      "heads": config.attention.num_kv_heads,
      "equal": all(jax.tree.leaves(jax.tree.map(
        lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()),
        params, expected))),
      "placed": all(jax.tree.leaves(jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, specs))),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, texts):
  """A folder with the runs, and what the program found."""
  folder = tmp_path_factory.mktemp("runs")
  started = several.start([["-c", _ON_FOUR_DEVICES, texts, folder]], devices=4)
  ((code, out, errors),) = several.finish(started)
  assert code == 0, errors[-3000:]
  return folder, json.loads(out.splitlines()[-1])


def test_training_goes_on_on_another_mesh(runs, texts, tmp_path):
  """And comes to what one device does."""
  folder, _ = runs
  whole, resumed = (np.load(folder / f"{x}.npz") for x in ("whole", "resumed"))
  alone, _ = Run(config_of(texts), str(tmp_path)).train()
  leaves = jax.tree.leaves(nnx.state(alone))
  for name, leaf in zip(whole.files, leaves, strict=True):
    np.testing.assert_allclose(resumed[name], whole[name], atol=2e-3)
    np.testing.assert_allclose(leaf, whole[name], atol=2e-3)
  lines = read_jsonl(folder / "second" / "metrics.jsonl")
  assert lines[-1]["step"] == 6


def test_a_run_is_read_onto_any_mesh_bit_for_bit(runs):
  _, actual = runs
  assert {case: numbers.pop("heads") for case, numbers in actual.items()} == {
    "2x2 target": 2, "2x2 draft": 2, "1x4 target": 4, "1x4 draft": 2,
    "4x1 target": 1, "4x1 draft": 1,
  }  # fmt: skip
  for case, numbers in actual.items():
    assert numbers == {"equal": True, "placed": True}, case


def test_a_run_on_a_mesh_is_read_onto_one_device_and_decodes_as_its_export(
  runs, cli, tmp_path
):
  run = runs[0] / "first"
  module = trained.load(str(run))
  written = np.load(runs[0] / "whole.npz")
  for name, leaf in zip(
    written.files, jax.tree.leaves(nnx.state(module)), strict=True
  ):
    np.testing.assert_array_equal(leaf, written[name])
  huggingface.save_llama(
    module, str(tmp_path / "export"), dtype=np.float32,
    tokenizer=tokenizers.load(str(run / "tokenizer")),
  )  # fmt: skip
  results = []
  for target in (run, tmp_path / "export"):
    output = tmp_path / "out.jsonl"
    code = cli(
      decode.run, "--config.max_new_tokens=6", "--nobaseline",
      "--config.drafter=model(tokens=2)", f"--output={output}",
      config=f"configs/huggingface.py:target={target},draft={run}",
    )  # fmt: skip
    assert code == 0
    results.append(read_jsonl(output))
    output.unlink()
  assert results[0] == results[1]
