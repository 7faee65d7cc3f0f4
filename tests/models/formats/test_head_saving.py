"""Heads are read back as they were saved, here and by other programs."""

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

from models import head_starts
from models.formats import head_checkpoints, head_saving
from models.formats.head_checkpoints import Target
from models.networks import eagle, medusa
from models.networks.description import llama_config
from models.networks.dflash import Parallel, ParallelConfig
from models.networks.mtp import Mtp, MtpConfig
from models.networks.transformer import FINAL, Transformer

pytestmark = pytest.mark.usefixtures("quick_to_compile")

V = 13
IDS = np.array([1, 4, 5, 9, 12], np.int32)
CONFIG = llama_config(
  vocab_size=V, embed_dim=8, num_layers=4, num_heads=2, num_kv_heads=1,
  head_dim=6, mlp_dim=12, max_positions=32, rope_theta=500.0, qkv_bias=False,
)  # fmt: skip
rope = functools.partial(dataclasses.replace, CONFIG.attention.rope)


@pytest.fixture(scope="module")
def target():
  return Transformer(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def about(target):
  return Target(
    num_layers=4, embed_dim=8, vocab_size=V,
    embedding=target.embed.embedding[...],
    output=target.lm_head.weight[...],
  )  # fmt: skip


@pytest.fixture
def save(about, tmp_path):
  """Saves a head; gives its settings and its tensors."""
  verifier = tmp_path / "target"
  verifier.mkdir()
  (verifier / "config.json").write_text('{"architectures": ["Theirs"]}')

  def saved(kind, head, **settings):
    settings = dict(target=about, verifier=str(verifier)) | settings
    features = READS.get(kind.partition(",")[0], (FINAL,))
    folder = tmp_path / "head"
    head_saving.save(head, str(folder), features=features, **settings)
    return (
      json.loads((folder / "config.json").read_text()),
      safetensors.numpy.load_file(folder / "model.safetensors"),
    )

  return saved


MAKE = {
  "eagle3": lambda target: head_starts.eagle3(
    target, layers=(0, 1, 3), draft_vocab=IDS, rngs=nnx.Rngs(1)
  ),
  "eagle": lambda target: head_starts.eagle1(target, rngs=nnx.Rngs(1)),
  "medusa": lambda target: head_starts.medusa(
    target, num_heads=2, rngs=nnx.Rngs(1)
  ),
  "dflash": lambda target: head_starts.parallel(
    target,
    num_layers=2,
    layers=(1, 3),
    block_size=4,
    mask_token=6,
    draft_vocab=None,
    rngs=nnx.Rngs(1),
  ),
  "eagle3, wide": lambda target: head_starts.eagle3(
    target, layers=(0, 1, 3), draft_vocab=IDS, mlp_dim=20, rngs=nnx.Rngs(1)
  ),
  "dflash, few words": lambda target: head_starts.parallel(
    target,
    num_layers=2,
    layers=(1, 3),
    block_size=4,
    mask_token=6,
    draft_vocab=IDS,
    rngs=nnx.Rngs(1),
  ),
}
LATER = eagle.EagleConfig(
  layer=described.alter(CONFIG, num_layers=2), generation=3,
  num_features=24, num_fused=3, norm_output=True, fc_norm=True,
)  # fmt: skip
MAKE |= {
  "eagle3, two layers": lambda target: LATER.make(rngs=nnx.Rngs(1)),
  "eagle3, a switch": lambda target: dataclasses.replace(
      LATER, layer=described.alter(CONFIG, num_layers=1), fc_norm=False,
      norm_before_residual=True,
    ).make(rngs=nnx.Rngs(1)),
  "eagle3, qwen's": lambda target: dataclasses.replace(
      LATER, layer=described.alter(CONFIG, num_layers=1, qk_norm="head"),
      fc_norm=False, norm_output=False,
    ).make(rngs=nnx.Rngs(1)),
}  # fmt: skip


def mtp_of_qwen(target):
  """One whose layer norms queries and keys."""
  layer = described.alter(CONFIG, num_layers=1, qk_norm="head")
  head = Mtp(MtpConfig(layer=layer, num_features=8), rngs=nnx.Rngs(1))
  head.embed.embedding[...] = target.embed.embedding[...]
  head.lm_head.weight[...] = target.lm_head.weight[...]
  return head


MAKE["mtp"] = lambda target: head_starts.mtp(target, rngs=nnx.Rngs(1))
MAKE["mtp, qwen's"] = mtp_of_qwen
MAKE["medusa, few words"] = lambda target: medusa.Medusa(
  medusa.MedusaConfig(
    num_heads=2, num_layers=1, embed_dim=8, vocab_size=V, draft_vocab_size=5
  ),
  rngs=nnx.Rngs(1),
)
BLOCKS = ParallelConfig(
  layers=described.alter(
    CONFIG, num_layers=2, qk_norm="head", windows=(None, 5)
  ),
  num_features=16, block_size=4, mask_token=6,
)  # fmt: skip
SLIDING = {
  "eagle, slides, stretched": eagle.EagleConfig(
    layer=described.alter(
      CONFIG, num_layers=1, windows=(5,), rope=rope(factors=(2.0, 2.0, 2.0))
    ),
    generation=1, num_features=8,
  ),
  "eagle3, slides": eagle.EagleConfig(
    layer=described.alter(CONFIG, num_layers=1, windows=(5,)),
    generation=3, num_features=24, num_fused=3,
  ),
  "dflash, slides": BLOCKS,
  "dflash, slides both ways": dataclasses.replace(
    BLOCKS, windows_before_block=True, causal_windows=False
  ),
  "dflash, slides before blocks": dataclasses.replace(
    BLOCKS, windows_before_block=True, draft_vocab_size=5
  ),
}  # fmt: skip


def sliding(kind, target):
  """A head with windows, and its target's embedding and output."""
  config = SLIDING[kind]
  head = config.make(rngs=nnx.Rngs(1))
  head.embed.embedding[...] = target.embed.embedding[...]
  if config.draft_vocab_size:
    head.target_ids[...] = IDS
  elif not kind.startswith("eagle3"):
    head.lm_head.weight[...] = target.lm_head.weight[...]
  return head


MAKE |= {kind: functools.partial(sliding, kind) for kind in SLIDING}
FEW_WORDS = "dflash, few words"
NAMES_ITS_TARGET = (
  "eagle3, two layers", "eagle3, a switch", "eagle3, qwen's", "eagle3, slides",
  "dflash, few words", "dflash, slides both ways",
  "dflash, slides before blocks", "mtp", "mtp, qwen's",
)  # fmt: skip
# These were not made of the target.
LATER_SWITCH = {
  "eagle3, two layers": False, "eagle3, a switch": True,
  "eagle3, qwen's": False, "eagle3, slides": False,
}  # fmt: skip
READS = {"eagle3": (0, 1, 3), "dflash": (1, 3)}


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_saved_is_what_is_read(kind, target, about, save, tmp_path):
  head = MAKE[kind](target)
  state = nnx.state(head, nnx.Param)
  noise = np.random.default_rng(0)
  for path, value in nnx.to_flat_state(state):
    shared = (path[0] == "embed" and kind not in LATER_SWITCH) or (
      kind in ("eagle", "dflash", "mtp", "mtp, qwen's") and path[0] == "lm_head"
    )
    if not shared:
      new = noise.standard_normal(value.shape)
      value[...] = jnp.asarray(new, jnp.bfloat16).astype(jnp.float32)
  nnx.update(head, state)
  settings, _ = save(kind, head)
  assert head_checkpoints.is_head(str(tmp_path / "head"))
  loaded = head_checkpoints.load(str(tmp_path / "head"), about)
  assert loaded.kind == kind.partition(",")[0]
  assert loaded.features == READS.get(loaded.kind, (FINAL,))
  assert loaded.module.config == head.config
  jax.tree.map(
    np.testing.assert_array_equal, nnx.state(loaded.module), nnx.state(head)
  )
  if loaded.kind != "medusa":
    config = loaded.module.config
    layers = config.layers if loaded.kind == "dflash" else config.layer
    assert layers.attention.rope.theta == 500.0
    assert config.max_positions == 32
  if loaded.kind == "dflash":
    assert (config.block_size, config.mask_token) == (4, 6)
  assert ("speculators_config" in settings) == (kind in NAMES_ITS_TARGET)
  if kind == "dflash":
    assert settings["num_target_layers"] == 4
  if kind in LATER_SWITCH:  # servers have other defaults of their own
    assert settings["norm_before_residual"] is LATER_SWITCH[kind]


# ------------------------------------------------- what other programs ask for
#
# Tensors by the names and shapes that their own loaders ask for, written down
# by hand: of speculators 0.9.0 (`Eagle3DraftModel`, `DFlashDraftModel`, less
# what they read from the verifier), vLLM 0.33.0 (`llama_eagle`, `llama_eagle3`,
# `qwen3_dflash`) and the last with Medusa (`medusa`), and SGLang 0.5.23
# (`llama_eagle3`).


def layer_of(name, *, read=8, qk_norm=False, biases=False, mlp=12):
  """A layer's tensors; read: channels that attention reads."""
  actual = {
    "self_attn.q_proj.weight": (12, read),
    "self_attn.k_proj.weight": (6, read),
    "self_attn.v_proj.weight": (6, read),
    "self_attn.o_proj.weight": (8, 12),
    "post_attention_layernorm.weight": (8,),
    "mlp.gate_proj.weight": (mlp, 8),
    "mlp.up_proj.weight": (mlp, 8),
    "mlp.down_proj.weight": (8, mlp),
  }
  if qk_norm:
    actual |= {f"self_attn.{n}_norm.weight": (6,) for n in "qk"}
  if biases:
    sizes = dict(q=12, k=6, v=6, o=8)
    actual |= {f"self_attn.{n}_proj.bias": (sizes[n],) for n in sizes}
  return {f"{name}.{part}": shape for part, shape in actual.items()}


def first_of(name, **more):
  """EAGLE-3's first layer."""
  norms = {
    f"{name}.{n}.weight": (8,) for n in ("input_layernorm", "hidden_norm")
  }
  return layer_of(name, read=16, **more) | norms


def medusa_of(words):
  return {
    name: shape
    for h in range(2)
    for name, shape in (
      (f"blocks.{h}.layers.0.weight", (8, 8)),
      (f"blocks.{h}.layers.0.bias", (8,)),
      (f"lm_heads.{h}.weight", (words, 8)),
    )
  }


MAPS = {"d2t": (5,), "t2d": (V,)}
EAGLE3 = {"fc.weight": (8, 24), "norm.weight": (8,)}
WHOLE = EAGLE3 | {"lm_head.weight": (V, 8), "embed_tokens.weight": (V, 8)}
LAYERS = {
  name: shape
  for i in range(2)
  for name, shape in {
    **layer_of(f"layers.{i}", qk_norm=True),
    f"layers.{i}.input_layernorm.weight": (8,),
  }.items()
}
MTP = {
  f"mtp_layers.0.{name}.weight": (8,) if "norm" in name else (8, 16)
  for name in (
    "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm",
    "input_layernorm",
  )
}  # fmt: skip
DFLASH = LAYERS | {
  "fc.weight": (8, 16), "hidden_norm.weight": (8,), "norm.weight": (8,)
}  # fmt: skip
ASKED = {
  "eagle": layer_of("layers.0") | {"fc.weight": (8, 16)},
  "eagle, qwen2's": layer_of("layers.0", biases=True) | {"fc.weight": (8, 16)},
  "eagle3": first_of("midlayer") | EAGLE3 | MAPS | {"lm_head.weight": (5, 8)},
  "eagle3, wide": (
    first_of("midlayer", mlp=20) | EAGLE3 | MAPS | {"lm_head.weight": (5, 8)}
  ),
  "eagle3, qwen2's": (
    first_of("midlayer", biases=True) | EAGLE3 | {"lm_head.weight": (V, 8)}
  ),
  "eagle3, two layers": (
    WHOLE | first_of("layers.0") | layer_of("layers.1")
    | {"layers.1.input_layernorm.weight": (8,)}
    | {f"fc_norm.{i}.weight": (8,) for i in range(3)}
  ),
  "eagle3, a switch": WHOLE | first_of("layers.0"),
  "eagle3, qwen's": WHOLE | first_of("layers.0", qk_norm=True),
  "mtp": MTP | layer_of("mtp_layers.0"),
  "mtp, qwen's": MTP | layer_of("mtp_layers.0", qk_norm=True),
  "medusa": medusa_of(V),
  "medusa, few words": medusa_of(5) | {"token_map": (5,)},
  "dflash": DFLASH,
  "dflash, few words": DFLASH | MAPS | {"lm_head.weight": (5, 8)},
}  # fmt: skip
ASKED |= {  # windows are settings
  "eagle, slides, stretched": ASKED["eagle"],
  "eagle3, slides": ASKED["eagle3, a switch"],
  "dflash, slides": DFLASH,
  "dflash, slides both ways": DFLASH,
  "dflash, slides before blocks": ASKED["dflash, few words"],
}
BIASED = described.alter(CONFIG, num_layers=1, qkv_bias=True)
QWEN2 = {
  "eagle, qwen2's": eagle.EagleConfig(
    layer=BIASED, generation=1, num_features=8
  ),
  "eagle3, qwen2's": eagle.EagleConfig(
    layer=BIASED, generation=3, num_features=24, num_fused=3
  ),
}
ALL = MAKE | {
  kind: lambda target, config=config: config.make(rngs=nnx.Rngs(1))
  for kind, config in QWEN2.items()
}


@pytest.mark.parametrize("kind", ALL)
def test_a_file_has_the_tensors_that_its_readers_ask_for(kind, target, save):
  head = ALL[kind](target)
  if kind in QWEN2:  # its embedding and output are those of the target
    head.embed.embedding[...] = target.embed.embedding[...]
    if kind.startswith("eagle,"):
      head.lm_head.weight[...] = target.lm_head.weight[...]
  settings, tensors = save(kind, head, dtype="float16")
  assert {n: x.shape for n, x in tensors.items()} == ASKED[kind]
  integers = {"d2t": np.int64, "t2d": np.bool_, "token_map": np.int64}
  for name, x in tensors.items():
    assert x.dtype == integers.get(name, np.float16), name
  if "d2t" in tensors:
    assert tensors["d2t"].tolist() == [1, 3, 3, 6, 8]
    assert np.flatnonzero(tensors["t2d"]).tolist() == IDS.tolist()
  layers = settings.get("transformer_layer_config", settings)
  if not kind.startswith("medusa"):
    assert layers["rope_theta"] == 500.0
    assert layers["vocab_size"] == V
    assert layers["attention_bias"] is (kind in QWEN2)
    # transformers forgets a Qwen3's window that is not said to be used.
    assert layers.get("use_sliding_window", False) is (kind in SLIDING)


def test_eagle1_has_a_name_that_vllm_and_one_that_sglang_knows(target, save):
  """Each goes through the list and takes what it knows."""
  settings, _ = save("eagle", MAKE["eagle"](target))
  assert settings["architectures"] == [
    "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"
  ]  # fmt: skip
  assert settings["model_type"] == "llama"
  assert settings["bias"] is False  # if nothing is said, its authors add one


def test_eagle3_says_its_layers_where_each_program_looks(target, save):
  settings, _ = save("eagle3", MAKE["eagle3"](target))
  assert settings["architectures"] == ["LlamaForCausalLMEagle3"]
  assert settings["draft_vocab_size"] == 5
  name = "eagle_aux_hidden_state_layer_ids"
  assert settings[name] == [0, 1, 3]  # what layers read
  assert settings["eagle_config"] == {
    name: [-1, 0, 2],  # what layers give
    "use_aux_hidden_state": True,
  }


@pytest.mark.parametrize("kind", ["medusa", "medusa, few words"])
def test_medusas_settings_are_vllms(kind, target, save):
  settings, tensors = save(kind, MAKE[kind](target))
  words = 5 if "few" in kind else V
  assert settings == dict(
    architectures=["MedusaModel"], model_type="medusa", num_heads=2,
    num_hidden_layers=1, hidden_size=8, vocab_size=V,
    truncated_vocab_size=words, medusa_fc_bias=True, dtype="bfloat16",
    torch_dtype="bfloat16",
  )  # fmt: skip
  if "few" in kind:
    assert tensors["token_map"].shape == (5,)


@pytest.mark.parametrize("kind", NAMES_ITS_TARGET)
def test_speculators_finds_the_target_and_what_it_validates(
  kind, target, save, tmp_path
):
  settings, _ = save(kind, MAKE[kind](target))
  made = settings["speculators_config"]
  assert made["verifier"] == {
    "name_or_path": str(tmp_path / "target"), "architectures": ["Theirs"]
  }  # fmt: skip
  (method,) = made["proposal_methods"]
  assert method["proposal_type"] == made["default_proposal_method"] == "greedy"
  assert method["speculative_tokens"] == 3
  algorithm = kind.partition(",")[0]
  assert made["algorithm"] == settings["speculators_model_type"] == algorithm
  layers = settings["transformer_layer_config"]
  qwens = kind.endswith("qwen's") or algorithm == "dflash"
  assert layers["model_type"] == ("qwen3" if qwens else "llama")
  if algorithm == "eagle3":
    assert settings["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert settings["draft_vocab_size"] == V
  elif algorithm == "mtp":
    assert settings["architectures"] == ["MTPDraftModel"]
    assert settings["num_nextn_predict_layers"] == 1
  else:
    assert settings["aux_hidden_state_layer_ids"] == [1, 3]
    assert (settings["block_size"], settings["mask_token_id"]) == (4, 6)


def test_a_target_may_be_named_as_on_the_hub(target, save):
  settings, _ = save(FEW_WORDS, MAKE[FEW_WORDS](target), verifier="them/model")
  assert settings["speculators_config"]["verifier"] == {
    "name_or_path": "them/model", "architectures": []
  }  # fmt: skip


@pytest.mark.parametrize("kind", QWEN2)
def test_biases_are_read_as_the_layer_of_a_llama(
  kind, target, about, save, tmp_path
):
  """That of the output is zero, and no other number changes."""
  head = ALL[kind](target)
  state = nnx.state(head, nnx.Param)
  noise = np.random.default_rng(0)
  for _, value in nnx.to_flat_state(state):
    value[...] = jnp.asarray(noise.standard_normal(value.shape), jnp.float32)
  nnx.update(head, state)
  settings, _ = save(kind, head, dtype="float32")
  if kind.startswith("eagle,"):
    assert settings["qkv_bias"] is True
  loaded = head_checkpoints.load(str(tmp_path / "head"), about).module
  assert not loaded.attention.out.bias[...].any()
  have, made = (
    dict(nnx.to_flat_state(nnx.state(x, nnx.Param))) for x in (loaded, head)
  )
  assert {*have} - {*made} == {("attention", "out", "bias")}
  for path, value in made.items():
    np.testing.assert_array_equal(have[path][...], value[...])


def test_what_a_format_does_not_have_is_not_saved(target, tmp_path):
  layers = described.alter(CONFIG, num_layers=1)
  plain = Parallel(
    ParallelConfig(layers=layers, num_features=8, block_size=4, mask_token=6),
    rngs=nnx.Rngs(0),
  )
  with pytest.raises(ValueError, match="layers are Qwen3's"):
    head_saving.save(plain, str(tmp_path), features=(1,))
  for change, message in (
    (dict(causal_windows=False), "no format has windows that end"),
    (
      dict(layers=described.alter(BLOCKS.layers, windows=(4, 5))),
      r"one window for all layers, got \(4, 5\)",
    ),
  ):
    config = dataclasses.replace(BLOCKS, **change)
    with pytest.raises(ValueError, match=message):
      head_saving.save(
        Parallel(config, rngs=nnx.Rngs(0)), str(tmp_path), features=(1, 3)
      )
  with pytest.raises(ValueError, match="dtype must be one of"):
    head_saving.save(MAKE["eagle"](target), str(tmp_path), dtype="int8")
  for kind in NAMES_ITS_TARGET:
    with pytest.raises(ValueError, match="verifier is missing"):
      head_saving.save(MAKE[kind](target), str(tmp_path), features=(0, 1, 3))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(rope=rope(factors=(1.0, 1.5, 2.0))), "cannot express factors"),
    (dict(rope=rope(dim=4)), "cannot express dim=4"),
    (dict(activation="relu"), "cannot express activation"),
  ],
)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash"])
def test_what_cannot_be_saved_is_known_before_it_is_trained(
  kind, changes, message
):
  layer = described.alter(CONFIG, num_layers=1, **changes)
  if kind == "dflash":
    layers = described.alter(layer, qk_norm="head")
    config = dataclasses.replace(BLOCKS, layers=layers)
  else:
    config = eagle.EagleConfig(
      layer=layer, generation=3 if kind == "eagle3" else 1, num_features=8
    )
  with pytest.raises(ValueError, match=message):
    head_saving.check(config)
