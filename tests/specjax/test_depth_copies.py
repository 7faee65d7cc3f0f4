"""Passes of the draft that may be skipped leave the caches where they are.

Each stands in a branch, and a branch that copied a cache, to hand it on as it
is or to write into it, would cost more than the pass that it saves. Compiled
for TPUs, none of them here.
"""

import functools

import pytest

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")

from launch import hardware
from launch.planning import networks, program
from models.layers import TransformerConfig
from models.meshes import Layout
from models.transformer import SkippedLayers
from specjax import drafters
from specjax import tree as tree_lib
from specjax.drafters import depth

# Caches are larger than what is beside the memory (128 MiB), where copies are
# not counted.
CONFIG = TransformerConfig(
  vocab_size=512, embed_dim=256, num_layers=2, num_heads=8, num_kv_heads=8,
  head_dim=128, mlp_dim=256, max_positions=40000,
)  # fmt: skip
SLOTS = 32768


def make_drafter(policy, question):
  """As the planner's own, under a policy."""
  q = question
  of_target, of_draft = q.layout.shardings()
  static = dict(tree=q.tree, vocab_size=q.vocab_size, depth=policy)
  if q.draft is not None:
    draft = networks.functions(q.cut_draft(), of_draft)
    return drafters.model.drafter(draft, **static)
  thinned = networks.functions(q.cut_target(), of_target, q.skipped)
  return drafters.layer_skip.drafter(thinned, **static)


@pytest.mark.parametrize(
  "drafts", ["model", pytest.param("layer_skip", marks=pytest.mark.heavy)]
)
def test_a_pass_that_may_be_skipped_copies_no_cache(monkeypatch, drafts):
  policy = depth.get("survival")
  monkeypatch.setattr(
    program, "make_drafter", functools.partial(make_drafter, policy)
  )
  own = drafts == "model"
  found = program.compile_for(
    program.Question(
      target=CONFIG, draft=CONFIG if own else None,
      skipped=None if own else SkippedLayers(attention=(1,)),
      tree=tree_lib.chain(2), siblings="iid", rule="token", batch_size=8,
      max_length=SLOTS, prompt_length=8,
      layout=Layout(data=1, model=4, draft=4 if own else 1),
    ),
    hardware.devices(hardware.topology("v5e-4")),
  )  # fmt: skip
  assert found.donation_honoured
  assert found.cache_copies == found.cache_moves == 0
