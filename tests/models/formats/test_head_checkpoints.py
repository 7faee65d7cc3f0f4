"""Heads in every published format become the same networks.

The files are made of random numbers (`published_heads`), by the names and
shapes that the formats have; no published checkpoint was opened.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
from flax import nnx
from jax.sharding import AxisType
from published_heads import (
  FORMATS,
  IDS,
  LAYER_JSON,
  MLP,
  NAME,
  OUTPUT,
  RNG,
  SPECULATORS,
  TARGET,
  VD,
  D,
  H,
  V,
  layer,
  random,
  write,
)

from models import head_shapes, meshes, sharding
from models.formats import head_checkpoints, head_files, huggingface
from models.formats.head_files import Place
from models.formats.weights import CheckpointError, Tensor


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_tells_by_itself_what_it_is(name, tmp_path):
  _, tensors, kind, features = FORMATS[name]
  directory = write(tmp_path / "head", name)
  assert head_checkpoints.is_head(directory)
  head = head_checkpoints.load(directory, TARGET)
  assert (head.kind, head.features) == (kind, features)
  # Every number of the file is in the network, and all others the target's.
  floats = [v for v in tensors.values() if v.dtype == np.float32]
  if "run twice" in name:
    floats += [v for n, v in tensors.items() if ".linear." in n]
  kept = [np.asarray(x) for x in jax.tree.leaves(nnx.state(head.module))]
  count = lambda arrays: sum(float(np.abs(x).sum()) for x in arrays)
  shared = {}
  if kind in ("eagle", "eagle3"):
    shared["embed_tokens.weight"] = TARGET.embedding
  if kind in ("eagle", "blockwise"):
    shared["lm_head.weight"] = OUTPUT
  shared = [
    v for n, v in shared.items()
    if not any(t.endswith(n) for t in tensors)
  ]  # fmt: skip
  ids = [IDS] if {"d2t", "token_map"} & {*tensors} else []
  np.testing.assert_allclose(
    count(kept), count(floats) + count(shared) + count(ids), rtol=1e-5
  )


@pytest.mark.parametrize("name", ["eagle3", "medusa", "blockwise"])
def test_parts_that_are_read_for_a_mesh_are_those_of_the_whole(name, tmp_path):
  """Each device asks for its own; here one asks for all, part by part."""
  mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
  place = Place(mesh=mesh, sharding=sharding.tensor_parallel())
  directory = write(tmp_path / "head", name)
  loaded = head_checkpoints.load(directory, TARGET, place=place)
  whole = head_checkpoints.load(directory, TARGET)
  pairs = zip(
    *(jax.tree.leaves(nnx.state(h.module)) for h in (loaded, whole)),
    strict=True,
  )
  for mine, theirs in pairs:
    np.testing.assert_array_equal(mine, theirs)
  module = loaded.module
  projection = {
    "eagle3": lambda: module.lm_head,
    "medusa": lambda: module.heads[0].lm_head,
    "blockwise": lambda: module.hidden,
  }[name]()
  assert projection.weight[...].sharding.spec == place.sharding.column_nd


def test_a_head_is_cut_over_what_divides_it():
  shape = head_checkpoints.shape(FORMATS["eagle3"][0], TARGET, kind="eagle3")
  assert {2, 1, MLP, H, V, VD} <= {*shape.config.even_sizes()}
  assert meshes.most_devices(shape.config.even_sizes(), 8) == 1
  assert meshes.most_devices((8, 24, 4), 8) == 4


def test_a_head_knows_the_positions_that_its_file_says():
  """With any number in its target; Medusa's and blockwise heads know all."""
  results = {}
  for name, (settings, tensors, *_) in FORMATS.items():
    files = head_files.normal_names(
      {n: Tensor(name=n, shape=v.shape, kind="F32", read=None)
       for n, v in tensors.items()}
    )  # fmt: skip
    shape = head_checkpoints.shape(settings, TARGET, files)
    results[name] = shape.config.max_positions
    module = nnx.eval_shape(lambda s=shape: s.config.make(rngs=nnx.Rngs(0)))
    model, _ = head_shapes.functions(module)
    assert getattr(model, "max_positions", None) == shape.config.max_positions
  free = {
    n for n, (_, _, k, _) in FORMATS.items() if k in ("medusa", "blockwise")
  }
  assert results == {n: None if n in free else 32 for n in FORMATS}


