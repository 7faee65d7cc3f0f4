"""Plans of draft heads: what is theirs, and what a round of theirs takes."""

import pytest

from configs import shapes
from launch import plan
from launch.hardware import CHIPS
from launch.planning import answer, heads, networks, program
from models import head_shapes, meshes
from models.formats import head_checkpoints
from models.formats.head_checkpoints import Target
from models.formats.huggingface_config import config_from_json
from specjax import tree as tree_lib

H, V, VD, MLP, KV = 4096, 128256, 32000, 14336, 1024
LAYER = H * (2 * H + 2 * KV) + 3 * H * MLP  # queries, out; keys, values; MLP
TARGET = config_from_json(shapes.SHAPES["llama-3.1-8b"])
ABOUT = Target(num_layers=32, embed_dim=H, vocab_size=V)
OTHERS = {
  "medusa": dict(medusa_num_heads=3, medusa_num_layers=1),
  "blockwise": dict(
    model_type="blockwise", num_heads=3, hidden_dim=H, hidden_size=H,
    vocab_size=V,
  ),
  "dflash": dict(
    shapes.SHAPES["llama-3.1-8b"], model_type="qwen3", num_hidden_layers=5,
    head_dim=128, block_size=8,
    dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 15, 29]},
  ),
  "eagle": dict(
    shapes.SHAPES["llama-3.1-8b"], num_hidden_layers=1, bias=False
  ),
}  # fmt: skip


def shape_of(kind):
  if kind == "eagle3":
    return plan.head("eagle3-llama-3.1-8b", "eagle3", TARGET)
  if kind == "mtp":
    return head_shapes.mtp_shape(TARGET)
  return head_checkpoints.shape(OTHERS[kind], ABOUT, kind=kind)


def question(kind="eagle3", **changes):
  head = shape_of(kind)
  fields = dict(
    target=TARGET, draft=None, head=head, tree=tree_lib.chain(3),
    siblings="iid", rule="token", batch_size=8, max_length=1024,
    prompt_length=128,
    layout=meshes.parse("", 8, draft=head.config.even_sizes()),
  )  # fmt: skip
  return program.Question(**fields | changes)


def test_what_is_a_heads_own_is_counted_once():
  """By the tensors of its file; the embedding is the target's array."""
  count_of = lambda kind: networks.count(heads.own_params(shape_of(kind)))
  wider = H * (H + 2 * KV)  # the attention of EAGLE-3 reads twice the width
  eagle3 = 3 * H * H + LAYER + wider + VD * H + 4 * H + VD
  assert count_of("eagle3") == eagle3
  assert count_of("eagle") == 2 * H * H + LAYER + H
  assert count_of("medusa") == 3 * (H * H + H + V * H)
  assert count_of("blockwise") == 3 * H * H + 9 * H * H + 6 * H
  assert count_of("dflash") == 5 * (LAYER + 2 * H + 2 * 128) + 3 * H * H + 2 * H


@pytest.mark.parametrize("kind", ["eagle3", "mtp", *OTHERS])
def test_every_kind_of_head_is_planned_and_cheaper_than_its_target(kind):
  q = question(kind)
  q.check()
  assert (q.drafter, q.layout.draft) == (kind, 8)
  line = answer.predict(CHIPS["v5e"], q)
  assert 0 < line["cost_ratio"] < 0.5
  best = [x["best draft length"] for x in line["by_acceptance"]]
  assert best == sorted(best)
  assert 1 <= best[0] <= best[-1] <= (q.head.config.num_predicted or 31)


def test_the_passes_of_eagle_3_by_hand():
  """Features are fused in the first; weights are read in all of them."""
  q = question()
  first, second, third = heads.passes(
    q.head, program.make_drafter(q), size=1, rows=8, slots=1000
  )
  # The ids of its words take four bytes each.
  layer = LAYER + H * (H + 2 * KV) + VD * H + 4 * H + 2 * VD
  cache = 2 * 8 * 1000 * KV
  between = lambda tokens: (
    2 * (2 * tokens * 2 * 2 * H + 2 * tokens * (2 * H + 2 * MLP))
    + 2 * 4 * tokens * VD
  )  # what lies between blocks, inside them, and logits
  assert second.hbm_bytes == pytest.approx(2 * (layer + cache) + between(8))
  assert third == second
  # Four pairs of a token and a feature a row, and the projection of features.
  assert first.hbm_bytes == pytest.approx(
    2 * (layer + 3 * H * H + cache) + between(32)
  )
  assert second.ici_bytes == 0


def test_heads_without_attention_read_weights_once_by_hand():
  q = question("medusa")
  (only,) = heads.passes(
    q.head, program.make_drafter(q), size=8, rows=2, slots=1000
  )
  weights, logits = 3 * (H * H + H + V * H), 4 * 2 * 3 * V
  assert only.hbm_bytes == pytest.approx(2 * weights / 8 + 2 * logits)
  assert only.flops == pytest.approx(2 * 2 * weights / 8)
  assert only.ici_bytes == pytest.approx(7 / 8 * logits)


def test_a_dynamic_tree_is_as_good_as_the_best_of_its_size():
  """Two levels of at most two children, all six nodes: by hand."""
  tree = tree_lib.bound(20, 4, 5)
  q = question(tree=tree, siblings="given", rule="match")
  q.check()
  assert program.make_drafter(q).passes[1:] == (5, 5, 5)
  assert answer.tokens_per_round(tree, 1.0) == 5
  whole = answer.tokens_per_round(tree_lib.bound(6, 2, 2), 0.6)
  assert whole == pytest.approx(1 + 0.84 + 0.84**2)
