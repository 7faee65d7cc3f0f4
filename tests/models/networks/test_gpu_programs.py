"""Programs for GPUs, lowered without one: nothing in a pass asks the host."""

import re

import described
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import specjax
from models.networks import stacked
from models.networks.description import llama_config
from models.networks.layers import lay_out
from models.networks.transformer import Transformer, as_language_model
from models.sharding import Sharding
from specjax import drafters, tree
from specjax.types import Params

CONFIG = llama_config(
  vocab_size=64, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=48, max_positions=2048,
)  # fmt: skip
SLICE = re.compile(r"dynamic_slice .*: \(tensor<([0-9x]+)x[a-z]+[0-9]+>")


def for_gpus(function, *arguments) -> str:
  lowered = jax.jit(function).trace(*arguments)
  return lowered.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("unroll", [False, True], ids=["one", "mesh"])
@pytest.mark.parametrize(
  "changes", [{}, described.GEMMA], ids=["llama", "gemma"]
)
def test_forward_pass_has_no_loop_and_copies_no_weights(
  unroll, changes, monkeypatch
):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  config = described.alter(CONFIG, **changes)
  module = Transformer(config, rngs=nnx.Rngs(0))
  for layer in () if unroll else module.layers:
    lay_out(layer)
  model, params = as_language_model(module)
  if unroll:
    model = stacked.as_language_model(config, sharding=Sharding(unrolled=True))
    params = stacked.stack(module, unrolled=True)
  cache = jax.eval_shape(lambda: model.init_cache(2, 1032))
  program = for_gpus(
    lambda *given: model.apply(*given)[0].logits,
    params, jax.ShapeDtypeStruct((2, 4), jnp.int32),
    cache.replace(read_slots=512),
  )  # fmt: skip
  assert "stablehlo.while" not in program
  of_weights = 7 if unroll else 4  # and four of attention
  assert (
    program.count("dot_general") == config.num_layers * (of_weights + 4) + 1
  )
  sliced = {tuple(map(int, x.split("x"))) for x in SLICE.findall(program)}
  assert sliced  # those of caches
  assert not sliced & {x.shape for x in jax.tree.leaves(params)}


def test_decoding_rounds_lower_to_one_loop():
  model, params = as_language_model(Transformer(CONFIG, rngs=nnx.Rngs(0)))
  drafter = drafters.model(model, tree=tree.chain(2), vocab_size=64)
  decoder = specjax.make_decoder(model, drafter=drafter)
  params = Params(target=params, draft=params)
  state = jax.eval_shape(
    lambda params: decoder.init(
      params, jnp.zeros((2, 8), jnp.int32), jnp.array([8, 3]),
      jax.random.key(0), buffer_length=1024, max_new_tokens=8,
    ), params,
  )  # fmt: skip
  program = for_gpus(lambda *x: decoder.steps(*x, 8, slots=256), params, state)
  assert program.count("stablehlo.while") == 1