def test_a_head_may_not_say_its_positions():
  settings = {k: v for k, v in LAYER_JSON.items() if "max_pos" not in k}
  shape = head_checkpoints.shape(settings, TARGET, kind="eagle")
  assert shape.config.max_positions is None
  assert shape.config.layer.max_positions is None
  llama3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
  )
  with pytest.raises(ValueError, match="needs max_position_embeddings"):
    head_checkpoints.shape(
      {**settings, "rope_scaling": llama3}, TARGET, kind="eagle"
    )


def test_offsets_are_added_to_the_draft_ids(tmp_path):
  head = head_checkpoints.load(write(tmp_path / "head", "eagle3"), TARGET)
  assert head.module.target_ids[...].tolist() == IDS.tolist()


def test_switches_are_those_of_the_format(tmp_path):
  load = lambda name: (
    head_checkpoints.load(write(tmp_path / name, name), TARGET).module.config
  )
  assert load("speculators").norm_before_residual
  assert load("eagle3.1").fc_norm
  assert load("eagle3.1").norm_output
  assert load("specforge, eagle3.1").norm_output
  assert load("eagle3").layer.rope_theta == 10_000
  assert not load("medusa, vllm").bias
  assert load("medusa").num_heads == 3  # whatever its configuration says


def test_medusas_file_is_a_head_without_a_configuration(tmp_path):
  directory = write(tmp_path / "head", "medusa, one block run twice")
  (tmp_path / "head" / "config.json").unlink()
  (tmp_path / "head" / "model.safetensors").rename(
    tmp_path / "head" / "medusa_lm_head.safetensors"
  )
  assert head_checkpoints.is_head(directory)
  assert head_checkpoints.load(directory, TARGET).kind == "medusa"


def test_the_same_key_means_another_thing_in_another_format(tmp_path):
  """SpecForge's files of heads whose logits are normed."""
  for said in (True, False):
    config = {**FORMATS["specforge"][0], "norm_output": said}
    directory = write(tmp_path / "head", "specforge", config=config)
    loaded = head_checkpoints.load(directory, TARGET).module.config
    assert not loaded.norm_output
  config |= {"norm_before_fc": True, "norm_output": True}
  norm = {"input_norm.weight": random(3 * H)}
  directory = write(tmp_path / "head", "specforge", config=config, **norm)
  assert head_checkpoints.load(directory, TARGET).module.config.norm_output


