"""Passes of the draft that may be skipped leave the caches where they are.

A pass that copied a cache, to hand it on as it is or to write into it, would
cost more than what is saved by not making it.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import specjax
from launch.planning import hlo
from models.networks.description import llama_config
from models.networks.transformer import (
  SkippedLayers,
  Transformer,
  as_language_model,
)
from specjax import drafters, random
from specjax import tree as tree_lib
from specjax.adaptive import chains, policies
from specjax.runtime import compilation

ROWS, LENGTH, LEVELS = 2, 48, 2
SMALL = llama_config(
  vocab_size=32, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2,
  head_dim=8, mlp_dim=16, max_positions=64,
)  # fmt: skip


def copies_here(drafts: str) -> int:
  """Copies of a whole cache in a round, as this machine's compiler has it."""
  target, params = as_language_model(Transformer(SMALL, rngs=nnx.Rngs(0)))
  draft, draft_params = as_language_model(
    Transformer(SMALL, rngs=nnx.Rngs(1)),
    skipped=SkippedLayers() if drafts == "model" else SkippedLayers(mlp=(0,)),
  )
  drafter = getattr(drafters, drafts)(
    draft, tree=tree_lib.chain(LEVELS), vocab_size=32,
    policy=policies.get("survival"),
  )  # fmt: skip
  decoder = specjax.make_decoder(target, drafter=drafter)
  actual = compilation.compile_both(
    decoder,
    lambda params, *rest: decoder.init(
      params, *rest, buffer_length=LENGTH, max_new_tokens=8
    ),
    (
      specjax.Params(
        target=params, draft=draft_params if drafts == "model" else None
      ),
      jnp.zeros((ROWS, 4), jnp.int32),
      jnp.full(ROWS, 4),
      random.row_keys(jax.random.key(0), jnp.arange(ROWS)),
    ),
  )
  whole = {("f32", (ROWS, 2, LENGTH + LEVELS + 1, 8))}
  assert actual.state.target_cache.keys[0].shape == (*next(iter(whole))[1],)
  return hlo.copies(hlo.parse(actual.loop.as_text()), whole)


@pytest.mark.parametrize(
  "drafts", ["model", pytest.param("layer_skip", marks=pytest.mark.slow)]
)
def test_skippable_draft_passes_copy_no_cache(drafts):
  assert copies_here(drafts) == 0


def test_plain_cond_copies_the_cache(monkeypatch):
  """The mutant. If this fails, XLA does better now, and a branch would do."""

  def by_branch(drafting, function, carry, otherwise):
    outputs = jax.tree.map(
      lambda x: jnp.full(x.shape, otherwise, x.dtype),
      jax.eval_shape(function, carry)[0],
    )
    skip = lambda carry: (outputs, carry)
    return lax.cond(jnp.any(drafting), function, skip, carry)

  monkeypatch.setattr(chains, "_if_any", by_branch)
  assert copies_here("model") > 0
