"""EAGLE's networks against a slow forward in NumPy, written from the formulas.

The reference feeds a whole row at once, causally, without a cache.
"""

import dataclasses

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from models import head_shapes, sharding
from models.networks import eagle
from models.networks.description import llama_config

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LAYER = llama_config(
  vocab_size=23, embed_dim=12, num_layers=1, num_heads=4, num_kv_heads=2,
  head_dim=6, mlp_dim=20, max_positions=64, norm_eps=1e-4, rope_theta=500.0,
)  # fmt: skip
EAGLE3 = eagle.EagleConfig(
  layers=LAYER, generation=3, num_fused=3, draft_vocab_size=9
)
CONFIGS = {
  "eagle": eagle.EagleConfig(
    layers=described.alter(LAYER, qkv_bias=True),
    generation=1, fc_bias=True,
  ),
  "eagle3": EAGLE3,
  "eagle3, whole vocabulary": dataclasses.replace(
    EAGLE3, draft_vocab_size=None, norm_before_residual=True
  ),
  "eagle3.1": dataclasses.replace(EAGLE3, fc_norm=True, norm_output=True),
  "norm before fc": dataclasses.replace(EAGLE3, norm_before_fc=True),
  "three layers": dataclasses.replace(
    EAGLE3, layers=described.alter(LAYER, num_layers=3)
  ),
  "windows": dataclasses.replace(
    EAGLE3,
    layers=described.alter(LAYER, num_layers=3, windows=(2, None, 4)),
  ),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 7))


def make(config):
  """A head whose every parameter is random, norms too."""
  module = head_shapes.make(config, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda x: jnp.asarray(
      (0.5 if x.ndim == 1 else 0.0) + 0.4 * rng.standard_normal(x.shape),
      x.dtype,
    ),
    nnx.state(module, nnx.Param),
  )
  nnx.update(module, params)
  if config.draft_vocab_size:
    module.target_ids = nnx.Variable(
      jnp.array([2, 3, 5, 7, 11, 13, 17, 19, 22], jnp.int32)
    )
  return module


class Reference:
  """The formulas, a row and a position at a time."""

  def __init__(self, module):
    self.config, self.c = module.config, module.config.layers
    flat = nnx.to_flat_state(nnx.state(module))
    self.w = {
      ".".join(map(str, k)): np.asarray(v[...], np.float64) for k, v in flat
    }

  def linear(self, name, x):
    return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

  def norm(self, name, x):
    size = np.sqrt((x**2).mean(-1, keepdims=True) + self.c.norm_eps)
    return x / size * self.w[f"{name}.scale"]

  def rotated(self, x, position):  # [heads, C]
    half = self.c.attention.head_dim // 2
    angle = position * self.c.attention.rope.theta ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
      [a * np.cos(angle) - b * np.sin(angle),
       b * np.cos(angle) + a * np.sin(angle)], axis=-1,
    )  # fmt: skip

  def attention(self, x, positions, prefix="", number=0):  # [T, ...]
    c = self.c.attention
    heads = lambda y: y.reshape(-1, c.head_dim)
    q, k, v = (
      [heads(self.linear(f"{prefix}attention.{n}", row)) for row in x]
      for n in "qkv"
    )
    q, k = (
      [self.rotated(y, p) for y, p in zip(z, positions, strict=True)]
      for z in (q, k)
    )
    out = []
    for t in range(len(x)):
      each = []
      for head in range(c.num_heads):
        group = head // (c.num_heads // c.num_kv_heads)
        window = self.c.windows[number] or len(x)
        near = [s for s in range(t + 1) if positions[t] - positions[s] < window]
        score = np.array([q[t][head] @ k[s][group] for s in near])
        weight = np.exp(score / np.sqrt(c.head_dim))
        weight /= weight.sum()
        pairs = zip(near, weight, strict=True)
        each.append(sum(w * v[s][group] for s, w in pairs))
      out.append(self.linear(f"{prefix}attention.out", np.concatenate(each)))
    return np.stack(out)

  def mlp(self, x, prefix=""):
    gate = self.linear(f"{prefix}mlp.gate", x)
    up = self.linear(f"{prefix}mlp.up", x)
    return self.linear(f"{prefix}mlp.down", gate / (1 + np.exp(-gate)) * up)

  def fuse(self, x):
    config = self.config
    if config.generation == 1:
      return x
    if config.norm_before_fc:
      x = self.norm("input_norm", x)
    if config.fc_norm:
      parts = np.split(x, config.num_fused, axis=-1)
      parts = [self.norm(f"fc_norms.{i}", p) for i, p in enumerate(parts)]
      x = np.concatenate(parts, axis=-1)
    return self.linear("fc", x)

  def __call__(self, tokens, hidden, positions):
    """Logits and states of one row."""
    embedding = self.w["embed.embedding"][tokens]
    if self.config.generation == 1:
      x = self.linear("fc", np.concatenate([embedding, hidden], axis=-1))
      x = x + self.attention(x, positions)
      x = x + self.mlp(self.norm("mlp_norm", x))
      return self.linear("lm_head", x), x
    normed = self.norm("hidden_norm", hidden)
    both = [self.norm("embed_norm", embedding), normed]
    residual = normed if self.config.norm_before_residual else hidden
    x = residual + self.attention(np.concatenate(both, axis=-1), positions)
    x = x + self.mlp(self.norm("mlp_norm", x))
    for number in range(self.c.num_layers - 1):  # a Llama's
      name = f"later.{number}."
      normed = self.norm(f"{name}attention_norm", x)
      x = x + self.attention(normed, positions, name, number + 1)
      x = x + self.mlp(self.norm(f"{name}mlp_norm", x), name)
    read = self.norm("final_norm", x)
    logits = self.linear("lm_head", read)
    if "target_ids" in self.w:
      whole = np.full((len(x), self.c.vocab_size), -np.inf)
      whole[:, self.w["target_ids"].astype(int)] = logits
      logits = whole
    return logits, read if self.config.norm_output else x


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_over_features_and_one_over_states_are_the_formulas(name):
  """In two passes through the cache, of which the second is fed back."""
  config = CONFIGS[name]
  module, rng = make(config), np.random.default_rng(3)
  model, params = eagle.as_feature_model(module)
  reference = Reference(module)
  features = rng.standard_normal((2, 5, config.num_features))
  hidden = model.fuse(params, jnp.asarray(features, jnp.float32))
  np.testing.assert_allclose(
    hidden, reference.fuse(features), atol=1e-4, rtol=1e-4
  )
  cache = model.init_cache(2, 16)
  logits, states, cache = jax.jit(model.apply)(
    params, jnp.asarray(TOKENS[:, :5]), hidden, cache
  )
  more, _, cache = jax.jit(model.apply)(
    params, jnp.asarray(TOKENS[:, 5:6]), states[:, -1:], cache
  )
  assert cache.length.tolist() == [6, 6]
  for row in range(2):
    fused = reference.fuse(features[row])
    expected, out = reference(TOKENS[row, :5], fused, np.arange(5))
    np.testing.assert_allclose(logits[row], expected, atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(states[row], out, atol=2e-4, rtol=1e-4)
    fed_back = np.concatenate([fused, out[-1:]])
    expected, _ = reference(TOKENS[row, :6], fed_back, np.arange(6))
    np.testing.assert_allclose(more[row, 0], expected[5], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "windows"])
