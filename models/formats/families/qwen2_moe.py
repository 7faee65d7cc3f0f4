"""Qwen2-MoE: Qwen2 with mixtures, and an expert beside them for every token.

What that expert gives is weighted by a sigmoid of the token.
"""

from models.formats.families import llama, mixtures, reading
from models.formats.families.family import Family, Gguf, Layout, Settings
from models.formats.families.reading import FULL, SLIDES, get
from models.networks.description import DenseSpec, TransformerConfig


def _read(settings: Settings) -> TransformerConfig:
  sizes = reading.sizes(settings)
  window = get(settings, "sliding_window", int, None, least=0)
  if not get(settings, "use_sliding_window", bool):
    window = None
  before = get(settings, "max_window_layers", int, least=0)
  slides = lambda i: bool(window) and i % 2 == 0 and i < before
  experts = mixtures.mixture(
    settings, sizes, num_experts="num_experts",
    expert_dim="moe_intermediate_size",
    renormalised=get(settings, "norm_topk_prob", bool),
    shared_dim=get(settings, "shared_expert_intermediate_size", int),
    shared_gate=True,
  )  # fmt: skip
  mlp = DenseSpec(width=sizes["mlp_dim"], activation=sizes["activation"])
  rope = reading.rope(settings, sizes["head_dim"])
  kinds = reading.layer_types(
    settings,
    [SLIDES if slides(i) else FULL for i in range(sizes["num_layers"])],
    [FULL, SLIDES] if window else [FULL],
    window,
  )
  layers = [
    mixtures.layer(
      sizes, mlp if dense else experts, rope=rope,
      window=window if kind == SLIDES else None,
      bias=get(settings, "qkv_bias", bool), out_bias=False,
    )
    for kind, dense in zip(
      kinds, mixtures.dense_layers(settings, len(kinds)), strict=True
    )
  ]  # fmt: skip
  return TransformerConfig(layers=tuple(layers), **reading.frame(sizes))


FAMILY = Family(
  name="qwen2_moe",
  read=_read,
  tensors={
    **llama.TENSORS,
    **mixtures.TENSORS,
    **mixtures.shared_tensors("shared_expert"),
    "layers.#.mlp.shared.weigh": "layers.#.mlp.shared_expert_gate.weight",
  },
  layouts=mixtures.LAYOUTS,
  defaults=dict(
    llama.DEFAULTS, num_key_value_heads=16, qkv_bias=True, layer_types=None,
    use_sliding_window=False, sliding_window=4096, max_window_layers=28,
    decoder_sparse_step=1, mlp_only_layers=None, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632, num_experts_per_tok=4,
    num_experts=60, norm_topk_prob=False,
  ),
  aliases={"num_local_experts": "num_experts"},
  harmless=mixtures.HARMLESS,
  gguf=Gguf(
    architecture="qwen2moe",
    keys={
      **mixtures.GGUF_KEYS,
      "expert_feed_forward_length": "moe_intermediate_size",
      "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    settings=lambda metadata, has: {
      **llama.shared_sizes(metadata),
      "qkv_bias": has("attn_q"),
      "norm_topk_prob": False,  # as llama.cpp has it
    },
    layouts={
      "layers.#.mlp.shared.weigh": Layout(
        lambda x, c: x[None], lambda s, c: s[1:]
      )
    },
  ),
)  # fmt: skip
