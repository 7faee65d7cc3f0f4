"""Heads from the command line: a directory tells by itself what it is."""

import json

import files
import numpy as np
import pytest
import safetensors.numpy
import torch

from configs import huggingface
from launch import pair, prompts
from specjax import engine

pytestmark = pytest.mark.usefixtures("quick_to_compile")

H, V, VD, D, MLP = 32, 4096, 512, 16, 48
RNG = np.random.default_rng(0)
random = lambda *shape: (0.1 * RNG.standard_normal(shape)).astype(np.float32)
LAYER = dict(
  model_type="llama", hidden_size=H, intermediate_size=MLP,
  num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
  vocab_size=V, rms_norm_eps=1e-5, hidden_act="silu", head_dim=D,
  max_position_embeddings=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A target of two layers, an EAGLE-3 head, and Medusa's of three heads."""
  path = tmp_path_factory.mktemp("heads")
  files.make_checkpoint(path / "target")
  ids = np.sort(RNG.choice(V, VD, replace=False))
  name = "midlayer"
  tensors = {
    f"{name}.self_attn.q_proj.weight": random(2 * D, 2 * H),
    f"{name}.self_attn.k_proj.weight": random(D, 2 * H),
    f"{name}.self_attn.v_proj.weight": random(D, 2 * H),
    f"{name}.self_attn.o_proj.weight": random(H, 2 * D),
    f"{name}.mlp.gate_proj.weight": random(MLP, H),
    f"{name}.mlp.up_proj.weight": random(MLP, H),
    f"{name}.mlp.down_proj.weight": random(H, MLP),
    **{
      f"{name}.{norm}.weight": 1 + random(H)
      for norm in (
        "post_attention_layernorm",
        "hidden_norm",
        "input_layernorm",
      )
    },
    "fc.weight": random(H, 2 * H),
    "norm.weight": 1 + random(H),
    "lm_head.weight": random(VD, H),
    "d2t": ids - np.arange(VD),
  }
  (path / "eagle3").mkdir()
  fused = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
  settings = {**LAYER, "draft_vocab_size": VD, **fused}
  (path / "eagle3" / "config.json").write_text(json.dumps(settings))
  safetensors.numpy.save_file(tensors, path / "eagle3" / "model.safetensors")
  (path / "medusa").mkdir()
  medusa = {
    f"{h}.{name}": torch.tensor(value)
    for h in range(3)
    for name, value in {
      "0.linear.weight": random(H, H),
      "0.linear.bias": random(H),
      "1.weight": random(V, H),
    }.items()
  }
  torch.save(medusa, path / "medusa" / "medusa_lm_head.pt")
  return path


def settings(saved, head, **changes):
  config = huggingface.get_config(
    f"target={saved / 'target'},draft={saved / head}"
  )
  config.update({"max_new_tokens": 12, "num_speculative_tokens": 3, **changes})
  return config


RUNS = {
  "a chain": ("eagle3", {}),
  "a dynamic tree": (
    "eagle3", dict(num_nodes=8, num_children=3, rule="match", drafter="eagle3")
  ),
  "a certain tree": (
    "medusa",
    dict(tree=(-1, 0, 0, 1, 2, 3), siblings="given", rule="match"),
  ),
  "a drawn tree": (
    "medusa", dict(num_drafts=2, rule="kseq", drafter="medusa")
  ),
}  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [n if n in ("a chain", "a certain tree")
   else pytest.param(n, marks=pytest.mark.heavy) for n in RUNS],
)  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding(saved, name):
  head, changes = RUNS[name]
  config = pair.settled(settings(saved, head, **changes))
  found = pair.build(config)
  items = prompts.built_in(found.tokenizer, max_tokens=60)[:2]
  (batch,) = engine.make_batches(items, batch_size=2, max_width=60)
  texts = []
  for plain in (False, True):
    done, _ = pair.engine_of(config, found, baseline=plain).run(batch)
    texts.append([c.token_ids for c in done])
  assert texts[0] == texts[1]


@pytest.mark.parametrize(
  "head, changes, message",
  [
    ("eagle3", dict(drafter="medusa"), "is 'medusa', and the head .* 'eagle3'"),
    ("eagle3", dict(siblings="given"), "tokens that are not drawn"),
    ("medusa", dict(num_speculative_tokens=4), "has 3 heads.* depth 4"),
    ("eagle3", dict(num_nodes=8, num_children=3), "rule 'token'"),
    ("target", dict(drafter="eagle"), "cannot use the head in .*/target"),
    ("target", dict(num_nodes=12, rule="match"), "num_nodes is of the dynamic"),
    ("medusa", dict(tree=("mc_sim",)), "or one of .*mc_sim_7b_63"),
  ],
)
def test_what_does_not_fit_is_one_line(saved, head, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    pair.build(settings(saved, head, **changes))
  assert "\n" not in str(error.value)


def test_a_published_tree_is_named(saved):
  config = settings(
    saved, "medusa", tree=("mc_sim_7b_63",), siblings="given", rule="match"
  )
  with pytest.raises(ValueError, match=r"has 3 heads.* depth 4"):
    pair.build(config)
  config.tree = ("mc_sim_7b_63", "eagle_25")
  with pytest.raises(ValueError, match="or one of"):
    pair.check_config(config)
