"""`launch.decoding.pair`: what is loaded once serves every rule and tree."""

import jax

from configs import huggingface
from launch.decoding import pair as pair_lib


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
