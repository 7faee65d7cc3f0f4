"""A head of latents and experts drafts what it says it does."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from models.networks import eagle
from models.networks.description import (
  AttentionSpec,
  Latent,
  LayerSpec,
  TransformerConfig,
)
from models.networks.mixture import Mixture
from models.networks.mtp import Mtp, config_of
from models.networks.rope import Rope

VOCAB = 4
CONFIG = TransformerConfig(
  layers=(
    LayerSpec(
      attention=AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=10, scale=0.4,
        rope=Rope(theta=500.0, dim=4),
        latent=Latent(rank=6, rope_dim=4, nope_dim=4, value_dim=6),
      ),
      feed_forward=Mixture(
        num_experts=4, num_chosen=2, embed_dim=8, expert_dim=6,
        router="sigmoid", shared_dim=4,
      ),
    ),
  ),
  vocab_size=VOCAB, embed_dim=8, max_positions=64,
)  # fmt: skip


def test_a_switch_feeds_back_states_before_their_norm():
  config = config_of(CONFIG, num_depths=2)
  said = {}
  for normed in (True, False):
    head = Mtp(
      dataclasses.replace(config, normed=normed), rngs=nnx.Rngs(1)
    )  # fmt: skip
    model, params = eagle.as_feature_model(head)
    tokens, hidden = jnp.array([[1, 3, 2]]), jnp.ones((1, 3, 8))
    said[normed] = [
      one.apply(params, tokens, hidden, one.init_cache(1, 4))[:2]
      for one in (model, *model.later)
    ]
  norms = (head.final_norm, head.later[0].final_norm)
  for norm, (logits, state), (same, before) in zip(
    norms, said[True], said[False], strict=True
  ):
    assert jnp.allclose(logits, same)
    assert jnp.allclose(state, norm(before))
    assert not jnp.allclose(state, before, atol=0.1)