def test_two_children_of_one_node_stand_at_one_position_and_do_not_meet(name):
  config = CONFIGS[name]
  module, rng = make(config), np.random.default_rng(4)
  model, params = eagle.as_feature_model(module)
  reference = Reference(module)
  hidden = rng.standard_normal((1, 3, 12)).astype(np.float32)
  _, states, cache = model.apply(
    params, jnp.asarray(TOKENS[:1, :3]), hidden, model.init_cache(1, 16)
  )
  children = jnp.broadcast_to(states[:, -1:], (1, 2, 12))
  logits, _, _ = model.apply(
    params, jnp.asarray(TOKENS[:1, 3:5]), children, cache,
    positions=jnp.array([[3, 3]]), mask=np.eye(2, dtype=bool),
  )  # fmt: skip
  for child in range(2):
    tokens = [*TOKENS[0, :3], TOKENS[0, 3 + child]]
    fed = np.concatenate([hidden[0], np.asarray(states[0, -1:])])
    expected, _ = reference(np.array(tokens), fed, np.arange(4))
    np.testing.assert_allclose(
      logits[0, child], expected[3], atol=2e-4, rtol=1e-4
    )


def test_layers_that_share_one_cache_say_what_those_with_their_own_say():
  """As they lie on a mesh; here it is of one device."""
  module = make(CONFIGS["windows"])
  rules = sharding.tensor_parallel()
  plain, params = eagle.as_feature_model(module)
  meshed, _ = eagle.as_feature_model(module, sharding=rules)
  mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
  hidden = np.random.default_rng(5).standard_normal((2, 7, 12))
  fed = params, jnp.asarray(TOKENS), jnp.asarray(hidden, jnp.float32)
  expected, _, cache = plain.apply(*fed, plain.init_cache(2, 8))
  with jax.set_mesh(mesh):
    logits, _, stacked = jax.jit(meshed.apply)(*fed, meshed.init_cache(2, 8))
  assert stacked.keys[0].shape[0] == len(cache.keys) == 3
  np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)
  np.testing.assert_allclose(
    stacked.values[0], jnp.stack(cache.values), atol=1e-4, rtol=1e-4
  )


def test_two_norms_of_the_features_are_refused():
  with pytest.raises(ValueError, match="exclude each other"):
    dataclasses.replace(EAGLE3, norm_before_fc=True, fc_norm=True)
