"""Heads begin as their target."""

import dataclasses
import operator

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import head_starts
from models.networks import unrolled
from models.networks.description import (
  DeltaSpec,
  DenseSpec,
  Latent,
  TransformerConfig,
  llama_config,
)
from models.networks.mixture import Mixture
from models.networks.rope import Rope
from models.networks.transformer import FINAL, Transformer

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LENGTH, V = 7, 13
IDS = np.array([1, 4, 5, 9, 12], np.int32)
CONFIG = llama_config(
  vocab_size=V, embed_dim=8, num_layers=4, num_heads=2, num_kv_heads=1,
  head_dim=6, mlp_dim=12, max_positions=32, rope_theta=500.0, qkv_bias=False,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, V, (1, LENGTH + 1))


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


def test_eagle3_begins_as_the_targets_last_layer(target, seen):
  """Without what reads the embedding, which no target has."""
  head = head_starts.eagle3(
    target, layers=(0, 1, 3), draft_vocab=IDS, rngs=nnx.Rngs(1)
  )
  for name in ("q", "k", "v"):
    weight = getattr(head.attention, name).weight
    assert np.abs(weight[:, :8]).max() > 0  # read from the first step on
    weight[...] = weight[...].at[:, :8].set(0)
  ((logits, _),) = unrolled.unroll(
    head, jnp.asarray(TOKENS), seen[0].features,
    positions=jnp.arange(LENGTH)[None], segments=jnp.ones((1, LENGTH), int),
    steps=1,
  )  # fmt: skip
  np.testing.assert_allclose(logits, seen[0].logits[..., IDS], atol=1e-3)


def test_a_wider_eagle3_begins_as_the_one_of_the_targets_width(target, seen):
  """The wider part adds nothing at first, and can learn."""
  make = lambda **more: head_starts.eagle3(
    target, layers=(0, 1, 3), draft_vocab=IDS, rngs=nnx.Rngs(1), **more
  )
  usual, wide = make(), make(mlp_dim=20)
  assert wide.mlp.gate.weight.shape == (20, 8)
  wide.attention, wide.fc = usual.attention, usual.fc

  def said(head):
    ((logits, _),) = unrolled.unroll(
      head, jnp.asarray(TOKENS), seen[0].features,
      positions=jnp.arange(LENGTH)[None], segments=jnp.ones((1, LENGTH), int),
      steps=1,
    )  # fmt: skip
    return logits

  np.testing.assert_allclose(said(wide), said(usual), atol=1e-5)
  graph, params, rest = nnx.split(wide, nnx.Param, ...)
  said_by = lambda params: said(nnx.merge(graph, params, rest))[..., 0].sum()
  moved = jax.grad(said_by)(params)["mlp"]["down"]["weight"][...]
  assert np.abs(moved[:, 12:]).min() > 0
  with pytest.raises(ValueError, match=r"must be 12, the target's, or more"):
    make(mlp_dim=11)


@pytest.mark.parametrize("before", [IDS, None], ids=["some", "all"])
def test_a_head_that_says_other_tokens_says_the_old_ones_as_before(
  before, target
):
  """New ones begin with the target's rows."""
  head = head_starts.eagle3(
    target, layers=(0, 1, 3), draft_vocab=before, rngs=nnx.Rngs(1)
  )
  old = 1 + head.lm_head.weight[...]
  head.lm_head.weight[...] = old
  ids = np.array([0, 4, 9, 10], np.int32)
  head_starts.say(head, target, ids)
  assert head.config.draft_vocab_size == 4
  np.testing.assert_array_equal(head.target_ids[...], ids)
  theirs = head_starts.output_rows(target)
  expected = (
    old[ids]
    if before is None
    else [theirs[0], old[1], old[3], theirs[10]]  # of 4 and 9
  )
  np.testing.assert_array_equal(head.lm_head.weight[...], jnp.array(expected))
  hidden = jnp.ones((1, 8))
  np.testing.assert_allclose(
    head.lm_head(hidden), hidden @ jnp.array(expected).T, rtol=1e-5
  )


