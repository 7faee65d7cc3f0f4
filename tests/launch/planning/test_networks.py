"""What a plan counts of encoder-decoders, and of latents."""

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
from models.networks import t5
from models.networks.description import TransformerConfig
from models.networks.transformer import SkippedLayers
from specjax import tree

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def config():
  return plan.shape("t5-1.1-small")


def test_parameters_are_those_of_the_published_model(config):
  assert networks.num_params(config) == 76_961_152


def test_a_pass_reads_the_decoder_without_what_the_input_made(config):
  found = networks.work(
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
  assert found.weights == read
  assert found.slots == 8 * (100 + 30)
  assert (found.attentions, found.mlps, found.sums) == (16, 8, 24)


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
  assert place.work.slots == without.work.slots
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
  found = program.compile_for(
    question(
      target=small, draft=small, batch_size=4,
      layout=Layout(data=2, model=2, draft=2),
    ),
    hardware.devices(hardware.topology("v5e-4")),
  )  # fmt: skip
  assert found.donation_honoured
  # Three sums a layer and one of the table.
  assert found.collectives["verify"]["all-reduce"]["count"] == 3 * 2 + 1


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


def test_a_model_whose_layers_differ_in_their_heads_is_refused():
  config = TransformerConfig(
    **described.GEMMA4, vocab_size=64, embed_dim=32, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, mlp_dim=48, max_positions=64,
  )  # fmt: skip
  with pytest.raises(ValueError, match="there are no plans"):
    networks.cut(config, 1)
