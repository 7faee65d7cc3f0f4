"""Counts of a plan: encoder-decoders, latents, Gemma 4 and few bits."""

import dataclasses
import math
import pathlib

import described
import jax
import pytest
from flax import nnx

from configs import shapes
from launch import plan
from launch.planning import networks, program, roofline
from models import sharding
from models.formats.huggingface import translate
from models.meshes import Layout
from models.networks import attention, t5
from models.networks.description import TransformerConfig
from models.networks.lowbits import Format
from models.networks.transformer import SkippedLayers
from specjax import tree

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def config():
  return plan.shape("t5-1.1-small")


def test_parameters_are_those_of_the_published_model(config):
  assert networks.num_params(config) == 76_961_152


def test_a_pass_reads_the_decoder_without_what_the_input_made(config):
  actual = networks.work(
    config, num_params=networks.num_params(config), skipped=SkippedLayers(),
    slots=100, text=100, input_length=30,
  )  # fmt: skip
  state = nnx.state(t5.abstract(config, dtype=networks.DTYPE))
  read = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    names = [str(getattr(k, "key", k)) for k in path]
    of_input = "cross" in names and {"k", "v"} & {*names}
    if (names[0] == "decoder" and leaf.ndim == 2 and not of_input
        and "position_bias" not in names) or names[0] == "lm_head":  # fmt: skip
      read += math.prod(leaf.shape)
  assert actual.weights == read
  assert actual.channels == 8 * (100 + 30) * 2 * 6 * 64
  assert actual.products == 8 * (100 + 30) * 6 * 64
  assert (actual.attentions, actual.mlps, actual.sums) == (16, 8, 24)


def test_the_table_of_states_is_the_arithmetic_of_plans():
  small, config = (
    translate(shapes.SHAPES[f"qwen3.5-{size}b"]) for size in (9, 27)
  )
  cache = jax.eval_shape(
    lambda: networks.functions(config, sharding.replicated()).init_cache(3, 8)
  )
  memories = cache.recurrent.layers
  kept = sum(
    x.size * x.dtype.itemsize for m in memories for x in (m.state, m.window)
  )
  assert networks.state_bytes(config)[0] == kept // 3
  page = (ROOT / "docs/families.md").read_text("utf-8")
  for nodes in (1, 8, 32, 64):
    every = [
      x / 2**20
      for of in (small, config)
      for x in networks.round_bytes(of, nodes)
    ]
    assert f"| {nodes} | {' | '.join(f'{x:.0f} MiB' for x in every)} |" in page


def test_a_pass_counts_states_once_and_keys_of_attention_alone():
  config = translate(shapes.SHAPES["qwen3.5-9b"])
  count = networks.num_params(config)
  place = roofline.Placement(
    config=config, num_params=count, size=4, rows=8, slots=1024
  )
  bare = dataclasses.replace(config, layers=config.layers[3::4], num_layers=8)
  without = dataclasses.replace(place, config=bare)
  assert place.work.channels == without.work.channels
  states, pending = networks.state_bytes(config)
  one, more = (roofline.forward(place, n).hbm_bytes for n in (1, 9))
  one_without, more_without = (
    roofline.forward(without, n).hbm_bytes for n in (1, 9)
  )
  assert (more - one) - (more_without - one_without) > 2 * 8 * 8 * pending / 4
  assert one - one_without > 2 * 8 * states / 4


def question(**changes):
  config = translate(shapes.T5_SHAPES["t5-1.1-small"])
  fields = dict(
    target=config, draft=config, tree=tree.chain(2), siblings="iid",
    rule="token", batch_size=2, max_length=64, prompt_length=1,
    layout=Layout(data=1, model=2, draft=2), input_length=32,
  )  # fmt: skip
  return program.Question(**fields | changes)


def test_what_does_not_go_together_is_refused():
  question().check()
  llama = translate(shapes.SHAPES["llama-3.2-1b"])
  for changes, words in (
    (dict(draft=llama), "must both be encoder-decoders"),
    (dict(input_length=0), "needs input_length"),
    (dict(target=llama, draft=llama), "input_length is what an encoder reads"),
    (dict(draft=None, skipped=SkippedLayers(mlp=(1,))), "no layers left out"),
    (dict(layout=Layout(data=1, model=4, draft=2)), r"num_heads \(6\)"),
  ):
    with pytest.raises(ValueError, match=words):
      question(**changes).check()


