"""Heads that draft blocks against a slow forward in NumPy, by published names.

DFlash's, JetSpec's, which is causal, and DSpark's with its Markov head.
"""

import dataclasses

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import published_blocks
import pytest
import safetensors.numpy
import toys
from flax import nnx
from published_blocks import BLOCK, LAYERS_JSON, MASK, TENSORS
from published_heads import IDS, OUTPUT, TARGET, H, V

from models import head_shapes
from models.formats import head_checkpoints, head_saving
from models.networks.description import llama_config
from models.networks.dspark import DSparkConfig
from specjax import tree as tree_lib
from specjax.drafters import dspark

random = published_blocks.numbers(1)
CONFIG = LAYERS_JSON | dict(
  architectures=["DFlashDraftModel"], block_size=BLOCK,
  num_target_layers=TARGET.num_layers,
  dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]},
)  # fmt: skip
states = published_blocks.Block(TENSORS).states


def write(path, *, config=CONFIG, drop=(), **more):
  kept = {k: v for k, v in (TENSORS | more).items() if k not in drop}
  return published_blocks.write(path, config, kept)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
  return head_checkpoints.load(
    write(tmp_path_factory.mktemp("dflash") / "head"), TARGET
  )


def reference(features, newest, *visible):
  """The logits of a block's masks after a row's features `[T, F]`."""
  return (states(features, newest, *visible) @ OUTPUT.T)[1:]


def test_block_logits_match_numpy_reference(head):
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


WORDS = {"lm_head.weight": random(len(IDS), H), "d2t": IDS - np.arange(5)}
SPECULATORS = dict(
  speculators_model_type="dflash", architectures=["DFlashSpeculator"],
  transformer_layer_config=LAYERS_JSON, draft_vocab_size=len(IDS),
  block_size=BLOCK, mask_token_id=MASK, sample_from_anchor=False,
  aux_hidden_state_layer_ids=[2, 5, 7], speculators_config={"algorithm": "x"},
)  # fmt: skip


def test_speculators_block_uses_its_own_draft_vocabulary(head, tmp_path):
  """Layers are numbered by what they are given; nothing was read yet."""
  directory = write(tmp_path / "few", config=SPECULATORS, **WORDS)
  assert head_checkpoints.is_head(directory)
  few = head_checkpoints.load(directory, TARGET)
  assert (few.kind, few.features) == (head.kind, head.features)
  model, params = few.functions()
  actual, _ = model.predict(params, jnp.array([[2]]), model.init_cache(1, 8))
  hidden = states(np.zeros((0, 3 * H)), 2)[1:]
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
    (OF_DFLASH(target_layer_ids=[1, 11]), "not all layers of a target with 12"),
    (OF_DFLASH(block_size=5), "and dflash_config.block_size must agree, got"),
    (OF_DFLASH(causal=True, causal_head=False), "causal_head must agree"),
    (OF_DFLASH(causal="yes"), "causal must be true or false"),
  ],
)
def test_invalid_checkpoints_are_rejected(changes, message, tmp_path):
  directory = write(tmp_path / "head", **changes)
  assert head_checkpoints.is_head(directory)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.load(directory, TARGET)


@pytest.mark.parametrize("form", ["native", "causal", "both ways"])
def test_windowed_layers_follow_their_formats_mask(form, tmp_path):
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

  def visible(layer, t, s):
    if layer == 1:
      return True
    if s >= count:  # in the block
      return s - count <= t or form == "both ways"
    return s > count + t - 4 if form == "native" else s >= count - 4

  read, predict = jax.jit(model.read), jax.jit(model.predict)
  cache = read(params, features, model.init_cache(1, 16))
  actual, _ = predict(params, jnp.array([[3]]), cache)
  expected = reference(features[0], 3, visible)
  np.testing.assert_allclose(actual[0], expected, atol=2e-3, rtol=2e-3)
  assert np.abs(reference(features[0], 3) - expected).max() > 0.05


# --------------------------------------------------------------------- JetSpec


@pytest.mark.parametrize(
  ("where", "count"),
  [
    (dict(is_causal=True), 0),
    (dict(dflash_config=CONFIG["dflash_config"] | {"causal": True}), 3),
    (dict(dflash_config=CONFIG["dflash_config"] | {"causal_head": True}), 3),
  ],
)
def test_causal_block_is_recognized_under_any_key(where, count, tmp_path):
  """After some features or none."""
  config = CONFIG | where
  head = head_checkpoints.load(write(tmp_path / "h", config=config), TARGET)
  model, params = head.functions()
  features, cache = random(1, count, 3 * H), model.init_cache(1, 16)
  if count:
    cache = model.read(params, features, cache)
  actual, _ = model.predict(params, jnp.array([[3]]), cache)
  visible = lambda layer, t, s: s - count <= t
  expected = reference(features[0], 3, visible)
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
def test_dspark_logits_condition_on_previous_tokens(kind, tmp_path):
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


