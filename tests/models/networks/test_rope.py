"""Rotary positions of every kind beside transformers'."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.llama import modeling_llama as llama

from models.networks import rope as rope_lib
from models.networks.rope import FULL, SLIDING, Rope, rope_from_json

C, LONGEST = 24, 256
# transformers takes powers in float32, whose exponents are rounded; these are
# of float64.
FREQUENCY = 2e-6
BASE = dict(max_position_embeddings=LONGEST, head_dim=C)
LLAMA3 = dict(
  rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LONG = dict(
  rope_type="longrope",
  short_factor=[1 + 0.1 * i for i in range(12)],
  long_factor=[2 + 0.7 * i for i in range(12)],
  original_max_position_embeddings=64,
)  # fmt: skip
KINDS = {
  "default": dict(rope_type="default"),
  "linear": dict(rope_type="linear", factor=3.0),
  "dynamic": dict(rope_type="dynamic", factor=2.0),
  "llama3": LLAMA3,
  "yarn": YARN,
  "yarn-exact": dict(YARN, truncate=False, factor=32.0),
  "yarn-betas": dict(YARN, beta_fast=8.0, beta_slow=2.0),
  "yarn-given": dict(YARN, attention_factor=1.5),
  "yarn-deepseek": dict(YARN, mscale=0.7, mscale_all_dim=0.4),
  "yarn-of-lengths": dict(YARN, factor=None),
  "longrope": LONG,
  "longrope-given": dict(LONG, attention_factor=1.2, factor=9.0),
  "proportional": dict(rope_type="proportional", partial_rotary_factor=0.25),
  "proportional-stretched": dict(
    rope_type="proportional", partial_rotary_factor=0.5, factor=2.0
  ),
}


def theirs(parameters, theta=1e4, **more):
  """A configuration of transformers'."""
  config = transformers.LlamaConfig(
    **BASE, hidden_size=2 * C, num_attention_heads=2,
    rope_parameters=dict(parameters, rope_theta=theta), **more,
  )  # fmt: skip
  return config


def file(parameters, theta=1e4, *, old=False):
  """The same as files of transformers 4 or 5 have it."""
  if not old:
    return dict(BASE, rope_parameters=dict(parameters, rope_theta=theta))
  scaling = dict(parameters)
  scaling["type"] = scaling.pop("rope_type")
  share = scaling.pop("partial_rotary_factor", None)
  return dict(
    BASE, rope_theta=theta, rope_scaling=scaling, partial_rotary_factor=share
  )