@pytest.mark.parametrize(
  "name, changes, message",
  [
    ("eagle3", dict(drop=["norm.weight"]), "missing: norm.weight"),
    ("eagle3", dict(drop=["d2t"]), "missing: d2t"),
    ("eagle3", {"fc.bias": random(H + 1)}, r"wrong shape: fc.bias"),
    ("eagle3", {"extra": random(2)}, "unexpected tensors in .*: extra"),
    ("eagle3", {"fc.weight": random(H, 2 * H)}, "wrong shape: fc.weight"),
    ("eagle3", {"d2t": IDS}, "are they ids already"),
    ("eagle3", {"d2t": IDS[:4]}, "d2t, expected 5 integers"),
    ("eagle3", dict(config={**FORMATS["eagle3"][0], "window": 3}),
     "settings that are not known: window"),
    ("specforge", dict(config={**FORMATS["specforge"][0], "eagle_config": {
      NAME: [1, 5, 8], "use_last_layernorm": False}}), "must be true, got Fal"),
    ("specforge", dict(config={**FORMATS["specforge"][0], "eagle_config": {
      NAME: [1, 5, 8], "foo": 1}}), "settings of eagle_config .* known: foo"),
    ("speculators", dict(config={**SPECULATORS, "transformer_layer_config": {
      **LAYER_JSON, "foo": 1}}), "_layer_config that are not known: foo"),
    ("speculators", dict(config={**SPECULATORS, "transformer_layer_config": {
      **LAYER_JSON, "layer_types": ["sliding_attention"]}}),
     "sliding_window must be an integer >= 1, got None"),
    ("speculators", dict(config={**SPECULATORS, "transformer_layer_config": {
      **LAYER_JSON, "layer_types": ["chunked_attention"]}}),
     "layer_types must be full_attention or sliding_attention"),
    ("speculators", dict(config={**SPECULATORS, "transformer_layer_config": {
      **LAYER_JSON, "model_type": "qwen3", "mlp_bias": True}}),
     "settings of a qwen3 model that are not known: mlp_bias"),
    ("eagle3, two layers", {"layers.1.hidden_norm.weight": random(H)},
     "after the first that have a hidden_norm, .*: layers.1.hidden_norm"),
    ("speculators, three layers", {"layers.2.hidden_norm.weight": random(H)},
     "after the first that have a hidden_norm, .*: layers.2.hidden_norm"),
    ("speculators 0.9", dict(config={**SPECULATORS,
      "transformer_layer_config": {**LAYER_JSON, "sliding_window": 2,
      "layer_types": ["sliding_attention"] * 2}}), "of 1 layers, got 2"),
    ("vllm, inputs of layers", dict(config={**LAYER_JSON,
      "num_aux_hidden_states": 4}), "num_aux_hidden_states is 4, and 3 layers"),
    ("eagle3", dict(config={**FORMATS["eagle3"][0], "logit_scale": -1}),
     "logit_scale must be a positive number, got -1"),
    ("eagle", dict(config={**LAYER_JSON, "logit_scale": 2.0}),
     "must be 1 without lm_head.weight"),
    ("medusa, one block run twice", {"medusa_head.0.3.weight": random(V, H),
     "medusa_head.0.1.linear.weight": random(H, H)}, "missing: 0.2.linear"),
    ("eagle3", {"t2d": np.ones(V, bool)}, "t2d does not mark"),
    ("eagle", {"layers.0.input_layernorm.weight": random(H)}, "unexpected"),
    ("eagle", dict(config={**LAYER_JSON, "vocab_size": 99}), "for 99 tokens"),
    ("eagle", dict(config={**LAYER_JSON, "bias": "no"}), "bias must be true"),
    ("eagle", dict(config={**LAYER_JSON, "num_hidden_layers": 2}), "must be 1"),
    ("speculators", dict(config={"speculators_model_type": "peagle"}),
     "must be 'eagle3', 'dflash' or 'mtp', got 'peagle'"),
    ("speculators", dict(config={**SPECULATORS, NAME: [2, 13]}),
     "are not layers of a target of 12"),
    ("specforge", dict(config={**FORMATS["specforge"][0], "eagle_config": {
      NAME: [1, 11]}}), "are not layers of a target of 12"),
    ("medusa", {"2.1.weight": random(V + 1, H)}, "wrong shape: 2.1.weight"),
    ("medusa", {"2.0.linear.bias": np.ones(H, np.int32)}, "wrong type"),
    ("medusa", dict(drop=["1.0.linear.weight"]), "missing: heads.1.blocks.0"),
    ("medusa, vllm, few words", {"token_map": IDS[[0, 0, 1, 2, 3]]},
     "each once"),
    ("medusa, vllm, few words", dict(drop=["token_map"]), "missing: d2t"),
    ("medusa", {"9.1.weight": random(V, H)}, "not numbered from 0"),
    ("blockwise", dict(drop=["out.bias"]), "missing: out.bias"),
    ("blockwise", {"more": random(2)}, "unexpected tensors in .*: more"),
    ("blockwise", dict(config={**FORMATS["blockwise"][0], "k": 4}),
     "settings that are not known: k"),
    ("blockwise", dict(config={**FORMATS["blockwise"][0], "hidden_dim": 0}),
     "hidden_dim must be a positive integer, got 0"),
    ("blockwise", dict(config={**FORMATS["blockwise"][0], "hidden_size": 9}),
     "hidden_size is 9, and the target's 8"),
  ],
)  # fmt: skip
def test_what_is_not_understood_is_an_error(name, changes, message, tmp_path):
  directory = write(tmp_path / "head", name, **changes)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.load(directory, TARGET)