def test_medusas_heads_of_few_words_say_what_those_of_all_do(target):
  make = lambda ids: head_starts.medusa(
    target, num_heads=2, draft_vocab=ids, rngs=nnx.Rngs(1)
  )
  hidden, every, few = jnp.ones((1, 8)), make(None), make(IDS)
  for heads in (every.heads, few.heads):
    for k, head in enumerate(heads, 2):  # as if learned
      head.lm_head.weight[...] = k * head.lm_head.weight[...]
  assert few(hidden).shape == (1, 2, len(IDS))
  np.testing.assert_allclose(few(hidden), every(hidden)[..., IDS], rtol=1e-5)
  others = np.array([0, 4, 9, 10], np.int32)
  head_starts.say(few, target, others)
  np.testing.assert_array_equal(few.target_ids[...], others)
  rows = head_starts.output_rows(target)[others]
  for k, head in enumerate(few.heads, 2):
    factors = jnp.array([1, k, k, 1])[:, None]  # two were there before
    np.testing.assert_array_equal(head.lm_head.weight[...], factors * rows)
  assert few(hidden).shape == (1, 2, 4)


def test_medusa_and_blockwise_begin_as_the_targets_output(target, seen):
  final = seen[1]
  for head in (
    head_starts.medusa(target, num_heads=2, rngs=nnx.Rngs(1)),
    head_starts.blockwise(target, num_heads=2, hidden_dim=0, rngs=nnx.Rngs(1)),
  ):
    logits = head(final.features)
    assert logits.shape == (1, LENGTH, 2, V)
    for k in range(2):
      np.testing.assert_allclose(logits[:, :, k], final.logits, atol=1e-3)


def test_mtp_begins_as_the_targets_output(target, seen):
  """Up to a factor of each place: the state is normed again."""
  head = head_starts.mtp(target, rngs=nnx.Rngs(1))
  ((logits, _),) = unrolled.unroll(
    head, jnp.asarray(TOKENS), seen[1].features,
    positions=jnp.arange(LENGTH)[None], segments=jnp.ones((1, LENGTH), int),
    steps=1,
  )  # fmt: skip
  wanted = np.asarray(seen[1].logits)
  size = np.sqrt((np.asarray(seen[1].features) ** 2).mean(-1, keepdims=True))
  usual = np.sqrt((np.asarray(target.final_norm.scale) ** 2).mean())
  np.testing.assert_allclose(logits, wanted * usual / size, atol=1e-3)
  for name in ("q", "k", "v"):  # which it learns to use
    jax.tree.map(
      np.testing.assert_array_equal,
      nnx.state(getattr(head.layer.attention, name)),
      nnx.state(getattr(target.layers[-1].attention, name)),
    )


def test_eagle1_takes_the_feature_and_the_last_layers_weights(target, seen):
  """Without what reads the embedding it says the feature once more."""
  head = head_starts.eagle1(target, rngs=nnx.Rngs(1))
  np.testing.assert_array_equal(head.fc.weight[:, 8:], np.eye(8))
  last, head_layer = target.layers[-1], head.attention
  for ours, theirs in (
    (head_layer.q, last.attention.q), (head_layer.k, last.attention.k),
    (head_layer.v, last.attention.v), (head.mlp.up, last.mlp.up),
    (head.mlp_norm, last.mlp_norm), (head.lm_head, target.lm_head),
    (head.embed, target.embed),
  ):  # fmt: skip
    jax.tree.map(
      np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs)
    )
  assert np.abs(head.fc.weight[:, :8]).max() > 0  # read from the first step on
  head.fc.weight[...] = head.fc.weight[...].at[:, :8].set(0)
  final = seen[1]
  for logits, state in unrolled.unroll(
    head, jnp.asarray(TOKENS), final.features,
    positions=jnp.arange(LENGTH)[None], segments=jnp.ones((1, LENGTH), int),
    steps=2,
  ):  # fmt: skip
    np.testing.assert_allclose(state, final.features, atol=1e-5)
    np.testing.assert_allclose(logits, final.logits, atol=1e-3)


