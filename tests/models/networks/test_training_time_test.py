"""The unrolled steps of training say what the head says when it drafts."""

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import head_shapes
from models.networks import eagle, training_time_test
from models.networks.description import llama_config
from models.networks.eagle import EagleConfig
from models.networks.mtp import MtpConfig
from models.networks.params import split

LAYER = llama_config(
  vocab_size=11, embed_dim=8, num_layers=1, num_heads=4, num_kv_heads=2,
  head_dim=6, mlp_dim=12, max_positions=64,
)  # fmt: skip
ROWS, LENGTH, STEPS = 2, 9, 4
IDS = [0, 3, 4, 8, 10]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 11, (ROWS, LENGTH + 1)).astype(np.int32)
# The second row holds two documents.
SEGMENTS = np.array([[1] * LENGTH, [1] * 4 + [2] * (LENGTH - 4)], np.int32)
POSITIONS = np.array([range(LENGTH), [*range(4), *range(LENGTH - 4)]], np.int32)
HEADS = {
  "eagle": EagleConfig(layers=LAYER, generation=1),
  "eagle3": EagleConfig(
    layers=described.alter(LAYER, qk_norm="head"), generation=3,
    num_fused=3, draft_vocab_size=len(IDS),
  ),
  "eagle3.1": EagleConfig(
    layers=LAYER, generation=3, num_fused=2, fc_norm=True,
    norm_output=True, norm_before_residual=True,
  ),
  "two layers": EagleConfig(
    layers=described.alter(LAYER, num_layers=2), generation=3,
    num_fused=2,
  ),
  "windows": EagleConfig(
    layers=described.alter(LAYER, num_layers=2, windows=(3, None)),
    generation=3, num_fused=2,
  ),
  "mtp": MtpConfig(
    layers=described.alter(LAYER, qk_norm="head")
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_unrolled_training_steps_match_drafting(x64, name):
  """Drafted one by one by the shipped model, with its cache, on a document."""
  module = head_shapes.make(HEADS[name], dtype=jnp.float64, rngs=nnx.Rngs(1))
  # Large weights: laws that differ, attention that looks somewhere.
  state = jax.tree.map(lambda x: 8 * x, nnx.state(module, nnx.Param))
  nnx.update(module, state)
  ids = range(11)
  if HEADS[name].draft_vocab_size:
    ids = IDS
    module.target_ids = nnx.Variable(jnp.array(IDS))
  features = RNG.standard_normal((ROWS, LENGTH, HEADS[name].num_features))
  merge, params = split(module)
  # What heads with windows are trained with does not move those later.
  steps = 1 if name == "windows" else STEPS

  @jax.jit
  def both_at_once(params):
    return list(
      training_time_test.unroll(
        merge(params), jnp.asarray(TOKENS), jnp.asarray(features),
        positions=jnp.asarray(POSITIONS), segments=jnp.asarray(SEGMENTS),
        steps=steps,
      )
    )  # fmt: skip

  actual = both_at_once(params)
  model, _ = eagle.as_feature_model(module)
  read = jax.jit(model.apply)
  compared = 0
  for row, first, end in ((0, 0, LENGTH + 1), (1, 4, LENGTH + 1), (1, 0, 4)):
    text = TOKENS[row : row + 1, first:end]
    hidden = model.fuse(params, features[row : row + 1, first:end])
    for place in range(text.shape[1] - 2):
      cache = model.init_cache(1, LENGTH + STEPS)
      state = hidden
      for step in range(min(steps, text.shape[1] - 2 - place)):
        fed = text[:, 1 : place + 2] if step == 0 else text[:, place + 1 + step]
        fed = fed.reshape(1, -1)
        given = state[:, : place + 1] if step == 0 else state
        logits, state, cache = read(params, fed, given, cache)
        state = state[:, -1:]
        ours = actual[step][0][row, first + place]
        theirs = np.asarray(logits[0, -1])
        np.testing.assert_allclose(
          ours, theirs[list(ids)], rtol=1e-4, atol=1e-4
        )
        assert np.ptp(ours) > 0.1
        np.testing.assert_allclose(
          actual[step][1][row, first + place], state[0, 0], rtol=1e-4, atol=1e-4
        )
        compared += 1
  assert compared == (14 if name == "windows" else 39)


def test_p_eagle_training_masks_match_drafting(x64):
  """Each step at fewer of the places; by the shipped model, with its cache."""
  config = EagleConfig(
    layers=described.alter(LAYER, num_layers=2), generation=3, num_fused=2,
    draft_vocab_size=len(IDS), mask_token=5,
  )  # fmt: skip
  module = head_shapes.make(config, dtype=jnp.float64, rngs=nnx.Rngs(1))
  state = jax.tree.map(lambda x: 8 * x, nnx.state(module, nnx.Param))
  nnx.update(module, state)
  module.target_ids = nnx.Variable(jnp.array(IDS))
  features = RNG.standard_normal((ROWS, LENGTH, config.num_features))
  places = np.array([RNG.permutation(LENGTH)[:7] for _ in range(ROWS)])
  merge, params = split(module)
  actual = jax.jit(
    lambda params: list(
      training_time_test.unmask(
        merge(params), jnp.asarray(TOKENS), jnp.asarray(features),
        jnp.asarray(places), positions=jnp.asarray(POSITIONS),
        segments=jnp.asarray(SEGMENTS), steps=STEPS,
      )
    )
  )(params)  # fmt: skip
  assert actual[0][1] is None
  for logits, some in actual[1:]:
    np.testing.assert_array_equal(some, places[:, : logits.shape[1]])
  # int(0.7 * 8), int(0.49 * 7) and int(0.343 * 6)
  assert [x.shape[1] for x, _ in actual] == [LENGTH, 5, 3, 2]
  model, _ = eagle.as_feature_model(module)
  token, vector = model.mask(params)
  unknown = model.fuse(params, vector[None, None])
  read = jax.jit(model.apply)
  for row in range(ROWS):
    for place in range(LENGTH):
      first = place - POSITIONS[row, place]  # of its document
      hidden = model.fuse(params, features[row : row + 1, first : place + 1])
      fed = TOKENS[row : row + 1, first + 1 : place + 2]
      logits, _, cache = read(
        params, fed, hidden, model.init_cache(1, LENGTH + STEPS)
      )
      masks = (1, STEPS - 1)
      more, *_ = read(
        params, jnp.full(masks, token),
        jnp.broadcast_to(unknown, (*masks, unknown.shape[-1])), cache,
      )  # fmt: skip
      theirs = np.concatenate([logits[0, -1:], more[0]])[:, IDS]
      assert np.ptp(theirs, axis=1).min() > 0.1
      for step, (ours, some) in enumerate(actual):
        at = [place] if some is None else np.flatnonzero(some[row] == place)
        for i in at:
          np.testing.assert_allclose(ours[row, i], theirs[step], atol=1e-6)