NESTED = "transformer_layer_config"
EAGLE3 = LAYER_JSON | {"draft_vocab_size": VD}
VLLM = FORMATS["medusa, vllm"][0]
AT_THE_TOP = dict(
  rope_theta=5e5, sliding_window=4, layer_types=["sliding_attention"],
  rope_scaling=dict(rope_type="linear", factor=2.0), rms_norm_eps=1e-6,
  hidden_size=H, eagle_config={}, logit_scale=1.0, num_hidden_layers=1,
  head_dim=D, bias=True, use_aux_norm=True, truncated_vocab_size=V,
)  # fmt: skip
INSIDE = {
  "norm_before_residual": True, "norm_output": True, "fc_norm": True,
  "logit_scale": 2.0, "target_hidden_size": H, NAME: [2, 6, 9],
  "norm_before_fc": True, "draft_vocab_size": VD, "eagle_config": {},
}  # fmt: skip
OF_EAGLE3 = {
  "norm_before_residual": True, "norm_output": True, "fc_norm": True,
  "use_aux_norm": True, "target_hidden_size": H, NAME: [2, 6, 9],
  "norm_before_fc": True, "draft_vocab_size": VD,
  "eagle_config": {NAME: [1]}, "num_aux_hidden_states": 3,
}  # fmt: skip


@pytest.mark.parametrize(
  "name, config, message",
  [
    *(("speculators", SPECULATORS | {k: v}, f"not known: {k}$")
      for k, v in AT_THE_TOP.items()),
    *(("speculators", SPECULATORS | {NESTED: LAYER_JSON | {k: v}},
       f"{NESTED} that are not known: {k}$") for k, v in INSIDE.items()),
    *(("eagle", LAYER_JSON | {k: v}, f"^.*: {k} is a setting of EAGLE-3")
      for k, v in OF_EAGLE3.items()),
    ("eagle", LAYER_JSON | {NESTED: LAYER_JSON}, f"not known: {NESTED}"),
    ("eagle3", EAGLE3 | {NESTED: LAYER_JSON}, f"not known: {NESTED}"),
    ("eagle3", EAGLE3 | {"add_para_norm": True}, "add_para_norm is not suppor"),
    ("eagle3", EAGLE3 | {"truncated_vocab_size": 7}, "truncated_vocab_size is"),
    ("medusa", {"medusa_num_heads": 2, NESTED: {}}, f"not known: {NESTED}"),
    ("blockwise", FORMATS["blockwise"][0] | {NESTED: {}}, f"known: {NESTED}"),
    ("medusa, vllm", VLLM | {"sliding_window": 4}, "not known: sliding_window"),
    ("medusa, vllm", VLLM | {"hidden_size": 999}, "hidden_size is 999, and"),
    ("medusa, vllm", VLLM | {"vocab_size": 9}, "vocab_size is 9, and .* 13"),
    ("medusa, vllm", VLLM | {"num_hidden_layers": 2}, "it says 2 layers, and"),
    ("medusa", {"medusa_num_heads": 2, "num_heads": 3},
     "medusa_num_heads and num_heads must agree, got .* 2, num_heads 3"),
    # One setting in two places.
    ("specforge", EAGLE3 | {NAME: [1, 5, 8], "eagle_config": {NAME: [1, 5, 8]}},
     r"must agree, got .*\(2, 6, 9\), .*\(1, 5, 8\)"),
    ("specforge", EAGLE3 | {"eagle_config": {
      NAME: [1, 5, 8], "layer_ids": [1, 5, 8]}}, "layer_ids .* must agree"),
    ("eagle3", EAGLE3 | {"norm_before_fc": False, "eagle_config": {
      "norm_before_fc": True}}, "eagle_config.norm_before_fc must agree"),
    ("eagle3", EAGLE3 | {"fc_norm": True, "use_aux_norm": False},
     "fc_norm and use_aux_norm must agree"),
    ("eagle, vllm", FORMATS["eagle, vllm"][0] | {"rms_norm_eps": 1e-6},
     "rms_norm_eps and model.rms_norm_eps must agree, got .* 1e-06, .* 1e-05"),
  ],
)  # fmt: skip
def test_no_setting_is_ignored(name, config, message, tmp_path):
  """In a place where nobody reads it, or beside another value of the same."""
  directory = write(tmp_path / "head", name, config=config)
  with pytest.raises(ValueError, match=message):
    head_checkpoints.load(directory, TARGET)


