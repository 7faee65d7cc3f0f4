"""Heads in every published format, made of random numbers.

By the names and shapes that the formats have; no published checkpoint was
opened.
"""

import json

import numpy as np
import safetensors.numpy
import torch

from models.formats.head_checkpoints import Target
from models.networks.transformer import FINAL

H, V, VD, LAYERS, MLP, D = 8, 13, 5, 12, 10, 6
RNG = np.random.default_rng(0)
random = lambda *shape: RNG.standard_normal(shape).astype(np.float32)
OUTPUT = random(V, H)
TARGET = Target(
  num_layers=LAYERS, embed_dim=H, vocab_size=V, embedding=random(V, H),
  output=OUTPUT,
)  # fmt: skip
LAYER_JSON = dict(
  model_type="llama", hidden_size=H, intermediate_size=MLP,
  num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
  vocab_size=V, rms_norm_eps=1e-5, hidden_act="silu",
  max_position_embeddings=32, head_dim=D,
)  # fmt: skip
IDS = np.array([1, 4, 5, 9, 12])


def layer(prefix, *, read):
  """The tensors of one layer; `read` channels go into its attention."""
  return {
    f"{prefix}.self_attn.q_proj.weight": random(2 * D, read),
    f"{prefix}.self_attn.k_proj.weight": random(D, read),
    f"{prefix}.self_attn.v_proj.weight": random(D, read),
    f"{prefix}.self_attn.o_proj.weight": random(H, 2 * D),
    f"{prefix}.mlp.gate_proj.weight": random(MLP, H),
    f"{prefix}.mlp.up_proj.weight": random(MLP, H),
    f"{prefix}.mlp.down_proj.weight": random(H, MLP),
    f"{prefix}.post_attention_layernorm.weight": random(H),
  }


def eagle3(prefix="midlayer", *, num_fused=3, **more):
  known = np.zeros(V, bool)
  known[IDS] = True
  return {
    **layer(prefix, read=2 * H),
    f"{prefix}.hidden_norm.weight": random(H),
    f"{prefix}.input_layernorm.weight": random(H),
    "fc.weight": random(H, num_fused * H),
    "norm.weight": random(H),
    "lm_head.weight": random(VD, H),
    "d2t": IDS - np.arange(VD),
    "t2d": known,
    **more,
  }


