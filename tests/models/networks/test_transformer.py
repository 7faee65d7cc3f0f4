"""The transformer: caches, token trees and skipped layers change no meaning."""

import dataclasses
import functools
import re

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from models.networks import stacked
from models.networks.attention import attend
from models.networks.description import llama_config
from models.networks.rope import Rope
from models.networks.transformer import (
  FINAL,
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import cache as cache_lib
from specjax import drafters
from specjax.tree import paths

VOCAB = 61
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 12))

LLAMA = llama_config(
  vocab_size=VOCAB, embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=48, max_positions=64,
)  # fmt: skip
CONFIGS = {
  "llama": LLAMA,
  "windows": described.alter(LLAMA, windows=(3, None, 4), qk_norm="head"),
  "gpt2": described.alter(
    LLAMA, norm="layer", activation="gelu_tanh", gated=False, rope=None,
    learned_positions=True, qkv_bias=True, out_bias=True, bias=True,
    tied_embeddings=True,
  ),
  "neox": described.alter(
    LLAMA, norm="layer", activation="gelu", gated=False, parallel=True,
    rope=Rope(theta=1e4, dim=4),
  ),
  "gemma": described.alter(LLAMA, **described.GEMMA),
  "gemma4": described.alter(LLAMA, **described.GEMMA4),
  "olmo": described.alter(LLAMA, **described.OLMO),
  "latents": described.alter(LLAMA, **described.LATENTS),
}  # fmt: skip

# The tree of the tests, by parent; node 5 is the grandchild 0-2-5.
PARENTS = (-1, 0, 0, 1, 1, 2, 4)
DEPTH = (0, 1, 1, 2, 2, 2, 3)

FEATURES = (0, 3, FINAL)  # the first layer's input, the last's output, normed


@functools.cache
def make_model(name):
  """A module, its pure functions (compiled) and its parameters."""
  module = described.random_module(CONFIGS[name])
  model, params = as_language_model(module, features=FEATURES)
  return module, dataclasses.replace(model, apply=jax.jit(model.apply)), params


def make_forward(module, **options):
  """`i32[B, T] -> ModelOutput` of whole sequences, without a cache."""
  graphdef, state = nnx.split(module)
  call = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, **options))

  def forward(tokens):
    output, cache = call(state, tokens)
    assert cache is None
    return output

  return forward


named_forward = functools.cache(
  lambda name: make_forward(make_model(name)[0], features=FEATURES)
)


def last_logits(name, sequences):
  """`f32[n, V]`: after the last token of each of n <= 14 sequences."""
  tokens = np.zeros((14, 12), int)
  for row, sequence in zip(tokens, sequences, strict=False):
    row[: len(sequence)] = sequence
  logits = np.asarray(named_forward(name)(tokens).logits)
  last = [len(sequence) - 1 for sequence in sequences]
  return logits[np.arange(len(last)), last]


def path_to(node):
  """The nodes from the root to `node`."""
  return [*path_to(PARENTS[node]), node] if node >= 0 else []