def test_a_setting_may_stand_in_two_places_if_they_agree():
  """Layers are numbered by what they give in one, by what they take in two."""
  of = lambda config, kind: head_checkpoints.shape(config, TARGET, kind=kind)
  layers = {NAME: [1, 6, 11], "eagle_config": {
    NAME: [0, 5, 10], "layer_ids": [1, 6, 11], "norm_before_fc": True,
  }}  # fmt: skip
  read = of(EAGLE3 | layers | {"norm_before_fc": True}, "eagle3")
  assert read.features == (1, 6, 11)
  assert read.config.norm_before_fc
  nested = {"model_type": "eagle", "model": LAYER_JSON | {"rope_theta": 7.0}}
  assert of(nested | {"rope_theta": 7.0}, "eagle").config.layer.rope_theta == 7
  assert of(VLLM | {"medusa_num_heads": 2}, "medusa").config.num_heads == 2


def test_ties_of_speculators_must_agree_where_they_matter(tmp_path):
  """Where the file has the output projection, none is needed."""
  name = "speculators"
  tied = SPECULATORS | {"tie_word_embeddings": False,
    NESTED: LAYER_JSON | {"tie_word_embeddings": True}}  # fmt: skip
  embed = {"embed_tokens.weight": random(V, H)}
  head_checkpoints.load(
    write(tmp_path / "own", name, config=tied, **embed), TARGET
  )
  whole = tied | {"draft_vocab_size": V}
  directory = write(
    tmp_path / "none", name, config=whole,
    drop=["lm_head.weight", "d2t", "t2d"], **embed,
  )  # fmt: skip
  with pytest.raises(ValueError, match="tie_word_embeddings must agree"):
    head_checkpoints.load(directory, TARGET)


def test_two_names_of_one_tensor_are_refused(tmp_path):
  more = {"layers.0.hidden_norm.weight": random(H)}
  with pytest.raises(CheckpointError, match=r"^twice: "):
    head_checkpoints.load(write(tmp_path / "h", "eagle3", **more), TARGET)


def test_a_model_of_its_own_is_no_head(tmp_path):
  assert not head_checkpoints.is_head("models/pretrained/draft")
  assert not head_checkpoints.is_head(str(tmp_path))