def test_a_block_takes_the_last_layers_weights(target):
  """It reads the highest of its features; its layers norm queries and keys."""
  head = head_starts.parallel(
    target, num_layers=2, layers=(1, 3), block_size=4, mask_token=6,
    draft_vocab=IDS, rngs=nnx.Rngs(1),
  )  # fmt: skip
  np.testing.assert_array_equal(head.fc.weight[:, 8:], np.eye(8))
  np.testing.assert_array_equal(head.fc.weight[:, :8], 0)
  for ours, theirs in zip(head.layers, target.layers[-2:], strict=True):
    for part in ("mlp", "mlp_norm", "attention_norm"):
      jax.tree.map(
        np.testing.assert_array_equal, nnx.state(getattr(ours, part)),
        nnx.state(getattr(theirs, part)),
      )  # fmt: skip
    for name in ("q", "k", "v", "out"):
      np.testing.assert_array_equal(
        getattr(ours.attention, name).weight[...],
        getattr(theirs.attention, name).weight[...],
      )
    np.testing.assert_array_equal(ours.attention.q_norm.scale[...], 1)
  rows = target.lm_head.weight[...][IDS]
  np.testing.assert_array_equal(head.lm_head.weight[...], rows)
  with pytest.raises(ValueError, match=r"num_layers must be in 1\.\.4, got 5"):
    head_starts.parallel(
      target, num_layers=5, layers=(1,), block_size=4, mask_token=6,
      draft_vocab=None, rngs=nnx.Rngs(1),
    )  # fmt: skip


MIXTURE = Mixture(num_experts=4, num_chosen=2, embed_dim=8, expert_dim=5)


def described_target(feed_forward, *, first=None, attention=(), **frame):
  """Two layers of that block, whose attention has nothing else of its own."""
  layers = described.layers(
    [None, None], norms=frame.pop("norms", "pre"), softcap=None, scale=None
  )
  layers = [
    dataclasses.replace(
      layer, feed_forward=feed_forward,
      attention=dataclasses.replace(
        layer.attention, **dict(rope=Rope(theta=50.0, dim=8)) | dict(attention)
      ),
    )
    for layer in layers
  ]  # fmt: skip
  if first is not None:
    layers[0] = dataclasses.replace(layers[0], feed_forward=first)
  config = TransformerConfig(
    layers=tuple(layers), vocab_size=V, embed_dim=8, max_positions=32, **frame
  )
  return Transformer(config, rngs=nnx.Rngs(0))


def made(kind, target):
  more = dict(layers=(0, 1), draft_vocab=IDS, rngs=nnx.Rngs(1))
  if kind == "eagle3":
    return head_starts.eagle3(target, **more)
  return head_starts.parallel(
    target, num_layers=1, block_size=3, mask_token=6, **more
  ).layers[0]


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_heads_of_mixtures_take_the_attention_and_a_silent_mlp(kind):
  """As wide as the experts of a token together."""
  target = described_target(MIXTURE)
  head = made(kind, target)
  last = target.layers[-1]
  assert head.mlp.up.weight.shape == (2 * 5, 8)
  assert np.abs(head.mlp.up.weight[...]).max() > 0
  np.testing.assert_array_equal(head.mlp.down.weight[...], 0)
  for part in ("attention.out", "attention.q_norm", "mlp_norm"):
    ours, theirs = (operator.attrgetter(part)(x) for x in (head, last))
    jax.tree.map(
      np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs)
    )
  if kind == "eagle3":
    np.testing.assert_array_equal(
      head.attention.q.weight[:, 8:], last.attention.q.weight[...]
    )


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_heads_of_layers_unlike_theirs_add_nothing_at_first(kind):
  """Gemma's norms multiply by one more than their weights."""
  dense = DenseSpec(width=12, activation="gelu_tanh")
  target = described_target(dense, norms="both", norm="rms_plus_one")
  target.final_norm.scale[...] = jnp.arange(8.0)
  head = made(kind, target)
  for part in (head.attention.out, head.mlp.down):
    np.testing.assert_array_equal(part.weight[...], 0)
  if kind == "eagle3":
    np.testing.assert_array_equal(
      head.final_norm.scale[...], 1 + np.arange(8.0)
    )
    assert head.config.layer.attention.rope.theta == 50.0


