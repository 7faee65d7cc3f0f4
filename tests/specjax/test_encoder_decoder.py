"""Encoder-decoders in the loop: T5 drafts, and SpecDec's blocks, exactly.

The networks are real ones of three tokens in float64, so that every draft of a
round can be enumerated through all of the shipped code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from models.networks import specdec, t5
from models.networks.specdec import BlockConfig, BlockDrafter
from models.networks.t5_config import T5Config
from specjax import drafters, exact, random
from specjax.tree import Tree, chain, paths
from specjax.types import Inputs, Params
from specjax.warp import make_sampling

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, ROWS, MASKS = 3, 3, 3
CONFIG = T5Config(
  vocab_size=VOCAB, embed_dim=8, num_layers=1, num_encoder_layers=1,
  num_heads=2, head_dim=3, mlp_dim=12,
  gated_mlp=True, tied_embeddings=False, scale_outputs=False,
)  # fmt: skip
RNG = np.random.default_rng(0)
INPUTS = Inputs(
  tokens=RNG.integers(0, VOCAB, (ROWS, 7), np.int32),
  lengths=np.array([7, 2, 4], np.int32),
)
PROMPTS = RNG.integers(0, VOCAB, (ROWS, 4), np.int32)
LENGTHS = np.array([1, 4, 2], np.int32)
FORK = Tree((-1, 0, 0, 1, 1))


def moved(params, seed, by):
  """Parameters a little off, so that laws are neither equal nor uniform."""
  leaves, shape = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(
    shape, [x + by * rng.standard_normal(x.shape) for x in leaves]
  )


@functools.cache
def t5_model(seed):
  module = t5.T5(CONFIG, dtype=jnp.float64, rngs=nnx.Rngs(0))
  model, params = t5.as_language_model(module)
  params = moved(params, 0, 0.3)
  return model, moved(params, seed, 0.15) if seed else params


@functools.cache
def block(seed=7, by=0.1):
  config = BlockConfig(t5=CONFIG, num_masks=MASKS)
  module = BlockDrafter(config, dtype=jnp.float64, rngs=nnx.Rngs(1))
  model, params = specdec.as_block_model(module)
  # Its layers are the target's, which read masks as well as anything.
  params["t5"] = moved(t5_model(0)[1], seed, by)
  return model, params


def make(kind, tree, rule, **more):
  """A decoder whose drafter is a T5 or a block, and the parameters."""
  target, params = t5_model(0)
  if kind == "model":
    model, of_draft = t5_model(5)
    drafter = drafters.model(model, tree=tree, vocab_size=VOCAB, **more)
  elif kind == "block":
    model, of_draft = block()
    drafter = drafters.specdec(model, tree=tree, **more)
  else:
    drafter, of_draft = None, None
  decoder = specjax.make_decoder(target, drafter=drafter, rule=rule)
  return decoder, Params(target=params, draft=of_draft)


def start(decoder, params, rows, *, temperature=1.0, budget=8):
  count = len(rows)
  return jax.jit(decoder.init, static_argnames="buffer_length")(
    params, PROMPTS[rows], LENGTHS[rows],
    random.row_keys(jax.random.key(0), jnp.asarray(rows)),
    buffer_length=14, max_new_tokens=np.int32(budget),
    sampling=make_sampling(count, temperature=temperature),
    inputs=jax.tree.map(lambda x: x[rows], INPUTS),
  )  # fmt: skip


LOSSLESS = [
  ("model", FORK, "recursive", dict(siblings="without_replacement")),
  ("block", chain(3), "block", {}),
  *(
    pytest.param(*case, {}, marks=pytest.mark.slow)
    for case in (
      ("model", chain(2), "token"),
      ("block", chain(2), "token"),
      ("block", paths(2, 2), "recursive"),
    )
  ),
]


@pytest.mark.parametrize(("kind", "tree", "rule", "more"), LOSSLESS)
def test_round_output_matches_target_distribution(kind, tree, rule, more):
  decoder, params = make(kind, tree, rule, **more)
  state = start(decoder, params, [1])
  # A round before has left what was rejected in the caches.
  state = jax.jit(decoder.step)(params, state)[0]
  law, expected = exact.round_law(decoder, params, state)
  assert law.output.sum() == pytest.approx(1, abs=1e-9)
  assert 0.1 < law.expected_accepted < tree.max_depth - 0.1
  np.testing.assert_allclose(law.output, expected, atol=1e-10)


@pytest.mark.parametrize("kind", ["model", "block"])
def test_drafters_with_inputs_pass_check_drafter(kind):
  decoder, params = make(kind, FORK, "recursive")
  target, _ = t5_model(0)
  checked = exact.check_drafter(
    decoder.drafter, params, target, vocab_size=VOCAB, prompts=PROMPTS,
    inputs=INPUTS,
  )  # fmt: skip
  assert checked.method == "exact"
  assert checked.error < 1e-10


def texts(state):
  return [
    np.asarray(state.tokens[r, : state.length[r]]).tolist()
    for r in range(len(state.length))
  ]


@pytest.mark.parametrize(
  ("kind", "tree", "rule"),
  [pytest.param("model", FORK, "recursive", marks=pytest.mark.slow),
   ("block", chain(3), "block")],
)  # fmt: skip
def test_row_output_is_same_alone_batched_and_refilled(kind, tree, rule):
  decoder, params = make(kind, tree, rule)
  generate = jax.jit(decoder.generate)
  alone = [
    texts(generate(params, start(decoder, params, [r])))[0] for r in range(ROWS)
  ]
  state = start(decoder, params, [0, 1, 2])
  assert texts(generate(params, state)) == alone
  # Row 2 gives way to the prompt and the input of row 0.
  state = jax.jit(decoder.steps)(params, state, 2)
  state = jax.jit(decoder.admit)(
    params, state, 2, PROMPTS[0], LENGTHS[0],
    random.row_keys(jax.random.key(0), jnp.array([0]))[0],
    max_new_tokens=np.int32(8),
    inputs=jax.tree.map(lambda x: x[:1], INPUTS),
  )  # fmt: skip
  assert texts(generate(params, state)) == [alone[0], alone[1], alone[0]]
