"""EAGLE's heads on trees and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from published_heads import RNG, TARGET, H, Published, write

from models import sharding
from models.formats import head_checkpoints
from models.networks.eagle import as_feature_model

TOKENS = np.array([[2, 7, 5, 1, 11]])


def load(path, name):
  return head_checkpoints.load(write(path / "head", name), TARGET).module


@pytest.mark.parametrize("name", ["eagle3", "speculators 0.9"])
def test_two_children_of_one_node_stand_at_one_position_and_do_not_meet(
  name, tmp_path
):
  model, params = as_feature_model(load(tmp_path, name))
  hidden = RNG.standard_normal((1, 3, H)).astype(np.float32)
  _, states, cache = model.apply(
    params, jnp.asarray(TOKENS[:, :3]), hidden, model.init_cache(1, 16)
  )
  children = jnp.broadcast_to(states[:, -1:], (1, 2, H))
  logits, _, _ = model.apply(
    params, jnp.asarray(TOKENS[:, 3:]), children, cache,
    positions=jnp.array([[3, 3]]), mask=np.eye(2, dtype=bool),
  )  # fmt: skip
  for child in range(2):
    tokens = np.array([*TOKENS[0, :3], TOKENS[0, 3 + child]])
    fed = np.concatenate([hidden[0], np.asarray(states[0, -1:])])
    expected, _ = Published(name)(tokens, fed)
    np.testing.assert_allclose(
      logits[0, child], expected[3], atol=2e-3, rtol=2e-3
    )


@pytest.mark.parametrize("name", ["eagle", "speculators 0.9"])
def test_layers_that_share_one_cache_say_what_those_with_their_own_say(
  name, tmp_path
):
  """As they lie on a mesh; here it is of one device."""
  module = load(tmp_path, name)
  plain, params = as_feature_model(module)
  rules = sharding.Sharding()
  meshed, _ = as_feature_model(module, sharding=rules)
  mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
  hidden = RNG.standard_normal((1, 5, H)).astype(np.float32)
  fed = params, jnp.asarray(TOKENS), hidden
  expected, _, cache = plain.apply(*fed, plain.init_cache(1, 8))
  with jax.set_mesh(mesh):
    logits, _, stacked = jax.jit(meshed.apply)(*fed, meshed.init_cache(1, 8))
  assert stacked.keys[0].shape[0] == len(cache.keys)
  np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=1e-3)
  np.testing.assert_allclose(
    stacked.values[0], jnp.stack(cache.values), atol=1e-3, rtol=1e-3
  )