@pytest.mark.parametrize(
  "kind",
  ["rnn", *(pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("vanilla", "gated"))],
)  # fmt: skip
def test_markov_head_rounds_match_target_distribution(kind, x64):
  """Of a random head, summed over all drafts."""
  layers = llama_config(
    vocab_size=3, embed_dim=4, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, mlp_dim=4, max_positions=64, qk_norm="head",
  )  # fmt: skip
  config = DSparkConfig(
    layers=layers, block_size=2, mask_token=0, markov=kind, rank=2,
    confidence=True,
  )  # fmt: skip
  head = head_shapes.make(config, dtype=jnp.float64, rngs=nnx.Rngs(0))
  nnx.update(head, jax.tree.map(lambda x: 5 * x, nnx.state(head, nnx.Param)))
  model, params = head_shapes.functions(head)
  narrow, double = model.markov.apply, lambda x: x.astype(jnp.float64)
  wide = dataclasses.replace(
    model.markov, apply=lambda *args: jax.tree.map(double, narrow(*args))
  )
  model = dataclasses.replace(model, markov=wide)
  for form, *rules in (
    (dict(tree=tree_lib.Tree((-1, 0, 0, 1, 1)), threshold=0.5),
     "recursive", "kseq", "transport"),
    (dict(tree=tree_lib.paths(2, 2)), "block_transport"),
    (dict(tokens=2, threshold=0.5), "token"),
  ):  # fmt: skip
    for rule in rules:
      error = exact_cases.round_error(
        dspark(model, **form), rule, model=toys.table_model(3, layers=4),
        target=toys.table(3, seed=0).astype(np.float64), draft=params,
      )  # fmt: skip
      assert error < 1e-10, (kind, rule)


def test_specforge_settings_load_the_same_head(tmp_path):
  """Which may read the embedding, and have copies of the target's arrays."""
  every = MARKOV | SURE | {
    "embed_tokens.weight": TARGET.embedding, "lm_head.weight": OUTPUT,
  }  # fmt: skip
  reads = {"target_layer_ids": [-1, 4, 6]}
  ours = head_checkpoints.load(
    write(tmp_path / "a", config=DEEPSPEC | reads, **every), TARGET
  )
  nested = {"dflash_config": SPECFORGE["dflash_config"] | reads}
  theirs = head_checkpoints.load(
    write(tmp_path / "b", config=SPECFORGE | nested, **every), TARGET
  )
  assert theirs.module.config == ours.module.config
  assert theirs.features == ours.features == (0, 5, 7)


def test_speculators_dspark_may_start_after_the_anchor(tmp_path):
  """And its confidence may read the hidden state alone."""
  few = {
    "markov_head.markov_w2.weight": random(len(IDS), RANK),
    "markov_head.markov_w1.weight": MARKOV["markov_head.markov_w1.weight"],
  }
  weight = random(1, H)
  alone = SURE | {"confidence_head.proj.weight": weight}
  config = SPECULATORS | OF_MARKOV | dict(
    speculators_model_type="dspark", confidence_head_with_markov=False
  )  # fmt: skip
  folder = write(tmp_path / "h", config=config, **WORDS, **few, **alone)
  head = head_checkpoints.load(folder, TARGET)
  model, params = head.functions()
  assert model.num_depths == BLOCK - 1
  block, _ = model.predict(params, jnp.array([[2]]), model.init_cache(1, 8))
  row = jax.tree.map(lambda x: x[:, 0, None], block)
  logits, _, sure = model.markov.apply(
    params, row, jnp.array([[2]]), jnp.zeros((1, 1, 0))
  )
  hidden = states(np.zeros((0, 3 * H)), 2)[1]
  chance = sigmoid(weight[0] @ hidden + SURE["confidence_head.proj.bias"])
  np.testing.assert_allclose(sure[0], chance, atol=1e-3)
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
def test_unsupported_dspark_settings_are_rejected_by_name(
  config, message, tmp_path
):
  folder = write(tmp_path / "h", config=config, **MARKOV, **SURE)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.load(folder, TARGET)
