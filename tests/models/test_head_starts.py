"""Heads begin as their target."""

import dataclasses

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import head_starts
from models.formats import dflash_format, eagle_format
from models.networks import dflash2, dflash_training, training_time_test
from models.networks.description import (
  DenseSpec,
  TransformerConfig,
  llama_config,
)
from models.networks.dflash2 import DFlash2
from models.networks.dspark import DSpark
from models.networks.mixture import Mixture
from models.networks.rope import Rope
from models.networks.transformer import FINAL, Transformer

LENGTH, V = 7, 13
IDS = np.array([1, 4, 5, 9, 12], np.int32)
CONFIG = llama_config(
  vocab_size=V, embed_dim=8, num_layers=4, num_heads=2, num_kv_heads=1,
  head_dim=6, mlp_dim=12, max_positions=32, rope_theta=500.0,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, V, (1, LENGTH + 1))
same = np.testing.assert_array_equal


@pytest.fixture(scope="module")
def target():
  module = Transformer(CONFIG, rngs=nnx.Rngs(0))
  nnx.update(module, jax.tree.map(lambda x: 8 * x, nnx.state(module)))
  return module


@pytest.fixture(scope="module")
def seen(target):
  """The target's output for a text: its last layer's input, and logits."""
  run = lambda features: target(TOKENS[:, :-1], features=features)[0]
  return run((0, 1, 3)), run((FINAL,))


def eagle3(target, ids=IDS, **more):
  reads = (0, 1, 3) if target.config.num_layers > 2 else (0, 1)
  return head_starts.eagle3(
    target, layers=reads, draft_vocab=ids, rngs=nnx.Rngs(1), **more
  )


def parallel(target, num_layers=1, layers=(1,), ids=IDS, **more):
  return head_starts.parallel(
    target, num_layers=num_layers, layers=layers, block_size=4, mask_token=6,
    draft_vocab=ids, rngs=nnx.Rngs(1), **more,
  )  # fmt: skip


def drafted(head, features, steps=1):
  """Logits and states of drafts from every place of the text."""
  return list(
    training_time_test.unroll(
      head,
      jnp.asarray(TOKENS),
      features,
      steps=steps,
      positions=jnp.arange(LENGTH)[None],
      segments=jnp.ones((1, LENGTH), int),
    )
  )


def alike(ours, theirs):
  """True if two modules have the same parameters."""
  both = (nnx.state(x, nnx.Param) for x in (ours, theirs))
  return jax.tree.all(jax.tree.map(np.array_equal, *both))


def without_embedding(weight):
  """Makes a projection read nothing of the embedding, as of no target."""
  assert np.abs(weight[:, :8]).max() > 0  # read from the first step on
  weight[...] = weight[...].at[:, :8].set(0)


def test_eagle3_init_reproduces_last_target_layer(target, seen):
  head = eagle3(target)
  for name in ("q", "k", "v"):
    without_embedding(getattr(head.attention, name).weight)
  ((logits, _),) = drafted(head, seen[0].features)
  np.testing.assert_allclose(logits, seen[0].logits[..., IDS], atol=1e-3)


def test_eagle1_init_passes_feature_and_copies_last_layer(target, seen):
  """Without what reads the embedding it says the feature once more."""
  head, last = head_starts.eagle1(target, rngs=nnx.Rngs(1)), target.layers[-1]
  same(head.fc.weight[:, 8:], np.eye(8))
  for ours, theirs in (
    (head.attention.q, last.attention.q), (head.attention.k, last.attention.k),
    (head.attention.v, last.attention.v), (head.mlp.up, last.mlp.up),
    (head.mlp_norm, last.mlp_norm), (head.lm_head, target.lm_head),
    (head.embed, target.embed),
  ):  # fmt: skip
    assert alike(ours, theirs)
  without_embedding(head.fc.weight)
  final = seen[1]
  for logits, state in drafted(head, final.features, steps=2):
    np.testing.assert_allclose(state, final.features, atol=1e-5)
    np.testing.assert_allclose(logits, final.logits, atol=1e-3)
  qwens = Transformer(
    described.alter(CONFIG, num_layers=1, qk_norm="head"), rngs=nnx.Rngs(0)
  )
  head = head_starts.eagle1(qwens, rngs=nnx.Rngs(1))  # which has no such norms
  assert head.config.layers.attention.qk_norm is None
  assert alike(head.attention.q, qwens.layers[-1].attention.q)


def test_mtp_init_reproduces_target_output(target, seen):
  """Up to a factor of each place: the state is normed again."""
  head = head_starts.mtp(target, rngs=nnx.Rngs(1))
  ((logits, _),) = drafted(head, seen[1].features)
  wanted = np.asarray(seen[1].logits)
  size = np.sqrt((np.asarray(seen[1].features) ** 2).mean(-1, keepdims=True))
  usual = np.sqrt((np.asarray(target.final_norm.scale) ** 2).mean())
  np.testing.assert_allclose(logits, wanted * usual / size, atol=1e-3)
  assert alike(head.layer.attention.q, target.layers[-1].attention.q)
  assert alike(head.layer.attention_norm, target.layers[-1].attention_norm)