SPECULATORS = dict(
  speculators_model_type="eagle3", transformer_layer_config=LAYER_JSON,
  draft_vocab_size=VD,
)  # fmt: skip
NAME = "eagle_aux_hidden_state_layer_ids"
# config.json, tensors, what it must be, what it must read of the target.
FORMATS = {
  "eagle": (
    LAYER_JSON,
    {**layer("layers.0", read=H), "fc.weight": random(H, 2 * H),
     "fc.bias": random(H)},
    "eagle", (FINAL,),
  ),
  "eagle, no bias, its own embedding": (
    {**LAYER_JSON, "bias": False, "qkv_bias": True},
    {**layer("model.layers.0", read=H), "model.fc.weight": random(H, 2 * H),
     **{f"model.layers.0.self_attn.{n}_proj.bias": random(size)
        for n, size in (("q", 2 * D), ("k", D), ("v", D))},
     "model.embed_tokens.weight": random(V, H)},
    "eagle", (FINAL,),
  ),
  "eagle3": (
    {**LAYER_JSON, "draft_vocab_size": VD}, eagle3(), "eagle3", (2, 6, 9)
  ),
  "eagle3, whole vocabulary": (
    LAYER_JSON,
    {**{k: v for k, v in eagle3().items() if k not in ("d2t", "t2d")},
     "lm_head.weight": random(V, H)},
    "eagle3", (2, 6, 9),
  ),
  "specforge": (
    {**LAYER_JSON, "draft_vocab_size": VD,
     "eagle_config": {NAME: [1, 5, 8], "use_aux_hidden_state": True}},
    eagle3(), "eagle3", (2, 6, 9),
  ),
  "speculators": (
    {**SPECULATORS, NAME: [2, 6, 9], "norm_before_residual": True},
    eagle3("layers.0"), "eagle3", (2, 6, 9),
  ),
  "eagle3.1": (
    {**SPECULATORS, NAME: [1, 11], "fc_norm": True, "norm_output": True},
    eagle3("layers.0", num_fused=2,
           **{f"fc_norm.{i}.weight": random(H) for i in range(2)}),
    "eagle3", (1, 11),
  ),
  "specforge, of a mixture": (
    {**LAYER_JSON, "draft_vocab_size": VD, "model_type": "gpt_oss",
     "num_local_experts": 16, "experts_per_token": 4,
     "eagle_config": {NAME: [1, 5, 10]}},
    eagle3(), "eagle3", (2, 6, 11),
  ),
  "nvidia": (
    {**LAYER_JSON, "draft_vocab_size": VD,
     "eagle_config": {
       NAME: [1, 5, 8], "use_aux_hidden_state": True,
       "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True,
       "use_mtp_layernorm": False, "next_layer_regular": True,
       "parallel_draft_step": 1}},
    eagle3(), "eagle3", (2, 6, 9),
  ),
  "eagle3, its target's settings": (  # which has forty layers
    {**LAYER_JSON, "num_hidden_layers": 40},
    eagle3(), "eagle3", (2, 6, 9),
  ),
  "speculators 0.9": (  # whose layers slide, and which reads the last one's
    {**SPECULATORS, NAME: [2, 6, 12],
     "transformer_layer_config": {
       **LAYER_JSON, "num_hidden_layers": 2, "use_sliding_window": True,
       "sliding_window": 2,
       "layer_types": ["sliding_attention", "full_attention"]}},
    eagle3("layers.0", **layer("layers.1", read=H),
           **{"layers.1.input_layernorm.weight": random(H)}),
    "eagle3", (2, 6, 12),
  ),
  "vllm, inputs of layers": (
    {**LAYER_JSON, "draft_vocab_size": VD, "num_aux_hidden_states": 3,
     "eagle_config": {"layer_ids": [2, 6, 9], "norm_before_fc": True}},
    eagle3(**{"input_norm.weight": random(3 * H)}), "eagle3", (2, 6, 9),
  ),
  "sglang, eagle3.1": (
    {**LAYER_JSON, "draft_vocab_size": VD, "use_aux_norm": True},
    eagle3(**{f"fc_norm.{i}.weight": random(H) for i in range(3)}),
    "eagle3", (2, 6, 9),
  ),
  "p_eagle": (
    {**LAYER_JSON, "draft_vocab_size": VD, "pard_token": 6,
     "norm_before_residual": True},
    eagle3(**{"embed_tokens.weight": random(V, H),
              "mask_hidden": random(1, 1, 3 * H)}),
    "p_eagle", (2, 6, 9),
  ),
  "speculators, p_eagle": (
    {**SPECULATORS, NAME: [2, 6], "speculators_model_type": "peagle",
     "mask_token_id": 6, "norm_before_residual": False, "fc_norm": True,
     "transformer_layer_config": {**LAYER_JSON, "num_hidden_layers": 2}},
    eagle3("layers.0", num_fused=2, **layer("layers.1", read=H), **{
      "layers.1.input_layernorm.weight": random(H),
      "embed_tokens.weight": random(V, H),
      "mask_hidden": random(1, 1, 2 * H),
      **{f"fc_norm.{i}.weight": random(H) for i in range(2)}}),
    "p_eagle", (2, 6),
  ),
  "eagle, tied": (  # its output projection is the target's none the less
    {**LAYER_JSON, "bias": False, "tie_word_embeddings": True,
     "model_type": "mistral", "sliding_window": 16},
    {**layer("layers.0", read=H), "fc.weight": random(H, 2 * H),
     "embed_tokens.weight": random(V, H)},
    "eagle", (FINAL,),
  ),
  "medusa": (
    dict(medusa_num_heads=2, medusa_num_layers=1),
    {f"{h}.{name}": value for h in range(3) for name, value in {
      "0.linear.weight": random(H, H), "0.linear.bias": random(H),
      "1.weight": random(V, H)}.items()},
    "medusa", (FINAL,),
  ),
  "medusa, in its model": (
    dict(medusa_num_heads=2, medusa_num_layers=1),
    {f"medusa_head.{h}.{name}": value for h in range(2) for name, value in {
      "0.linear.weight": random(H, H), "0.linear.bias": random(H),
      "1.weight": random(V, H)}.items()},
    "medusa", (FINAL,),
  ),
  "medusa, vllm": (
    dict(model_type="medusa", num_heads=2, num_hidden_layers=1,
         truncated_vocab_size=V, vocab_size=V, hidden_size=H),
    {name: value for h in range(2) for name, value in {
      f"blocks.{h}.layers.0.weight": random(H, H),
      f"lm_heads.{h}.weight": random(V, H)}.items()},
    "medusa", (FINAL,),
  ),
}  # fmt: skip


