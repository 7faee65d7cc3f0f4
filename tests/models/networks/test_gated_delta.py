"""Layers of the gated delta rule over trees: the recurrence along each path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import gated_delta
from models.networks.description import (
  AttentionSpec,
  DeltaSpec,
  DenseSpec,
  LayerSpec,
  TransformerConfig,
)
from models.networks.gated_delta import GatedDelta
from models.networks.transformer import after_pass, delta_memory
from specjax import cache as cache_lib
from specjax import recurrent
from specjax.recurrent import Recurrent

pytestmark = pytest.mark.usefixtures("x64")

SPEC = DeltaSpec(
  num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=4
)
WIDTH, ROWS, NODES, ROUNDS = 6, 2, 7, 6
EXACT = 1e-12


def layer():
  """A layer none of whose parameters could be left out unnoticed."""
  full = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2)
  block = DenseSpec(width=4)
  config = TransformerConfig(
    layers=tuple(
      LayerSpec(attention=a, feed_forward=block) for a in (SPEC, full)
    ),
    vocab_size=3, embed_dim=WIDTH, max_positions=99, norm_eps=1e-5,
    tied_embeddings=True,
  )  # fmt: skip
  module = GatedDelta(config, jnp.float64, index=0, rngs=nnx.Rngs(0))
  graphdef, state = nnx.split(module)
  rng = np.random.default_rng(1)
  state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), state)
  return nnx.merge(graphdef, state)


class Slow:
  """The recurrence, a token at a time, for one path."""

  def __init__(self, module):
    get = lambda x: np.asarray(x[...])
    self.weights = {
      n: get(getattr(module, n).weight)
      for n in ("qkv", "z", "a", "b", "delta_out")
    }
    self.conv, self.norm = get(module.conv), get(module.norm)
    self.log_decay = get(module.log_decay)
    self.step_bias = get(module.step_bias)
    s = SPEC
    self.states = np.zeros((s.num_value_heads, s.key_dim, s.value_dim))
    self.inputs = [np.zeros(len(self.conv))] * (s.kernel - 1)

  def copy(self):
    other = object.__new__(Slow)
    other.__dict__.update(self.__dict__)
    other.states, other.inputs = self.states.copy(), [*self.inputs]
    return other

  def feed(self, x):
    """`[D] -> [D]`."""
    s, w = SPEC, self.weights
    self.inputs = [*self.inputs[1 - s.kernel :], w["qkv"] @ x]
    mixed = sum(
      self.conv[:, i] * y for i, y in enumerate(self.inputs[-s.kernel :])
    )
    mixed = mixed / (1 + np.exp(-mixed))
    by_key_head = mixed.reshape(s.num_key_heads, -1)
    strength = 1 / (1 + np.exp(-(w["b"] @ x)))
    gates = -np.exp(self.log_decay) * np.log1p(
      np.exp(w["a"] @ x + self.step_bias)
    )
    z = (w["z"] @ x).reshape(s.num_value_heads, -1)
    served, said = s.num_value_heads // s.num_key_heads, []
    unit = lambda y: y / np.sqrt((y**2).sum() + 1e-6)
    for head in range(s.num_value_heads):
      q, k, values = np.split(
        by_key_head[head // served], [s.key_dim, 2 * s.key_dim]
      )
      q, k = unit(q) / np.sqrt(s.key_dim), unit(k)
      v = values.reshape(served, -1)[head % served]
      state = np.exp(gates[head]) * self.states[head]
      state = state + np.outer(k, strength[head] * (v - state.T @ k))
      self.states[head] = state
      o = state.T @ q
      o = o / np.sqrt((o**2).mean() + 1e-5) * self.norm
      said.append(o * z[head] / (1 + np.exp(-z[head])))
    return w["delta_out"] @ np.concatenate(said)


def random_tree(rng):
  parents = np.array([-1, *(rng.integers(0, i) for i in range(1, NODES))])
  tree = np.eye(NODES, dtype=bool)
  for i in range(1, NODES):
    tree[i] |= tree[parents[i]]
  return parents, tree


def passes(graphdef):
  """A pass of the layer: what it says, and what is remembered then."""

  @jax.jit
  def run(params, held, length, x, tree):
    cache = cache_lib.Cache(
      keys=(), values=(), positions=None, length=jnp.asarray(length),
      recurrent=held,
    )  # fmt: skip
    seen = (
      gated_delta.chain(x.shape[1], None, SPEC.kernel, cache)
      if tree is None
      else gated_delta.from_mask(tree, SPEC.kernel, cache)
    )
    out, memory = nnx.merge(graphdef, params)(
      x, None, seen, held.layers[0], None
    )
    return out, after_pass(cache, (memory,), cache.length, x.shape[1])

  return run


def errors(*, chain=False, more=0):
  """Largest errors of outputs and of states over rounds of random trees.

  Args:
    chain: chains instead.
    more: pending tokens that there is room for beside those of a pass.
  """
  rng, module = np.random.default_rng(0), layer()
  graphdef, params = nnx.split(module)

  look = passes(graphdef)

  @jax.jit
  def keep(held, start, path):
    return recurrent.keep_path(held, start, path)

  memory = delta_memory(SPEC, ROWS, jnp.float64)
  held = Recurrent(base=jnp.zeros(ROWS, jnp.int32), layers=(memory,))
  held = recurrent.widen(held, NODES + more)
  length, slow = np.zeros(ROWS, np.int32), [Slow(module) for _ in range(ROWS)]
  worst = 0.0
  for _ in range(ROUNDS):
    x = rng.normal(size=(ROWS, NODES, WIDTH))
    parents, trees = zip(*(random_tree(rng) for _ in range(ROWS)), strict=True)
    mask = np.stack(trees)
    if chain:
      parents = [np.arange(NODES) - 1] * ROWS
      trees, mask = [np.tri(NODES, dtype=bool)] * ROWS, None
    out, held = look(params, held, length, x, mask)
    paths = np.zeros((ROWS, NODES), np.int32)
    count = np.zeros(ROWS, np.int32)
    for row in range(ROWS):
      after = {-1: slow[row]}
      for node in range(NODES):
        after[node] = after[parents[row][node]].copy()
        said = after[node].feed(x[row, node])
        worst = max(worst, np.abs(out[row, node] - said).max())
      last = rng.integers(NODES)
      path = np.flatnonzero(trees[row][last])
      paths[row, : len(path)] = path
      count[row], slow[row] = len(path), after[last]
    held = keep(held, length, paths)
    length = length + count
  folded = recurrent.fold(held, length, 1)
  assert folded is not None
  states = np.stack([s.states for s in slow])
  return worst, float(np.abs(folded.layers[0].state - states).max())


@pytest.mark.parametrize(
  ("chain", "more", "piece"),
  [(False, 0, 64), (True, 0, 64), (True, 3, 3), (False, 3, 64)],
)
def test_tree_pass_matches_recurrence_along_each_path(
  monkeypatch, chain, more, piece
):
  monkeypatch.setattr(gated_delta, "_CHUNK", piece)
  assert max(errors(chain=chain, more=more)) < EXACT


# Documents that begin within pieces of four, at their edges, and twice in one.
DOCUMENTS = np.array(
  [[1, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4], [1] * 9 + [0] * 2], np.int32
)


@pytest.mark.parametrize("piece", [4, 64])
def test_packed_documents_match_separate_recurrences(monkeypatch, piece):
  monkeypatch.setattr(gated_delta, "_CHUNK", piece)
  module = layer()
  graphdef, params = nnx.split(module)
  length = DOCUMENTS.shape[1]

  @jax.jit
  def look(params, x, segments):
    seen = gated_delta.chain(length, segments, SPEC.kernel, None)
    return nnx.merge(graphdef, params)(x, None, seen, None, None)[0]

  x = np.random.default_rng(4).normal(size=(2, length, WIDTH))
  out = look(params, x, DOCUMENTS)
  for row, segments in enumerate(DOCUMENTS):
    for document in {*segments}:
      slow = Slow(module)
      for at in np.flatnonzero(segments == document):
        assert np.abs(out[row, at] - slow.feed(x[row, at])).max() < EXACT
  one = look(params, x, np.ones_like(DOCUMENTS))  # which is another text
  assert np.abs(out - one)[0, 3:].max() > 1e-3
  # A number that is none reaches the rest of its document.
  broken = x.copy()
  broken[0, 4] = np.nan
  told = look(params, broken, DOCUMENTS)
  assert np.isnan(told[0, 4:8]).all()
  rest = np.r_[0:4, 8:length]
  np.testing.assert_array_equal(told[0, rest], out[0, rest])


@pytest.mark.parametrize("keys", ["random", "equal"])
def test_triangular_inverse_is_backward_stable(keys):
  """Equal keys at full strength, where powers of the system are 10^17."""
  rng, fed = np.random.default_rng(0), 64
  k = rng.normal(size=(4, fed, 16))
  strength = rng.uniform(size=(4, fed, 1))
  total = -np.cumsum(rng.exponential(size=(4, fed)) * 0.1, axis=1)
  if keys == "equal":
    k, strength, total = k[:, :1] + 0 * k, 1 + 0 * strength, 0 * total
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  fade = np.exp(np.minimum(total[..., None] - total[:, None], 0))
  system = np.tril(strength * (k @ k.swapaxes(1, 2)) * fade, -1)
  system = system.astype(np.float32)
  whole = np.eye(fed) + system.astype(np.float64)
  expected = np.linalg.inv(whole)
  # Backwards stable: the inverse of a system that is off by rounding alone.
  actual = np.asarray(gated_delta._inverse(jnp.asarray(system)), np.float64)
  assert np.abs(actual - expected).max() < 3e-6 * np.abs(expected).max()
  assert np.abs(whole @ actual - np.eye(fed)).max() < 1e-5


def test_nan_inputs_reach_only_descendant_nodes():
  graphdef, params = nnx.split(layer())
  tree = np.array(
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool
  )
  x = np.random.default_rng(2).normal(size=(1, 4, WIDTH))
  broken = x.copy()
  broken[0, 1] = np.nan
  look = passes(graphdef)

  memory = delta_memory(SPEC, 1, jnp.float64)
  empty = Recurrent(base=jnp.zeros(1, jnp.int32), layers=(memory,))
  empty = recurrent.widen(empty, 4)
  keep = lambda held, *path: recurrent.keep_path(
    held, np.array([0]), np.array([path])
  )
  said, held = look(params, empty, np.array([0]), x, tree)
  actual, other = look(params, empty, np.array([0]), broken, tree)
  np.testing.assert_array_equal(actual[0, [0, 2]], said[0, [0, 2]])
  assert np.isnan(actual[0, [1, 3]]).all()
  expected, _ = look(params, keep(held, 0, 2), np.array([2]), x, tree)
  actual, _ = look(params, keep(other, 0, 2), np.array([2]), x, tree)
  np.testing.assert_array_equal(actual, expected)
  actual, _ = look(params, keep(other, 0, 1), np.array([2]), x, tree)
  assert np.isnan(actual).all()  # it was committed
  actual, _ = look(params, held, np.array([-1]), x, tree)
  assert np.isnan(actual).all()  # nobody goes back that far
