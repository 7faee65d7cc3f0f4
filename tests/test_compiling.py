"""Promises of `compiling.quickly`: no program passes in or out."""

import compiling
import jax
import jax.numpy as jnp
import pytest


def compiled_anew(act):
  """Number of programs that XLA is asked for (a cache on disk may answer)."""
  asked = []

  def listen(event, duration, **kwargs):
    asked.extend([event] * event.endswith("backend_compile_duration"))

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    act()
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  return len(asked)


def test_programs_made_quickly_and_as_for_users_are_kept_apart():
  @jax.jit
  def program(x):
    return jnp.sin(x) * 3

  x = jax.device_put(1.0)
  assert compiled_anew(lambda: program(x)) == 1
  assert compiled_anew(lambda: program(x)) == 0
  with compiling.quickly():
    assert compiled_anew(lambda: program(x)) == 1
    assert compiled_anew(lambda: program(x)) == 0
  assert compiled_anew(lambda: program(x)) == 1


def test_a_module_without_the_mark_is_compiled_as_for_users():
  mark = pytest.mark.usefixtures("quick_to_compile").mark
  with compiling.quickly():
    quick = compiling.is_quick()
    compiling.begin([mark])
    assert compiling.is_quick() == quick
    compiling.begin([])
    assert not compiling.is_quick()