class Published:
  """A slow forward by the names that a file has, a row of tokens at once.

  Attributes:
    w: tensors of a file, `layers.0.` for EAGLE-3's `midlayer.`.
    windows: of layers, by their numbers.
  """

  def __init__(self, tensors, windows):
    self.windows = windows
    self.w = {
      name.removeprefix("model.").replace("midlayer.", "layers.0."): value
      for name, value in tensors.items()
    }

  def norm(self, name, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.w[name]

  def rotated(self, x, position):
    angle = position * 10_000.0 ** (-np.arange(0, D, 2) / D)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def layer(self, read, residual, number=0):
    """Attention over what is read, then the feed-forward part."""
    here = f"layers.{number}."
    of = lambda name: read @ self.w[f"{here}self_attn.{name}_proj.weight"].T
    q, k, v = (of(n).reshape(len(read), -1, D) for n in "qkv")
    mixed = np.zeros((len(read), 2 * D))
    for t in range(len(read)):
      for head in range(2):  # both read the one key/value head
        query = self.rotated(q[t, head], t)
        first = max(0, t + 1 - self.windows.get(number, t + 1))
        near = range(first, t + 1)
        score = [query @ self.rotated(k[s, 0], s) for s in near]
        weight = np.exp(np.array(score) / np.sqrt(D))
        weight /= weight.sum()
        mixed[t, head * D : (head + 1) * D] = weight @ v[first : t + 1, 0]
    x = residual + mixed @ self.w[f"{here}self_attn.o_proj.weight"].T
    y = self.norm(f"{here}post_attention_layernorm.weight", x)
    gate = y @ self.w[f"{here}mlp.gate_proj.weight"].T
    up = y @ self.w[f"{here}mlp.up_proj.weight"].T
    down = self.w[f"{here}mlp.down_proj.weight"].T
    return x + (gate / (1 + np.exp(-gate)) * up) @ down

  def eagle(self, tokens, features):
    embedding = self.w.get("embed_tokens.weight", TARGET.embedding)[tokens]
    both = np.concatenate([embedding, features], axis=-1)
    x = both @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)
    return self.layer(x, x) @ OUTPUT.T

  def eagle3(self, tokens, features, *, normed_residual=False):
    if "input_norm.weight" in self.w:
      features = self.norm("input_norm.weight", features)
    if "fc_norm.0.weight" in self.w:
      parts = np.split(features, features.shape[-1] // H, axis=-1)
      features = np.concatenate(
        [self.norm(f"fc_norm.{i}.weight", x) for i, x in enumerate(parts)],
        axis=-1,
      )
    hidden = features @ self.w["fc.weight"].T
    normed = self.norm("layers.0.hidden_norm.weight", hidden)
    embedding = self.norm(
      "layers.0.input_layernorm.weight", TARGET.embedding[tokens]
    )
    read = np.concatenate([embedding, normed], axis=-1)
    x = self.layer(read, normed if normed_residual else hidden)
    number = 1
    while (name := f"layers.{number}.input_layernorm.weight") in self.w:
      x = self.layer(self.norm(name, x), x, number)
      number += 1
    all_logits = self.norm("norm.weight", x) @ self.w["lm_head.weight"].T
    if "d2t" not in self.w:
      return all_logits
    logits = np.full((len(x), V), -np.inf)
    for draft_id, offset in enumerate(self.w["d2t"]):
      logits[:, draft_id + offset] = all_logits[:, draft_id]
    return logits


@pytest.mark.parametrize(
  "name", [n for n, made in FORMATS.items() if made[2] in ("eagle", "eagle3")]
)
def test_logits_are_those_of_the_formulas_by_published_names(name, tmp_path):
  settings, tensors, kind, _ = FORMATS[name]
  head = head_checkpoints.load(write(tmp_path / "head", name), TARGET)
  model, params = head.functions()
  tokens = np.array([3, 7, 11])
  features = RNG.standard_normal((3, model.num_features)).astype(np.float32)
  hidden = model.fuse(params, jnp.asarray(features)[None])
  logits, _, _ = model.apply(
    params, jnp.asarray(tokens)[None], hidden, model.init_cache(1, 4)
  )
  more = {}
  if kind == "eagle3":
    more["normed_residual"] = settings.get("norm_before_residual", False)
  windows = {0: 2} if name == "speculators 0.9" else {}
  reference = Published(tensors, windows)
  expected = getattr(reference, kind)(tokens, features, **more)
  np.testing.assert_allclose(logits[0], expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("medusa")])
