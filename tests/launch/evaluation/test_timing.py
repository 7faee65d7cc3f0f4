"""Timing of loops, and what the loops do."""

import jax.numpy as jnp
import numpy as np
import toys

from launch.evaluation import timing


def test_passes_loop_writes_after_the_cache_length_and_keeps_it():
  model = toys.table_model(5)
  caches = {
    who: model.init_cache(2, 9).replace(length=jnp.full((2,), 3 + place))
    for place, who in enumerate(("target", "draft"))
  }
  loop = timing.passes_loop(
    {"target": (model, "target"), "draft": (model, "draft")},
    (("draft", 2), ("target", 4)),
  )
  params = dict.fromkeys(caches, toys.table(5, seed=0, scale=1.0) + 9)
  for repeats, written in ((0, 0), (1, 1)):
    copies = {who: cache.replace() for who, cache in caches.items()}
    actual = loop(params, copies, repeats)
    for place, (who, fed) in enumerate((("target", 4), ("draft", 2))):
      np.testing.assert_array_equal(actual[who].length, 3 + place)
      places = np.asarray(actual[who].positions[0]) > 0
      assert places.sum() == written * fed
      assert places[3 + place : 3 + place + fed * written].all()
    caches = actual
  # The draft was fed from token 0 on, and the target from what came of it, both
  # different tokens.
  fed = lambda who, row: actual[who].keys[0][row, 0, :, 0].astype(int)
  np.testing.assert_array_equal(fed("draft", 0)[4:6], [0, 2])
  np.testing.assert_array_equal(fed("draft", 1)[4:6], [4, 1])
  np.testing.assert_array_equal(fed("target", 0)[3:7], [1, 3, 0, 2])
