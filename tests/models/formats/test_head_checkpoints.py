"""Heads in every published format become the same networks.

The files are made of random numbers (`published_heads`), by the names and
shapes that the formats have; no published checkpoint was opened.
"""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import published_heads
import pytest
import safetensors.numpy
import torch
from flax import nnx
from published_heads import (
  EAGLES,
  FORMATS,
  IDS,
  LAYER_JSON,
  NAME,
  RNG,
  SPECULATORS,
  TARGET,
  VD,
  H,
  Published,
  V,
  random,
  write,
)

from models.formats import head_checkpoints

NESTED = "transformer_layer_config"
EAGLE3 = LAYER_JSON | {"draft_vocab_size": VD}


def read(path, name, **changes):
  """The head of a format, some of it changed."""
  return head_checkpoints.load(write(path / "head", name, **changes), TARGET)


@pytest.mark.parametrize("name", EAGLES)
def test_eagle_logits_match_numpy_reference(name, tmp_path):
  """In two passes through the cache, of which the second is fed back."""
  kind, reads = FORMATS[name][2:]
  directory = write(tmp_path / "head", name)
  assert head_checkpoints.is_head(directory)
  head = head_checkpoints.load(directory, TARGET)
  assert (head.kind, head.features) == (kind, reads)
  assert head.module.config.max_positions == 32
  model, params = head.functions()
  tokens = np.array([3, 7, 11, 2])
  features = RNG.standard_normal((3, model.num_features)).astype(np.float32)
  hidden = model.fuse(params, jnp.asarray(features)[None])
  apply = jax.jit(model.apply)
  logits, states, cache = apply(
    params, jnp.asarray(tokens)[None, :3], hidden, model.init_cache(1, 4)
  )
  more, *_ = apply(params, jnp.asarray(tokens)[None, 3:], states[:, 2:], cache)
  reference = Published(name)
  fused = reference.fuse(features)
  expected, out = reference(tokens[:3], fused)
  after, _ = reference(tokens, np.concatenate([fused, out[-1:]]))
  for actual, wanted in (
    (logits[0], expected), (states[0], out), (more[0, 0], after[3])
  ):  # fmt: skip
    np.testing.assert_allclose(actual, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["p_eagle", "speculators, p_eagle"])
def test_p_eagle_predicts_all_depths_in_one_pass(name, tmp_path):
  """A text, then masks: of two and of one, from a cache and after a round."""
  head = read(tmp_path, name)
  model, params = head.functions()
  token, vector = model.mask(params)
  reference, tokens = Published(name), np.array([3, 7, 11, 2])
  assert token == 6
  features = RNG.standard_normal((4, model.num_features)).astype(np.float32)
  masked = reference.fuse(reference.w["mask_hidden"][0])
  feed, apply = jax.jit(model.fuse), jax.jit(model.apply)

  def expected(length, masks):
    hidden = np.concatenate(
      [reference.fuse(features[:length])] + masks * [masked]
    )
    return reference([*tokens[:length], *masks * [6]], hidden)[0][length - 1 :]

  cache = model.init_cache(1, 8)
  for first, length, masks in ((0, 3, 2), (3, 4, 1)):
    cache = cache.replace(length=jnp.array([first]))
    hidden = feed(params, jnp.asarray(features)[None, first:length])
    logits, _, cache = apply(
      params, jnp.asarray(tokens)[None, first:length], hidden, cache
    )
    fused = jnp.broadcast_to(feed(params, vector[None, None]), (1, masks, H))
    more, _, cache = apply(params, jnp.full((1, masks), token), fused, cache)
    actual = jnp.concatenate([logits[0, -1:], more[0]])
    np.testing.assert_allclose(
      actual, expected(length, masks), rtol=2e-3, atol=2e-3
    )


def test_p_eagle_accepts_dflash_mask_token_key(tmp_path):
  config = {k: v for k, v in FORMATS["p_eagle"][0].items() if k != "pard_token"}
  config |= {"dflash_config": {"mask_token_id": 6}}
  head = read(tmp_path, "p_eagle", config=config)
  assert (head.kind, head.module.config.mask_token) == ("p_eagle", 6)


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("medusa")])
def test_medusa_logits_match_numpy_reference(name, tmp_path):
  tensors = {
    n.removeprefix("medusa_head."): v for n, v in FORMATS[name][1].items()
  }
  head = read(tmp_path, name)
  assert (head.kind, head.features) == FORMATS[name][2:]
  model, params = head.functions()
  x = random(2, H)
  actual = model.apply(params, jnp.asarray(x))
  assert actual.shape[1] == (3 if name == "medusa" else 2)  # as in its file
  for number in range(actual.shape[1]):
    if "vllm" in name:
      linear, bias = tensors[f"blocks.{number}.layers.0.weight"], 0
      out = tensors[f"lm_heads.{number}.weight"]
    else:
      linear = tensors[f"{number}.0.linear.weight"]
      bias = tensors[f"{number}.0.linear.bias"]
      out = tensors[f"{number}.1.weight"]
    y = x @ linear.T + bias
    expected = (x + y / (1 + np.exp(-y))) @ out.T
    np.testing.assert_allclose(
      actual[:, number], expected, rtol=1e-3, atol=1e-3
    )


