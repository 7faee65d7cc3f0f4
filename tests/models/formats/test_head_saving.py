"""Heads are read back as they were saved, here and by other programs.

Tensors by the names and shapes that other loaders ask for are written down by
hand: of speculators 0.9.0 (`Eagle3DraftModel`, `DFlashDraftModel`, less what
they read from the verifier), vLLM 0.33.0 (`llama_eagle`, `llama_eagle3`,
`qwen3_dflash`) and the last with Medusa (`medusa`), and SGLang 0.5.23
(`llama_eagle3`).
"""

import dataclasses
import functools
import json

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from published_heads import IDS, V, layer_shapes

from models import head_shapes, head_starts
from models.formats import head_checkpoints, head_saving
from models.formats.head_checkpoints import Target
from models.networks.description import llama_config
from models.networks.dflash import ParallelConfig
from models.networks.eagle import EagleConfig
from models.networks.mtp import MtpConfig
from models.networks.transformer import FINAL, Transformer

CONFIG = llama_config(
  vocab_size=V, embed_dim=8, num_layers=4, num_heads=2, num_kv_heads=1,
  head_dim=6, mlp_dim=12, max_positions=32, rope_theta=500.0,
)  # fmt: skip
layers = functools.partial(described.alter, CONFIG)
rope = functools.partial(dataclasses.replace, CONFIG.attention.rope)
EAGLE3 = EagleConfig(layers=layers(num_layers=1), generation=3, num_fused=3)
BLOCKS = ParallelConfig(
  layers=layers(num_layers=2, qk_norm="head", windows=(None, 5)),
  num_fused=2, block_size=4, mask_token=6,
)  # fmt: skip
of_eagle3 = functools.partial(dataclasses.replace, EAGLE3)
of_blocks = functools.partial(dataclasses.replace, BLOCKS)
# As they are made of the target.
STARTS = {
  "eagle": lambda target: head_starts.eagle1(target, rngs=nnx.Rngs(1)),
  "eagle3": lambda target: head_starts.eagle3(
    target, layers=(0, 1, 3), draft_vocab=IDS, mlp_dim=20, rngs=nnx.Rngs(1)
  ),
  "medusa": lambda target: head_starts.medusa(
    target, num_heads=2, rngs=nnx.Rngs(1)
  ),
  "dflash": lambda target: head_starts.parallel(
    target, num_layers=2, layers=(1, 3), block_size=4, mask_token=6,
    draft_vocab=None, rngs=nnx.Rngs(1),
  ),
  "mtp": lambda target: head_starts.mtp(target, rngs=nnx.Rngs(1)),
}  # fmt: skip
CONFIGS = {
  "eagle3, slides": of_eagle3(layers=layers(num_layers=1, windows=(5,))),
  "eagle3, two layers": of_eagle3(
    layers=layers(num_layers=2), norm_output=True, fc_norm=True
  ),
  "eagle3, qwen's": of_eagle3(
    layers=layers(num_layers=1, qk_norm="head"), norm_before_residual=True
  ),
  "p_eagle": of_eagle3(layers=layers(num_layers=2), mask_token=6),
  "dflash, slides": BLOCKS,
  "dflash, slides both ways": of_blocks(
    windows_before_block=True, causal_windows=False
  ),
  "dflash, few words": of_blocks(
    windows_before_block=True, draft_vocab_size=5
  ),
  "mtp, qwen's": MtpConfig(
    layers=layers(num_layers=1, qk_norm="head")
  ),
}  # fmt: skip
BIASED = {
  "eagle, qwen2's": EagleConfig(
    layers=layers(
      num_layers=1, qkv_bias=True, windows=(5,), rope=rope(factors=(2.0,) * 3)
    ),
    generation=1,
  ),
}
READS = {"eagle3": (0, 1, 3), "p_eagle": (0, 1, 3), "dflash": (1, 3)}


layer_of = functools.partial(layer_shapes, read=8, mlp=12)


def first_of(name, **more):
  """EAGLE-3's first layer."""
  norms = {
    f"{name}.{n}.weight": (8,) for n in ("input_layernorm", "hidden_norm")
  }
  return layer_of(name, read=16, **more) | norms