def test_medusa_init_reproduces_target_output(target, seen):
  final = seen[1]
  logits = head_starts.medusa(target, num_heads=2, rngs=nnx.Rngs(1))(
    final.features
  )
  for k in range(2):
    np.testing.assert_allclose(logits[:, :, k], final.logits, atol=1e-3)


def test_block_init_copies_last_target_layers(target):
  """It reads the highest of its features; its layers norm queries and keys."""
  head = parallel(target, num_layers=2, layers=(1, 3))
  same(head.fc.weight[:, 8:], np.eye(8))
  same(head.fc.weight[:, :8], 0)
  for ours, theirs in zip(head.layers, target.layers[-2:], strict=True):
    for part in ("mlp", "mlp_norm", "attention_norm"):
      assert alike(getattr(ours, part), getattr(theirs, part))
    for name in ("q", "k", "v", "out"):
      assert alike(*(getattr(x.attention, name) for x in (ours, theirs)))
    same(ours.attention.q_norm.scale[...], 1)
  same(head.lm_head.weight[...], target.lm_head.weight[...][IDS])
  with pytest.raises(ValueError, match=r"num_layers must be in 1\.\.4, got 5"):
    parallel(target, num_layers=5)


@pytest.mark.parametrize(
  ("kind", "more"),
  [
    (DSpark, dict(markov="rnn", rank=3, from_newest=False)),
    (DFlash2, dict(taps=2, group=4, rank=3, num_candidates=V)),
  ],
)
def test_dspark_and_dflash2_init_match_dflash(target, seen, kind, more):
  features = seen[0].features[..., 8:16]
  plain, ours = (
    dflash_training.predict(
      parallel(target, ids=None, **of_kind), jnp.asarray(TOKENS), features,
      jnp.array([[1, 4]]), positions=jnp.arange(LENGTH)[None],
      segments=jnp.ones((1, LENGTH), int),
    )
    for of_kind in ({}, more | {"kind": kind})
  )  # fmt: skip
  said = ours[0] if kind is DSpark else dflash2.spread(*ours[1], V)
  np.testing.assert_allclose(said, plain[0], atol=1e-4)


MIXTURE = Mixture(num_experts=4, num_chosen=2, embed_dim=8, expert_dim=5)
ROPE = Rope(theta=50.0, dim=8)


def made(feed_forward, *, norms="pre", attention=(), **frame):
  """A target of two layers of that block, and EAGLE-3's head of it."""
  layers = tuple(
    dataclasses.replace(
      layer, feed_forward=feed_forward,
      attention=dataclasses.replace(
        layer.attention, **dict(rope=ROPE) | dict(attention)
      ),
    )
    for layer in described.layers(
      [None, None], norms=norms, softcap=None, scale=None
    )
  )  # fmt: skip
  target = Transformer(
    TransformerConfig(
      layers=layers, vocab_size=V, embed_dim=8, max_positions=32, **frame
    ),
    rngs=nnx.Rngs(0),
  )
  return target, eagle3(target)


def test_mixture_target_heads_copy_attention_and_zero_the_mlp():
  """As wide as the experts of a token together."""
  target, head = made(MIXTURE)
  block = parallel(target).layers[0]
  for ours in (head, block):
    assert ours.mlp.up.weight.shape == (2 * 5, 8)
    assert np.abs(ours.mlp.up.weight[...]).max() > 0
    same(ours.mlp.down.weight[...], 0)
    last = target.layers[-1]
    assert alike(ours.attention.out, last.attention.out)
    assert alike(ours.attention.q_norm, last.attention.q_norm)
    assert alike(ours.mlp_norm, last.mlp_norm)
  same(head.attention.q.weight[:, 8:], last.attention.q.weight[...])


def test_heads_of_incompatible_layers_start_with_zero_output():
  """Gemma's norms multiply by one more than their weights."""
  dense = DenseSpec(width=12, activation="gelu_tanh")
  target, _ = made(dense, norms="both", norm="rms_plus_one")
  target.final_norm.scale[...] = jnp.arange(8.0)
  head = eagle3(target)
  for ours in (head, parallel(target).layers[0]):
    for part in (ours.attention.out, ours.mlp.down):
      same(part.weight[...], 0)
  same(head.final_norm.scale[...], 1 + np.arange(8.0))
  assert head.config.layers.attention.rope.theta == 50.0


def test_feature_layers_are_valid_and_ascending():
  """Qwen3-8B's block reads five of 36: outputs of 1, 9, 17, 25 and 33."""
  assert eagle_format.usual_layers(30) == (2, 15, 27)
  assert eagle_format.usual_layers(3) == (0, 1, 2)
  assert dflash_format.usual_layers(5, 36) == (2, 10, 18, 26, 34)
  assert head_starts.check_layers((1, 5), 6, first=1) == (1, 5)
  with pytest.raises(ValueError, match=r"ascending layers in 1\.\.5"):
    head_starts.check_layers((0, 3), 6, first=1)
