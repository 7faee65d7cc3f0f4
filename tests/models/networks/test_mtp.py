"""What an MTP head's layers feed back."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from models.networks import eagle
from models.networks.description import llama_config
from models.networks.mtp import Mtp, config_of

CONFIG = llama_config(
  vocab_size=4, embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=1,
  head_dim=4, mlp_dim=6, max_positions=64,
)  # fmt: skip


def test_unnormed_head_feeds_back_pre_norm_states():
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
