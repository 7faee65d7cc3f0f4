"""Plans of draft heads: every kind, and dynamic trees."""

import pytest
from flax import nnx

from configs import shapes
from launch import plan
from launch.hardware import CHIPS
from launch.planning import answer, heads, networks, program
from models import head_shapes, meshes
from models.formats import head_checkpoints
from models.formats.head_checkpoints import Target
from models.formats.huggingface_config import config_from_json
from specjax import tree as tree_lib

H, V = 4096, 128256
TARGET = config_from_json(shapes.SHAPES["llama-3.1-8b"])
ABOUT = Target(num_layers=32, embed_dim=H, vocab_size=V)
MLP, OF_LAYER = 14336, 2 * H * H + 2 * H * 1024  # numbers of its attention
BLOCK = dict(
  shapes.SHAPES["llama-3.1-8b"], model_type="qwen3", num_hidden_layers=5,
  head_dim=128, block_size=8,
)  # fmt: skip
READS = {"mask_token_id": 7, "target_layer_ids": [1, 15, 29]}
OTHERS = {
  "medusa": dict(medusa_num_heads=3, medusa_num_layers=1),
  "dflash": dict(BLOCK, dflash_config=READS),
  "jetspec": dict(BLOCK, dflash_config=READS | {"causal": True}),
  "dflash2": dict(
    BLOCK,
    dflash_config=READS | {
      "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
      "selector_top_k": 16,
    },
  ),
  "dspark": dict(BLOCK, **READS, markov_rank=256),
  "p_eagle": dict(
    shapes.SHAPES["llama-3.1-8b"], num_hidden_layers=2,
    pard_token=7, norm_before_residual=False,
  ),
  "eagle": dict(
    shapes.SHAPES["llama-3.1-8b"], num_hidden_layers=1, bias=False
  ),
}  # fmt: skip


# Numbers that the passes of a round read: layers, what is fused, the output
# rows, and of DSpark for each of three tokens the rows of its bias.
_FIVE = 5 * (OF_LAYER + 3 * H * MLP) + 3 * H * H + H * V
_TWO = 2 * (OF_LAYER + 3 * H * MLP) + H * (H + 2 * 1024) + 3 * H * H + H * V
READ = {
  "dflash": _FIVE,
  "jetspec": _FIVE,
  "dflash2": _FIVE + 10 * H * (4 * H // 16) + 256 * H,
  "dspark": _FIVE + 3 * 256 * V,
  "p_eagle": 2 * _TWO,  # what is committed, then the masks
}


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


@pytest.mark.parametrize("kind", ["eagle3", "mtp", *OTHERS])
def test_every_head_kind_is_planned_and_cheaper_than_its_target(kind):
  q = question(kind)
  q.check()
  named = "dflash" if kind == "jetspec" else kind
  assert (q.drafter, q.layout.draft) == (named, 8)
  line = answer.predict(CHIPS["v5e"], q)
  assert 0 < line["cost_ratio"] < 0.5
  best = [x["best draft length"] for x in line["by_acceptance"]]
  assert best == sorted(best)
  assert 1 <= best[0] <= best[-1] <= (q.head.config.num_predicted or 31)


@pytest.mark.parametrize("kind", READ)
def test_draft_round_reads_weights_but_not_embedding_tables(kind):
  """A synthetic rule verifies them all; caches and logits are small here."""
  q = question(
    kind, rule="synthetic(0.9, 0.8)", batch_size=1, max_length=256,
    layout=meshes.parse("", 1, draft=()),
  )  # fmt: skip
  q.check()
  drafting, _ = answer.passes(q)
  num_bytes = sum(one.hbm_bytes for one in drafting)
  assert 1 <= num_bytes / (2 * READ[kind]) < 1.01


def test_every_device_reads_replicated_weights():
  q = question("dflash2", batch_size=1, max_length=256)
  q.check()
  one, eight = (
    heads.passes(q.head, program.make_drafter(q), size=size, rows=1, slots=256)[
      0
    ].hbm_bytes
    for size in (1, 8)
  )
  flat = nnx.to_flat_state(heads.own_params(q.head))
  names = {"kernel_projection", "hidden_projection"}
  whole = [x for key, x in flat if names & {*key}]
  assert networks.num_bytes(whole) > 0.02 * one
  # Logits and activations are replicated too, and small.
  expected = one / 8 + networks.num_bytes(whole) * 7 / 8
  assert eight == pytest.approx(expected, rel=0.05)


def test_dynamic_tree_yields_the_best_tokens_per_round_of_its_size():
  """Two levels of at most two children, all six nodes: by hand."""
  tree = tree_lib.bound(20, 4, 5)
  q = question(tree=tree, siblings="given", rule="match")
  q.check()
  assert program.make_drafter(q).passes[1:] == (5, 5, 5)
  assert answer.tokens_per_round(tree, 1.0) == 5
  whole = answer.tokens_per_round(tree_lib.bound(6, 2, 2), 0.6)
  assert whole == pytest.approx(1 + 0.84 + 0.84**2)
