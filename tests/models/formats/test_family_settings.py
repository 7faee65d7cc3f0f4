"""Keys of every family's `config.json`: read, harmless or refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import references
import transformers
from flax import nnx
from references import MODELS

from models.formats import huggingface, loading
from models.formats.families import FAMILIES

_YARN = dict(
  rope_type="yarn", factor=8.0, original_max_position_embeddings=16
)  # fmt: skip
ROPES = {
  "linear": dict(rope_type="linear", factor=3.0),
  "dynamic": dict(rope_type="dynamic", factor=2.0),
  "llama3": references.LLAMA3,
  "yarn": _YARN | dict(beta_fast=4.0, beta_slow=0.5),
  "yarn of the usual bounds": _YARN,
  "yarn between channels": _YARN | dict(beta_fast=4.0, truncate=False),
  "yarn of a told scale": _YARN | dict(attention_factor=0.8),
  "yarn of DeepSeek": _YARN | dict(mscale=0.7, mscale_all_dim=0.4),
  "proportional": dict(
    rope_type="proportional", factor=2.0, partial_rotary_factor=0.5
  ),
  "partial": dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.4),
}  # fmt: skip


@pytest.mark.parametrize(
  ("family", "kind"),
  [
    *(("llama", kind) for kind in ROPES if kind != "partial"),
    # One of each family with a call of its own.
    ("gpt_neox", "partial"), ("glm4_moe", "partial"), ("qwen3_next", "partial"),
    ("gemma3_text", "yarn"), ("gemma4_text", "proportional"), ("olmo3", "yarn"),
    ("deepseek_v3", "yarn of DeepSeek"), ("gpt_oss", "yarn"),
    ("mixtral", "linear"),
  ],
)  # fmt: skip
def test_rope_scaling_matches_transformers(family, kind):
  settings = settings_of(family)
  by_type = "full_attention" in (settings.get("rope_parameters") or ())
  said = dict(ROPES[kind], rope_theta=500.0)
  settings["rope_parameters"] = (
    dict.fromkeys(("full_attention", "sliding_attention"), said)
    if by_type
    else said
  )
  theirs = transformers.AutoModel.from_config(
    references.make_config(family, settings)
  ).rotary_emb
  config = huggingface.config_from_json(settings)
  for attention in config.attentions.values():
    which = "sliding" if attention.window else "full"
    which = f"{which}_attention_" if by_type else ""
    wanted = getattr(theirs, f"{which}inv_freq").numpy()
    np.testing.assert_allclose(attention.rope.frequencies(), wanted, rtol=2e-6)
    scale = getattr(theirs, f"{which}attention_scaling")
    assert attention.rope.scale == pytest.approx(scale, rel=1e-12)


def settings_of(family):
  """All that transformers writes of the family's first model."""
  chosen = next(v for v in MODELS.values() if v[0] == family)
  return references.make_config(*chosen[:2]).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_config_keys_are_rejected_by_name(family):
  settings = settings_of(family)
  expected = huggingface.config_from_json(settings)
  for known in ({"no_such_switch": None}, {"_commit_hash": "0"}):
    assert huggingface.config_from_json(settings | known) == expected
  with pytest.raises(ValueError, match=f"a {family} model: no_such_switch"):
    huggingface.config_from_json(settings | {"no_such_switch": 0.5})


def test_every_family_has_a_logits_comparison_model():
  assert {family for family, *_ in MODELS.values()} == {*FAMILIES}


_QWEN_3_6 = dict(
  mamba_ssm_dtype="float32", attn_output_gate=True, output_gate_type="swish",
  mlp_only_layers=[],
)  # fmt: skip
_QWEN_CODER = dict(
  use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0
)