def test_medusas_logits_are_those_of_the_formulas_by_published_names(
  name, tmp_path
):
  tensors = {
    n.removeprefix("medusa_head."): v for n, v in FORMATS[name][1].items()
  }
  times = 2 if "run twice" in name else 1
  head = head_checkpoints.load(write(tmp_path / "head", name), TARGET)
  model, params = head.functions()
  x = random(2, H)
  actual = model.apply(params, jnp.asarray(x))
  for number in range(actual.shape[1]):
    if "vllm" in name:
      linear, bias = tensors[f"blocks.{number}.layers.0.weight"], 0
      out = tensors[f"lm_heads.{number}.weight"]
    else:
      linear = tensors[f"{number}.0.linear.weight"]
      bias = tensors[f"{number}.0.linear.bias"]
      out = tensors[f"{number}.{times}.weight"]
    state = x
    for _ in range(times):
      y = state @ linear.T + bias
      state = state + y / (1 + np.exp(-y))
    expected = state @ out.T
    if "token_map" in tensors:
      logits, expected = expected, np.full((2, V), -np.inf)
      expected[:, tensors["token_map"]] = logits
    np.testing.assert_allclose(
      actual[:, number], expected, rtol=1e-3, atol=1e-3
    )


def test_blockwise_logits_are_the_formula(tmp_path):
  """One hidden layer for all, a residual, and the target's projection."""
  w = FORMATS["blockwise"][1]
  head = head_checkpoints.load(write(tmp_path / "head", "blockwise"), TARGET)
  model, params = head.functions()
  x = random(2, H)
  hidden = np.maximum(x @ w["hidden.weight"].T + w["hidden.bias"], 0)
  out = hidden @ w["out.weight"].T + w["out.bias"]
  expected = (x[:, None] + out.reshape(2, 2, H)) @ OUTPUT.T
  actual = model.apply(params, jnp.asarray(x))
  np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_head_is_described_by_its_configuration_alone():
  """As for a plan, which has no tensors."""
  of = lambda name, **more: head_checkpoints.shape(
    FORMATS[name][0], TARGET, **more
  )
  assert of("eagle3").config.draft_vocab_size == VD
  assert of("eagle", kind="eagle").config.fc_bias
  assert of("speculators").features == (2, 6, 9)
  assert of("medusa").config.num_heads == 2
  assert of("blockwise").config.num_predicted == 2
  whole = of("eagle3, whole vocabulary", kind="eagle3")
  assert (whole.config.kind, whole.config.draft_vocab_size) == ("eagle3", None)
  with pytest.raises(ValueError, match="number of heads must be said, got N"):
    head_checkpoints.shape({}, TARGET, kind="medusa")


def test_a_head_may_tie_its_own_embedding_to_its_output(tmp_path):
  settings = FORMATS["eagle3, whole vocabulary"][0]
  table = random(V, H)
  directory = write(
    tmp_path / "head", "eagle3, whole vocabulary",
    config={**settings, "tie_word_embeddings": True}, drop=["lm_head.weight"],
    **{"embed_tokens.weight": table},
  )  # fmt: skip
  head = head_checkpoints.load(directory, TARGET)
  np.testing.assert_array_equal(head.module.lm_head.weight[...], table)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_head_in_several_files_is_the_head_in_one(ending, tmp_path):
  whole = head_checkpoints.load(write(tmp_path / "whole", "eagle3"), TARGET)
  config, tensors, *_ = FORMATS["eagle3"]
  path = tmp_path / "parts"
  path.mkdir()
  (path / "config.json").write_text(json.dumps(config))
  name = "model" if ending == "safetensors" else "pytorch_model"
  where = {n: f"{name}-{i % 2}.{ending}" for i, n in enumerate(tensors)}
  for file in {*where.values()}:
    part = {n: tensors[n] for n in tensors if where[n] == file}
    if ending == "safetensors":
      safetensors.numpy.save_file(part, path / file)
    else:
      part = {n: torch.tensor(x) for n, x in part.items()}
      torch.save(part, path / file)
  index = path / f"{name}.{ending}.index.json"
  index.write_text(json.dumps({"weight_map": where}))
  assert head_checkpoints.is_head(str(path))
  parts = head_checkpoints.load(str(path), TARGET)
  jax.tree.map(
    np.testing.assert_array_equal,
    nnx.state(parts.module), nnx.state(whole.module),
  )  # fmt: skip
  (path / f"{name}-1.{ending}").unlink()
  with pytest.raises(FileNotFoundError, match=rf"{name}-1.{ending}.*not there"):
    head_checkpoints.load(str(path), TARGET)