def assert_close(actual, expected):
  np.testing.assert_allclose(
    actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max()
  )


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_without_cache_matches_cached_forward(name):
  _, model, params = make_model(name)
  expected = named_forward(name)(TOKENS)
  assert expected.logits.shape == (*TOKENS.shape, VOCAB)
  width = len(FEATURES) * LLAMA.embed_dim
  assert expected.features.shape == (*TOKENS.shape, width)
  cache = model.init_cache(2, 24)
  outputs = []
  for piece in np.split(TOKENS, [11], axis=1):
    output, cache = model.apply(params, piece, cache)
    outputs.append(output)
  np.testing.assert_array_equal(cache.length, [12, 12])
  for field in ("logits", "features"):
    actual = np.concatenate([getattr(o, field) for o in outputs], axis=1)
    assert_close(actual, getattr(expected, field))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_roll_back_independently_and_ignore_stale_slots(name):
  _, model, params = make_model(name)
  lengths = (3, 7)
  _, cache = model.apply(params, TOKENS[:, :8], model.init_cache(2, 24))
  cache = cache.replace(length=jnp.array(lengths))
  other = (TOKENS[:, :3] + 1) % VOCAB
  output, cache = model.apply(params, other, cache)
  np.testing.assert_array_equal(cache.length, [6, 10])
  sequences = [
    [*TOKENS[row, :length], *other[row, : t + 1]]
    for row, length in enumerate(lengths)
    for t in range(3)
  ]
  expected = last_logits(name, sequences).reshape(2, 3, VOCAB)
  assert_close(output.logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
  ("name", "pieces"),
  [
    *((name, [slice(0, 7)]) for name in CONFIGS),
    ("windows", [slice(0, 3), slice(3, 6), slice(6, 7)]),
    ("gpt2", [slice(0, 1), slice(1, 7)]),
  ],
)
def test_tree_nodes_see_only_their_own_path(name, pieces):
  module, model, params = make_model(name)
  lengths = np.array([2, 6])
  _, cache = model.apply(params, TOKENS[:, :8], model.init_cache(2, 24))
  cache = cache.replace(length=jnp.asarray(lengths))
  nodes = range(len(PARENTS))
  tokens = np.random.default_rng(2).integers(0, VOCAB, (2, len(PARENTS)))
  ancestors = np.array([[n in path_to(m) for n in nodes] for m in nodes])
  apply = as_language_model(module)[0].apply
  logits = []
  for piece in pieces:
    # The root alone is among the slots before the mask, which all nodes see.
    columns = slice(min(piece.start, 1), piece.stop)
    feed = functools.partial(apply, mask=ancestors[piece, columns])
    positions = lengths[:, None] + np.array(DEPTH)[piece]
    output, cache = jax.jit(feed)(
      params, tokens[:, piece], cache, positions=positions
    )
    logits.append(output.logits)
  sequences = [
    [*TOKENS[row, :length], *tokens[row, path_to(node)]]
    for row, length in enumerate(lengths)
    for node in nodes
  ]
  expected = last_logits(name, sequences).reshape(2, len(PARENTS), VOCAB)
  assert_close(np.concatenate(logits, axis=1), expected)


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_skipped_layers_keep_their_cache_and_add_nothing(name):
  module, full, params = make_model(name)
  skipped = SkippedLayers(attention=(0, 2), mlp=(1,))
  model, _ = as_language_model(module, skipped=skipped)
  _, cache = full.apply(params, TOKENS[:, :7], full.init_cache(2, 24))
  output, after = jax.jit(model.apply)(params, TOKENS[:, 7:10], cache)
  np.testing.assert_array_equal(after.length, [10, 10])
  for layer in range(3):
    for old, new in (
      (cache.keys[layer], after.keys[layer]),
      (cache.values[layer], after.values[layer]),
    ):
      assert np.array_equal(old, new) == (layer in skipped.attention)
      np.testing.assert_array_equal(old[:, :, :7], new[:, :, :7])
  # A sub-layer whose output projection is zero adds nothing either.
  silent = nnx.clone(module)
  for layer in skipped.attention:
    silence(silent.layers[layer].attention.out)
  for layer in skipped.mlp:
    silence(silent.layers[layer].mlp.down)
  expected, _ = full.apply(nnx.state(silent), TOKENS[:, 7:10], cache)
  assert_close(output.logits, expected.logits)
  whole = make_forward(module, skipped=skipped)(TOKENS)
  assert_close(whole.logits, make_forward(silent)(TOKENS).logits)


def silence(linear):
  nnx.update(linear, jax.tree.map(jnp.zeros_like, nnx.state(linear)))


@pytest.mark.parametrize(
  ("num_speculative_tokens", "num_drafts", "batch"), [(3, 1, 9), (2, 2, 1)]
)
def test_decoding_loop_updates_caches_in_place(
  batch, num_speculative_tokens, num_drafts
):
  """No array of a cache's shape is copied in the compiled, donated loop."""
  config = llama_config(
    vocab_size=64, embed_dim=48, num_layers=2, num_heads=3, num_kv_heads=3,
    head_dim=16, mlp_dim=64, max_positions=256,
  )  # fmt: skip
  model, params = as_language_model(Transformer(config, rngs=nnx.Rngs(0)))
  drafter = drafters.model(
    model, tree=paths(num_speculative_tokens, num_drafts), vocab_size=64
  )
  decoder = specjax.make_decoder(model, drafter=drafter, rule="match")
  both = specjax.Params(target=params, draft=params)
  state = jax.eval_shape(
    lambda: decoder.init(
      both, jnp.ones((batch, 4), jnp.int32), np.full(batch, 4),
      jax.random.key(0), buffer_length=40, max_new_tokens=30,
    )
  )  # fmt: skip
  loop = jax.jit(decoder.generate, donate_argnums=1)
  text = loop.lower(both, state).compile().as_text()
  shape = ",".join(map(str, state.target_cache.keys[0].shape))
  assert f"f32[{shape}]" in text
  assert not re.findall(rf"f32\[{shape}\]\S* copy\(", text)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_admission_prefills_its_row_in_place(is_stacked):
  """From another row on; no cache is copied, and no neighbor changes."""
  config = described.alter(CONFIGS["windows"], max_positions=400)
  module = described.random_module(config)
  model, params = as_language_model(module)
  if is_stacked:
    model = stacked.as_language_model(config)
    params = stacked.stack(module)
  drafter = drafters.layer_skip(model, tree=paths(2, 1), vocab_size=VOCAB)
  decoder = specjax.make_decoder(model, drafter=drafter)
  both, room = specjax.Params(target=params), 331
  begin = jax.jit(
    lambda prompts, lengths, budget: decoder.init(
      both, prompts, lengths, jax.random.key(0), buffer_length=room,
      max_new_tokens=budget,
    )
  )  # fmt: skip
  generate = jax.jit(decoder.generate)
  state = generate(both, begin(TOKENS, np.array([12, 7]), 9))
  text = np.asarray(state.tokens[0, :20])
  new = (TOKENS[1, :5] + 3) % VOCAB
  admit = jax.jit(
    lambda params, state, row, source, keep: decoder.admit(
      params, state, row, jnp.asarray(new), 5, jax.random.key(4),
      max_new_tokens=8, source=source, keep=keep,
    ),
    donate_argnums=1,
  )  # fmt: skip
  compiled = admit.lower(both, state, 1, 0, 3).compile()
  shape = ",".join(map(str, state.target_cache.keys[0].shape))
  assert f"f32[{shape}]" in compiled.as_text()
  assert not re.findall(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())
  after = admit(both, jax.tree.map(jnp.copy, state), 1, 0, 17)
  for new_keys, keys in zip(
    after.target_cache.keys, state.target_cache.keys, strict=True
  ):
    np.testing.assert_array_equal(
      new_keys[..., 0, :, :20, :], keys[..., 0, :, :20, :]
    )
  whole = np.zeros((1, 25), int)
  whole[0, :22] = [*text[:17], *new]
  alone = jax.jit(
    lambda prompts, length: decoder.init(
      both, prompts, length, jax.random.key(4)[None], buffer_length=room,
      max_new_tokens=8,
    )
  )(whole, np.array([22]))  # fmt: skip
  actual, expected = generate(both, after), generate(both, alone)
  np.testing.assert_array_equal(
    actual.tokens[1, : actual.length[1]], expected.tokens[0, : actual.length[1]]
  )