@pytest.mark.heavy
def test_a_small_t5_compiles_for_two_devices():
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  from launch import hardware

  small = dataclasses.replace(
    translate(shapes.T5_SHAPES["t5-1.1-small"]), num_layers=2,
    num_encoder_layers=2,
  )  # fmt: skip
  actual = program.compile_for(
    question(
      target=small, draft=small, batch_size=4,
      layout=Layout(data=2, model=2, draft=2),
    ),
    hardware.devices(hardware.topology("v5e-4")),
  )  # fmt: skip
  assert actual.donation_honoured
  # Three sums a layer and one of the table.
  assert actual.collectives["verify"]["all-reduce"]["count"] == 3 * 2 + 1


def test_a_latent_is_counted_once():
  latents = TransformerConfig.of_layers(
    described.LATENTS["layers"], vocab_size=61, embed_dim=32, max_positions=64
  )
  usual = TransformerConfig.of_layers(
    described.OLMO["layers"], vocab_size=61, embed_dim=32, max_positions=64
  )
  assert networks.slot_channels(latents) == 18
  assert networks.slot_channels(latents, 128) == 128
  assert networks.slot_channels(usual) == 2 * 2 * 8
  assert networks.slot_channels(usual, 128) == 2 * 2 * 128


def test_layers_that_differ_in_their_heads_are_counted_apart():
  """Heads of 8, of 12 with a mixture beside, and of 8 that the first caches."""
  config = TransformerConfig(
    **described.GEMMA4 | dict(per_layer_vocab=64), vocab_size=64, embed_dim=32,
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48,
    max_positions=64,
  )  # fmt: skip
  config = networks.cut(config, 2)  # a second head for the second layer
  place = roofline.Placement(
    config=config, num_params=networks.num_params(config), size=2, rows=3,
    slots=40,
  )  # fmt: skip
  cached = [networks.slot_channels(x) for x in networks.cached(config)]
  assert cached == [2 * 2 * 8, 2 * 2 * 12]
  work, read = place.work, attention.slots_read(40, 40, 3)
  assert work.channels == 2 * read * 32 + 40 * 48
  assert work.products == 2 * read * 4 * 8 + 40 * 4 * 12
  assert work.inside == 2 * (4 * (8 + 12 + 8) + 3 * 48 + 12)
  assert (work.attentions, work.mlps, work.sums) == (3, 4, 7)
  tables = 64 * 3 * 6  # of each layer's own, which are looked up
  assert work.weights == networks.num_params(config) - tables
  # Gates and projections of these are whole on both devices.
  whole = 3 * 32 * 3 * 6
  one = dataclasses.replace(place, size=1)
  idle = networks.idle(config, SkippedLayers(), 3)
  weights = work.weights - idle
  assert roofline.least_bytes(one) == 2 * (weights + 3 * work.channels)
  assert roofline.least_bytes(place) == weights + 3 * work.channels + whole
  more = roofline.forward(place, 1).ici_bytes
  # There and back, of two bytes: partial sums, and what was looked up.
  assert more == 3 * 2 * ((7 + 1) * 32 + 3 * 6) + 4 * 3 * 64 / 2


def test_experts_in_few_bits_are_left_out_by_their_own_bytes():
  """As gpt-oss is published: 4.25 bits; here scales take 32 bits, so 5."""
  config = translate(shapes.SHAPES["gpt-oss-20b"])
  form = Format(kind="fp4", group=32, output=False, dense=False)
  assert networks.bytes_per_expert_weight(config, None) == 2
  each = networks.bytes_per_expert_weight(config, form)
  assert each == pytest.approx(5 / 8, rel=0.01)  # biases take two bytes
  count = networks.num_params(config)
  place = roofline.Placement(
    config=config, num_params=count, size=1, rows=1, slots=8
  )
  low = dataclasses.replace(place, weights=form)
  of_experts = 24 * 4 * config.layer(0).feed_forward.num_expert_params
  saved = roofline.least_bytes(place) - roofline.least_bytes(low)
  assert saved == pytest.approx((2 - each) * of_experts, rel=1e-3)
  # Groups are dequantised: all is read, written, and read as far as touched.
  more = (
    roofline.forward(low, 1).hbm_bytes - roofline.forward(place, 1).hbm_bytes
  )
  assert more == pytest.approx((each + 2) * 8 * of_experts, rel=1e-3)
