"""Heads that draft blocks against a slow forward in NumPy, by published names.

DFlash's, JetSpec's, which is causal, and DSpark's with its Markov head.

The reference attends over a whole context and a block at once, without a cache.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models.formats import head_checkpoints, head_saving
from models.formats.head_checkpoints import Target

H, V, MLP, D, HEADS, KV, LAYERS, BLOCK, MASK = 8, 13, 10, 6, 4, 2, 2, 4, 11
THETA, EPS, N = 5_000.0, 1e-3, 9
RNG = np.random.default_rng(0)
random = lambda *shape: RNG.standard_normal(shape).astype(np.float32)
OUTPUT = random(V, H)
TARGET = Target(
  num_layers=N, embed_dim=H, vocab_size=V, embedding=random(V, H),
  output=OUTPUT,
)  # fmt: skip
CONFIG = dict(
  model_type="qwen3", architectures=["DFlashDraftModel"], hidden_size=H,
  intermediate_size=MLP, num_attention_heads=HEADS, num_key_value_heads=KV,
  num_hidden_layers=LAYERS, vocab_size=V, rms_norm_eps=EPS, hidden_act="silu",
  head_dim=D, max_position_embeddings=64, rope_theta=THETA, block_size=BLOCK,
  tie_word_embeddings=False, num_target_layers=N,
  layer_types=["full_attention"] * LAYERS,
  dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]},
)  # fmt: skip


def tensors_of(count=LAYERS):
  actual = {
    "fc.weight": random(H, 3 * H), "hidden_norm.weight": 1 + random(H),
    "norm.weight": 1 + random(H),
  }  # fmt: skip
  for i in range(count):
    shapes = {
      "self_attn.q_proj": (HEADS * D, H), "self_attn.k_proj": (KV * D, H),
      "self_attn.v_proj": (KV * D, H), "self_attn.o_proj": (H, HEADS * D),
      "self_attn.q_norm": (D,), "self_attn.k_norm": (D,),
      "input_layernorm": (H,), "post_attention_layernorm": (H,),
      "mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H),
      "mlp.down_proj": (H, MLP),
    }  # fmt: skip
    actual |= {f"layers.{i}.{k}.weight": random(*s) for k, s in shapes.items()}
  return actual


TENSORS = tensors_of()


def write(path, *, config=CONFIG, drop=(), **more):
  path.mkdir()
  (path / "config.json").write_text(json.dumps(config))
  kept = {k: v for k, v in {**TENSORS, **more}.items() if k not in drop}
  safetensors.numpy.save_file(kept, path / "model.safetensors")
  return str(path)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
  return head_checkpoints.load(
    write(tmp_path_factory.mktemp("dflash") / "head"), TARGET
  )


def norm(x, name):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * TENSORS[name]


def rotated(x, position):  # [heads, D]
  angle = position * THETA ** (-np.arange(0, D, 2) / D)
  a, b = np.split(x, 2, axis=-1)
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def reference(features, newest, sees=lambda i, t, s: True):
  """The logits of a block's masks after a row's features `[T, F]`."""
  return (states(features, newest, sees) @ OUTPUT.T)[1:]


def states(features, newest, sees=lambda i, t, s: True):
  """What the output projection reads, the newest token's row among it.

  Token t of the block sees what stands at position s if `sees(layer, t, s)`.
  """
  context = norm(features @ TENSORS["fc.weight"].T, "hidden_norm.weight")
  x = TARGET.embedding[[newest] + [MASK] * (BLOCK - 1)]
  count = len(features)
  for i in range(LAYERS):
    of = lambda name, y, i=i: y @ TENSORS[f"layers.{i}.{name}.weight"].T
    normed = norm(x, f"layers.{i}.input_layernorm.weight")
    read = np.concatenate([context, normed])
    heads = lambda y: y.reshape(len(y), -1, D)
    q = norm(
      heads(of("self_attn.q_proj", normed)),
      f"layers.{i}.self_attn.q_norm.weight",
    )
    k = norm(
      heads(of("self_attn.k_proj", read)), f"layers.{i}.self_attn.k_norm.weight"
    )
    v = heads(of("self_attn.v_proj", read))
    q = [rotated(y, count + t) for t, y in enumerate(q)]
    k = np.stack([rotated(y, t) for t, y in enumerate(k)])
    mixed = []
    for t, query in enumerate(q):
      each = []
      seen = np.array([sees(i, t, s) for s in range(len(k))])
      for h in range(HEADS):
        score = k[:, h // (HEADS // KV)] @ query[h] / np.sqrt(D)
        weight = np.exp(score - score.max()) * seen
        each.append(weight / weight.sum() @ v[:, h // (HEADS // KV)])
      mixed.append(np.concatenate(each))
    x = x + of("self_attn.o_proj", np.stack(mixed))
    y = norm(x, f"layers.{i}.post_attention_layernorm.weight")
    gate = of("mlp.gate_proj", y)
    x = x + of(
      "mlp.down_proj", gate / (1 + np.exp(-gate)) * of("mlp.up_proj", y)
    )
  return norm(x, "norm.weight")


def test_a_block_is_the_formulas_by_published_names(head):
  """Of rows of two lengths, read in two parts, of which blocks were said."""
  assert head.kind == "dflash"
  assert head.features == (2, 5, 7)  # what comes out of layers 1, 4 and 6
  model, params = head.functions()
  assert (model.num_depths, model.num_features) == (BLOCK - 1, 3 * H)
  features, newest = random(2, 6, 3 * H), jnp.array([[3], [7]])
  read, predict = jax.jit(model.read), jax.jit(model.predict)
  cache = read(params, features[:, :2], model.init_cache(2, 16))
  first, cache = predict(params, newest, cache)
  assert cache.length.tolist() == [2, 2]
  cache = read(params, features[:, 2:], cache)
  cache = cache.replace(length=jnp.array([6, 4]))
  second, _ = predict(params, newest, cache)
  for row, count in ((0, 6), (1, 4)):
    for actual, seen in ((first, 2), (second, count)):
      expected = reference(features[row, :seen], int(newest[row, 0]))
      np.testing.assert_allclose(actual[row], expected, atol=2e-3, rtol=2e-3)


def test_the_first_token_of_a_text_has_a_block_too(head):
  """Nothing was read: the block sees itself alone."""
  model, params = head.functions()
  actual, _ = model.predict(params, jnp.array([[2]]), model.init_cache(1, 8))
  expected = reference(np.zeros((0, 3 * H)), 2)
  np.testing.assert_allclose(actual[0], expected, atol=2e-3, rtol=2e-3)


IDS = np.array([1, 4, 5, 9, 12])
WORDS = {"lm_head.weight": random(len(IDS), H), "d2t": IDS - np.arange(5)}
LAYERS_JSON = {
  k: v for k, v in CONFIG.items()
  if k not in ("block_size", "dflash_config", "num_target_layers",
               "architectures")
}  # fmt: skip
SPECULATORS = dict(
  speculators_model_type="dflash", architectures=["DFlashSpeculator"],
  transformer_layer_config=LAYERS_JSON, draft_vocab_size=len(IDS),
  block_size=BLOCK, mask_token_id=MASK, sample_from_anchor=False,
  aux_hidden_state_layer_ids=[2, 5, 7], speculators_config={"algorithm": "x"},
)  # fmt: skip


def test_a_block_of_speculators_has_words_of_its_own(head, tmp_path):
  """Layers are numbered by what they are given; else it is the same head."""
  directory = write(tmp_path / "few", config=SPECULATORS, **WORDS)
  assert head_checkpoints.is_head(directory)
  few = head_checkpoints.load(directory, TARGET)
  assert (few.kind, few.features) == (head.kind, head.features)
  model, params = few.functions()
  actual, _ = model.predict(params, jnp.array([[2]]), model.init_cache(1, 8))
  hidden = np.linalg.lstsq(
    OUTPUT, reference(np.zeros((0, 3 * H)), 2).T, rcond=None
  )[0].T  # what the target's rows were multiplied with
  expected = np.full((BLOCK - 1, V), -np.inf)
  expected[:, IDS] = hidden @ WORDS["lm_head.weight"].T
  np.testing.assert_allclose(actual[0], expected, atol=2e-3, rtol=2e-3)


CHANGED = lambda **changes: dict(config={**CONFIG, **changes})
OF_DFLASH = lambda **changes: CHANGED(
  dflash_config={**CONFIG["dflash_config"], **changes}
)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(drop=["fc.weight"]), "missing: fc.weight"),
    (OF_DFLASH(projector_type="domino"), "settings: projector_type"),
    (OF_DFLASH(target_layer_ids=[1, 8]), "not all layers of a target with 9"),
    (OF_DFLASH(block_size=5), "and dflash_config.block_size must agree, got"),
    (OF_DFLASH(causal=True, causal_head=False), "causal_head must agree"),
  ],
)
def test_what_is_not_understood_is_an_error(changes, message, tmp_path):
  directory = write(tmp_path / "head", **changes)
  assert head_checkpoints.is_head(directory)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.load(directory, TARGET)


@pytest.mark.parametrize("form", ["native", "causal", "both ways"])
def test_layers_with_a_window_see_what_their_format_means(form, tmp_path):
  """The first of two layers has one, of four tokens."""
  slides = dict(
    sliding_window=4, use_sliding_window=True,
    layer_types=["sliding_attention", "full_attention"],
  )  # fmt: skip
  count, config = 6, CONFIG | slides
  if form != "native":
    config = SPECULATORS | dict(
      draft_vocab_size=V, sliding_window_non_causal=form == "both ways",
      transformer_layer_config=LAYERS_JSON | slides,
    )  # fmt: skip
  head = head_checkpoints.load(write(tmp_path / "h", config=config), TARGET)
  model, params = head.functions()
  features = random(1, count, 3 * H)

  def sees(layer, t, s):
    if layer == 1:
      return True
    if s >= count:  # in the block
      return s - count <= t or form == "both ways"
    return s > count + t - 4 if form == "native" else s >= count - 4

  read, predict = jax.jit(model.read), jax.jit(model.predict)
  cache = read(params, features, model.init_cache(1, 16))
  actual, _ = predict(params, jnp.array([[3]]), cache)
  expected = reference(features[0], 3, sees)
  np.testing.assert_allclose(actual[0], expected, atol=2e-3, rtol=2e-3)
  assert np.abs(reference(features[0], 3) - expected).max() > 0.05


# --------------------------------------------------------------------- JetSpec


@pytest.mark.parametrize(
  "where",
  [
    dict(is_causal=True),
    dict(dflash_config=CONFIG["dflash_config"] | {"causal": True}),
    dict(dflash_config=CONFIG["dflash_config"] | {"causal_head": True}),
  ],
)
def test_a_causal_block_by_any_of_its_names(where, tmp_path):
  config = CONFIG | where
  head = head_checkpoints.load(write(tmp_path / "h", config=config), TARGET)
  model, params = head.functions()
  features, count = random(1, 3, 3 * H), 3
  cache = model.read(params, features, model.init_cache(1, 16))
  actual, _ = model.predict(params, jnp.array([[3]]), cache)
  sees = lambda layer, t, s: s - count <= t
  expected = reference(features[0], 3, sees)
  np.testing.assert_allclose(actual[0], expected, atol=2e-3, rtol=2e-3)
  assert np.abs(reference(features[0], 3) - expected).max() > 0.05
  head_saving.save(
    head.module, str(tmp_path / "again"), features=head.features,
    dtype=jnp.float32,
  )  # fmt: skip
  again = head_checkpoints.load(str(tmp_path / "again"), TARGET)
  assert again.module.config == head.module.config


# ---------------------------------------------------------------------- DSpark

RANK = 3
MARKOV = {
  "markov_head.markov_w1.weight": random(V, RANK),
  "markov_head.markov_w2.weight": random(V, RANK),
}
OF_KIND = {
  "vanilla": {},
  "gated": {"gate_proj": (RANK, H + RANK)},
  "rnn": {"joint_proj": (3 * RANK, 2 * RANK + H)},
}
SURE = {
  "confidence_head.proj.weight": random(1, H + RANK),
  "confidence_head.proj.bias": random(1),
}
OF_MARKOV = dict(
  markov_rank=RANK, enable_confidence_head=True,
  confidence_head_with_markov=True,
)  # fmt: skip
DEEPSPEC = {
  k: v for k, v in CONFIG.items() if k != "dflash_config"
} | OF_MARKOV | dict(
  architectures=["Qwen3DSparkModel"], num_anchors=4,
  **CONFIG["dflash_config"],
)  # fmt: skip
SPECFORGE = CONFIG | dict(
  architectures=["DSparkDraftModel"],
  dflash_config=CONFIG["dflash_config"] | {
    "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": RANK,
    "markov_head_type": "vanilla", "confidence_head_alpha": 1.0,
  },
)  # fmt: skip
sigmoid = lambda x: 1 / (1 + np.exp(-x))


def of_kind(kind):
  tensors = {}
  for name, shape in OF_KIND[kind].items():
    tensors[f"markov_head.{name}.weight"] = random(*shape)
    tensors[f"markov_head.{name}.bias"] = random(shape[0])
  return tensors


def markov_step(kind, tensors, hidden, token, state):
  """The bias after a token, the state there, and the chance of acceptance."""
  code = tensors["markov_head.markov_w1.weight"][token]
  linear = lambda name, x: (
    tensors[f"markov_head.{name}.weight"] @ x
    + tensors[f"markov_head.{name}.bias"]
  )
  out = code
  if kind == "gated":
    out = sigmoid(linear("gate_proj", np.concatenate([hidden, code]))) * code
  if kind == "rnn":
    z = linear("joint_proj", np.concatenate([state, code, hidden]))
    gate, new, last = sigmoid(z[:RANK]), z[RANK : 2 * RANK], z[2 * RANK :]
    state, out = gate * state + (1 - gate) * np.tanh(new), np.tanh(last)
  sure = tensors["confidence_head.proj.weight"][0] @ np.concatenate(
    [hidden, code]
  )
  chance = sigmoid(sure + tensors["confidence_head.proj.bias"][0])
  return tensors["markov_head.markov_w2.weight"] @ out, state, chance


@pytest.mark.parametrize("kind", OF_KIND)
def test_dsparks_distributions_follow_the_tokens_before(kind, tmp_path):
  tensors = MARKOV | SURE | of_kind(kind)
  config = DEEPSPEC | dict(markov_head_type=kind)
  folder = write(tmp_path / "h", config=config, **tensors)
  head = head_checkpoints.load(folder, TARGET)
  assert (head.kind, head.features) == ("dspark", (2, 5, 7))
  model, params = head.functions()
  assert model.num_depths == BLOCK  # the newest token's row predicts too
  features = random(1, 4, 3 * H)
  cache = model.read(params, features, model.init_cache(1, 16))
  block, _ = jax.jit(model.predict)(params, jnp.array([[3]]), cache)
  hidden, carried = (
    states(features[0], 3),
    jnp.zeros((1, 1, model.markov.state_size)),
  )
  own = np.zeros(RANK)
  for k, token in enumerate([3, 7, 0, 12]):
    row = jax.tree.map(lambda x, k=k: x[:, k, None], block)
    logits, carried, sure = model.markov.apply(
      params, row, jnp.array([[token]]), carried
    )
    bias, own, chance = markov_step(kind, tensors, hidden[k], token, own)
    expected = hidden[k] @ OUTPUT.T + bias
    np.testing.assert_allclose(logits[0, 0], expected, atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(sure[0, 0], chance, atol=1e-3)
  head_saving.save(
    head.module, str(tmp_path / "again"), features=head.features,
    dtype=jnp.float32, target=TARGET,
  )  # fmt: skip
  saved = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
  assert {*saved} == {*TENSORS, *tensors}
  again = head_checkpoints.load(str(tmp_path / "again"), TARGET)
  assert again.module.config == head.module.config


def test_specforges_settings_say_the_same_head(tmp_path):
  ours = head_checkpoints.load(
    write(tmp_path / "a", config=DEEPSPEC, **MARKOV, **SURE), TARGET
  )
  theirs = head_checkpoints.load(
    write(tmp_path / "b", config=SPECFORGE, **MARKOV, **SURE), TARGET
  )
  assert theirs.module.config == ours.module.config
  assert theirs.features == ours.features


def test_a_dspark_of_speculators_may_begin_after_the_newest_token(tmp_path):
  few = {
    "markov_head.markov_w2.weight": random(len(IDS), RANK),
    "markov_head.markov_w1.weight": MARKOV["markov_head.markov_w1.weight"],
  }
  config = SPECULATORS | OF_MARKOV | dict(speculators_model_type="dspark")
  folder = write(tmp_path / "h", config=config, **WORDS, **few, **SURE)
  head = head_checkpoints.load(folder, TARGET)
  model, params = head.functions()
  assert model.num_depths == BLOCK - 1
  block, _ = model.predict(params, jnp.array([[2]]), model.init_cache(1, 8))
  row = jax.tree.map(lambda x: x[:, 0, None], block)
  logits, *_ = model.markov.apply(
    params, row, jnp.array([[2]]), jnp.zeros((1, 1, 0))
  )
  hidden = states(np.zeros((0, 3 * H)), 2)[1]
  bias, *_ = markov_step("vanilla", few | SURE, hidden, 2, np.zeros(RANK))
  expected = np.full(V, -np.inf)
  expected[IDS] = hidden @ WORDS["lm_head.weight"].T + bias
  np.testing.assert_allclose(logits[0, 0], expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({k: v for k, v in SPECULATORS.items() if k != "sample_from_anchor"}
     | OF_MARKOV | dict(speculators_model_type="dspark"),
     "sample_from_anchor is missing"),
    (CONFIG | dict(dspark_block_size=7), "DeepSeek-V4's DSpark"),
    (DEEPSPEC | dict(markov_head_type="fir"), "markov_head_type must be one"),
    (DEEPSPEC | dict(local_position=True), "settings: local_position"),
    (SPECFORGE | dict(
      dflash_config=SPECFORGE["dflash_config"] | dict(attention_mode="mla")),
     "attention_mode must be 'gqa', got 'mla'"),
  ],
)  # fmt: skip
def test_what_of_dspark_is_not_read_is_refused_by_its_name(
  config, message, tmp_path
):
  folder = write(tmp_path / "h", config=config, **MARKOV, **SURE)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.load(folder, TARGET)
