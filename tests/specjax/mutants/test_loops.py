"""Broken loops and caches must fail on table-lookup models, by their tokens."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import mutation
import numpy as np
import pytest
import toys

import specjax
from specjax import cache as cache_lib
from specjax import decode, drafters
from specjax import tree as tree_lib
from specjax import warp as warp_lib
from specjax.drafters.shared import levels
from specjax.drafters.shared.arguments import Drawing
from specjax.siblings import IID
from specjax.warp import make_sampling

VOCAB, BUDGET = 11, 12
TABLE = toys.table(VOCAB, seed=0)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (3, 4))
TEMPERATURES = np.array([0.0, 1.0, 0.0])


def decoded(tree, *, change=lambda drafter: drafter):
  """Decodes a mixed batch with a draft model that is the target."""
  model = toys.table_model(VOCAB)
  drafter = drafters.model(model, tree=tree, vocab_size=VOCAB)
  decoder = specjax.make_decoder(model, drafter=change(drafter), rule="match")
  params = specjax.Params(target=jnp.asarray(TABLE), draft=jnp.asarray(TABLE))

  @jax.jit
  def run(params, prompts, key, settings):
    state = decoder.init(
      params, prompts, jnp.full(3, 4), key,
      buffer_length=4 + BUDGET, max_new_tokens=BUDGET, sampling=settings,
    )  # fmt: skip
    return decoder.generate(params, state)

  settings = make_sampling(3, temperature=TEMPERATURES)
  return run(params, jnp.asarray(PROMPTS), jax.random.key(0), settings)


def is_sound(state, tree) -> bool:
  """Greedy rows are the argmax of every context, and no draft is rejected."""
  for b in np.flatnonzero(TEMPERATURES == 0):
    row = np.asarray(state.tokens[b, : 4 + BUDGET]).tolist()
    for at in range(4, len(row)):
      if row[at] != np.argmax(toys.context_logits(TABLE, row[:at])):
        return False
    if state.counters.num_target_calls[b] != BUDGET // (tree.max_depth + 1):
      return False
  return True


def upside_down(logits, settings):
  """Greedy rows of a mixed batch are divided by a temperature of -1."""
  some = jnp.any(settings.temperature > 0)
  greedy = (settings.temperature == 0) & some
  temperature = jnp.where(greedy, 1, settings.temperature)
  settings = dataclasses.replace(settings, temperature=temperature)
  logits = jnp.where(greedy[:, None, None], -logits, logits)
  return warp_lib.warp(logits, settings)


def without_keep_path():
  """Rejected tokens stay in the target's cache, the length is right."""
  keep = lambda cache, start, path, length, *, nodes: cache.replace(
    length=length
  )
  return mock.patch.object(
    decode, "cache_lib", mutation.copy_of(cache_lib, keep_path=keep)
  )


def feeds_one_token(drafter):
  """A draft model that is fed the newest token only.

  The last drafted token was never fed to it: once that is accepted, its slot in
  the draft's cache is one that nobody wrote.
  """
  model, tree = toys.table_model(VOCAB), drafter.tree

  def propose(params, cache, target_cache, context):
    root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)
    output, cache = model.apply(
      params.draft, root, cache.replace(length=context.length - 1)
    )
    draft, cache = levels.draft_tree(
      model, params.draft, cache, output.logits[:, 0], context,
      Drawing(tree=tree, siblings=IID, vocab_size=VOCAB),
    )  # fmt: skip
    return draft, cache, target_cache

  return dataclasses.replace(drafter, propose=propose)


LOOPS = {
  # tpu-inference: greedy rows of a mixed batch carry temperature -1, and the
  # verifier has no guard for them: the logits are upside down.
  "greedy rows upside down": (
    tree_lib.chain(2),
    dict(patch=lambda: mutation.verifier_warps(upside_down)),
  ),
  # No known system.
  "stale rows in the target's cache": (
    tree_lib.paths(2, 2),
    dict(patch=without_keep_path),
  ),
  # No known system.
  "a row too few in the draft's cache": (
    tree_lib.chain(2),
    dict(change=feeds_one_token),
  ),
}
sound_twin = functools.cache(decoded)


@pytest.mark.parametrize("name", LOOPS)
def test_broken_loops_are_caught(name):
  tree, options = LOOPS[name]
  options = dict(options)
  assert is_sound(sound_twin(tree), tree)
  with options.pop("patch", contextlib.nullcontext)():
    state = decoded(tree, **options)
  assert not is_sound(state, tree)
