"""MTP heads in the files of their targets."""

import numpy as np
import references
import torch
from transformers.modeling_layers import MtpModel


def add(path, settings, *, seed=0):
  """Adds a random head to a target; its tensors, in float64."""
  width, heads = settings["hidden_size"], settings["num_attention_heads"]
  kv, size = settings["num_key_value_heads"], settings["head_dim"]
  projections = {
    "q": (2 * heads * size, width), "k": (kv * size, width),
    "v": (kv * size, width), "o": (width, heads * size),
  }  # fmt: skip
  shapes = {"fc.weight": (width, 2 * width)}
  for letter, shape in projections.items():
    shapes[f"layers.0.self_attn.{letter}_proj.weight"] = shape
    if settings.get("attention_bias"):
      shapes[f"layers.0.self_attn.{letter}_proj.bias"] = shape[:1]
  for name in (
    "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm",
    "layers.0.input_layernorm", "layers.0.post_attention_layernorm",
  ):  # fmt: skip
    shapes[f"{name}.weight"] = (width,)
  for letter in "qk":
    shapes[f"layers.0.self_attn.{letter}_norm.weight"] = (size,)
  blocks = {"": settings.get("intermediate_size")}
  if count := settings.get("num_experts"):
    inner = settings["moe_intermediate_size"]
    blocks = {f"experts.{i}.": inner for i in range(count)}
    blocks["shared_expert."] = settings["shared_expert_intermediate_size"]
    shapes["layers.0.mlp.gate.weight"] = (count, width)
    shapes["layers.0.mlp.shared_expert_gate.weight"] = (1, width)
  for block, inner in blocks.items():
    for name in ("gate", "up"):
      shapes[f"layers.0.mlp.{block}{name}_proj.weight"] = (inner, width)
    shapes[f"layers.0.mlp.{block}down_proj.weight"] = (width, inner)
  rng = np.random.default_rng(seed)
  made = {
    k: (0.3 * rng.standard_normal(s)).astype("f4") for k, s in shapes.items()
  }
  references.edit_tensors(
    path, lambda all_: all_.update({f"mtp.{k}": x for k, x in made.items()})
  )
  return {k: x.astype(np.float64) for k, x in made.items()}


class Theirs:
  """A random head of transformers', for a target of its own."""

  def __init__(self, target, *, num_depths=1, seed=0):
    config = target.config
    config.num_mtp_layers = num_depths
    if getattr(config, "mlp_layer_types", None):  # of GLM-4.7-Flash
      config.mtp_mlp_layer_types = ["sparse"] * num_depths
    self.prefix, self.renamed = (
      lambda k: f"layers.{config.num_hidden_layers + k}",
      {"post_norm.weight": "shared_head.norm.weight"},
    )
    if config.model_type == "mimo":
      config.mtp_layer_types = ["full_attention"] * num_depths
      config.mtp_hidden_states_first = True
      self.prefix, self.renamed = (
        lambda k: f"mtp_layers.{k}",
        {
          "enorm.weight": "token_layernorm.weight",
          "hnorm.weight": "hidden_layernorm.weight",
          "eh_proj.weight": "input_proj.weight",
          "post_norm.weight": "final_layernorm.weight",
        },
      )
    self.target = target
    self.model = references.eager(MtpModel(target, num_depths))
    references.randomized(self.model.layers, seed=seed)
    self.model.layers.to(target.dtype)

  def tensors(self):
    """By the names of released files."""
    output = {}
    for k, layer in enumerate(self.model.layers):
      for name, value in layer.state_dict().items():
        name = self.renamed.get(name, name.removeprefix("mtp_block."))
        value = value.float().numpy()
        block, _, fused = name.rpartition("experts.")
        parts = {name: value}
        if fused in ("gate_up_proj", "down_proj"):
          halves = np.split(value, 2, axis=1) if "_up_" in fused else [value]
          which = ("gate", "up") if "_up_" in fused else ("down",)
          parts = {
            f"{block}experts.{i}.{x}_proj.weight": np.ascontiguousarray(half[i])
            for x, half in zip(which, halves, strict=True)
            for i in range(len(value))
          }
        output |= {f"model.{self.prefix(k)}.{n}": x for n, x in parts.items()}
    return output

  def features(self, tokens):
    """`f64[B, T, D]`, the target's, after its final norm."""
    with torch.no_grad():
      output = self.target.model(torch.tensor(tokens))
    return output.last_hidden_state.numpy()

  def __call__(self, tokens, hidden, *, layer=0, first=0):
    """Logits and states after pairs of a token and a state.

    Args:
      tokens: `i32[B, T]`, of layer k those k + 1 after the states' places.
      hidden: `f64[B, T, D]`.
      layer: k.
      first: position of the first pair.
    """
    hidden = torch.as_tensor(hidden)
    with torch.no_grad():
      hidden = self.model.forward_layer(
        layer, hidden, first + torch.arange(hidden.shape[1])[None], None,
        input_ids=torch.tensor(np.asarray(tokens)),
      )  # fmt: skip
      return self.model.shared_head(hidden).numpy(), hidden.numpy()
