"""EAGLE's heads on trees."""

import jax.numpy as jnp
import numpy as np
import pytest
from published_heads import RNG, TARGET, H, Published, write

from models.formats import head_checkpoints
from models.networks.eagle import as_feature_model

TOKENS = np.array([[2, 7, 5, 1, 11]])


@pytest.mark.parametrize("name", ["eagle3", "speculators 0.9"])
def test_siblings_share_a_position_without_seeing_each_other(name, tmp_path):
  head = head_checkpoints.load(write(tmp_path / "head", name), TARGET)
  model, params = as_feature_model(head.module)
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
