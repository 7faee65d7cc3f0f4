"""Keys of every family's `config.json`: read, harmless or refused."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import references
import transformers
from flax import nnx
from references import MODELS

from models.formats import experts, huggingface, huggingface_config, weights
from models.formats.families import FAMILIES
from models.networks.mixture import Mixture

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ROOT = pathlib.Path(__file__).parents[3]

# Of heads of 8, 12 and 16 channels.
ROPES = {
  "linear": dict(rope_type="linear", factor=3.0),
  "dynamic": dict(rope_type="dynamic", factor=2.0),
  "llama3": references.LLAMA3,
  "yarn": dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=16,
    beta_fast=4.0, beta_slow=0.5,
  ),
  "yarn of DeepSeek": dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=16,
    mscale=0.7, mscale_all_dim=0.4,
  ),
  "longrope": dict(
    rope_type="longrope", original_max_position_embeddings=32,
    short_factor=1.1, long_factor=3.0,
  ),
  "proportional": dict(
    rope_type="proportional", factor=2.0, partial_rotary_factor=0.5
  ),
  "partial": dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.4),
}  # fmt: skip
# What further keys say is the same in all families: a llama has them.
MORE_ROPES = {
  "yarn of the usual bounds": dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16
  ),
  "yarn between channels": ROPES["yarn"] | dict(truncate=False),
  "yarn of a told scale": ROPES["yarn"] | dict(attention_factor=0.8),
  "longrope of a told scale": ROPES["longrope"] | dict(
    factor=9.0, attention_factor=1.2
  ),
}  # fmt: skip
PARTIAL = (
  "gpt_neox", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip


@pytest.mark.parametrize(
  ("family", "kind"),
  [
    (family, kind)
    for family in sorted({*FAMILIES} - {"gpt2"})
    for kind in ROPES
    # transformers cannot make a Gemma 4 of it.
    if (family, kind) != ("gemma4_text", "longrope")
  ]
  + [("llama", kind) for kind in MORE_ROPES],
)
def test_every_family_rotates_in_every_kind_as_transformers_does(family, kind):
  settings = settings_of(family)
  by_type = "full_attention" in (settings.get("rope_parameters") or ())
  sizes = {}
  config = huggingface.config_from_json(settings)
  for attention in config.attentions.values():
    slides = by_type and attention.window is not None
    name = "sliding_attention" if slides else "full_attention"
    latent = attention.latent
    sizes[name] = latent.rope_dim if latent else attention.head_dim

  def said(size):
    actual = dict((ROPES | MORE_ROPES)[kind], rope_theta=500.0)
    for key in {"short_factor", "long_factor"} & {*actual}:
      actual[key] = [actual[key] + 0.2 * i for i in range(size // 2)]
    return (
      {"partial_rotary_factor": 1.0} if family in PARTIAL else {}
    ) | actual

  every = {name: said(size) for name, size in sizes.items()}
  settings["rope_parameters"] = every if by_type else every["full_attention"]
  if kind == "partial" and family not in PARTIAL:
    with pytest.raises(ValueError, match="partial_rotary_factor must be 1"):
      huggingface.config_from_json(settings)
    return
  theirs = transformers.AutoModel.from_config(
    references.make_config(family, settings)
  ).rotary_emb
  config = huggingface.config_from_json(settings)
  assert config.max_positions == (32 if kind.startswith("longrope") else 64)
  for attention in config.attentions.values():
    which = ""
    if by_type:
      which = (
        "full_attention_"
        if attention.window is None
        else ("sliding_attention_")
      )
    wanted = getattr(theirs, f"{which}inv_freq").numpy()
    actual = attention.rope.frequencies()
    np.testing.assert_allclose(actual, wanted, rtol=2e-6)
    scale = getattr(theirs, f"{which}attention_scaling")
    assert attention.rope.scale == pytest.approx(scale, rel=1e-12)


def settings_of(family):
  """All that transformers writes of the family's first model."""
  chosen = next(v for v in MODELS.values() if v[0] == family)
  return references.make_config(*chosen[:2]).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_nobody_knows_is_refused_by_name(family):
  settings = settings_of(family)
  expected = huggingface.config_from_json(settings)
  for known in ({"no_such_switch": None}, {"_commit_hash": "0"}):
    assert huggingface.config_from_json(settings | known) == expected
  with pytest.raises(ValueError, match=f"a {family} model .*: no_such_switch"):
    huggingface.config_from_json(settings | {"no_such_switch": 0.5})


def test_a_t5s_key_that_nobody_knows_is_refused_by_name():
  settings = transformers.T5Config().to_dict()
  expected = huggingface.translate(settings)
  for known in ({"no_such_switch": None}, {"n_positions": 512}):
    assert huggingface.translate(settings | known) == expected
  with pytest.raises(ValueError, match=r"a t5 model .*: no_such_switch"):
    huggingface.translate(settings | {"no_such_switch": 0.5})


