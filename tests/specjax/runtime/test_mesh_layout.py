"""Placement of the loop's state on a mesh."""

import jax
import jax.numpy as jnp
import mesh_decoding
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from specjax.runtime import compilation
from specjax.runtime.mesh import MeshDecoder


@pytest.mark.usefixtures("x64")  # as `mesh_decoding` runs
@pytest.mark.parametrize("how", ["eagle3", "dflash", "paths"])
def test_caches_are_sharded_like_their_models(how):
  """In the state of EAGLE's drafter the cache is one part of several."""
  make = (
    mesh_decoding.head_pair
    if how in mesh_decoding.HEADS
    else mesh_decoding.network_pair
  )
  # Shapes are all it takes: no program is compiled.
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  mesh_decoding.DRAFTS["1x1"] = "as the target"
  with jax.set_mesh(mesh):
    decoder, params = make(mesh, how)
    state = jax.eval_shape(
      lambda params: decoder.init(
        params, jnp.zeros((2, 3), jnp.int32), jnp.array([3, 3]),
        jax.random.key(0), buffer_length=8, max_new_tokens=2,
      ),
      params,
    )  # fmt: skip
  mapped = MeshDecoder.of(decoder, mesh=mesh)
  of_target = P(None, None, ("model",), None, None)
  of_draft = P(None, None, "model", None, None)
  actual = compilation._shardings((of_target, of_draft), mapped, state)
  whole = actual.drafter_state
  cache = whole.caches[0] if how == "eagle3" else whole
  for buffer in (*cache.keys, *cache.values):
    assert buffer.spec == P(None, "data", "model", None, None)
  for buffer in actual.target_cache.keys:
    assert buffer.spec == P(None, "data", ("model",), None, None)
  assert cache.length.spec == P("data")
  if how == "eagle3":
    assert whole.logits.spec == P("data")
