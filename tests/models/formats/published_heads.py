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


def layer_shapes(
  prefix, *, read, heads=2, kv_heads=1, mlp=MLP, qk_norm=False, biases=False
):
  """A layer's tensors; `read` channels go into its attention."""
  of_parts = {
    "self_attn.q_proj.weight": (heads * D, read),
    "self_attn.k_proj.weight": (kv_heads * D, read),
    "self_attn.v_proj.weight": (kv_heads * D, read),
    "self_attn.o_proj.weight": (H, heads * D),
    "mlp.gate_proj.weight": (mlp, H),
    "mlp.up_proj.weight": (mlp, H),
    "mlp.down_proj.weight": (H, mlp),
    "post_attention_layernorm.weight": (H,),
  }
  if qk_norm:
    of_parts |= {f"self_attn.{n}_norm.weight": (D,) for n in "qk"}
  if biases:
    sizes = dict(q=heads * D, k=kv_heads * D, v=kv_heads * D, o=H)
    of_parts |= {f"self_attn.{n}_proj.bias": (sizes[n],) for n in sizes}
  return {f"{prefix}.{part}": shape for part, shape in of_parts.items()}


def layer(prefix, **more):
  return {k: random(*s) for k, s in layer_shapes(prefix, **more).items()}


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

  eps, theta = 1e-5, 10_000.0

  def __init__(self, name):
    self.settings, tensors, self.kind, _ = FORMATS[name]
    self.windows = {0: 2} if name == "speculators 0.9" else {}
    self.w = {
      name.removeprefix("model.").replace("midlayer.", "layers.0."): value
      for name, value in tensors.items()
    }

  def norm(self, name, x):
    size = np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
    return x / size * self.w[f"{name}.weight"]

  def rotated(self, x, position):
    angle = position * self.theta ** (-np.arange(0, D, 2) / D)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def linear(self, name, x):
    return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

  def attention(self, here, x, context, sees):
    """Of tokens after a context; token t sees place s if `sees(t, s)`."""
    every, count = np.concatenate([context, x]), len(context)
    q = self.heads(f"{here}self_attn.q", x)
    k = self.heads(f"{here}self_attn.k", every)
    v = self.heads(f"{here}self_attn.v", every)
    k = np.stack([self.rotated(y, s) for s, y in enumerate(k)])
    mixed = np.zeros(q.shape)
    for t, queries in enumerate(q):
      seen = np.array([s for s in range(len(k)) if sees(t, s)])
      for head, query in enumerate(self.rotated(queries, count + t)):
        group = head * k.shape[1] // len(queries)
        score = k[seen, group] @ query / np.sqrt(D)
        weight = np.exp(score - score.max())
        mixed[t, head] = weight / weight.sum() @ v[seen, group]
    return self.linear(f"{here}self_attn.o_proj", mixed.reshape(len(x), -1))

  def heads(self, name, x):
    """Queries, keys or values, normed if there is a norm of them."""
    y = self.linear(f"{name}_proj", x).reshape(len(x), -1, D)
    has_norm = f"{name}_norm.weight" in self.w
    return self.norm(f"{name}_norm", y) if has_norm else y

  def feed_forward(self, here, x):
    gate = self.linear(f"{here}mlp.gate_proj", x)
    up = self.linear(f"{here}mlp.up_proj", x)
    return self.linear(f"{here}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

  def layer(self, read, residual, number=0):
    """Attention over what is read, then the feed-forward part."""
    here = f"layers.{number}."
    window = self.windows.get(number, len(read))
    sees = lambda t, s: t - window < s <= t
    x = residual + self.attention(here, read, read[:0], sees)
    normed = self.norm(f"{here}post_attention_layernorm", x)
    return x + self.feed_forward(here, normed)

  def fuse(self, features):
    """What stands beside the tokens, of the target's features."""
    if self.kind == "eagle":
      return features
    if "input_norm.weight" in self.w:
      features = self.norm("input_norm", features)
    if "fc_norm.0.weight" in self.w:
      parts = np.split(features, features.shape[-1] // H, axis=-1)
      parts = [self.norm(f"fc_norm.{i}", x) for i, x in enumerate(parts)]
      features = np.concatenate(parts, axis=-1)
    return self.linear("fc", features)

  def __call__(self, tokens, hidden):
    """Logits and states."""
    embedding = self.w.get("embed_tokens.weight", TARGET.embedding)[tokens]
    if self.kind == "eagle":
      x = self.linear("fc", np.concatenate([embedding, hidden], axis=-1))
      x = self.layer(x, x)
      return x @ OUTPUT.T, x
    normed = self.norm("layers.0.hidden_norm", hidden)
    embedding = self.norm("layers.0.input_layernorm", embedding)
    read = np.concatenate([embedding, normed], axis=-1)
    before = self.settings.get("norm_before_residual", False)
    x = self.layer(read, normed if before else hidden)
    number = 1
    while (name := f"layers.{number}.input_layernorm") + ".weight" in self.w:
      x = self.layer(self.norm(name, x), x, number)
      number += 1
    out = self.norm("norm", x)
    logits = all_logits = out @ self.w["lm_head.weight"].T
    if "d2t" in self.w:
      logits = np.full((len(x), V), -np.inf)
      for draft_id, offset in enumerate(self.w["d2t"]):
        logits[:, draft_id + offset] = all_logits[:, draft_id]
    return logits, out if self.settings.get("norm_output", False) else x
