"""A head of latents and experts drafts what it says it does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
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
    model, head_params = eagle.as_feature_model(head)
    drafter = drafters.mtp(model, tree=tree, vocab_size=VOCAB)
    actual = exact.check_drafter(
      drafter,
      Params(target=params, draft=head_params),
      target,
      vocab_size=VOCAB,
    )
  assert actual.method == "exact"


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


@pytest.mark.heavy
def test_a_text_that_goes_on_is_read_as_one_that_was_given_whole():
  """Nothing is left of what was drafted."""
  with jax.enable_x64(True):
    module = Transformer(CONFIG, dtype=jnp.float64, rngs=nnx.Rngs(0))
    config = config_of(CONFIG, num_depths=3)
    head = Mtp(config, dtype=jnp.float64, rngs=nnx.Rngs(1))
    for one in (module, head):
      nnx.update(
        one, jax.tree.map(lambda x: 4 * x, nnx.state(one, nnx.Param))
      )  # fmt: skip
    target, params = as_language_model(module, features=(FINAL,))
    model, head_params = eagle.as_feature_model(head)
    params = Params(target=params, draft=head_params)
    tree = Tree((-1, 0, 0, 2, 3))
    whole = drafters.mtp(model, tree=tree, vocab_size=VOCAB)
    decoder = specjax.make_decoder(target, drafter=whole, rule="recursive")
    init = jax.jit(decoder.init, static_argnames="buffer_length")
    steps, propose = jax.jit(decoder.steps), jax.jit(decoder.propose)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (64, 40))
    state = init(
      params, prompts, np.full(64, 5), jax.random.key(0), buffer_length=40,
      max_new_tokens=np.full(64, 30),
    )  # fmt: skip
    before = steps(params, state, 4)
    state = steps(params, before, 1)
    row = int(np.argmax(state.length - before.length))
    # By nodes 2, 3 and 4, and a token after them.
    assert state.length[row] - before.length[row] == 4
    longer = jax.jit(decoder.extend)(
      params, state, row, jnp.array([1, 3]), 2, max_new_tokens=5
    )
    actual = propose(params, longer)[0].log_probs[row, 1:]
    text = np.zeros((64, 40), int)
    text[row] = longer.tokens[row, :40]
    fresh = init(
      params, text, np.where(np.arange(64) == row, longer.length, 1),
      longer.keys, buffer_length=40, max_new_tokens=np.full(64, 5),
    )  # fmt: skip
    expected = propose(params, fresh)[0].log_probs[row, 1:]
  np.testing.assert_allclose(actual, expected, atol=1e-9)
