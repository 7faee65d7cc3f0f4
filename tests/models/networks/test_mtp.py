"""A head of latents and experts drafts what it says it does."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.networks import eagle
from models.networks.description import (
  AttentionSpec,
  Latent,
  LayerSpec,
  Rope,
  TransformerConfig,
)
from models.networks.mixture import Mixture
from models.networks.mtp import Mtp, config_of
from models.networks.transformer import FINAL, Transformer, as_language_model
from specjax import drafters, exact
from specjax.tree import Tree, chain
from specjax.types import Params

pytestmark = pytest.mark.usefixtures("quick_to_compile")

VOCAB = 4
CONFIG = TransformerConfig.of_layers(
  [
    LayerSpec(
      attention=AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=10, scale=0.4,
        rope=Rope(theta=500.0, dim=4),
        latent=Latent(rank=6, rope_dim=4, still_dim=4, value_dim=6),
      ),
      feed_forward=Mixture(
        num_experts=4, num_chosen=2, embed_dim=8, expert_dim=6,
        router="sigmoid", shared_dim=4,
      ),
    )
  ],
  vocab_size=VOCAB, embed_dim=8, max_positions=64,
)  # fmt: skip


@pytest.mark.parametrize(
  "tree",
  [chain(2), pytest.param(Tree((-1, 0, 0, 1)), marks=pytest.mark.heavy)],
)
def test_laws_are_those_that_tokens_are_drawn_from_and_rows_are_apart(tree):
  with jax.enable_x64(True):
    larger = lambda module: nnx.update(
      module, jax.tree.map(lambda x: 8 * x, nnx.state(module, nnx.Param))
    )
    module = Transformer(CONFIG, dtype=jnp.float64, rngs=nnx.Rngs(0))
    head = Mtp(config_of(CONFIG), dtype=jnp.float64, rngs=nnx.Rngs(1))
    larger(module)
    larger(head)
    target, params = as_language_model(module, features=(FINAL,))
    model, own = eagle.as_feature_model(head)
    drafter = drafters.mtp(model, tree=tree, vocab_size=VOCAB)
    found = exact.check_drafter(
      drafter, Params(target=params, draft=own), target, vocab_size=VOCAB
    )
  assert found.method == "exact"
