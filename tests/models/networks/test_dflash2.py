"""DFlash 2's heads against a slow forward in NumPy, by published names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models.formats import head_checkpoints, head_saving
from models.formats.head_checkpoints import Target

H, V, MLP, D, LAYERS, BLOCK, MASK, FED = 8, 13, 10, 4, 2, 4, 11, 16
GROUP, TAPS, RANK, TOP, SCALE, CAP = 2, 2, 3, 4, 0.7, 3.0
THETA, EPS = 5_000.0, 1e-3
RNG = np.random.default_rng(0)
random = lambda *shape: RNG.standard_normal(shape).astype(np.float32)
TARGET = Target(
  num_layers=9, embed_dim=H, vocab_size=V, embedding=random(V, H),
  output=random(V, H),
)  # fmt: skip
OF_HEAD = {
  "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 6],
  "conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK,
  "selector_top_k": TOP, "output_multiplier": SCALE,
  "final_logit_softcapping": CAP,
}  # fmt: skip
# As the published fixture: windows, and a block that sees itself both ways.
CONFIG = dict(
  model_type="qwen3", architectures=["DFlash2DraftModel"], hidden_size=H,
  intermediate_size=MLP, num_attention_heads=2, num_key_value_heads=2,
  num_hidden_layers=LAYERS, vocab_size=V, rms_norm_eps=EPS, hidden_act="silu",
  head_dim=D, max_position_embeddings=64, tie_word_embeddings=False,
  rope_parameters={"rope_theta": THETA, "rope_type": "default"},
  is_causal=False, sliding_window=32, use_sliding_window=True,
  layer_types=["sliding_attention"] * LAYERS, dflash_config=OF_HEAD,
)  # fmt: skip
SHAPES = {
  "self_attn.q_proj.weight": (H, H), "self_attn.k_proj.weight": (H, H),
  "self_attn.v_proj.weight": (H, H), "self_attn.o_proj.weight": (H, H),
  "self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,),
  "input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,),
  "mlp.gate_proj.weight": (MLP, H), "mlp.up_proj.weight": (MLP, H),
  "mlp.down_proj.weight": (H, MLP),
}  # fmt: skip
CONV = {
  f"{name}_conv.{x}": shape
  for name in ("attention", "mlp")
  for x, shape in (
    ("base_kernel", (2, TAPS, H)),
    ("kernel_projection.weight", (2 * TAPS * H // GROUP, H)),
  )
}
SELECTOR = {
  "candidate_selector.hidden_projection.weight": random(RANK, H),
  "candidate_selector.predecessor_codebook": random(V, RANK),
  "candidate_selector.successor_codebook": random(V, RANK),
}
PLAIN = {
  "fc.weight": random(H, FED), "hidden_norm.weight": random(H),
  "norm.weight": random(H),
} | {
  f"layers.{i}.{name}": random(*shape)
  for i in range(LAYERS)
  for name, shape in SHAPES.items()
}  # fmt: skip
CONVS = {
  f"layers.{i}.{name}": random(*shape)
  for i in range(LAYERS)
  for name, shape in CONV.items()
}
TENSORS = PLAIN | CONVS | SELECTOR
FEATURES = random(1, 5, FED)


def load(path, *, config=CONFIG, tensors=TENSORS):
  path.mkdir()
  (path / "config.json").write_text(json.dumps(config))
  safetensors.numpy.save_file(tensors, path / "model.safetensors")
  return head_checkpoints.load(str(path), TARGET)


def norm(x, name):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * TENSORS[name]


def rotated(x, position):
  angle = position * THETA ** (-np.arange(0, D, 2) / D)
  a, b = np.split(x, 2)
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def convolved(x, read, side, name):
  """Row i, channel c: of itself and of the row before, by kernels of `read`."""
  base = TENSORS[f"{name}.base_kernel"]
  projection = TENSORS[f"{name}.kernel_projection.weight"]
  y = np.zeros_like(x)
  for i in range(len(x)):
    change = (projection @ read[i]).reshape(2, TAPS, H // GROUP)
    for tap in range(min(TAPS, i + 1)):
      for c in range(H):
        kernel = base[side, tap, c] + change[side, tap, c // GROUP]
        y[i, c] += kernel * x[i - tap, c]
  return y


def attended(x, context, i):
  of = lambda name, y: y @ TENSORS[f"layers.{i}.self_attn.{name}.weight"].T
  every, count = np.concatenate([context, x]), len(context)
  keys, values = of("k_proj", every), of("v_proj", every)
  queries = of("q_proj", x)
  out = []
  for t in range(len(x)):
    heads = []
    for head in (slice(0, D), slice(D, 2 * D)):
      q_name, k_name = (f"layers.{i}.self_attn.{n}_norm.weight" for n in "qk")
      q = rotated(norm(queries[t, head], q_name), count + t)
      k = [rotated(norm(y[head], k_name), s) for s, y in enumerate(keys)]
      weight = np.exp(np.stack(k) @ q / np.sqrt(D))
      heads.append(weight / weight.sum() @ values[:, head])
    out.append(np.concatenate(heads))
  return of("o_proj", np.stack(out))


def states(features, newest):
  """What the output projection reads of a block, the newest token's first."""
  context = norm(features @ TENSORS["fc.weight"].T, "hidden_norm.weight")
  x = TARGET.embedding[[newest] + [MASK] * (BLOCK - 1)]
  for i in range(LAYERS):
    of = lambda name, y, i=i: y @ TENSORS[f"layers.{i}.mlp.{name}.weight"].T
    name = f"layers.{i}.attention_conv"
    u = norm(x, f"layers.{i}.input_layernorm.weight")
    y = attended(convolved(u, u, 0, name), context, i)
    x = x + convolved(y, u, 1, name)
    name = f"layers.{i}.mlp_conv"
    u = norm(x, f"layers.{i}.post_attention_layernorm.weight")
    y = convolved(u, u, 0, name)
    gate = of("gate_proj", y)
    y = of("down_proj", gate / (1 + np.exp(-gate)) * of("up_proj", y))
    x = x + convolved(y, u, 1, name)
  return norm(x, "norm.weight")


