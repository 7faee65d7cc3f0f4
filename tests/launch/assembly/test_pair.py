"""`launch.assembly.pair`: what is loaded once serves every rule and tree."""

import decoding
import files
import jax
import numpy as np
import pytest

from configs import common, huggingface
from launch.assembly import pair as pair_lib


def test_pairs_of_the_same_models_share_weights(pair):
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


@pytest.mark.parametrize(
  ("drafter", "changes", "message"),
  [
    ("model(tree=(-1, 0, 1))", dict(max_new_tokens=1), "drafts of 2 tokens ar"),
    ("model(tree=paths(2))", {}, "single path.*; config.rule=block_transport"),
    ("model(policy=3)", dict(rule="multipath_block"), "whose form is fixed"),
    ("model", dict(draft_devices=2), "draft_devices needs a mesh"),
    ("online(model)", dict(mesh="data:1"), "online learning runs on one dev"),
    ('eagle3("models/pretrained/eagle3", weights=int8)', dict(mesh="data:1"),
     "on one device, got the mesh 'data:1': leave out weights=int8"),
    ("quantized_self", dict(weights="int8"), "must have fewer bits, got int8"),
    ("model", dict(cache="int4"), "a cache is stored as one of"),
    ("lookahead", {}, "use config.rule=match"),
    ('eagle3("models/pretrained/draft")', {}, "needs a head on the target's"),
    ('model("models/pretrained/eagle3")', {}, "needs a model of its own, but"),
  ],
)  # fmt: skip
def test_unsupported_settings_are_rejected(drafter, changes, message):
  config = common.get_config()
  config.checkpoints.draft, config.max_new_tokens = "models/pretrained/draft", 8
  config.update(drafter=drafter, **changes)
  with pytest.raises(ValueError, match=message):
    pair_lib.check_config(config)


def test_int8_target_with_int4_draft_matches_plain_decoding(tmp_path):
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
