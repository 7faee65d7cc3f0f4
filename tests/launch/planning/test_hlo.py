"""Counting what compiled programs do."""

from launch.planning import hlo

# As libtpu prints: trip counts are only in the conditions.
TEXT = """\
HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: bf16[4,8]) -> bf16[4,8] {
  ROOT %inside = bf16[4,8]{0,1} copy(%p)
}

%written (p: bf16[4,8], r: bf16[1,8]) -> bf16[4,8] {
  ROOT %inside = bf16[4,8]{1,0} dynamic-update-slice(%p, %r, %i, %j)
}

%reduced (p: bf16[4,8]) -> bf16[1,8] {
  %whole = bf16[4,8]{1,0} all-reduce(%p), to_apply=%add
  ROOT %part = bf16[1,8]{1,0} dynamic-slice(%whole, %i, %j)
}

%layer_cond (p: (s32[], bf16[4,8])) -> pred[] {
  %twelve = s32[]{:T(128)} constant(12)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %twelve), direction=LT
}

%layer (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %x = bf16[4,8]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %r = bf16[4,8]{1,0} all-reduce(%x), to_apply=%add, \
metadata={op_name="jit(f)/while/body/score/while/body/dot_general"}
  %c = bf16[4,8]{0,1} copy(%r)
  ROOT %t = (s32[], bf16[4,8]) tuple(%i, %c)
}

%round_cond (p: (pred[])) -> pred[] {
  ROOT %more = pred[] get-tuple-element(%p), index=0
}

%second (p: f32[4]) -> f32[4] {
  %one = f32[4] all-reduce(%p), to_apply=%add
  %kept = f32[4] copy(%one)
  ROOT %two = f32[4] all-reduce(%one), to_apply=%add
}

%round (p: (pred[])) -> (pred[]) {
  %s = f32[4] conditional(%i, %p, %p), branch_computations={%second}, \
metadata={op_name="jit(f)/while/body/verify/cond"}
  %w = (s32[], bf16[4,8]) while(%t0), condition=%layer_cond, body=%layer, \
metadata={op_name="jit(f)/while/body/score/while"}
  %g = (f32[2,3], f32[2,6]) all-gather-start(%y), dimensions={1}, \
metadata={op_name="jit(f)/while/body/draft/concatenate"}
  %d = f32[2,6] all-gather-done(%g)
  %h = (f32[3], f32[5]) all-reduce(%y, %z), to_apply=%add
  %e = bf16[1,8] fusion(%x), kind=kCustom, calls=%reduced, \
metadata={op_name="jit(f)/while/body/commit/add"}
  %f = (f32[7], bf16[8,4]) fusion(%x), kind=kLoop, calls=%fused
  %u = bf16[4,8] fusion(%x, %y), kind=kLoop, calls=%written
  ROOT %q = (pred[]) tuple(%z)
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %k = bf16[4,8]{0,1} copy(%x)
  ROOT %loop = (pred[]) while(%t1), condition=%round_cond, body=%round
}
"""
PHASES = {
  "draft_step": ("draft",), "verify": ("score", "verify"),
  "commit": ("commit",),
}  # fmt: skip


def test_collectives_in_loops_count_once_per_iteration():
  actual = hlo.collectives(hlo.parse(TEXT), PHASES)
  assert actual == {
    "draft_step": {"all-gather": {"count": 1, "bytes": 2 * 6 * 4}},
    # Two sums of 16 bytes in a branch.
    "verify": {
      "all-reduce": {"count": 12 + 2, "bytes": 12 * 4 * 8 * 2 + 2 * 16}
    },
    # Inside a fusion, of which a part alone is kept.
    "commit": {"all-reduce": {"count": 1, "bytes": 4 * 8 * 2}},
    # Two arrays in one sum.
    "other": {"all-reduce": {"count": 1, "bytes": (3 + 5) * 4}},
  }


def test_copies_count_in_any_dimension_order_and_updates_do_not():
  """Twelve in the layers, one at the entry, one as a fusion."""
  module = hlo.parse(TEXT)
  assert hlo.copies(module, {("bf16", (4, 8))}) == 12 + 1 + 1
  assert hlo.copies(module, {("bf16", (8, 4))}) == 12 + 1 + 1
  assert hlo.copies(module, {("f32", (4, 8))}) == 0
  assert hlo.copies(module, {("f32", (4,))}) == 1  # in any branch