def selected(hidden, before):
  """Logits after a token: the candidates' are chosen before all else."""
  plain = TARGET.output @ hidden
  code = TENSORS["candidate_selector.hidden_projection.weight"] @ hidden
  code = code * TENSORS["candidate_selector.predecessor_codebook"][before]
  out = np.full(V, -np.inf)
  for token in np.argsort(-plain)[:TOP]:
    edge = code @ TENSORS["candidate_selector.successor_codebook"][token]
    out[token] = CAP * np.tanh(SCALE * plain[token] / CAP) + edge
  return out


def test_a_block_is_the_formulas_by_published_names(tmp_path):
  """Of two rows of two lengths; tokens before need not be candidates."""
  head = load(tmp_path / "h")
  assert (head.kind, head.features) == ("dflash2", (2, 7))
  model, params = head.functions()
  assert (model.num_depths, model.markov.estimates) == (BLOCK - 1, False)
  features, newest, counts = random(2, 6, FED), jnp.array([[3], [7]]), (6, 4)
  cache = jax.jit(model.read)(params, features, model.init_cache(2, 16))
  cache = cache.replace(length=jnp.array(counts))
  block, _ = jax.jit(model.predict)(params, newest, cache)
  apply = jax.jit(model.markov.apply)
  before = jnp.array([[0, 5, 12], [1, 7, 9]])
  for k in range(BLOCK - 1):
    place = jax.tree.map(lambda x, k=k: x[:, k, None], block)
    logits, *_ = apply(params, place, before, jnp.zeros((2, 3, 0)))
    for row, count in enumerate(counts):
      hidden = states(features[row, :count], int(newest[row, 0]))[1 + k]
      for w in range(3):
        expected = selected(hidden, int(before[row, w]))
        np.testing.assert_allclose(
          logits[row, w], expected, atol=2e-3, rtol=2e-3
        )


def test_a_saved_head_has_the_published_names(tmp_path):
  head = load(tmp_path / "h")
  head_saving.save(
    head.module, str(tmp_path / "again"), features=head.features,
    dtype=jnp.float32, target=TARGET,
  )  # fmt: skip
  saved = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
  assert {*saved} == {*TENSORS}
  again = head_checkpoints.load(str(tmp_path / "again"), TARGET)
  assert again.module.config == head.module.config
  assert again.features == head.features


def test_without_convolutions_and_codes_it_is_dflashs(tmp_path):
  idle = {k: 0 * v for k, v in (CONVS | SELECTOR).items()}
  for name, kernel in idle.items():
    if name.endswith("base_kernel"):
      kernel[:, 0] = 1
  of_dflash = {
    k: OF_HEAD[k] for k in ("block_size", "mask_token_id", "target_layer_ids")
  }
  theirs = load(
    tmp_path / "dflash", tensors=PLAIN,
    config=CONFIG | dict(architectures=[], dflash_config=of_dflash),
  )  # fmt: skip
  of_head = OF_HEAD | dict(output_multiplier=1, final_logit_softcapping=0)
  named = {  # as speculators' embeddings are
    k + ".weight" if k.endswith("_codebook") else k: v for k, v in idle.items()
  }
  ours = load(
    tmp_path / "dflash2", tensors=PLAIN | named,
    config=CONFIG | dict(dflash_config=of_head),
  )  # fmt: skip
  assert theirs.kind == "dflash"
  said = []
  for head in (theirs, ours):
    model, params = head.functions()
    cache = model.read(params, FEATURES, model.init_cache(1, 16))
    said.append(model.predict(params, jnp.array([[3]]), cache)[0])
  logits, (tokens, kept, _) = said
  np.testing.assert_array_equal(
    jnp.take_along_axis(logits, tokens, axis=-1), kept
  )


OF = lambda **changes: CONFIG | dict(dflash_config=OF_HEAD | changes)
WITHOUT = {k: v for k, v in OF_HEAD.items() if k != "selector_top_k"}


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (OF(input_embedding_scale=0.5), "input_embedding_scale must be 1"),
    (OF(conv_group_size=3), "groups of 3 channels"),
    (OF(selector_top_k=V + 1), "14 candidates are more than the 13"),
    (OF(selector_bias=True), "settings: selector_bias"),
    (CONFIG | dict(dflash_config=WITHOUT), "selector_top_k must be an int"),
    (CONFIG | dict(use_swa=True), "settings: use_swa"),
    (
      {k: v for k, v in CONFIG.items() if k != "dflash_config"}
      | dict(speculators_model_type="dflash2"),
      "speculators_model_type 'dflash2' is not known",
    ),
  ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_its_name(config, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    load(tmp_path / "h", config=config)


@pytest.mark.parametrize(
  ("said", "both_ways"), [({"is_causal": False}, True), ({}, False)]
)
def test_a_block_with_windows_is_causal_unless_it_says_not(said, both_ways):
  config = {k: v for k, v in CONFIG.items() if k != "is_causal"} | said
  shape = head_checkpoints.shape(config, TARGET)
  assert shape.config.causal_windows is not both_ways
