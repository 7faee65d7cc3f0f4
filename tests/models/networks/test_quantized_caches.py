"""Caches in eight bits: values by definition, and laws of a text alone."""

import dataclasses

import described
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from models.networks import stacked
from models.networks.description import llama_config
from models.networks.transformer import Transformer, as_language_model
from specjax import cache as cache_lib
from specjax import quantized_cache

RNG = np.random.default_rng(0)
CONFIG = llama_config(
  vocab_size=61, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=64, max_positions=64,
)  # fmt: skip
_FIRST, _SECOND = described.layers((None, None), norms="pre", softcap=None)
_READS = dataclasses.replace(_SECOND.attention, source=0)
# Whose second layer attends to the keys of the first.
SHARED = described.alter(
  CONFIG, layers=(_FIRST, dataclasses.replace(_SECOND, attention=_READS))
)
TEXT = RNG.integers(0, 61, (2, 6))


@pytest.mark.parametrize("kind", quantized_cache.KINDS)
def test_slots_are_quantized_independently_by_definition(kind):
  rows = RNG.standard_normal((2, 2, 3, 8)).astype(np.float32)
  rows[0, 0, 1] = 0
  rows[1, 1, 2, 4] = np.nan
  rows[1, 0, 0, 0] = np.inf
  like = quantized_cache.zeros((2, 2, 5, 8), jnp.float32, kind)
  actual, stored = cache_lib.as_stored(jnp.asarray(rows), like)
  assert stored.values.dtype == quantized_cache.KINDS[kind][0]
  largest = np.abs(rows).max(-1, keepdims=True)
  scales = largest / np.float32({"int8": 127, "fp8": 448}[kind])
  whole = np.isfinite(largest[..., 0])
  values = np.where(whole[..., None], rows, 0) / np.where(
    scales == 0, 1, scales
  )
  if kind == "fp8":
    values = values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  expected = np.round(values) if kind == "int8" else values
  assert whole.sum() == 10
  np.testing.assert_allclose(
    actual[whole], expected[whole] * scales[whole], rtol=1e-6
  )
  assert np.isnan(actual)[~whole].all()


def model_of(kind, is_stacked, config=CONFIG):
  """A model with such a cache, as one that tests call and its parameters."""
  make = nnx.jit(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  module = make()
  if is_stacked:
    model = stacked.as_language_model(config, stored=kind)
    return model, stacked.stack(module)
  return as_language_model(module, stored=kind)


@pytest.mark.parametrize(
  ("kind", "is_stacked", "config"),
  [
    ("int8", False, CONFIG), ("int8", False, SHARED),
    pytest.param("fp8", True, CONFIG, marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_tree_pass_matches_decoding_each_path(kind, is_stacked, config):
  """After which one path is kept, and what follows is the same too."""
  model, params = model_of(kind, is_stacked, config)
  ancestors = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]])
  paths = [(0, 1), (0, 2, 3)]

  def both(params, text, nodes, after):
    # Rows of one and of three tokens of text.
    start = jnp.array([1, 3])
    _, cache = model.apply(params, text, model.init_cache(2, 12))
    cache = cache.replace(length=start)
    depth = np.array([0, 1, 1, 2])
    output, cache = model.apply(
      params, nodes, cache, positions=start[:, None] + depth,
      mask=ancestors.astype(bool),
    )  # fmt: skip
    path, count = jnp.array([[0, 2, 3], [0, 1, 1]]), jnp.array([3, 2])
    cache = cache_lib.keep_path(cache, start, path, start + count, nodes=4)
    last, _ = model.apply(params, after, cache)
    return output.logits, last.logits[:, 0]

  def one_by_one(params, texts, lengths):
    cache = model.init_cache(len(texts), 12)

    def feed(cache, token):
      output, cache = model.apply(params, token[:, None], cache)
      return cache, output.logits[:, 0]

    _, logits = jax.lax.scan(feed, cache, texts.T)
    return logits[lengths - 1, jnp.arange(len(texts))]

  nodes, after = TEXT[:, 2:], (TEXT[:, :1] + 7) % 61
  logits, last = jax.jit(both)(params, TEXT[:, :4], nodes, after)
  texts, lengths, expected = np.zeros((6, 8), int), [], []
  for row, start in enumerate((1, 3)):
    kept = [0, 2, 3] if row == 0 else [0, 1]
    for path in (*paths, None):
      tail = nodes[row, list(path or kept)]
      more = [] if path else [after[row, 0]]
      text = [*TEXT[row, :start], *tail, *more]
      texts[len(lengths), : len(text)] = text
      lengths.append(len(text))
      expected.append(logits[row, path[-1]] if path else last[row])
  actual = jax.jit(one_by_one)(params, texts, np.array(lengths))
  np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_row_view_reads_and_writes_a_single_row(is_stacked):
  shape = (2, 3, 2, 7, 4) if is_stacked else (3, 2, 7, 4)
  buffer = quantized_cache.zeros(shape, jnp.float32, "int8")
  rows = jnp.asarray(RNG.standard_normal((*shape[:-2], 2, 4)), jnp.float32)
  _, stored = cache_lib.as_stored(rows, buffer)
  start = jnp.array([1, 0, 4])
  buffer = cache_lib.write_rows(buffer, stored, start)
  read = lambda b, at: cache_lib.as_read(cache_lib.read_rows(b, at, 2))
  whole = read(buffer, start)
  np.testing.assert_array_equal(whole, quantized_cache.load(stored))
  one = jax.tree.map(lambda b: cache_lib.RowsView(b, (jnp.array(2),)), buffer)
  actual = read(one, jnp.array([4]))
  np.testing.assert_array_equal(actual[..., 0, :, :, :], whole[..., 2, :, :, :])
  part = jax.tree.map(lambda x: x[..., 1:2, :, :, :], stored)
  one = cache_lib.write_rows(one, part, jnp.array([0]))
  actual = read(one, jnp.array([0]))
  np.testing.assert_array_equal(actual[..., 0, :, :, :], whole[..., 1, :, :, :])