@pytest.mark.parametrize("theta", [1e4, 150_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_and_what_they_turn_are_transformers(kind, theta):
  """Frequencies and queries turned by them."""
  config = theirs(KINDS[kind], theta)
  rope = rope_from_json(file(KINDS[kind], theta))
  assert rope == rope_from_json(file(KINDS[kind], theta, old=True))
  module = llama.LlamaRotaryEmbedding(config)
  expected = module.inv_freq.numpy()
  found = rope_lib.frequencies(rope, C)
  assert (found.dtype, found.shape) == (np.float32, expected.shape)
  np.testing.assert_allclose(found, expected, rtol=FREQUENCY)
  assert rope.scale == pytest.approx(module.attention_scaling, rel=1e-12)
  _turned_as_by(llama, module, rope, longest=rope.max_positions or 2 * LONGEST)


def _turned_as_by(family, module, rope, longest):
  """One row's positions go up to `longest`, where transformers' text ends."""
  rng = np.random.default_rng(0)
  positions = rng.integers(longest, size=(2, 5))
  positions[0, 0] = longest - 1
  x = rng.normal(size=(2, 5, 3, C))
  with torch.no_grad():
    cos, sin = module(torch.tensor(x), torch.tensor(positions))
    turned, _ = family.apply_rotary_pos_emb(
      *(torch.tensor(x).transpose(1, 2),) * 2, cos, sin
    )
  with jax.enable_x64(True):
    table = rope_lib.rotary_table(rope, C, jnp.asarray(positions))
    found = np.asarray(rope_lib.rotate(jnp.asarray(x), table))
  assert found.dtype == np.float64
  # An angle is a position times a frequency.
  error = np.abs(found - turned.transpose(1, 2).numpy()).max()
  assert error < FREQUENCY * longest


def test_partial_rotation_leaves_the_last_channels():
  config = transformers.Glm4MoeConfig(
    **BASE, hidden_size=2 * C, num_attention_heads=2,
    rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5,
                         rope_theta=1e4),
  )  # fmt: skip
  rope = rope_from_json(dict(BASE, partial_rotary_factor=0.5, rope_theta=1e4))
  module = glm4.Glm4MoeRotaryEmbedding(config)
  np.testing.assert_allclose(
    rope_lib.frequencies(rope, C), module.inv_freq, rtol=FREQUENCY
  )
  assert len(module.inv_freq) == C // 4
  _turned_as_by(glm4, module, rope, LONGEST)


def test_shares_that_are_no_whole_number_of_channels():
  for share in (0.334, 0.3, 0.9):
    for kind in ("linear", "proportional"):
      given = dict(rope_type=kind, factor=2.0, partial_rotary_factor=share)
      expected, _ = ROPE_INIT_FUNCTIONS[kind](theirs(given))
      found = rope_lib.frequencies(rope_from_json(file(given)), C)
      np.testing.assert_allclose(found, expected, rtol=FREQUENCY)


def test_longrope_is_chosen_once_by_the_longest_text():
  config = theirs(LONG)
  module = llama.LlamaRotaryEmbedding(config)
  short = rope_from_json(file(LONG), length=64)
  long = rope_from_json(file(LONG), length=65)
  assert short == rope_from_json(file(LONG))
  assert (short.max_positions, long.max_positions) == (64, None)
  assert short.factors == tuple(LONG["short_factor"])
  _turned_as_by(llama, module, short, 64)
  _turned_as_by(llama, module, long, 65)
  _turned_as_by(llama, module, long, LONGEST)
  with pytest.raises(AssertionError):  # at 65 transformers changes its mind
    _turned_as_by(llama, module, short, 65)


def test_dynamic_is_refused_beyond_what_it_is_exact_for():
  dynamic = file(KINDS["dynamic"])
  rope = rope_from_json(dynamic, length=LONGEST)
  assert rope.max_positions == LONGEST
  module = llama.LlamaRotaryEmbedding(theirs(KINDS["dynamic"]))
  with pytest.raises(AssertionError):
    _turned_as_by(llama, module, rope, LONGEST + 100)
  with pytest.raises(ValueError, match="longest row of a batch"):
    rope_from_json(dynamic, length=LONGEST + 1)


BY_TYPE = {
  "gemma3": transformers.Gemma3TextConfig,
  "olmo3": transformers.Olmo3Config,
  "gemma4": transformers.Gemma4TextConfig,
}


@pytest.mark.parametrize(
  ("family", "given", "thetas"),
  [
    ("gemma3", dict(rope_theta=2e5, rope_local_base_freq=3e3, rope_scaling=dict(
      rope_type="linear", factor=8.0)), (1e6, 1e4)),
    ("gemma3", dict(rope_parameters={
      FULL: dict(rope_type="linear", factor=8.0, rope_theta=2e6),
      SLIDING: dict(rope_type="default", rope_theta=3e3)}), (1e6, 1e4)),
    ("olmo3", dict(rope_theta=5e5, rope_scaling=YARN), (5e5, 5e5)),
    ("gemma4", dict(rope_parameters={
      FULL: dict(rope_type="proportional", partial_rotary_factor=0.25,
                 rope_theta=1e6),
      SLIDING: dict(rope_type="default", rope_theta=1e4)}), (1e6, 1e4)),
  ],
)  # fmt: skip
def test_layer_types_have_their_own(family, given, thetas):
  given = dict(given, max_position_embeddings=LONGEST)
  config = BY_TYPE[family](
    hidden_size=2 * C, num_attention_heads=2, head_dim=C, num_hidden_layers=6,
    **{k: dict(v) if isinstance(v, dict) else v for k, v in given.items()},
  )  # fmt: skip
  for layer_type, theta in zip((FULL, SLIDING), thetas, strict=True):
    rope = rope_from_json(given, layer_type=layer_type, theta=theta)
    expected = config.rope_parameters[layer_type]
    assert rope.kind == expected["rope_type"]
    assert rope.theta == expected["rope_theta"]
    if rope.kind != "default":
      # A configuration of one layer type, which transformers can compute.
      single = types.SimpleNamespace(
        rope_parameters=expected, head_dim=C, hidden_size=2 * C,
        num_attention_heads=2, max_position_embeddings=LONGEST,
        standardize_rope_params=lambda: None,
      )  # fmt: skip
      freq, scale = ROPE_INIT_FUNCTIONS[rope.kind](single)
      np.testing.assert_allclose(
        rope_lib.frequencies(rope, C), freq, rtol=FREQUENCY
      )
      assert rope.scale == pytest.approx(scale, rel=1e-12)


def test_a_layer_type_may_have_none():
  nested = {FULL: None, SLIDING: dict(rope_type="default")}
  config = dict(BASE, rope_parameters=nested)
  assert rope_from_json(config, layer_type=FULL) is None
  assert rope_from_json(config, layer_type=SLIDING) == Rope()


def test_gpt_neox_has_names_of_its_own():
  config = dict(BASE, rotary_pct=0.5, rotary_emb_base=5e3)
  rope = rope_from_json(config, share=0.25)
  assert rope == Rope(share=0.5, theta=5e3)
  assert rope_from_json(BASE, share=0.25, theta=7.0) == Rope(
    share=0.25, theta=7.0
  )


@pytest.mark.parametrize(
  ("parameters", "message"),
  [
    (dict(rope_type="axial"), "rope_type must be one of .*got 'axial'"),
    (dict(rope_type=["yarn"]), "rope_type must be one of"),
    (dict(rope_type="default", factor=2.0), "'default' have no factor"),
    (dict(rope_type="linear", factor=2.0, beta_fast=3), "have no beta_fast"),
    (dict(rope_type="default", mrope_section=[4, 4]), "no mrope_section"),
    (dict(rope_type="linear"), "linear needs factor"),
    (dict(LONG, long_factor=None), "longrope needs long_factor"),
    (dict(LONG, long_factor=2.0), "long_factor must be a list"),
    (dict(LONG, short_factor=[0.0] * 12), "short_factor must be a positive"),
    (dict(rope_type="linear", factor=-1), "factor must be a positive number"),
    (dict(rope_type="linear", factor=True), "factor must be a positive number"),
    (dict(LLAMA3, low_freq_factor=4), "low_freq_factor must be below"),
    (dict(YARN, truncate=1), "truncate must be true or false"),
    (dict(YARN, original_max_position_embeddings=6.5), "a positive integer"),
    (dict(rope_type="default", partial_rotary_factor=1.5), "in .0, 1."),
    ({FULL: dict(rope_type="default")}, "given by layer type"),
  ],
)
def test_unknown_kinds_keys_and_values_are_refused_by_name(parameters, message):
  with pytest.raises(ValueError, match=message):
    rope_from_json(dict(BASE, rope_parameters=parameters))


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (dict(rope_parameters=dict(YARN)), "must be given by layer type"),
    (dict(rope_theta=3e4), "rope_local_base_freq must be given"),
    (dict(rope_parameters={SLIDING: dict(YARN, truncate=False)}), "truncate"),
    (dict(rope_parameters=[1]), "rope_parameters must be an object"),
    (dict(rope_theta=3e4, rope_local_base_freq=1e4,
          rope_parameters={SLIDING: dict(rope_theta=2e4)}), "rope_theta is"),
  ],
)  # fmt: skip
def test_contradictions_of_layer_types_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    rope_from_json({**BASE, **config}, layer_type=SLIDING)


def test_what_is_given_twice_must_be_the_same():
  twice = dict(BASE, rope_theta=1e4, rope_parameters=dict(rope_theta=2e4))
  with pytest.raises(ValueError, match="rope_theta is both"):
    rope_from_json(twice)
  lengths = dict(BASE, rope_scaling=YARN, original_max_position_embeddings=32)
  with pytest.raises(ValueError, match="original_max_position_embeddings is"):
    rope_from_json(lengths)


def test_factors_are_one_a_pair():
  rope = Rope(kind="longrope", factors=(1.0, 2.0))
  with pytest.raises(ValueError, match="must have 12 entries"):
    rope_lib.frequencies(rope, C)
  for kind, needs in (("longrope", "needs them"), ("yarn", "yarn needs")):
    with pytest.raises(ValueError, match=needs):
      dataclasses.replace(Rope(), kind=kind)
