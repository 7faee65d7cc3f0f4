"""The network of SpecDec's drafter, and its checkpoints; T5's as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5s
from flax import nnx

from models import checkpoints
from models.formats import huggingface
from models.networks import specdec, t5
from models.networks.specdec import BlockConfig, BlockDrafter
from models.networks.t5_config import T5Config
from specjax.types import Inputs

CONFIG = T5Config(
  vocab_size=t5s.VOCAB, embed_dim=24, num_layers=1, num_encoder_layers=2,
  num_heads=4, head_dim=5, mlp_dim=40, activation="gelu_tanh", gated_mlp=True,
  tied_embeddings=False, scale_outputs=False,
)  # fmt: skip
RNG = np.random.default_rng(0)
INPUTS = Inputs(
  tokens=RNG.integers(2, t5s.VOCAB, (2, 9)), lengths=np.array([9, 4])
)
TOKENS = RNG.integers(2, t5s.VOCAB, (2, 8))
LENGTH = np.array([3, 6])


@pytest.fixture(scope="module")
def module():
  return BlockDrafter(BlockConfig(t5=CONFIG, num_masks=4), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def run(module):
  model, params = specdec.as_block_model(module)

  @jax.jit
  def run(params, tokens, length):
    return model.predict(params, tokens, length, model.encode(params, INPUTS))

  return lambda tokens, length, params=params: np.asarray(
    run(params, tokens, length)
  )


def test_masks_read_the_whole_text_and_no_stale_tokens(run):
  plain = run(TOKENS, LENGTH)
  assert plain.shape == (2, 4, t5s.VOCAB)
  stale = np.where(np.arange(8) < LENGTH[:, None], TOKENS, 5)
  np.testing.assert_array_equal(run(stale, LENGTH), plain)
  for place in range(3):  # of row 0: all of its text counts
    other = TOKENS.copy()
    other[0, place] = (other[0, place] + 1) % t5s.VOCAB
    assert np.abs(run(other, LENGTH)[0] - plain[0]).max() > 1e-3
    np.testing.assert_array_equal(run(other, LENGTH)[1], plain[1])


def test_mask_attention_is_bidirectional(module, run):
  state = nnx.state(module)
  changed = jax.tree.map(lambda x: x, state)
  changed["mask"] = changed["mask"].replace(state["mask"][...].at[3].add(1.0))
  moved = run(TOKENS, LENGTH, changed) - run(TOKENS, LENGTH)
  assert np.abs(moved[:, 0]).max() > 1e-4


def test_revealed_token_replaces_its_mask(module):
  memory = module.encode(INPUTS)
  shown = np.array([[True, False, False, False]] * 2)
  revealed = RNG.integers(2, t5s.VOCAB, (2, 4))
  actual = module(TOKENS, LENGTH, memory, revealed=revealed, shown=shown)
  longer = TOKENS.copy()
  longer[np.arange(2), LENGTH] = revealed[:, 0]
  # The same text, read one token further by a model of one mask less.
  mask = np.asarray(nnx.state(module)["mask"][...])
  few = BlockDrafter(BlockConfig(t5=CONFIG, num_masks=3), rngs=nnx.Rngs(0))
  nnx.update(few.t5, nnx.state(module.t5))
  few.mask = nnx.Param(jnp.asarray(mask[1:]))
  expected = few(longer, LENGTH + 1, memory)
  np.testing.assert_allclose(actual[:, 1:], expected, atol=1e-4)


def test_saved_drafter_round_trips_and_is_not_loaded_as_a_model(
  module, run, tmp_path
):
  specdec.save(module, tmp_path)
  loaded = specdec.load(str(tmp_path))
  assert loaded.config == module.config
  assert specdec.is_block(tmp_path)
  np.testing.assert_array_equal(
    run(TOKENS, LENGTH, loaded.params), run(TOKENS, LENGTH)
  )
  with pytest.raises(ValueError, match="t5_block"):
    checkpoints.load(str(tmp_path), dtype=None, mesh=None, sharding=None)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_t5_loads_in_transformers(tmp_path, tied):
  config = T5Config(
    **{**vars(CONFIG), "tied_embeddings": tied, "scale_outputs": tied}
  )
  module = t5.T5(config, rngs=nnx.Rngs(3))
  huggingface.save_t5(module, tmp_path)
  theirs = t5s.read(tmp_path)
  model, params = t5.as_language_model(module)
  logits = jax.jit(
    lambda p: model.apply(p, TOKENS, model.new_cache(p, 2, 9, INPUTS))[0].logits
  )(params)
  expected = t5s.logits(theirs, INPUTS.tokens, INPUTS.lengths, TOKENS)
  assert t5s.relative_error(logits, expected) < 1e-4
  assert huggingface.read_config(str(tmp_path)) == T5Config(
    **{**vars(config), "tied_embeddings": True}
  )
