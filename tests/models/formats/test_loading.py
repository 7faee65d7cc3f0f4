"""Memory that loading takes, and what weights are rounded to meanwhile."""

import gc
import tracemalloc

import ggufs
import jax
import numpy as np
import pytest
import references
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from jax.sharding import AxisType

from models import checkpoints, sharding
from models.formats import gguf, loading, weights
from models.networks.quantized import Quantization

INT8 = Quantization(dtype="int8", embedding=True)
SETTINGS = references.GATED | dict(
  hidden_size=128, intermediate_size=2048, num_hidden_layers=8
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return ggufs.write(
    tmp_path_factory.mktemp("loading") / "x.gguf",
    references.make("llama", SETTINGS),
    kinds=lambda name, shape: Kind.Q8_0 if len(shape) == 2 else Kind.F32,
  )


def load(path, how, on_mesh):
  mesh = jax.make_mesh(
    (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  where = dict(mesh=mesh, sharding=sharding.Sharding()) if on_mesh else {}
  return checkpoints.load(str(path), weights=how, **where)


def live():
  """Bytes of all of JAX's arrays."""
  return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("how", [INT8, "published"])
def test_loading_never_holds_the_whole_model_in_float32(
  path, how, on_mesh, monkeypatch
):
  load(path, how, on_mesh)  # what is traced and compiled stays
  gc.collect()
  real, most, before = weights.part, [0], live()

  def part(*args):
    most[0] = max(most[0], live() - before)
    return real(*args)

  laid_out, sizes = checkpoints.lay_out, []

  def lay_out(layer):  # as on a GPU; what is replaced is freed
    with monkeypatch.context() as gpu:
      gpu.setattr(jax, "default_backend", lambda: "gpu")
      laid_out(layer)
    sizes.append(live() - before)

  monkeypatch.setattr(checkpoints, "lay_out", lay_out)
  monkeypatch.setattr(weights, "part", part)
  monkeypatch.setattr(loading, "_NUMBERS", 2**12)
  tracemalloc.start()
  try:
    network = load(path, how, on_mesh)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  parameters = jax.tree.leaves(network.params)
  stored = sum(x.nbytes for x in parameters)
  whole = 4 * sum(x.size for x in parameters)
  assert whole > 2.5 * stored
  largest = 4 * max(x.size for x in parameters)
  assert 0 < most[0] < 1.02 * stored + largest  # read as float32
  assert on_mesh or 0 < max(sizes) < 1.01 * stored
  assert peak < stored + whole / 4


@pytest.mark.parametrize("how", [None, INT8])
def test_device_takes_over_what_was_read(path, how, monkeypatch):
  made, empty = [], loading._empty
  record = lambda x: made.append(empty(x)) or made[-1]
  monkeypatch.setattr(loading, "_empty", record)
  params = nnx.state(loading.load(gguf.source(str(path)), form=how))
  held = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
  assert held == {x.ctypes.data for x in made}


def test_quantizing_while_loading_matches_quantizing_after(path):
  form = Quantization(dtype="int4", group=32)
  expected = down(load(path, None, False).quantize(form).params["layers"][3])
  alone, on_mesh = (load(path, form, on_mesh) for on_mesh in (False, True))
  assert alone.weights == on_mesh.weights == form
  of_all = down(on_mesh.params["layers"]["kind0"])
  for actual in (down(alone.params["layers"][3]), of_all[3]):
    np.testing.assert_array_equal(
      np.asarray(actual.values, int), np.asarray(expected.values, int)
    )
    np.testing.assert_allclose(actual.scales, expected.scales, rtol=1e-6)


def down(layer):
  """The last weight of an MLP."""
  return layer["mlp"]["down"]["weight"].get_value()
