"""Plans of draft heads: what is theirs, and what a round of theirs takes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from configs import shapes
from launch import plan
from launch.hardware import topology
from launch.planning import answer, heads, memory, networks, program, roofline
from models import head_shapes, meshes
from models.formats import head_checkpoints
from models.formats.head_checkpoints import Target
from models.formats.huggingface_config import config_from_json
from models.networks.lowbits import Format
from specjax import tree as tree_lib
from specjax.types import Params

H, V, VD, MLP, KV = 4096, 128256, 32000, 14336, 1024
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
  return head_checkpoints.shape(OTHERS[kind], ABOUT, kind=kind)


def question(kind="eagle3", **changes):
  head = shape_of(kind)
  fields = dict(
    target=TARGET, draft=None, head=head, tree=tree_lib.chain(3),
    siblings="iid", rule="token", batch_size=8, max_length=1024,
    prompt_length=128, layout=meshes.parse("", 8, draft=head.even_sizes()),
  )  # fmt: skip
  return program.Question(**fields | changes)


LAYER = H * (2 * H + 2 * KV) + 3 * H * MLP  # queries, out; keys, values; MLP


def test_what_is_a_heads_own_is_counted_once():
  """By the tensors of its file; the embedding is the target's array."""
  count_of = lambda kind: heads.num_params(shape_of(kind), jnp.bfloat16)
  wider = H * (H + 2 * KV)  # the attention of EAGLE-3 reads twice the width
  eagle3 = 3 * H * H + LAYER + wider + VD * H + 4 * H + VD
  assert count_of("eagle3") == eagle3
  assert count_of("eagle") == 2 * H * H + LAYER + H
  assert count_of("medusa") == 3 * (H * H + H + V * H)
  assert count_of("blockwise") == 3 * H * H + 9 * H * H + 6 * H
  assert count_of("dflash") == 5 * (LAYER + 2 * H + 2 * 128) + 3 * H * H + 2 * H


@pytest.mark.parametrize("kind", ["eagle3", *OTHERS])
def test_every_kind_of_head_is_asked_for_and_costs_something(kind):
  q = question(kind)
  q.check()
  assert q.drafter == kind
  assert q.layout.draft == 8
  drafter = program.make_drafter(q)
  actual = heads.passes(q.head, drafter, size=8, rows=8, slots=q.slots)
  assert len(actual) == len(drafter.passes)
  line = answer._roofline(topology("v5e-8"), q)
  # All of them read less than the target does.
  assert 0 < line["cost_ratio"] < 0.5
  assert line["best_num_speculative_tokens"] >= 1
  if q.head.num_depths is not None:
    assert line["best_num_speculative_tokens"] <= q.head.num_depths


def test_a_head_of_latents_and_experts_is_cut_as_its_target_is():
  """Every device has the latents; of narrow experts it has some, whole."""
  target = config_from_json(
    dict(
      model_type="deepseek_v3", vocab_size=4096, hidden_size=1024,
      intermediate_size=2048, num_hidden_layers=3, num_attention_heads=16,
      num_key_value_heads=16, moe_intermediate_size=512, n_routed_experts=16,
      num_experts_per_tok=4, n_group=4, topk_group=2, kv_lora_rank=448,
      first_k_dense_replace=1, qk_rope_head_dim=64, hidden_act="silu",
      max_position_embeddings=2048,
    )
  )  # fmt: skip
  head = head_shapes.mtp_shape(target)
  q = question(
    target=target, head=head,
    layout=meshes.parse("", 8, draft=head.even_sizes()),
  )  # fmt: skip
  q.check()
  assert (q.drafter, q.layout.draft) == ("mtp", 8)
  cut, rules = q.cut_head()
  assert (cut.config.layer.num_kv_heads, rules.experts) == (8, "expert")
  without = dataclasses.replace(q, head=None)
  more = memory.held(q) - memory.held(without)
  count_of = heads.num_params(head, jnp.bfloat16)
  assert more == 2 * count_of // 8 + 2 * 512 * q.rows * q.slots
  assert 0 < answer._roofline(topology("v5e-8"), q)["cost_ratio"] < 1
  three = dataclasses.replace(
    q, head=head_shapes.mtp_shape(target, num_depths=3)
  )
  # Of each a cache, with room for what the deepest passes feed.
  assert memory.held(three) - memory.held(without) == (
    2 * (heads.num_params(three.head, jnp.bfloat16)) // 8
    + 3 * 2 * 512 * q.rows * (q.slots + 3 + 2)
  )
  ratio = lambda q: answer._roofline(topology("v5e-8"), q)["cost_ratio"]
  assert ratio(q) < ratio(three) < 2 * ratio(q)
  passes = lambda q: heads.passes(
    q.head, program.make_drafter(q), size=1, rows=8, slots=1000
  )
  assert len(passes(three)) == len(passes(q)) == 3