@pytest.mark.parametrize(
  ("family", "said", "refused"),
  [
    ("qwen3_next", {"use_sliding_window": False}, {"use_sliding_window": True}),
    ("qwen3_5_text", _QWEN_3_6, {"attn_output_gate": False}),
    ("qwen3_5_moe_text", _QWEN_3_6, {"output_gate_type": "sigmoid"}),
    ("glm4_moe_lite", {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
     {"topk_method": "greedy"}),
    ("qwen3_moe", _QWEN_CODER, {"use_qk_norm": False}),
  ],
)  # fmt: skip
def test_extra_keys_of_released_configs_are_validated(family, said, refused):
  settings = settings_of(family)
  expected = huggingface.config_from_json(settings)
  assert huggingface.config_from_json(settings | said) == expected
  with pytest.raises(ValueError, match=f"{next(iter(refused))} must be"):
    huggingface.config_from_json(settings | said | refused)


def test_both_expert_count_keys_are_read():
  """Qwen's own, and that which transformers 5 writes."""
  settings = settings_of("qwen3_moe")
  expected = huggingface.config_from_json(settings)
  settings["num_experts"] = settings.pop("num_local_experts")
  assert huggingface.config_from_json(settings) == expected
  with pytest.raises(ValueError, match="model: num_local_experts"):
    huggingface.config_from_json(settings | {"num_local_experts": 3})


# ------------------------------------------------------------------- tensors


@pytest.mark.parametrize(
  ("name", "unread"),
  [
    # A layer that drafts for the model, and what reads another one's keys.
    ("glm-moe", ["3.eh_proj", "3.mlp.experts.0.up_proj"]),
    ("gemma4", [f"3.self_attn.{x}" for x in ("k_proj", "v_proj", "k_norm")]),
  ],
)
def test_unused_tensors_are_ignored(copied, name, unread):
  path = copied(name)
  expected = nnx.state(loading.load(huggingface.source(path)))
  zeros = {f"model.layers.{x}.weight": np.zeros(3, "f4") for x in unread}
  references.edit_tensors(path, lambda tensors: tensors.update(zeros))
  actual = nnx.state(loading.load(huggingface.source(path)))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_fused_expert_tensors_load_identically(copied):
  path = copied("qwen3-5-moe")
  expected = loading.load(huggingface.source(path))
  references.edit_tensors(path, references.fuse_experts)
  loaded = loading.load(huggingface.source(path))
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(loaded), nnx.state(expected)
  )


# ---------------------------------------------------------------- multimodal


@pytest.mark.parametrize(
  ("name", "prefix"),
  [("gemma3", "language_model."), ("gemma4", "model.language_model.")],
)
def test_text_model_of_multimodal_checkpoint_loads(copied, saved, name, prefix):
  path = copied(name)

  def edit(tensors):
    for tensor in list(tensors):
      newer = prefix == "model.language_model."
      bare = tensor.removeprefix("model.") if newer else tensor
      full = tensor if newer and tensor == "lm_head.weight" else prefix + bare
      tensors[full] = tensors.pop(tensor)
    tensors["vision_tower.vision_model.embeddings.weight"] = np.zeros(3, "f4")
    tensors["model.multi_modal_projector.weight"] = np.zeros(3, "f4")

  references.edit_tensors(path, edit)
  nested = json.loads((path / "config.json").read_text())
  # That of the whole counts, as in transformers.
  tied = nested["tie_word_embeddings"]
  nested["tie_word_embeddings"] = not tied
  settings = {"model_type": name, "text_config": nested}
  settings |= {"tie_word_embeddings": tied, "vision_config": {}}
  (path / "config.json").write_text(json.dumps(settings))
  actual, expected = (
    loading.load(huggingface.source(x)) for x in (path, saved(name)[0])
  )
  capped = expected.config
  if name == "gemma3":  # whose logits have no cap
    capped = dataclasses.replace(capped, logit_softcap=None)
  assert actual.config == capped
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(actual), nnx.state(expected)
  )
  with pytest.raises(ValueError, match="model: mrope_section"):
    huggingface.config_from_json(settings | {"mrope_section": [1]})