def write(path, name, *, config=None, drop=(), **tensors):
  """A directory of a format, some of it changed."""
  settings, weights, *_ = FORMATS[name]
  settings = settings if config is None else config
  weights = {k: v for k, v in {**weights, **tensors}.items() if k not in drop}
  path.mkdir(exist_ok=True)
  (path / "config.json").write_text(json.dumps(settings))
  if name == "medusa":
    torch.save(
      {k: torch.tensor(v) for k, v in weights.items()},
      path / "medusa_lm_head.pt",
    )
  else:
    safetensors.numpy.save_file(weights, path / "model.safetensors")
  return str(path)


EAGLES = [n for n, made in FORMATS.items() if "eagle" in made[2]]


class Published:
  """A slow EAGLE head by the names that a file has, a row of tokens at once.

  Attributes:
    settings: its `config.json`.
    w: its tensors, `layers.0.` for EAGLE-3's `midlayer.`.
    windows: of layers, by their numbers.
  """

  def __init__(self, name):
    self.settings, tensors, self.kind, _ = FORMATS[name]
    self.windows = {0: 2} if name == "speculators 0.9" else {}
    self.w = {
      name.removeprefix("model.").replace("midlayer.", "layers.0."): value
      for name, value in tensors.items()
    }

  def norm(self, name, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * self.w[name]

  def rotated(self, x, position):
    angle = position * 10_000.0 ** (-np.arange(0, D, 2) / D)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def linear(self, name, x):
    return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

  def layer(self, read, residual, number=0):
    """Attention over what is read, then the feed-forward part."""
    here = f"layers.{number}."
    of = lambda name: self.linear(f"{here}self_attn.{name}_proj", read)
    q, k, v = (of(n).reshape(len(read), -1, D) for n in "qkv")
    mixed = np.zeros((len(read), 2 * D))
    for t in range(len(read)):
      for head in range(2):  # both read the one key/value head
        query = self.rotated(q[t, head], t)
        first = max(0, t + 1 - self.windows.get(number, t + 1))
        near = range(first, t + 1)
        score = np.array([query @ self.rotated(k[s, 0], s) for s in near])
        weight = np.exp((score - score.max()) / np.sqrt(D))
        weight /= weight.sum()
        mixed[t, head * D : (head + 1) * D] = weight @ v[first : t + 1, 0]
    x = residual + self.linear(f"{here}self_attn.o_proj", mixed)
    y = self.norm(f"{here}post_attention_layernorm.weight", x)
    gate = self.linear(f"{here}mlp.gate_proj", y)
    up = self.linear(f"{here}mlp.up_proj", y)
    return x + self.linear(
      f"{here}mlp.down_proj", gate / (1 + np.exp(-gate)) * up
    )

  def fuse(self, features):
    """What stands beside the tokens, of the target's features."""
    if self.kind == "eagle":
      return features
    if "input_norm.weight" in self.w:
      features = self.norm("input_norm.weight", features)
    if "fc_norm.0.weight" in self.w:
      parts = np.split(features, features.shape[-1] // H, axis=-1)
      parts = [self.norm(f"fc_norm.{i}.weight", x) for i, x in enumerate(parts)]
      features = np.concatenate(parts, axis=-1)
    return self.linear("fc", features)

  def __call__(self, tokens, hidden):
    """Logits and states."""
    embedding = self.w.get("embed_tokens.weight", TARGET.embedding)[tokens]
    if self.kind == "eagle":
      x = self.linear("fc", np.concatenate([embedding, hidden], axis=-1))
      x = self.layer(x, x)
      return x @ OUTPUT.T, x
    normed = self.norm("layers.0.hidden_norm.weight", hidden)
    embedding = self.norm("layers.0.input_layernorm.weight", embedding)
    read = np.concatenate([embedding, normed], axis=-1)
    before = self.settings.get("norm_before_residual", False)
    x = self.layer(read, normed if before else hidden)
    number = 1
    while (name := f"layers.{number}.input_layernorm.weight") in self.w:
      x = self.layer(self.norm(name, x), x, number)
      number += 1
    out = self.norm("norm.weight", x)
    logits = all_logits = out @ self.w["lm_head.weight"].T
    if "d2t" in self.w:
      logits = np.full((len(x), V), -np.inf)
      for draft_id, offset in enumerate(self.w["d2t"]):
        logits[:, draft_id + offset] = all_logits[:, draft_id]
    return logits, out if self.settings.get("norm_output", False) else x
