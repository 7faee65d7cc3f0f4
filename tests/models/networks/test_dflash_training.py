"""Blocks that are trained say what the head says when it drafts them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import head_shapes
from models.networks import dflash_training
from models.networks.description import llama_config
from models.networks.dflash import ParallelConfig
from models.networks.dflash2 import DFlash2Config, spread
from models.networks.dspark import DSparkConfig

V, F, LENGTH, DEPTH = 11, 16, 9, 3
LAYERS = llama_config(
  vocab_size=V, embed_dim=8, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=6, mlp_dim=12, max_positions=64, qk_norm="head",
)  # fmt: skip
IDS = [0, 3, 4, 8, 10]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (2, LENGTH + 1)).astype(np.int32)
FEATURES = RNG.standard_normal((2, LENGTH, F)).astype(np.float32)
# The second row holds two documents.
SEGMENTS = np.array([[1] * LENGTH, [1] * 4 + [2] * (LENGTH - 4)], np.int32)
POSITIONS = np.array([range(LENGTH), [*range(4), *range(LENGTH - 4)]], np.int32)
PLACES = np.array([[6, 0, 8, 3], [2, 4, 7, 0]], np.int32)


SIZES = dict(layers=LAYERS, num_fused=2, mask_token=5)
HEADS = {
  "dflash": lambda words: ParallelConfig(
    **SIZES, block_size=DEPTH + 1, draft_vocab_size=words
  ),
  "jetspec": lambda words: ParallelConfig(
    **SIZES, block_size=DEPTH + 1, draft_vocab_size=words, causal=True
  ),
  "dspark": lambda words: DSparkConfig(
    **SIZES, block_size=DEPTH, draft_vocab_size=words, markov="rnn", rank=4,
    confidence=True,
  ),
  "dflash2": lambda words: DFlash2Config(
    **SIZES, block_size=DEPTH + 1, taps=2, group=4, rank=3, num_candidates=4,
    logit_scale=0.5, softcap=9.0,
  ),
}  # fmt: skip


@pytest.mark.parametrize(
  ("kind", "words"),
  [("dflash", None), ("dflash", 5), ("jetspec", None), ("dspark", 5),
   ("dflash2", None)],
)  # fmt: skip
def test_training_blocks_match_drafted_blocks(kind, words):
  """By the shipped model with its cache, which read what stands before it."""
  module = head_shapes.make(HEADS[kind](words), rngs=nnx.Rngs(1))
  # Large weights: laws that differ, attention that looks somewhere.
  nnx.update(
    module, jax.tree.map(lambda x: 12 * x, nnx.state(module, nnx.Param))
  )
  if words:
    module.target_ids = nnx.Variable(jnp.array(IDS))
  actual, more = jax.jit(
    lambda *batch: dflash_training.predict(
      module, *batch, positions=jnp.asarray(POSITIONS),
      segments=jnp.asarray(SEGMENTS),
    )
  )(TOKENS, FEATURES, PLACES)  # fmt: skip
  assert actual.shape == (2, 4, DEPTH, words or V)
  model, params = head_shapes.functions(module)
  predict = jax.jit(model.predict)

  def along(block, tokens):
    """What a Markov head says of a block whose tokens are the text's."""
    state, each = jnp.zeros((1, 1, model.markov.state_size)), []
    for k in range(DEPTH):
      row = jax.tree.map(lambda x, k=k: x[:, k, None], block)
      before = jnp.asarray(tokens[None, k : k + 1])
      logits, state, chance = model.markov.apply(params, row, before, state)
      each.append((logits[0, 0], chance[0, 0]))
    logits, chances = zip(*each, strict=True)
    return np.stack(logits)[None], np.stack(chances)

  for row, some in enumerate(PLACES):
    for i, place in enumerate(some):
      first = place - POSITIONS[row, place]  # of its document
      cache = model.read(
        params, FEATURES[row : row + 1, first : place + 1],
        model.init_cache(1, LENGTH + DEPTH + 1),
      )  # fmt: skip
      newest = TOKENS[row : row + 1, place + 1 : place + 2]
      said, _ = predict(params, jnp.asarray(newest), cache)
      if kind in ("dspark", "dflash2"):
        before = np.minimum(place + 1 + np.arange(DEPTH), LENGTH)
        said, chances = along(said, TOKENS[row, before])
      if kind == "dspark":
        np.testing.assert_allclose(
          jax.nn.sigmoid(more[row, i]), chances, atol=1e-4
        )
      said, ours = np.asarray(said[0]), actual[row, i]
      if kind == "dflash2":
        ours = np.asarray(spread(*(x[row, i] for x in more), V))
        assert ((ours > -np.inf).sum(axis=-1) == 4).all()
        said, ours = (np.where(x == -np.inf, -99, x) for x in (said, ours))
      if words:
        others = np.delete(said, IDS, axis=1)
        assert (others == -np.inf).all()
        said = said[:, IDS]
      np.testing.assert_allclose(ours, said, rtol=1e-4, atol=1e-4)
      assert np.ptp(said) > 0.1
