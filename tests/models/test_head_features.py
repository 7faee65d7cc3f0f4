"""Features read by heads of each format, of a target with marked layers.

Layer j of the toy target adds one to channel j and does nothing else, so a
hidden state tells which layers have been applied, and in which order parts lie.
Expected are the states by the numbers of `transformers`: `states[i]` is what
layer i is given, and the last is after the final norm.
"""

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.formats import head_checkpoints
from models.formats.head_checkpoints import Target
from models.networks import stacked
from models.networks.description import llama_config
from models.networks.transformer import Transformer, as_language_model

N, D, V = 12, 16, 23
CONFIG = described.alter(
  llama_config(
    vocab_size=V, embed_dim=D, num_layers=N, num_heads=2, num_kv_heads=1,
    head_dim=4, mlp_dim=8, max_positions=64,
  ),
  bias=True,
)  # fmt: skip
ABOUT = Target(num_layers=N, embed_dim=D, vocab_size=V)
TOKENS = np.array([[3, 7, 11, 2]])
LAYER = dict(
  model_type="llama", hidden_size=D, intermediate_size=8, vocab_size=V,
  num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
  rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=32, head_dim=4,
)  # fmt: skip
LAST = -1
# config.json, what kind it is said to be, the states that are read, in order.
FORMATS = {
  "eagle": (LAYER, "eagle", (LAST,)),
  "eagle3": ({**LAYER, "draft_vocab_size": 9}, None, (2, 6, 9)),
  "medusa": (dict(medusa_num_heads=2), None, (LAST,)),
  "dflash": (
    {**LAYER, "block_size": 4,
     "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 6]}},
    None, (2, 5, 7),
  ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
  """The toy, and its hidden states by NumPy."""
  module = Transformer(CONFIG, rngs=nnx.Rngs(0))
  for j, layer in enumerate(module.layers):
    silent = jax.tree.map(jnp.zeros_like, nnx.state(layer))
    nnx.update(layer, silent)
    layer.mlp.down.bias[...] = jnp.eye(D)[j]
  scale = np.linspace(0.5, 2, D).astype(np.float32)
  module.final_norm.scale[...] = jnp.asarray(scale)
  embedded = np.asarray(module.embed.embedding[...])[TOKENS[0]]
  states = [embedded + (np.arange(D) < i) for i in range(N + 1)]
  size = np.sqrt((states[-1] ** 2).mean(-1, keepdims=True) + 1e-5)
  states[-1] = states[-1] / size * scale
  return module, states


def read(module, features, *, on_a_mesh=False):
  """The features of all tokens, `f[T, F]`."""
  model, params = as_language_model(module, features=features)
  if on_a_mesh:
    model = stacked.as_language_model(CONFIG, features=features)
    params = stacked.stack(module)
  cache = model.init_cache(1, 8)
  return np.asarray(model.apply(params, TOKENS, cache)[0].features[0])


@pytest.mark.parametrize("on_a_mesh", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_head_reads_the_features_its_format_defines(target, name, on_a_mesh):
  module, states = target
  config, kind, wanted = FORMATS[name]
  shape = head_checkpoints.shape(config, ABOUT, kind=kind)
  expected = np.concatenate([states[i] for i in wanted], axis=-1)
  actual = read(module, shape.features, on_a_mesh=on_a_mesh)
  np.testing.assert_allclose(actual, expected, atol=1e-5)