@pytest.mark.parametrize("broken", ["key", "value"])
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_nonfinite_slot_affects_only_queries_that_see_it(broken, what):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  q, keys, values = draw(1, 2, 4, 3), draw(1, 2, 5, 3), draw(1, 2, 5, 3)
  mask = np.ones((1, 2, 5), bool)
  mask[0, 0, 3] = False
  expected = attend(q, keys, values, mask)
  {"key": keys, "value": values}[broken][:, :, 3, 1] = what
  actual = attend(q, *cache_lib.contain(keys, values), mask)
  np.testing.assert_allclose(actual[:, 0], expected[:, 0], rtol=1e-6)
  # An infinite key of the right sign only says not to look there.
  lost = np.isnan(actual[:, 1]).reshape(4, 3)
  assert lost.all() if broken == "value" or np.isnan(what) else lost.any()


def test_mismatched_parameters_are_rejected():
  narrow = described.random_module(described.alter(LLAMA, embed_dim=16))
  shallow = described.random_module(described.alter(LLAMA, num_layers=2))
  model, _ = as_language_model(make_model("llama")[0])
  cache = model.init_cache(2, 24)
  with pytest.raises(ValueError, match=r"the 30 arrays.*got 21 \(are target"):
    model.apply(nnx.state(shallow), TOKENS, cache)
  with pytest.raises(
    ValueError, match=r"embedding is \[61, 32\], got \[61, 16"
  ):
    model.apply(nnx.state(narrow), TOKENS, cache)
  stack = stacked.as_language_model(LLAMA)
  with pytest.raises(ValueError, match="are target and draft swapped"):
    stack.apply(stacked.stack(narrow), TOKENS, stack.init_cache(2, 24))


def test_logits_at_selects_the_requested_tokens():
  for name in ("llama", "gpt2"):
    module, model, params = make_model(name)
    assert module.config.tied_embeddings == (name == "gpt2")
    whole, _ = model.apply(params, TOKENS[:, :8], model.init_cache(2, 24))
    wanted = np.array([[7, 0, 3], [2, 2, 6]])
    some, _ = model.apply(
      params, TOKENS[:, :8], model.init_cache(2, 24), logits_at=wanted
    )
    np.testing.assert_array_equal(some.features, whole.features)
    expected = np.take_along_axis(whole.logits, wanted[..., None], axis=1)
    np.testing.assert_allclose(some.logits, expected, atol=1e-5)


def test_prefill_computes_no_prompt_logits():
  """Nor does it where nothing is jitted: they may be larger than all else."""
  config = described.alter(LLAMA, num_layers=1)
  model, params = as_language_model(described.random_module(config))
  drafter = drafters.model(model, tree=paths(2, 1), vocab_size=VOCAB)
  decoder = specjax.make_decoder(model, drafter=drafter)
  jaxpr = jax.make_jaxpr(
    lambda params: decoder.init(
      specjax.Params(target=params, draft=params), jnp.ones((1, 13), int),
      np.array([13]), jax.random.key(0), buffer_length=20, max_new_tokens=4,
    )
  )(params)  # fmt: skip
  assert "f32[1,13,32]" in str(jaxpr)
  assert "f32[1,13,61]" not in str(jaxpr)