def test_the_passes_of_eagle_3_by_hand():
  """Features are fused in the first; weights are read in all of them."""
  q = question(layout=meshes.Layout(data=1, model=8, draft=1))
  first, second, third = heads.passes(
    q.head, program.make_drafter(q), size=1, rows=8, slots=1000
  )
  layer = LAYER + H * (H + 2 * KV) + VD * H + 4 * H + VD
  cache = 2 * 8 * 1000 * KV
  read = lambda tokens: (
    2 * (2 * tokens * 2 * 2 * H + 2 * tokens * (2 * H + 2 * MLP))
    + 2 * 4 * tokens * VD
  )  # what lies between blocks, inside them, and logits
  assert second.hbm_bytes == pytest.approx(2 * (layer + cache) + read(8))
  assert third == second
  # Four pairs of a token and a feature a row, and the projection of features.
  assert first.hbm_bytes == pytest.approx(
    2 * (layer + 3 * H * H + cache) + read(32)
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
  assert isinstance(only, roofline.Pass)


def test_a_tied_targets_embedding_is_the_output_projection_of_its_head():
  head = shape_of("eagle")
  params = Params(
    target={"frame": {"embed": {"embedding": "table"}}},
    draft=heads.own_params(head, jnp.bfloat16),
  )
  draft = heads.with_shared(head, params).draft
  assert draft["embed"]["embedding"] == draft["lm_head"]["weight"] == "table"


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "blockwise"])
def test_a_head_reads_tables_in_few_bits_as_its_target_has_them(kind):
  """A byte less for each number of an output projection, but for scales."""
  form = Format(kind="int8", embedding=True)
  low, plain = question(kind, weights=form), question(kind)
  low.check()
  cost = lambda q: answer._passes(q)[0][-1]
  saved = V * H - 4 * V if kind != "eagle3" else 0  # which has one of its own
  actual = cost(plain).hbm_bytes - cost(low).hbm_bytes
  assert actual == pytest.approx(saved / 8)
  assert cost(plain).flops == cost(low).flops


def test_a_head_with_tables_in_few_bits_drafts():
  """Its tied target's one table, values and scales, is both of its own."""
  small = dict(
    model_type="llama", vocab_size=128, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=1e-5, hidden_act="silu",
    tie_word_embeddings=True,
  )  # fmt: skip
  target = config_from_json(small)
  about = Target(num_layers=2, embed_dim=32, vocab_size=128)
  one = small | dict(num_hidden_layers=1, bias=False)
  head = head_checkpoints.shape(one, about, kind="eagle")
  q = question(
    target=target, head=head, weights=Format(kind="int8"), max_length=32,
    prompt_length=4, batch_size=2,
    layout=meshes.Layout(data=1, model=1, draft=1),
  )  # fmt: skip
  q.check()
  mesh = q.layout.mesh(jax.devices()[:1])
  decoder = program.make_decoder(q, mesh).decoder
  params = Params(
    target=networks.shapes(target, q.weights),
    draft=heads.own_params(head, jnp.bfloat16),
  )

  def decoded(params, prompts, lengths, key):
    state = decoder.init(
      params, prompts, lengths, key, buffer_length=32, max_new_tokens=8
    )
    return decoder.step(params, state)[0]

  prompts = jax.ShapeDtypeStruct((2, 4), jnp.int32)
  lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  actual = jax.eval_shape(decoded, params, prompts, lengths, key)
  assert actual.tokens.shape[0] == 2


