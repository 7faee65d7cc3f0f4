"""`launch.assembly.pair`: what is loaded once serves every rule and tree."""

import pathlib
import re
import subprocess
import sys
import types

import decoding
import files
import jax
import numpy as np
import pytest

from configs import common, embedded, huggingface
from launch.assembly import pair as pair_lib
from launch.assembly import registry
from models.networks.quantized import Quantization


def test_a_pair_is_assembled_without_a_commands_flags():
  """As a notebook does: nothing is defined that a program of one's own has."""
  code = (
    "import sys, launch.assembly.pair\n"
    "print({'launch.cli', 'launch.processes'} & {*sys.modules})"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "set()"


def test_pairs_of_the_same_models_share_their_parameters(pair):
  config = huggingface.get_config(f"target={pair[0]},draft={pair[1]}")
  config.drafter = "model(tokens=2)"
  models = pair_lib.load(config)
  one = pair_lib.assemble(config, models)
  config.drafter, config.rule = "model(tokens=3)", "block"
  other = pair_lib.assemble(config, models)
  assert other.decoder.rule.name == "block"
  assert other.decoder.drafter.tree.max_depth == 3
  shared = jax.tree.map(lambda a, b: a is b, one.params, other.params)
  assert all(jax.tree.leaves(shared))
  assert one.params.draft is not None


def test_a_drafter_of_ones_own_reads_a_file(pair, tmp_path, monkeypatch):
  """As CONTRIBUTING.md shows it; its parameters are what `load` returns."""
  text = pathlib.Path("CONTRIBUTING.md").read_text("utf-8")
  blocks = re.findall(r"```python\n(.*?)```", text, re.S)
  (code,) = [block for block in blocks if "SUCCESSORS = " in block]
  (tmp_path / "of_mine.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  config = huggingface.get_config(f"target={pair[0]}")
  file = tmp_path / "table.npy"
  config.drafter = f'of_mine.SUCCESSORS("{file}", tokens=2)'
  with pytest.raises(FileNotFoundError, match=f"there is no {file}"):
    pair_lib.load(config)
  np.save(file, np.roll(np.arange(4096, dtype=np.int32), -5))  # x + 5
  made = pair_lib.assemble(config, pair_lib.load(config))
  root = types.SimpleNamespace(root=np.array([[3], [40]]))
  draft, *_ = made.decoder.drafter.propose(made.params, (), None, root)
  assert draft.tokens.tolist() == [[3, 8, 13], [40, 45, 50]]
  config.drafter = "of_mine.SUCCESSORS"
  with pytest.raises(ValueError, match=r'needs a checkpoint: .*"DIR"'):
    pair_lib.load(config)


@pytest.mark.parametrize(
  ("drafter", "changes", "message"),
  [
    ("model(tree=(-1, 0, 1))", dict(max_new_tokens=1), "drafts of 2 tokens ar"),
    ("model(tokens=9)", {}, "drafts of 9 tokens are longer than max_new_tok"),
    ("model(tree=paths(2))", {}, "single path.*; config.rule=block_transport"),
    ("model", dict(seed=2**70), r"seed must be in 0\.\.4294967295, got"),
    ("model(policy=3)", dict(rule="multipath_block"), "whose form is fixed"),
    ("ladder(model, lengths=(0, 2))", dict(rule="multipath_block"),
     "verifies trees whose form is fixed"),
    ("online(model)", dict(mesh="data:1"), "online learning runs on one dev"),
    ('eagle3("models/pretrained/eagle3", weights=int8)', dict(mesh="data:1"),
     "on one device, got the mesh 'data:1': leave out weights=int8"),
    ("model", dict(weights="int8(group=48)"), "group must be one of"),
    ("quantized_self", dict(weights="int8"), "int8 must have fewer, got int8"),
    ("model", dict(cache="int4"), "a cache is stored as one of"),
    ("lookahead", {}, "config.rule=match verifies"),
    ("suffix", dict(rule="block"), "config.rule=match verifies"),
    ("rasd(nodes=16)", {}, "rule=recursive verif"),
    ('eagle3("models/pretrained/draft")', {}, "reads a head on the target's"),
    ('model("models/pretrained/eagle3")', {}, "reads a model of its own, and"),
  ],
)  # fmt: skip
def test_settings_that_cannot_be_run_are_refused(drafter, changes, message):
  config = common.get_config()
  config.checkpoints.draft, config.max_new_tokens = "models/pretrained/draft", 8
  config.update(drafter=drafter, **changes)
  with pytest.raises(ValueError, match=message):
    pair_lib.check_config(config)


def test_a_checkpoint_is_the_calls_or_the_configs_of_that_name():
  config = embedded.get_config()
  of = lambda text: registry.of(config, text).checkpoint
  assert of("model") == of("blockwise") == "models/pretrained/draft"
  assert of("eagle3") == of("repeats(eagle3)") == "models/pretrained/eagle3"
  assert of('medusa("D")') == "D"
  assert of("ngram") == ""
  config.checkpoints.draft = ""
  with pytest.raises(ValueError, match="drafter 'model' needs a checkpoint"):
    of("model")


def test_weights_in_few_bits_are_each_models_own(pair):
  config = huggingface.get_config(f"target={pair[0]},draft={pair[1]}")
  config.weights, config.drafter = (
    "int8",
    "model(tokens=2, weights=fp8, cache=fp8)",
  )
  models = pair_lib.load(config)
  built = pair_lib.assemble(config, models).params
  kinds = lambda params: {str(x.dtype) for x in jax.tree.leaves(params)}
  assert kinds(built.target) == {"int8", "float32"}
  assert kinds(built.draft) == {"float8_e4m3fn", "float32"}
  cached = lambda network: network.whole().init_cache(1, 8).keys[0]
  assert cached(models.target).dtype == np.float32
  assert cached(models.draft).values.dtype.name == "float8_e4m3fn"
  with pytest.raises(ValueError, match="must have fewer, got fp8"):
    models.target.quantize(Quantization(dtype="fp8"))


def test_weights_are_as_published_unless_the_config_says_otherwise(tmp_path):
  of_target = registry.target_weights
  assert of_target("", str(tmp_path)) == of_target("published") == "published"
  assert of_target("", "of/a/file.gguf") is None  # dequantized
  assert of_target("whole", str(tmp_path)) is None
  assert of_target("fp4") == Quantization(dtype="fp4", group=32)
  with pytest.raises(ValueError, match="unknown weights 'published'"):
    registry.weights("published")


def test_a_target_in_eight_bits_says_the_same_with_drafts_and_without(tmp_path):
  """Its copy has fewer bits, one attention less, and the target's own rest."""
  path = tmp_path / "layers.json"
  path.write_text('{"skip_attention": [1], "skip_mlp": []}')
  target = files.make_checkpoint(tmp_path, mlp_dim=64)  # groups of 32
  config = huggingface.get_config(f"target={target}")
  config.weights = config.cache = "int8"
  config.drafter = f'quantized_self(bits=4, skipped="{path}", tokens=2)'
  built = pair_lib.build(config)
  drafted, target = built.params.draft, built.params.target
  assert (
    drafted["final_norm"]["scale"][...] is target["final_norm"]["scale"][...]
  )
  kinds = lambda params: {str(x.dtype) for x in jax.tree.leaves(params)}
  assert kinds(drafted) == {"int4", "float32"}
  assert kinds(target) == {"int8", "float32"}

  prompts, texts = np.array([[3, 5, 7, 9]] * 2), []
  for decoder in (built.decoder, built.baseline):
    state = decoding.greedy(decoder, built.params, prompts, (4, 2), budget=9)
    assert state.target_cache.keys[0].values.dtype == np.int8
    texts.append(decoding.rows_of(state))
  assert texts[0] == texts[1]


def test_weights_in_few_bits_lie_on_a_mesh_as_the_weights_would(pair):
  config = huggingface.get_config(f"target={pair[0]}")
  config.weights, config.drafter = "int8", "plain"
  alone = pair_lib.load(config).target.params
  config.mesh = "data:1,model:1"
  (layers,) = pair_lib.load(config).target.params["layers"].values()
  of = lambda layer: layer["attention"]["q"]["weight"][...]
  for name in ("values", "scales"):
    stacked = getattr(of(layers), name)
    assert tuple(stacked.sharding.spec)[:2] == (None, "model")
    for i, one in enumerate(stacked):
      expected = getattr(of(alone["layers"][i]), name)
      np.testing.assert_array_equal(one, expected)
