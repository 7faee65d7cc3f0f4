"""T5 with the layers of each stack stacked and scanned over.

As `models.networks.stacked`: a scan over the encoder's layers and one over the
decoder's, whose cache and cross-attention have a leading axis too. A stack's
bias by distance is the same in all of its layers: computed once. The numbers
are those of `models.networks.t5`, whose modules are used.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.networks import stacked
from models.networks.params import check_params
from models.networks.t5 import T5, Encoded, Layer, Memory
from models.networks.t5_config import T5Config
from models.sharding import Sharding, constrain
from specjax import cache as cache_lib
from specjax.cache import Cache
from specjax.types import Inputs, LanguageModel

# {"frame": all but the layers, "layers": {"encoder", "decoder"}, parameters
# with a leading axis L}
StackedParams = dict[str, Any]


def _num_layers(config: T5Config) -> dict[str, int]:
  return {"encoder": config.num_encoder_layers, "decoder": config.num_layers}


def _modules(config: T5Config, dtype) -> tuple[T5, dict[str, Layer]]:
  """A T5 without layers, and a layer of each stack; shapes for parameters."""
  bare = dataclasses.replace(config, num_layers=0, num_encoder_layers=0)
  layer = lambda name: Layer(
    config, dtype, is_decoder=name == "decoder", rngs=nnx.Rngs(0)
  )
  return nnx.eval_shape(
    lambda: (
      T5(bare, dtype=dtype, rngs=nnx.Rngs(0)),
      {name: layer(name) for name in _num_layers(config)},
    )
  )


def abstract_params(config: T5Config, *, dtype) -> StackedParams:
  """Shapes and dtypes of the parameters, `jax.ShapeDtypeStruct` leaves."""
  frame, layers = _modules(config, dtype)
  layers = {
    name: stacked.abstract_stack(layers[name], count)
    for name, count in _num_layers(config).items()
  }
  return {"frame": _frame(frame), "layers": layers}


def stack(module: T5) -> StackedParams:
  """The parameters of a module, stacked; copies the layers'."""
  of = {"encoder": module.encoder, "decoder": module.decoder}
  layers = {name: stacked.stack_modules(of[name].layers) for name in of}
  return {"frame": _frame(module), "layers": layers}


def _frame(module: T5) -> nnx.State:
  """A T5's parameters, those of its layers left out."""
  flat = nnx.to_flat_state(nnx.state(module))
  return nnx.from_flat_state([(k, v) for k, v in flat if "layers" not in k])


def as_language_model(
  config: T5Config, *, dtype=jnp.float32, sharding: Sharding | None = None
) -> LanguageModel:
  """The model as pure functions of stacked parameters.

  Args:
    config: shapes and switches.
    dtype: of parameters, activations and cache, as of `models.networks.t5.T5`.
    sharding: where activations, what the encoder made and the cache lie on the
      mesh in use; None, or no mesh, for wherever XLA puts them.

  Returns:
    The `LanguageModel`, as that of `models.networks.t5`; its parameters are as
    `abstract_params` says.
  """
  frame, layers = _modules(config, dtype)
  frame_def = nnx.graphdef(frame)
  layer_defs = {name: nnx.graphdef(layer) for name, layer in layers.items()}
  put = functools.partial(constrain, sharding=sharding)
  shapes = abstract_params(config, dtype=dtype)

  def merged(params) -> T5:
    check_params(shapes, params)
    return nnx.merge(frame_def, params["frame"])

  def over_layers(params, name: str, step, carry):
    """Scans `step(carry, layer, number) -> (carry, output)` over a stack."""

    def body(carry, number):
      of = params["layers"][name]
      return step(
        carry, stacked.module_at(layer_defs[name], of, number), number
      )

    numbers = jnp.arange(_num_layers(config)[name], dtype=jnp.int32)
    return lax.scan(body, carry, numbers)

  def init_cache(batch: int, slots: int) -> Cache:
    cache = cache_lib.make_cache(
      batch=batch,
      slots=slots,
      num_layers=config.num_layers,
      num_kv_heads=config.num_heads,
      head_dim=config.head_dim,
      dtype=dtype,
      with_positions=True,
      stacked=True,
    )
    return jax.tree.map(
      lambda x: put(x, "cache_lbksc") if x.ndim == 5 else x, cache
    )

  def encode_inputs(params, inputs: Inputs) -> Encoded:
    outer = merged(params)
    x, bias, is_text = outer.open(inputs)

    def step(x, layer, _):
      x, _ = layer(x, bias, is_text[:, None])
      return put(x, "act_btd"), None

    x, _ = over_layers(params, "encoder", step, put(x, "act_btd"))
    return Encoded(states=outer.encoder.final_norm(x), mask=is_text)

  def encode(params, inputs: Inputs | Encoded) -> Memory:
    known = (
      inputs if isinstance(inputs, Encoded) else encode_inputs(params, inputs)
    )
    check_params(shapes, params)

    def step(carry, layer, _):
      return carry, layer.cross.keys_values(known.states)

    _, kv = over_layers(params, "decoder", step, None)
    keys, values = (put(x, "cache_lbksc") for x in kv)
    return Memory(keys=(keys,), values=(values,), mask=known.mask)

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    outer, memory = merged(params), cache.context
    inputs = memory.seen(tokens, cache)
    fed = outer.enter(tokens, cache, positions=positions, mask=mask)

    def step(carry, layer, number):
      x, kv = carry
      x, kv = layer(
        x, fed.bias, fed.sees, kv=kv, start=fed.start, layer=number,
        memory=(*memory.keys, *memory.values, inputs),
      )  # fmt: skip
      kv = tuple(put(buffer, "cache_lbksc") for buffer in kv)
      return (put(x, "act_btd"), kv), None

    carry = put(fed.x, "act_btd"), (fed.cache.keys[0], fed.cache.values[0])
    (x, kv), _ = over_layers(params, "decoder", step, carry)
    output = outer.leave(x, logits_at)
    output = dataclasses.replace(
      output, logits=put(output.logits, "logits_btv")
    )
    return output, fed.cache.replace(
      keys=(kv[0],), values=(kv[1],), length=fed.start + tokens.shape[1]
    )

  return LanguageModel(
    vocab_size=config.vocab_size,
    init_cache=init_cache,
    apply=apply,
    encode=encode,
    encode_inputs=encode_inputs,
  )
