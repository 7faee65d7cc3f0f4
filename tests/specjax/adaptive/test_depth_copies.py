"""Passes of the draft that may be skipped leave the caches where they are.

A pass that copied a cache, to hand it on as it is or to write into it, would
cost more than what is saved by not making it.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import specjax
from launch import hardware
from launch.planning import hlo, networks, program
from models.meshes import Layout
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
def test_a_pass_that_may_be_skipped_copies_no_cache(drafts):
  assert copies_here(drafts) == 0


def test_a_branch_in_its_place_copies_them(monkeypatch):
  """The mutant. If this fails, XLA does better now, and a branch would do."""

  def by_branch(goes, function, carry, otherwise):
    said = jax.tree.map(
      lambda x: jnp.full(x.shape, otherwise, x.dtype),
      jax.eval_shape(function, carry)[0],
    )
    skip = lambda carry: (said, carry, jnp.zeros((), jnp.int32))
    return lax.cond(jnp.any(goes), function, skip, carry)

  monkeypatch.setattr(chains, "_if_any", by_branch)
  assert copies_here("model") > 0


# ------------------------------------------------- for TPUs, none of them here

# Caches are larger than what is beside the memory (128 MiB), where copies are
# not counted.
CONFIG = llama_config(
  vocab_size=512, embed_dim=256, num_layers=2, num_heads=8, num_kv_heads=8,
  head_dim=128, mlp_dim=256, max_positions=40000,
)  # fmt: skip
SLOTS = 32768


def make_drafter(policy, question):
  """As the planner's own, under a policy."""
  q = question
  of_target, of_draft = q.layout.shardings()
  static = dict(tree=q.tree, vocab_size=q.vocab_size, policy=policy)
  if q.draft is not None:
    draft = networks.functions(q.cut_draft(), of_draft)
    return drafters.model(draft, **static)
  thinned = networks.functions(q.cut_target(), of_target, q.skipped)
  return drafters.layer_skip(thinned, **static)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["model", "layer_skip"])
def test_nor_does_it_on_a_tpu(monkeypatch, drafts):
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  policy = policies.get("survival")
  monkeypatch.setattr(
    program, "make_drafter", functools.partial(make_drafter, policy)
  )
  has_draft = drafts == "model"
  actual = program.compile_for(
    program.Question(
      target=CONFIG, draft=CONFIG if has_draft else None,
      skipped=None if has_draft else SkippedLayers(attention=(1,)),
      tree=tree_lib.chain(2), siblings="iid", rule="token", batch_size=8,
      max_length=SLOTS, prompt_length=8,
      layout=Layout(data=1, model=4, draft=4 if has_draft else 1),
    ),
    hardware.devices(hardware.topology("v5e:2x2")),
  )  # fmt: skip
  assert actual.buffers_reused
  assert actual.cache_copies == 0