@pytest.mark.parametrize("family", ["gemma", "gemma3n_text", "phi3"])
def test_other_families_are_refused(family):
  with pytest.raises(ValueError, match=f"one of .*'olmo2'.*, got '{family}'"):
    huggingface.config_from_json(settings_of("llama") | {"model_type": family})


def test_layers_that_draft_for_the_model_are_left_out(copied):
  path = copied("glm-moe")
  expected = nnx.state(huggingface.load(path))

  def edit(tensors):
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((32, 64), "f4")
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = np.zeros(3, "f4")

  references.edit_tensors(path, edit)
  actual = nnx.state(huggingface.load(path))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
  ("family", "changes", "message"),
  [
    ("gemma2", {"use_bidirectional_attention": True}, "must be False"),
    ("gemma2", {"sliding_window": None}, "entries, each one of .'full"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "object of"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "a positive number"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "or 'vision', got"),
    ("gemma4_text", {"num_kv_shared_layers": 3}, "a layer of each kind, got"),
    ("gemma4_text", {"per_layer_config": {"1": {"heads": 3}}}, "per_layer_con"),
    ("gemma4_text", {"vocab_size_per_layer_input": 3}, "at least vocab_size"),
    (
      "glm4_moe",
      {
        "rope_parameters": {
          "rope_type": "yarn",
          "factor": 2.0,
          "partial_rotary_factor": 0.25,
        }
      },
      "an even number of channels, got 3",
    ),
    ("olmo2", {"clip_qkv": 8.0}, "not known: clip_qkv"),
    ("olmo3", {"layer_types": ["full_attention"]}, "must be 4 entries"),
  ],
)
def test_settings_that_are_not_supported_are_errors(family, changes, message):
  with pytest.raises(ValueError, match=message):
    huggingface.config_from_json(settings_of(family) | changes)


_QWEN = dict(mamba_ssm_dtype="float32", attn_output_gate=True)
_QWEN_3_6 = dict(_QWEN, output_gate_type="swish", mlp_only_layers=[])
_QWEN_CODER = dict(
  use_qk_norm=True, qkv_bias=False, shared_expert_intermediate_size=0
)


@pytest.mark.parametrize(
  ("family", "said", "refused"),
  [
    ("qwen3_next", {"use_sliding_window": False}, {"use_sliding_window": True}),
    ("qwen3_5_text", _QWEN_3_6, {"attn_output_gate": False}),
    ("qwen3_5_moe_text", _QWEN_3_6, {"output_gate_type": "sigmoid"}),
    ("qwen3_5_text", _QWEN_3_6, {"mlp_only_layers": [1]}),
    ("glm4_moe_lite", {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
     {"topk_method": "greedy"}),
    ("gemma2", {"cache_implementation": "hybrid", "sliding_window_size": 4096},
     {"use_bidirectional_attention": True}),
    ("gemma3_text", {"cache_implementation": "hybrid"},
     {"use_bidirectional_attention": True}),
    ("qwen3_moe", _QWEN_CODER, {"use_qk_norm": False}),
    ("qwen3_moe", _QWEN_CODER, {"shared_expert_intermediate_size": 8}),
  ],
)  # fmt: skip
def test_what_released_files_say_beside_is_known(family, said, refused):
  settings = settings_of(family)
  expected = huggingface.config_from_json(settings)
  assert huggingface.config_from_json(settings | said) == expected
  with pytest.raises(ValueError, match=f"{next(iter(refused))} must be"):
    huggingface.config_from_json(settings | said | refused)


def test_the_first_layer_alone_is_dense_where_none_are_listed():
  settings = settings_of("glm4_moe_lite") | {"mlp_layer_types": None}
  settings["num_hidden_layers"] = 3
  config = huggingface.config_from_json(settings)
  kinds = [isinstance(x.feed_forward, Mixture) for x in config.layers]
  assert kinds == [False, True, True]
  with pytest.raises(ValueError, match="first_k_dense_replace must be 1"):
    huggingface.config_from_json(settings | {"first_k_dense_replace": 2})


def test_a_multimodal_gemma_ties_its_tables_and_does_not_cap_logits():
  """As transformers' class of it, whatever its text model's settings say."""
  nested = settings_of("gemma3_text")
  nested |= {"tie_word_embeddings": False, "final_logit_softcapping": 4.0}
  whole = {"model_type": "gemma3", "text_config": nested}
  config = huggingface.config_from_json(whole)
  assert config.tied_embeddings
  assert config.logit_softcap is None
  apart = huggingface.config_from_json(whole | {"tie_word_embeddings": False})
  assert not apart.tied_embeddings


@pytest.mark.parametrize(
  ("family", "said", "message"),
  [
    ("gpt_neox", {"rope_theta": 5000.0}, "is called rotary_emb_base"),
    ("gpt_neox", {"partial_rotary_factor": 0.5}, "is called rotary_pct"),
    ("glm4_moe_lite", {"mlp_layer_types": 3}, "mlp_layer_types must be"),
    ("llama", {"layer_types": 3}, "of sliding_attention, got 3"),
    ("mistral", {"attention_bias": True}, "attention_bias must be False"),
    (
      "deepseek_v3",
      {"rope_parameters": {"rope_type": "linear", "factor": 2.0,
                           "mscale_all_dim": "1"}},
      "mscale_all_dim must be",
    ),
  ],
)  # fmt: skip
def test_what_would_be_read_otherwise_is_refused_by_name(family, said, message):
  settings = settings_of(family)
  if family == "gpt_neox":
    settings = {k: v for k, v in settings.items() if "rope" not in k}
    settings = {k: v for k, v in settings.items() if "rotary" not in k}
  huggingface.config_from_json(settings)
  with pytest.raises(ValueError, match=message):
    huggingface.config_from_json(settings | said)


def test_every_family_has_a_model_whose_logits_are_compared():
  assert {family for family, *_ in MODELS.values()} == {*FAMILIES}


def test_the_page_of_families_has_them_all():
  page = (ROOT / "docs/families.md").read_text("utf-8")
  rows = [line.split("|") for line in page.splitlines() if line[:3] == "| `"]
  names = lambda cell: {name.strip(" `") for name in cell.split(",")}
  written = {name: row for row in rows[1:] for name in names(row[1])}
  others = {
    "gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "gemma4_assistant",
  }  # fmt: skip
  assert {*FAMILIES} | others == {*written}
  for name, family in FAMILIES.items():
    if family.gguf is not None:
      assert family.gguf.architecture in names(written[name][2])


def test_readers_ask_for_what_they_refuse():
  """A default that nobody reads would be no default."""
  for family in FAMILIES.values():
    settings = huggingface_config.Settings(
      settings_of(family.name), family.defaults
    )
    family.read(settings)
    read = settings.asked | {*family.aliases}
    unread = {*family.defaults} - read - family.harmless
    assert not unread, (family.name, unread)


@pytest.mark.parametrize("name", ["qwen3-5-moe", "mixtral"])
def test_experts_that_are_one_tensor_are_read_alike(copied, name):
  path = copied(name)
  expected = huggingface.load(path)

  def edit(tensors):
    usual = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj"}
    usual["w3"] = "up_proj"
    for tensor in list(tensors):
      parts = (usual.get(part, part) for part in tensor.split("."))
      tensors[".".join(parts)] = tensors.pop(tensor)
    references.fuse_experts(tensors)

  references.edit_tensors(path, edit)
  loaded = huggingface.load(path)
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(loaded), nnx.state(expected)
  )


