"""Gemma 4 and its assistant as transformers makes them, with random weights."""

import contextlib
from unittest import mock

import references
import torch
import transformers

_KINDS = ("sliding_attention", "full_attention")
# Two layers of each kind have keys and values, of which the second is read.
TARGET = references.MODELS["gemma4"][1] | dict(
  vocab_size=96, vocab_size_per_layer_input=96, num_hidden_layers=6,
  layer_types=[*_KINDS] * 3, num_kv_shared_layers=2,
)  # fmt: skip
ORDERED = dict(
  use_ordered_embeddings=True, num_centroids=12, centroid_intermediate_top_k=3
)
# What an assistant has of its target: heads of keys, channels, vocabulary.
_ALIKE = (
  "vocab_size", "num_key_value_heads", "head_dim", "global_head_dim",
  "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def _modes(config):
  """Layers that keep keys and values for others, and those that read them.

  Version 5.23.0 refuses a model all of whose layers read: its own assistants.
  """
  kinds, shared = config.layer_types, config.num_kv_shared_layers
  first = len(kinds) - shared
  unshared = kinds[:first]
  kept = {first - 1 - unshared[::-1].index(kind) for kind in {*unshared}}
  return [
    "reuse" if i >= first else "store" if i in kept else None
    for i in range(len(kinds))
  ]


@contextlib.contextmanager
def readable():
  """Assistants can be made and run inside."""
  with mock.patch.object(
    transformers.Gemma4TextConfig, "kv_sharing_modes", property(_modes)
  ):
    yield


def make(target=TARGET, *, seed=1, **settings):
  """An assistant of a target with these settings; `readable` alone."""
  text = {key: target[key] for key in _ALIKE} | dict(
    hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=6, layer_types=[_KINDS[0], *_KINDS], sliding_window=3,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=0,
    attention_bias=True, rope_parameters=target["rope_parameters"],
  )  # fmt: skip
  config = transformers.Gemma4AssistantConfig(
    text_config=transformers.Gemma4TextConfig(**text),
    backbone_hidden_size=target["hidden_size"], **settings,
  )  # fmt: skip
  config._attn_implementation = config.text_config._attn_implementation = (
    "eager"
  )
  model = transformers.Gemma4AssistantForCausalLM(config)
  model = references.randomized(model, seed=seed).eval()
  if settings.get("use_ordered_embeddings"):
    order = torch.randperm(
      target["vocab_size"], generator=torch.Generator().manual_seed(seed)
    )
    model.masked_embedding.token_ordering.copy_(order)
  return model


def save(path, target=TARGET, **settings):
  """A target and its assistant, in folders `target` and `assistant`.

  Returns:
    Both, as transformers' models.
  """
  with readable():
    pair = references.make("gemma4_text", target), make(target, **settings)
    for name, model in zip(("target", "assistant"), pair, strict=True):
      model.save_pretrained(path / name)
  return pair


def draft(target, assistant, tokens, steps):
  """A greedy chain after a text, as transformers drafts it.

  What it is given of the target is of the tokens before the newest alone.

  Args:
    target, assistant: its models.
    tokens: of one row.
    steps: G.

  Yields:
    Of each step the token that is read, `f64[V]` logits and `f64[F]` states.
  """
  with readable(), torch.no_grad():
    read = target.model(
      torch.tensor([tokens[:-1]]), use_cache=False,
      return_shared_kv_states=True,
    )  # fmt: skip
    hidden, token = read.last_hidden_state[:, -1:], int(tokens[-1])
    for _ in range(steps):
      embedded = target.model.embed_tokens(torch.tensor([[token]]))
      said = assistant(
        inputs_embeds=torch.cat([embedded, hidden], dim=-1),
        position_ids=torch.tensor([[len(tokens) - 1]]),
        shared_kv_states=dict(read.shared_kv_states), use_cache=False,
      )  # fmt: skip
      hidden = said.last_hidden_state
      yield token, said.logits[0, 0].numpy(), hidden[0, 0].numpy()
      token = int(said.logits.argmax())
