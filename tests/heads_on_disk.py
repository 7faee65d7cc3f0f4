"""A small target, and a head of every kind for it, of random numbers."""

import json

import files
import numpy as np
import safetensors.numpy
import torch

H, V, VD, D, MLP = 32, 4096, 512, 16, 48
RNG = np.random.default_rng(0)
random = lambda *shape: (0.1 * RNG.standard_normal(shape)).astype(np.float32)
LAYER = dict(
  model_type="llama", hidden_size=H, intermediate_size=MLP,
  num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
  vocab_size=V, rms_norm_eps=1e-5, hidden_act="silu", head_dim=D,
  max_position_embeddings=200,
)  # fmt: skip


def write_all(path):
  """Writes folders named as the heads' kinds, and `target`.

  The target has two layers; EAGLE-3's head says 512 tokens, all others three
  tokens ahead.

  Args:
    path: an empty folder.
  """
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
  write(path / "dflash", {**LAYER, **block}, layer)
  blockwise = dict(
    model_type="blockwise", num_heads=3, hidden_dim=8, hidden_size=H,
    vocab_size=V,
  )  # fmt: skip
  sizes = {"hidden.weight": (24, H), "hidden.bias": (24,)}
  sizes |= {"out.weight": (3 * H, 24), "out.bias": (3 * H,)}
  write(
    path / "blockwise", blockwise, {n: random(*s) for n, s in sizes.items()}
  )


def write(folder, settings, tensors):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(settings))
  tensors = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