def test_norm_output_meaning_depends_on_the_format(tmp_path):
  """SpecForge's files of heads whose logits are normed."""
  config = {**FORMATS["specforge"][0], "norm_output": True}
  assert not read(
    tmp_path, "specforge", config=config
  ).module.config.norm_output
  config |= {"norm_before_fc": True}
  norm = {"input_norm.weight": random(3 * H)}
  after = read(tmp_path, "specforge", config=config, **norm).module.config
  assert after.norm_output
  theirs = read(tmp_path, "eagle3.1").module.config
  assert theirs.norm_output
  assert theirs.fc_norm


# Of each format: tensors that are not a head's, and settings that would change
# what it predicts if they were read.
REFUSED = {
  "eagle": [
    ({"layers.0.input_layernorm.weight": random(H)}, "unexpected: layers.0.in"),
    (LAYER_JSON | {"vocab_size": 99}, "vocabulary is 99"),
    (LAYER_JSON | {"num_hidden_layers": 2}, "must be 1"),
  ],
  "eagle3": [
    ({"drop": ["d2t"]}, "missing: d2t"),
    ({"d2t": IDS}, "ids instead of offsets"),
    ({"t2d": np.ones(V, bool)}, "t2d does not mark"),
    (EAGLE3 | {"window": 3, "logit_scale": 2.0}, ": logit_scale, window"),
    (EAGLE3 | {NAME: [1, 5, 8], "eagle_config": {NAME: [1, 5, 8]}},
     r"must agree, got .*\(2, 6, 9\), .*\(1, 5, 8\)"),
  ],
  "speculators": [
    (SPECULATORS | {NESTED: LAYER_JSON | {"norm_output": True}},
     f"unknown settings of {NESTED}: norm_output$"),
  ],
  "p_eagle": [
    ({"drop": ["mask_hidden"]}, "missing: mask_hidden"),
    ({"mask_hidden": random(1, 1, H)}, "wrong shape: mask_hidden"),
    (EAGLE3, "needs one of mask_token_id, pard_token, ptd_token_id"),
    (EAGLE3 | {"pard_token": 6}, "norm_before_residual is missing"),
    (EAGLE3 | {"pard_token": 6, "ptd_token_id": 7}, "must agree"),
  ],
  "medusa": [({"2.1.weight": random(V + 1, H)}, "wrong shape: 2.1.weight")],
  "medusa, vllm": [
    (FORMATS["medusa, vllm"][0] | {"truncated_vocab_size": 5},
     f"truncated_vocab_size is 5, but the target's is {V}"),
  ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_tensors_and_unknown_settings_are_rejected(name, tmp_path):
  for changes, message in REFUSED[name]:
    of_file = "drop" in changes or any(
      isinstance(value, np.ndarray) for value in changes.values()
    )
    with pytest.raises(ValueError, match=message):
      read(tmp_path, name, **(changes if of_file else {"config": changes}))


def test_eagle3_may_be_narrower_than_its_target(tmp_path):
  """As of a 70B target, whose features are of its own width."""
  width = 6
  with mock.patch.object(published_heads, "H", width):
    tensors = published_heads.eagle3(**{
      "fc.weight": random(width, 3 * H),
      "embed_tokens.weight": random(V, width),
    })  # fmt: skip
  directory = write(
    tmp_path / "head", "eagle3",
    config=EAGLE3 | {"hidden_size": width, "target_hidden_size": H}, **tensors,
  )  # fmt: skip
  model, params = head_checkpoints.load(directory, TARGET).functions()
  assert model.num_features == 3 * H
  hidden = model.fuse(params, jnp.asarray(random(1, 2, 3 * H)))
  assert hidden.shape == (1, 2, width)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_sharded_head_files_load_like_a_single_file(ending, tmp_path):
  whole = read(tmp_path, "eagle3")
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


def test_medusa_file_loads_without_a_config(tmp_path):
  """And counts before the weights beside it."""
  path = tmp_path / "head"
  write(path, "medusa, in its model")
  (path / "config.json").unlink()
  (path / "model.safetensors").rename(path / "medusa_lm_head.safetensors")
  safetensors.numpy.save_file(
    {"model.norm.weight": random(H)}, path / "model.safetensors"
  )
  assert head_checkpoints.is_head(str(path))
  assert head_checkpoints.load(str(path), TARGET).kind == "medusa"
