"""Work that is not wanted is not done: nothing is moved out of its loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import cond_in_place as cond_lib
from specjax.cond_in_place import cond_in_place

SIZE = 24


def updated(wanted, key, table, carry):
  """A carry whose update reads nothing of it, but a table and a key."""
  place, buffer = carry

  def update(carry):
    del carry
    noise = jax.random.normal(key, (SIZE, SIZE), table.dtype)
    return place + 1, lax.dynamic_update_slice(
      buffer, jnp.sort(table + noise, axis=0)[:1], (place, 0)
    )

  return cond_in_place(wanted, update, carry)


def made():
  rng = np.random.default_rng(0)
  table, buffer = rng.normal(size=(2, SIZE, SIZE)).astype(np.float32)
  key = jax.random.key(0)
  return jnp.array(True), key, jnp.asarray(table), (jnp.int32(3), buffer)


def sorts_of_entry() -> int:
  """Sorts that the compiled program makes whatever is wanted."""
  text = jax.jit(lambda *x: updated(*x)).lower(*made()).compile().as_text()
  assert len(re.findall(r"\bsort\(", text)) == 1
  return len(re.findall(r"\bsort\(", text[text.index("\nENTRY ") :]))


def test_carry_is_updated_only_when_condition_holds():
  _, key, table, (place, buffer) = made()
  after, new = jax.jit(updated)(jnp.array(True), key, table, (place, buffer))
  noise = jax.random.normal(key, (SIZE, SIZE))
  assert after == 4
  np.testing.assert_allclose(
    new[3], jnp.sort(table + noise, axis=0)[0], rtol=1e-5
  )
  np.testing.assert_array_equal(np.delete(new, 3, 0), np.delete(buffer, 3, 0))
  after, same = jax.jit(updated)(jnp.array(False), key, table, (place, buffer))
  assert after == 3
  np.testing.assert_array_equal(same, buffer)


def test_optimization_barrier_prevents_hoisting_invariant_work(monkeypatch):
  """And without the barrier it does not."""
  assert sorts_of_entry() == 0
  monkeypatch.setattr(cond_lib.lax, "optimization_barrier", lambda x: x)
  assert sorts_of_entry() == 1
