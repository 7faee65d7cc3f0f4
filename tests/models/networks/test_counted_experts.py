"""Experts that the passes of the loop touched, beside the router's choices."""

import dataclasses

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import stacked
from models.networks.description import TransformerConfig
from models.networks.mixture import Mixture, Router
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import drafters
from specjax.decode import make_decoder
from specjax.types import Params
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("quick_to_compile")

V, E, K = 24, 8, 2
PROMPTS = np.array([[3, 4, 3, 4, 3], [7, 8, 9, 7, 8], [1, 2, 1, 0, 0]])
LENGTHS = np.array([5, 5, 3])


def module(mixed, **more):
  """A model of layers of which some are mixtures."""
  mixture = Mixture(num_experts=E, num_chosen=K, embed_dim=32, expert_dim=12)
  dense = described.layers([None] * len(mixed))
  layers = [
    dataclasses.replace(layer, feed_forward=mixture) if mix else layer
    for layer, mix in zip(dense, mixed, strict=True)
  ]
  config = TransformerConfig(
    layers=tuple(layers), vocab_size=V, embed_dim=32, max_positions=64, **more
  )
  return Transformer(config, rngs=nnx.Rngs(5))


def decoder_of(model):
  drafter = drafters.ngram(tokens=2)
  return make_decoder(model, drafter=drafter, vocab_size=V)


def decoded(model, params, rounds=3):
  """A state after its rounds, and what each fed: `[B, T]` a row and round."""
  decoder = decoder_of(model)
  params = Params(target=params)
  init = jax.jit(decoder.init, static_argnames="buffer_length")
  state = init(
    params, PROMPTS, LENGTHS, jax.random.key(0), buffer_length=16,
    max_new_tokens=np.array([8, 8, 1]),
    sampling=make_sampling(3, temperature=0.0),
  )  # fmt: skip
  fed, step = [], jax.jit(decoder.step)
  for _ in range(rounds):
    texts = [
      np.asarray(state.tokens[b, : state.length[b] - 1]) for b in range(3)
    ]
    active = ~np.asarray(state.done)
    state, info = step(params, state)
    fed.append((texts, np.asarray(info.draft.tokens), active))
  return state, fed


def routed(network, fed, monkeypatch):
  """`i32[B, M]`: sums over a row's rounds of the experts all rows touched."""
  chosen, call = [], Router.__call__

  def record(self, x):
    actual = call(self, x)
    chosen.append(actual[0])
    return actual

  @jax.jit
  def choose(tokens):
    network(tokens)
    return jnp.stack(chosen).reshape(len(chosen), *tokens.shape, K)

  monkeypatch.setattr(Router, "__call__", record)
  whole = [  # every row of every round as one text
    [*text, *drafted]
    for texts, tokens, _ in fed
    for text, drafted in zip(texts, tokens, strict=True)
  ]
  padded = np.array([text + [0] * (16 - len(text)) for text in whole])
  experts = np.asarray(choose(padded))  # [M, rounds B, 16, K]
  total = 0
  for number, (texts, tokens, active) in enumerate(fed):
    counts = []
    for layer in experts:
      met = set()
      for row, text in enumerate(texts):
        part = layer[number * len(texts) + row, len(text) :]
        met |= {*part[: tokens.shape[1]].ravel().tolist()}
      counts.append(len(met))
    total = total + active[:, None] * np.array(counts)
  return total


@pytest.fixture(scope="module")
def mixed():
  """A model whose middle layer is dense, and what it decoded, counted."""
  network = module([True, False, True])
  model, params = as_language_model(network, count_experts=True)
  return network, model, *decoded(model, params)


def test_a_state_sums_what_every_pass_touched_by_layer(mixed, monkeypatch):
  """The third row ends after a round, and takes no part in the later sums."""
  network, model, state, fed = mixed
  assert model.num_counted == 2
  actual = np.asarray(state.counters.num_experts)
  np.testing.assert_array_equal(actual, routed(network, fed, monkeypatch))
  assert state.counters.num_target_calls.tolist() == [3, 3, 1]
  assert (actual[:2] > 3 * K).all()  # more than one token's
  assert (actual[2] <= E).all()


def test_stacked_layers_that_take_turns_count_as_others_do(monkeypatch):
  network = module([True, False, True, False])
  model = stacked.as_language_model(network.config, count_experts=True)
  state, fed = decoded(model, stacked.stack(network))
  np.testing.assert_array_equal(
    state.counters.num_experts, routed(network, fed, monkeypatch)
  )


def test_nobody_counts_who_is_not_asked(mixed):
  network, _, counted, _ = mixed
  model, params = as_language_model(network)
  output, _ = jax.eval_shape(
    model.apply, params, PROMPTS, model.init_cache(3, 8)
  )
  assert (model.num_counted, output.experts) == (0, None)
  state = jax.eval_shape(
    lambda: decoder_of(model).init(
      Params(target=params), PROMPTS, LENGTHS, jax.random.key(0),
      buffer_length=16, max_new_tokens=8,
    )
  )  # fmt: skip
  assert state.counters.num_experts is None
  less = dataclasses.replace(counted.counters, num_experts=None)
  assert jax.tree.structure(less) == jax.tree.structure(state.counters)


def test_a_model_with_layers_left_out_counts_those_it_has(mixed):
  network = mixed[0]
  skipped = SkippedLayers(mlp=(0,))
  model, params = as_language_model(
    network, skipped=skipped, count_experts=True
  )
  output, _ = jax.eval_shape(
    model.apply, params, PROMPTS, model.init_cache(3, 8)
  )
  assert output.experts.shape == (1,) == (model.num_counted,)
  stack = stacked.as_language_model(
    network.config, skipped=skipped, count_experts=True
  )
  assert stack.num_counted == 1


def test_a_mixture_beside_the_mlp_is_counted_too(monkeypatch):
  beside = Mixture(
    num_experts=E, num_chosen=K, embed_dim=32, expert_dim=12,
    router_norm_eps=1e-6,
  )  # fmt: skip
  layers = [
    dataclasses.replace(layer, norms="both", beside=beside)
    for layer in described.layers([None])
  ]
  config = TransformerConfig(
    layers=tuple(layers), vocab_size=V, embed_dim=32, max_positions=64
  )
  network = Transformer(config, rngs=nnx.Rngs(5))
  model, params = as_language_model(network, count_experts=True)
  chosen, call = [], Router.__call__

  def record(self, x):
    actual = call(self, x)
    jax.debug.callback(chosen.append, actual[0])
    return actual

  monkeypatch.setattr(Router, "__call__", record)
  output, _ = jax.jit(model.apply)(params, PROMPTS, model.init_cache(3, 8))
  jax.effects_barrier()
  assert output.experts.tolist() == [len(np.unique(chosen[0]))]
  assert model.num_counted == 1 < len(np.unique(chosen[0])) / K