FEW = {"d2t": (5,), "t2d": (V,), "lm_head.weight": (5, 8)}
FC3 = {"fc.weight": (8, 24), "norm.weight": (8,)}
WHOLE = FC3 | {"lm_head.weight": (V, 8), "embed_tokens.weight": (V, 8)}
EAGLE1 = layer_of("layers.0") | {"fc.weight": (8, 16)}
MTP = {
  f"mtp_layers.0.{name}.weight": (8,) if "norm" in name else (8, 16)
  for name in (
    "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
    "input_layernorm",
  )
}  # fmt: skip
DFLASH = {
  "fc.weight": (8, 16), "hidden_norm.weight": (8,), "norm.weight": (8,),
  "layers.0.input_layernorm.weight": (8,),
  "layers.1.input_layernorm.weight": (8,),
  **layer_of("layers.0", qk_norm=True), **layer_of("layers.1", qk_norm=True),
}  # fmt: skip
ASKED = {
  "eagle": EAGLE1,
  "eagle, qwen2's": layer_of("layers.0", biases=True) | {"fc.weight": (8, 16)},
  "eagle3": first_of("midlayer", mlp=20) | FC3 | FEW,
  "eagle3, two layers": (
    WHOLE | first_of("layers.0") | layer_of("layers.1")
    | {"layers.1.input_layernorm.weight": (8,)}
    | {f"fc_norm.{i}.weight": (8,) for i in range(3)}
  ),
  "p_eagle": (
    WHOLE | first_of("layers.0") | layer_of("layers.1")
    | {"layers.1.input_layernorm.weight": (8,), "mask_hidden": (1, 1, 24)}
  ),
  "eagle3, slides": WHOLE | first_of("layers.0"),
  "eagle3, qwen's": WHOLE | first_of("layers.0", qk_norm=True),
  "mtp": MTP | layer_of("mtp_layers.0"),
  "mtp, qwen's": MTP | layer_of("mtp_layers.0", qk_norm=True),
  "medusa": {
    name: shape
    for h in range(2)
    for name, shape in (
      (f"blocks.{h}.layers.0.weight", (8, 8)),
      (f"blocks.{h}.layers.0.bias", (8,)),
      (f"lm_heads.{h}.weight", (V, 8)),
    )
  },
  "dflash": DFLASH,
  "dflash, few words": DFLASH | FEW,
  "dflash, slides": DFLASH,
  "dflash, slides both ways": DFLASH,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
  """Of numbers that bfloat16 has."""
  module = Transformer(CONFIG, rngs=nnx.Rngs(0))
  rounded = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
  nnx.update(module, jax.tree.map(rounded, nnx.state(module)))
  return module


@pytest.fixture(scope="module")
def about(target):
  return Target(
    num_layers=4, embed_dim=8, vocab_size=V,
    embedding=target.embed.embedding[...],
    output=target.lm_head.weight[...],
  )  # fmt: skip


def made(name, target):
  """A head of random numbers that bfloat16 has, but for the target's arrays."""
  config = (CONFIGS | BIASED).get(name)
  head = (
    head_shapes.make(config, rngs=nnx.Rngs(1))
    if config
    else STARTS[name](target)
  )
  noise = np.random.default_rng(0)
  state = nnx.state(head, nnx.Param)
  for path, value in nnx.to_flat_state(state):
    new = jnp.asarray(noise.standard_normal(value.shape), jnp.bfloat16)
    value[...] = new.astype(jnp.float32)
    if path[0] in head.config.shared:
      theirs = target.embed.embedding, target.lm_head.weight
      value[...] = theirs[path[0] == "lm_head"][...]
  nnx.update(head, state)
  if head.config.draft_vocab_size:
    head.target_ids[...] = IDS
  return head


@pytest.fixture
def save(target, about, tmp_path):
  """Saves a head; gives it, its settings and its tensors."""
  verifier = tmp_path / "target"
  verifier.mkdir()
  (verifier / "config.json").write_text('{"architectures": ["Theirs"]}')

  def saved(name, **settings):
    head, folder = made(name, target), tmp_path / "head"
    settings = dict(target=about, verifier=str(verifier)) | settings
    features = READS.get(name.partition(",")[0], (FINAL,))
    head_saving.save(head, str(folder), features=features, **settings)
    return (
      head,
      json.loads((folder / "config.json").read_text()),
      safetensors.numpy.load_file(folder / "model.safetensors"),
    )

  return saved


@pytest.mark.parametrize("name", ASKED)
def test_saved_head_has_expected_tensors_and_round_trips(
  name, about, save, tmp_path
):
  """Where queries have biases, that of the output is there too, and zero."""
  head, settings, tensors = save(name)
  assert {n: x.shape for n, x in tensors.items()} == ASKED[name]
  if "d2t" in tensors:
    assert tensors["d2t"].tolist() == [1, 3, 3, 6, 8]
    assert np.flatnonzero(tensors["t2d"]).tolist() == IDS.tolist()
  shown = settings.get("transformer_layer_config", settings)
  kind = name.partition(",")[0]
  if kind != "medusa":
    assert (shown["rope_theta"], shown["vocab_size"]) == (500.0, V)
    assert shown["attention_bias"] is (name in BIASED)
    # transformers forgets a Qwen3's window that is not said to be used.
    slides = any(head.config.layers.windows)
    assert shown.get("use_sliding_window", False) is slides
  assert head_checkpoints.is_head(str(tmp_path / "head"))
  loaded = head_checkpoints.load(str(tmp_path / "head"), about)
  assert (loaded.kind, loaded.features) == (kind, READS.get(kind, (FINAL,)))
  have, wanted = (
    dict(nnx.to_flat_state(nnx.state(x))) for x in (loaded.module, head)
  )
  if name in BIASED:
    assert not have.pop(("attention", "out", "bias"))[...].any()
  else:
    assert loaded.module.config == head.config
  jax.tree.map(np.testing.assert_array_equal, have, wanted)


IDS_READ = "eagle_aux_hidden_state_layer_ids"
# What other programs read of a `config.json`.
SAID = {
  "eagle": dict(
    # vLLM and SGLang go through the list and take what they know.
    architectures=["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"],
    model_type="llama", qkv_bias=False,
    bias=False,  # if nothing is said, its authors add one
  ),
  "eagle3": {
    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 5,
    IDS_READ: [0, 1, 3],  # what layers read
    "eagle_config": {  # what layers give
      IDS_READ: [-1, 0, 2], "use_aux_hidden_state": True
    },
  },
  "medusa": dict(
    architectures=["MedusaModel"], model_type="medusa", num_heads=2,
    num_hidden_layers=1, hidden_size=8, vocab_size=V, truncated_vocab_size=V,
    medusa_fc_bias=True, dtype="float16", torch_dtype="float16",
  ),
  "p_eagle": dict(
    speculators_model_type="peagle", mask_token_id=6, embed_requires_grad=True,
    norm_before_residual=False, draft_vocab_size=V,
  ),
  "dflash": dict(
    num_target_layers=4, block_size=4,
    dflash_config={"mask_token_id": 6, "target_layer_ids": [0, 2]},
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_saved_config_has_the_keys_other_programs_read(name, save):
  _, settings, tensors = save(name, dtype="float16")
  assert settings | SAID[name] == settings
  assert np.dtype(np.float16) in {x.dtype for x in tensors.values()}


OF_SPECULATORS = (
  "eagle3, slides", "eagle3, qwen's", "dflash, few words", "mtp"
)  # fmt: skip


@pytest.mark.parametrize("name", OF_SPECULATORS)
def test_speculators_config_has_verifier_and_required_fields(
  name, save, tmp_path
):
  _, settings, _ = save(name)
  kind, made = name.partition(",")[0], settings["speculators_config"]
  assert made["verifier"] == {
    "name_or_path": str(tmp_path / "target"), "architectures": ["Theirs"]
  }  # fmt: skip
  (method,) = made["proposal_methods"]
  assert method["proposal_type"] == made["default_proposal_method"] == "greedy"
  assert method["speculative_tokens"] == 3
  assert made["algorithm"] == settings["speculators_model_type"] == kind
  shown = settings["transformer_layer_config"]
  qwens = name.endswith("qwen's") or kind == "dflash"
  assert shown["model_type"] == ("qwen3" if qwens else "llama")
  if kind == "eagle3":
    assert settings["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert settings["draft_vocab_size"] == V
    # Servers have other defaults of their own.
    assert settings["norm_before_residual"] is qwens
  elif kind == "mtp":
    assert settings["architectures"] == ["MTPDraftModel"]
    assert settings["num_nextn_predict_layers"] == 1
  else:
    assert settings["aux_hidden_state_layer_ids"] == [1, 3]
    assert (settings["block_size"], settings["mask_token_id"]) == (4, 6)


def test_inexpressible_heads_are_not_saved(target, tmp_path):
  """Which is known before a head is trained."""
  bent = layers(num_layers=1, rope=rope(factors=(1.0, 1.5, 2.0)))
  for config, message in (
    (of_blocks(layers=layers(num_layers=1)), "needs Qwen3's layers"),
    (of_blocks(causal=True, draft_vocab_size=5), "has no causal blocks"),
    (of_eagle3(layers=bent), "cannot express"),
  ):
    with pytest.raises(ValueError, match=message):
      head_saving.check(config)
  head = STARTS["mtp"](target)
  with pytest.raises(ValueError, match="verifier is missing"):
    head_saving.save(head, str(tmp_path))
  with pytest.raises(ValueError, match="dtype must be float32"):
    head_saving.save(head, str(tmp_path), dtype="int8", verifier="them/model")
  assert not list(tmp_path.iterdir())
