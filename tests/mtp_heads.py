"""MTP heads in the files of their targets."""

import numpy as np
import references


def add(path, settings, *, seed=0):
  """Adds a random head to a target; its tensors, in float64."""
  width, heads = settings["hidden_size"], settings["num_attention_heads"]
  kv, size = settings["num_key_value_heads"], settings["head_dim"]
  inner = settings.get("intermediate_size", 0)
  shapes = {
    "fc.weight": (width, 2 * width),
    "layers.0.self_attn.q_proj.weight": (2 * heads * size, width),
    "layers.0.self_attn.k_proj.weight": (kv * size, width),
    "layers.0.self_attn.v_proj.weight": (kv * size, width),
    "layers.0.self_attn.o_proj.weight": (width, heads * size),
    "layers.0.self_attn.q_norm.weight": (size,),
    "layers.0.self_attn.k_norm.weight": (size,),
    "layers.0.mlp.gate_proj.weight": (inner, width),
    "layers.0.mlp.up_proj.weight": (inner, width),
    "layers.0.mlp.down_proj.weight": (width, inner),
    **{
      f"{x}.weight": (width,)
      for x in (
        "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm",
        "layers.0.input_layernorm", "layers.0.post_attention_layernorm",
      )
    },
  }  # fmt: skip
  if settings.get("attention_bias"):
    for letter, count in (("q", 2 * heads), ("k", kv), ("v", kv)):
      shapes[f"layers.0.self_attn.{letter}_proj.bias"] = (count * size,)
    shapes["layers.0.self_attn.o_proj.bias"] = (width,)
  if count := settings.get("num_experts"):
    for name in ("gate", "up", "down"):
      del shapes[f"layers.0.mlp.{name}_proj.weight"]
    shared = settings["shared_expert_intermediate_size"]
    inner = settings["moe_intermediate_size"]
    blocks = {f"experts.{i}": inner for i in range(count)}
    for block, size in (blocks | {"shared_expert": shared}).items():
      for name in ("gate", "up"):
        shapes[f"layers.0.mlp.{block}.{name}_proj.weight"] = (size, width)
      shapes[f"layers.0.mlp.{block}.down_proj.weight"] = (width, size)
    shapes["layers.0.mlp.gate.weight"] = (count, width)
    shapes["layers.0.mlp.shared_expert_gate.weight"] = (1, width)
  rng = np.random.default_rng(seed)
  made = {
    k: (0.3 * rng.standard_normal(s)).astype("f4") for k, s in shapes.items()
  }
  references.edit_tensors(
    path, lambda all_: all_.update({f"mtp.{k}": x for k, x in made.items()})
  )
  return {k: x.astype(np.float64) for k, x in made.items()}