def test_a_heads_bytes_are_held_beside_the_targets():
  q = question()
  without = dataclasses.replace(q, head=None, tree=tree_lib.chain(3))
  more = memory.held(q) - memory.held(without)
  count_of = heads.num_params(q.head, jnp.bfloat16)
  assert more == 2 * count_of // 8 + 2 * 2 * KV * q.rows * q.slots // 8


def grown(kind="eagle3", *, nodes=20, depth=4, children=5, **changes):
  """A question of a tree that is grown anew in every round."""
  return question(
    kind, tree=tree_lib.bound(nodes, depth, children), siblings="given",
    rule="match", **changes,
  )  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_a_tree_that_is_grown_is_asked_for(kind):
  """EAGLE's passes are of five nodes each; other heads have one pass."""
  q = grown(kind, depth=3)
  q.check()
  drafter = program.make_drafter(q)
  assert drafter.tree.num_drafted == 20
  assert drafter.passes[1:] == ((5, 5) if kind == "eagle3" else ())
  line = answer._roofline(topology("v5e-8"), q)
  assert line["tokens_fed"] == 21
  assert 0 < line["break_even_acceptance"] < 1
  assert answer._settings(q)["grown"]
  assert not answer._settings(question(kind))["grown"]


def test_a_grown_tree_is_as_good_as_the_best_of_its_size():
  """With all accepted a chain; more than any chain of its depth otherwise."""
  q = grown()
  assert answer.tokens_per_round(q.tree, 1.0) == 5
  assert answer.tokens_per_round(q.tree, 0.0) == 1
  chain = answer.tokens_per_round(tree_lib.chain(4), 0.6)
  tokens = answer.tokens_per_round(q.tree, 0.6)
  assert chain < tokens < 5
  # Two levels of at most two children, all six nodes: by hand.
  whole = answer.tokens_per_round(tree_lib.bound(6, 2, 2), 0.6)
  assert whole == pytest.approx(1 + 0.84 + 0.84**2)


def test_a_heads_cache_holds_what_is_never_verified():
  """Fifteen nodes of a grown tree beside those that the target is fed."""
  q = grown()
  assert heads.more_slots(q.head, q.tree) == 15
  assert heads.more_slots(q.head, tree_lib.chain(20)) == 0
  assert heads.more_slots(shape_of("dflash"), q.tree) == 8
  without = dataclasses.replace(
    q, head=None, tree=tree_lib.chain(20), siblings="iid", rule="token"
  )
  count_of = heads.num_params(q.head, jnp.bfloat16)
  more = memory.held(q) - memory.held(without)
  assert more == 2 * count_of // 8 + 2 * 2 * KV * q.rows * (q.slots + 15) // 8


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(max_length=4096), "exceeds the models' 2048 positions"),
    (dict(tree=tree_lib.bound(20, 4, 5)), "siblings must|rule 'token'"),
    (dict(tree=tree_lib.chain(9), head=shape_of("dflash")),
     "dflash says 7 tokens ahead"),
    (dict(layout=meshes.Layout(data=1, model=16, draft=16)),
     "cannot be cut over 16 devices"),
    (dict(siblings="given"), "tokens that are not drawn"),
  ],
)  # fmt: skip
def test_what_cannot_be_drafted_is_said_before_compiling(changes, message):
  with pytest.raises(ValueError, match=message):
    question(**changes).check()
