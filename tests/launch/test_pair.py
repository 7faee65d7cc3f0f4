"""`launch.build.pair`: what is loaded once serves every rule and tree."""

import jax
import pytest

from configs import common, embedded, huggingface
from launch.build import pair as pair_lib


def test_pairs_of_the_same_models_share_their_parameters(pair):
  config = huggingface.get_config(f"target={pair[0]},draft={pair[1]}")
  config.num_speculative_tokens = 2
  models = pair_lib.load(config)
  one = pair_lib.assemble(config, models)
  config.num_speculative_tokens, config.rule = 3, "block"
  other = pair_lib.assemble(config, models)
  assert other.decoder.rule.name == "block"
  assert other.decoder.drafter.tree.max_depth == 3
  shared = jax.tree.map(lambda a, b: a is b, one.params, other.params)
  assert all(jax.tree.leaves(shared))
  assert one.params.draft is not None


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(tree=(-1, 0, 1), num_speculative_tokens=0), "is 2, and num_specul"),
    (
      dict(tree=(-1, 0, 1), max_new_tokens=1),
      "the depth of config.tree .2. is",
    ),
    (dict(num_speculative_tokens=9), "num_speculative_tokens .9. is larger"),
    (dict(num_speculative_tokens=2**60), "is larger than max_new_tokens"),
    (dict(drafter="ngram", siblings="top_k"), "must be 'iid', got 'top_k'"),
    (dict(top_k=2**31), "top_k must be in 0..2147483647, got 2147483648"),
    (dict(seed=2**70), r"seed must be in 0\.\.4294967295, got"),
    (dict(seed=-1), "seed must be in"),
    (dict(depth="survivl"), "did you mean 'survival'"),
    (dict(depth="survival", drafter="ngram"), "got 'ngram'"),
    (dict(depth="survival", num_drafts=2, rule="match"), "ends one path"),
    (
      dict(depth="3", rule="multipath_block"),
      "verifies trees whose form is fixed",
    ),
    (dict(ladder=(0, 2, 1)), "rising, got .0, 2, 1."),
    (dict(ladder=(2,)), "two lengths or more"),
    (dict(ladder=(0, 2), drafter="dflash"), "got 'parallel'"),
    (dict(ladder=(0, 2), depth="3"), "drafted whole: not with depth"),
    (dict(ladder=(0, 2), num_drafts=2, rule="match"), "not with num_drafts"),
    (
      dict(ladder=(0, 2), rule="multipath_block"),
      "verifies trees whose form is fixed",
    ),
  ],
)
def test_settings_that_cannot_be_run_are_refused(changes, message):
  config = common.get_config()
  config.draft, config.max_new_tokens = "models/pretrained/draft", 8
  config.update(changes)
  with pytest.raises(ValueError, match=message):
    pair_lib.check_config(config)


def test_a_head_that_is_named_is_the_one_that_the_config_knows():
  config = embedded.get_config()
  assert pair_lib.settled(config).draft == "models/pretrained/draft"
  config.drafter = "eagle3"
  assert pair_lib.settled(config).draft == "models/pretrained/eagle3"
  config.drafter, config.draft = "medusa", "models/pretrained/eagle3"
  assert pair_lib.settled(config).draft == "models/pretrained/eagle3"


def test_one_width_is_what_all_commands_but_two_decode_with(pair):
  config = huggingface.get_config(f"target={pair[0]},draft={pair[1]}")
  config.ladder, config.max_new_tokens = (0, 1, 3), 8
  config = pair_lib.settled(config)
  assert config.num_speculative_tokens == 3
  models = pair_lib.load(config)
  with pytest.raises(ValueError, match=r"launch\.decode and launch\.evaluate"):
    pair_lib.assemble(config, models)
  found = pair_lib.assemble(config, models, climbs=True)
  assert set(found.rungs.decoders) == {0, 1, 3}
  assert pair_lib.engine_of(config, found).ladder.lengths == (0, 1, 3)
  assert pair_lib.engine_of(config, found, baseline=True).rungs is None


def test_beside_a_tree_the_number_of_tokens_is_its_depth():
  config = common.get_config()
  config.draft, config.rule = "models/pretrained/draft", "recursive"
  config.tree, config.num_speculative_tokens = (-1, 0, 0, 1), 5
  config.max_new_tokens = 2  # fewer than the tokens that nobody reads
  pair_lib.check_config(config)
  assert pair_lib.settled(config).num_speculative_tokens == 2
  assert config.num_speculative_tokens == 5
  config.tree = ()
  assert pair_lib.settled(config).num_speculative_tokens == 5