LATENT = Latent(rank=6, rope_dim=2, still_dim=4, value_dim=10)


@pytest.mark.parametrize(
  ("attention", "size"),
  [
    (dict(rope=Rope(theta=50.0, dim=4)), 8),
    (dict(output_gate=True), 8),
    (dict(latent=LATENT, num_kv_heads=1, head_dim=8, qk_norm=None,
          rope=Rope(theta=50.0, dim=2), scale=0.3), 10),
  ],
)  # fmt: skip
def test_heads_of_attention_unlike_theirs_attend_to_nothing_at_first(
  attention, size
):
  target = described_target(DenseSpec(width=12), attention=attention)
  head = made("eagle3", target)
  assert head.config.layer.attention.head_dim == size
  np.testing.assert_array_equal(head.attention.out.weight[...], 0)
  assert np.abs(head.mlp.down.weight[...]).max() > 0


def test_a_block_whose_layers_have_other_widths_takes_those_of_the_last():
  target = described_target(DenseSpec(width=12), first=DenseSpec(width=20))
  head = head_starts.parallel(
    target, num_layers=2, layers=(1,), block_size=3, mask_token=6,
    draft_vocab=IDS, rngs=nnx.Rngs(1),
  )  # fmt: skip
  first, last = head.layers
  assert first.mlp.down.weight.shape == (8, 12)
  np.testing.assert_array_equal(first.mlp.down.weight[...], 0)
  assert np.abs(last.mlp.down.weight[...]).max() > 0


def test_a_target_whose_last_layer_is_recurrent_has_no_head_like_it():
  delta = DeltaSpec(num_key_heads=1, num_value_heads=1, key_dim=2, value_dim=2)
  config = described_target(DenseSpec(width=12)).config
  first, last = config.layers
  layers = first, dataclasses.replace(last, attention=delta)
  target = Transformer(
    dataclasses.replace(config, layers=layers), rngs=nnx.Rngs(0)
  )
  with pytest.raises(ValueError, match="attend, and the target's last does n"):
    made("eagle3", target)


def test_the_head_of_a_described_dense_layer_begins_as_that_layer():
  target = described_target(DenseSpec(width=12))
  head = made("eagle3", target)
  for name in ("gate", "up", "down"):
    np.testing.assert_array_equal(
      getattr(head.mlp, name).weight[...],
      getattr(target.layers[-1].mlp, name).weight[...],
    )


def test_layers_of_a_block_are_spread_as_published():
  """Qwen3-8B's: five of 36, whose outputs are 1, 9, 17, 25 and 33."""
  assert head_starts.spread_layers(5, 36, ()) == (2, 10, 18, 26, 34)
  assert head_starts.spread_layers(2, 6, (1, 5)) == (1, 5)
  for count, asked in ((2, (0, 3)), (1, (6,)), (2, (3, 3)), (2, (3, 1))):
    with pytest.raises(ValueError, match=r"give config.head.layers, of 1\.\.5"):
      head_starts.spread_layers(count, 6, asked)
  with pytest.raises(ValueError, match="cannot be read at layers 2,2"):
    head_starts.spread_layers(2, 4, ())


def test_layers_that_are_not_there_are_refused():
  assert head_starts.fused_layers(30, ()) == (2, 15, 27)
  assert head_starts.fused_layers(2, (0, 1)) == (0, 1)
  with pytest.raises(ValueError, match="of 3 layers cannot be read"):
    head_starts.fused_layers(3, (0, 3))
  with pytest.raises(ValueError, match=r"give config\.head\.layers"):
    head_starts.fused_layers(2, ())


def test_layers_are_read_in_the_order_of_servers():
  """They collect them one after the other, whatever a file's order is."""
  assert head_starts.fused_layers(3, ()) == (0, 1, 2)
  with pytest.raises(ValueError, match=r"at layers 3,1: .* lowest first"):
    head_starts.fused_layers(6, (3, 1))


def test_eagle1_has_no_layer_like_qwen3s():
  config = described.alter(CONFIG, num_layers=1, qk_norm="head")
  qwens = Transformer(config, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="no norms of queries and keys"):
    head_starts.eagle1(qwens, rngs=nnx.Rngs(1))