def test_parts_of_experts_that_are_one_tensor_are_read(copied):
  whole = np.arange(3 * 8 * 4).reshape(3, 8, 4)
  name = "layers.0.mlp.experts.gate_up_proj"
  tensor = weights.Tensor(
    name=name, shape=whole.shape, kind="F32", read=whole.__getitem__
  )
  apart = experts.of_projections({name: tensor}, FAMILIES["qwen3_5_moe_text"])
  up = apart["layers.0.mlp.experts.*.up_proj.weight"]
  part = slice(1, 3), slice(2, None), slice(0, 3)
  np.testing.assert_array_equal(up.read(part), whole[:, 4:][part])

  def spoil(tensors):
    references.fuse_experts(tensors)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:, 2:]

  path = copied("qwen3-5-moe")
  references.edit_tensors(path, spoil)
  with pytest.raises(ValueError, match=r"wrong shape: .*gate_up_proj, exp"):
    huggingface.load(path)


def test_keys_and_values_of_layers_that_attend_to_others_are_left_out(copied):
  path = copied("gemma4")
  expected = nnx.state(huggingface.load(path))

  def edit(tensors):
    for name in ("k_proj", "v_proj", "k_norm"):
      tensors[f"model.layers.3.self_attn.{name}.weight"] = np.zeros(3, "f4")

  references.edit_tensors(path, edit)
  actual = nnx.state(huggingface.load(path))
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
  ("name", "prefix"),
  [
    ("gemma3", "model.language_model."),
    ("gemma3", "language_model."),
    ("gemma4", "model.language_model."),
  ],
)
def test_the_text_model_of_a_multimodal_one_is_read(
  copied, saved, name, prefix
):
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
  settings["tie_word_embeddings"] = tied
  settings |= {"vision_config": {}, "mm_tokens_per_image": 256}
  settings |= {"vision_soft_tokens_per_image": 4, "language_model_only": False}
  (path / "config.json").write_text(json.dumps(settings))
  actual, expected = map(huggingface.load, (path, saved(name)[0]))
  capped = expected.config
  if name == "gemma3":  # whose logits have no cap
    capped = dataclasses.replace(capped, logit_softcap=None)
  assert actual.config == capped
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(actual), nnx.state(expected)
  )
  with pytest.raises(ValueError, match="not known: mrope_section"):
    huggingface.config_from_json(settings | {"mrope_section": [1]})
  with pytest.raises(ValueError, match=f"must be a {name}_text, got 'llama'"):
    huggingface.config_from_json(
      settings | {"text_config": {"model_type": "llama"}}
    )
