"""Heads from the command line: a directory tells by itself what it is."""

import json

import files
import jax
import numpy as np
import pytest
import safetensors.numpy
import several
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
  num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
  vocab_size=V, rms_norm_eps=1e-5, hidden_act="silu", head_dim=D,
  max_position_embeddings=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A target of two layers, and a head of every kind."""
  path = tmp_path_factory.mktemp("heads")
  files.make_checkpoint(path / "target")
  ids = np.sort(RNG.choice(V, VD, replace=False))
  name = "midlayer"
  tensors = {
    f"{name}.self_attn.q_proj.weight": random(2 * D, 2 * H),
    f"{name}.self_attn.k_proj.weight": random(2 * D, 2 * H),
    f"{name}.self_attn.v_proj.weight": random(2 * D, 2 * H),
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
  fused = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
  settings = {**LAYER, "draft_vocab_size": VD, **fused}
  write(path / "eagle3", settings, tensors)
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
  block = {
    "model_type": "qwen3", "block_size": 4,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]},
  }  # fmt: skip
  layer = {
    name.replace("midlayer.", "layers.0."): value[..., :H]
    for name, value in tensors.items()
    if name.startswith("midlayer.") and "hidden_norm" not in name
  }
  whole = ("o_proj", "down_proj")  # which do not read the embedding too
  layer |= {
    name.replace("midlayer.", "layers.0."): value
    for name, value in tensors.items()
    if any(word in name for word in whole)
  }
  layer |= {f"layers.0.self_attn.{n}_norm.weight": 1 + random(D) for n in "qk"}
  layer |= {"fc.weight": random(H, H), "norm.weight": 1 + random(H)}
  layer |= {"hidden_norm.weight": 1 + random(H)}
  write(path / "parallel", {**LAYER, **block}, layer)
  blockwise = dict(
    model_type="blockwise", num_heads=3, hidden_dim=8, hidden_size=H,
    vocab_size=V,
  )  # fmt: skip
  sizes = {"hidden.weight": (24, H), "hidden.bias": (24,)}
  sizes |= {"out.weight": (3 * H, 24), "out.bias": (3 * H,)}
  write(
    path / "blockwise", blockwise, {n: random(*s) for n, s in sizes.items()}
  )
  return path


def write(folder, settings, tensors):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(settings))
  tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")


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
  "a block": ("parallel", dict(rule="block", drafter="parallel")),
  "the best tree of a block": (
    "parallel", dict(num_nodes=8, num_children=3, rule="match")
  ),
  "blockwise": ("blockwise", dict(siblings="given", rule="match")),
}  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [n if n in ("a chain", "a certain tree", "the best tree of a block")
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
    ("medusa", dict(num_speculative_tokens=4), "says 3 tokens ahead.* depth 4"),
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
  with pytest.raises(ValueError, match=r"says 3 tokens ahead.* depth 4"):
    pair.build(config)
  config.tree = ("mc_sim_7b_63", "eagle_25")
  with pytest.raises(ValueError, match="or one of"):
    pair.check_config(config)


@pytest.mark.heavy("a mesh over two processes")
@pytest.mark.parametrize("head", ["eagle3", "medusa", "parallel"])
def test_two_processes_decode_on_a_mesh_what_one_device_does(
  saved, head, tmp_path
):
  """Greedy in float32; a near-tie may go either way, none of these does."""
  records = [{"id": i, "prompt": f"def f{i}(x):\n  return"} for i in range(2)]
  prompts = files.write_jsonl(tmp_path / "in.jsonl", records)
  command = [
    "-m", "launch.decode", "--nobaseline", f"--prompts={prompts}",
    f"--config=configs/huggingface.py:target={saved / 'target'},"
    f"draft={saved / head}",
    "--config.max_new_tokens=12", "--config.num_speculative_tokens=3",
    "--config.batch_size=2",
  ]  # fmt: skip
  rows = []
  for count, mesh in ((1, ""), (2, "data:2,model:2")):
    output = tmp_path / f"{count}.jsonl"
    run = [*command, f"--output={output}", f"--config.mesh={mesh}"]
    for code, _, errors in several.finish(
      several.start([run] * count, devices=2 if mesh else 1)
    ):
      assert code == 0, errors[-3000:]
    rows.append([row["token_ids"] for row in files.read_jsonl(output)])
  assert rows[0] == rows[1]


def test_a_head_that_cannot_be_cut_so_is_one_line(saved, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: real * 3)
  real = jax.local_devices()
  monkeypatch.setattr(jax, "device_count", lambda: 3)
  with pytest.raises(ValueError, match="cannot be cut over 3 devices"):
    pair.build(settings(saved, "eagle3", mesh="data:1,model:3", batch_size=1))