def test_logits_are_multiplied_by_the_scale_that_a_file_says(tmp_path):
  config, tensors, *_ = FORMATS["eagle3"]
  directory = write(
    tmp_path / "h", "eagle3", config=config | {"logit_scale": 3}
  )
  head = head_checkpoints.load(directory, TARGET)
  np.testing.assert_allclose(
    head.module.lm_head.weight[...], 3 * tensors["lm_head.weight"], rtol=1e-6
  )


def test_a_head_reads_rescaled_frequencies_and_windows_of_its_own():
  """As its target's family would, but without that family's own windows."""
  yarn = dict(rope_type="yarn", factor=4.0, rope_theta=1e4,
              original_max_position_embeddings=8)  # fmt: skip
  shape = head_checkpoints.shape(
    {**LAYER_JSON, "rope_parameters": yarn, "max_position_embeddings": 32},
    TARGET, kind="eagle",
  )  # fmt: skip
  layer = shape.config.layer
  assert len({*layer.rope_factors}) > 1
  assert layer.rope_scale == pytest.approx(1 + 0.1 * np.log(4))
  slides = {"use_sliding_window": True, "sliding_window": 5}
  for settings, windows in (
    (slides | {"model_type": "qwen3", "max_window_layers": 0}, (5,)),
    (slides | {"model_type": "qwen3"}, None),  # from layer 28 on
    ({"model_type": "mistral", "sliding_window": 5}, None),
  ):
    nested = {**LAYER_JSON, **settings}
    config = {**SPECULATORS, "transformer_layer_config": nested}
    actual = head_checkpoints.shape(config, TARGET).config.layer.windows
    assert actual == windows


def test_medusas_heads_are_read_of_the_model_that_they_are_merged_with(
  tmp_path,
):
  """Each of the same files reads its own part."""
  name = "medusa, one block run twice"
  settings = dict(
    model_type="llama", hidden_size=H, intermediate_size=MLP, vocab_size=V,
    num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=32,
  )  # fmt: skip
  base = {
    f"model.{n}": random(H, H) if "self_attn" in n else x
    for n, x in layer("layers.0", read=H).items()
  }
  base |= {"model.layers.0.input_layernorm.weight": random(H)}
  base |= {"model.norm.weight": random(H), "lm_head.weight": random(V, H)}
  base |= {"model.embed_tokens.weight": random(V, H)}
  directory = write(tmp_path / "both", name, config=settings, **base)
  assert head_checkpoints.is_head(directory)
  head = head_checkpoints.load(directory, TARGET)
  alone = head_checkpoints.load(write(tmp_path / "alone", name), TARGET)
  jax.tree.map(
    np.testing.assert_array_equal,
    nnx.state(head.module), nnx.state(alone.module),
  )  # fmt: skip
  target = huggingface.load(directory)
  np.testing.assert_array_equal(
    target.lm_head.weight[...], base["lm_head.weight"]
  )


def test_medusas_file_counts_before_the_weights_beside_it(tmp_path):
  directory = tmp_path / "head"
  write(directory, "medusa")
  safetensors.numpy.save_file(
    {"model.norm.weight": random(H)}, directory / "model.safetensors"
  )
  assert head_checkpoints.load(str(directory), TARGET).kind == "medusa"
