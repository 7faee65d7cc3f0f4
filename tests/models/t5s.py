"""T5s of transformers with random weights, saved as checkpoints."""

import json

import numpy as np
import references
import tokenizers as hf
import torch
import transformers

VOCAB = 64
SIZES = dict(
  vocab_size=VOCAB, d_model=24, d_kv=5, d_ff=40, num_layers=2, num_heads=4,
)  # fmt: skip
# Each is (settings, whether the output projection has a tensor of its own).
MODELS = {
  "1.0": (dict(), False),
  "1.1": (
    dict(
      feed_forward_proj="gated-gelu", tie_word_embeddings=False,
      num_decoder_layers=3, num_layers=1,
    ),
    True,
  ),
  "1.1-tied": (
    dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False), False
  ),
  "silu": (dict(feed_forward_proj="gated-silu", d_kv=8), True),
}  # fmt: skip


def save(folder, *, seed=0, untied=False, **settings):
  """Saves a random T5; the folder, and the model as transformers reads it."""
  config = transformers.T5Config(
    **{**SIZES, **settings}, decoder_start_token_id=0
  )
  model = transformers.T5ForConditionalGeneration(config)
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      is_scale = parameter.ndim == 1
      parameter.copy_(1 + 0.3 * noise if is_scale else 0.25 * noise)
      if "relative_attention_bias" in name:
        parameter.mul_(6)  # distances decide, or no test would see them
  model.save_pretrained(folder)
  if untied:
    noise = np.random.default_rng(seed).normal(size=(VOCAB, config.d_model))
    head = {"lm_head.weight": (0.3 * noise).astype(np.float32)}
    references.edit_tensors(folder, lambda tensors: tensors.update(head))
  return folder, read(folder)


def read(folder, **options):
  return transformers.T5ForConditionalGeneration.from_pretrained(
    folder, attn_implementation="eager", **options
  ).eval()


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,-"


def save_tokenizer(folder):
  """One token a character; what is encoded ends with </s>."""
  words = ["<pad>", "</s>", "<unk>", *CHARACTERS]
  backend = hf.Tokenizer(
    hf.models.WordLevel(
      {word: i for i, word in enumerate(words)}, unk_token="<unk>"
    )
  )
  backend.pre_tokenizer = hf.pre_tokenizers.Split("", "isolated")
  backend.decoder = hf.decoders.Fuse()
  backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
  backend.post_processor = hf.processors.TemplateProcessing(
    single="$A </s>", special_tokens=[("</s>", 1)]
  )
  backend.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "</s>", "pad_token": "<pad>"})
  )


def logits(model, inputs, lengths, tokens):
  """`f32[B, T, V]` of transformers, inputs beyond their lengths masked."""
  is_text = np.arange(inputs.shape[1]) < np.asarray(lengths)[:, None]
  with torch.no_grad():
    output = model(
      input_ids=torch.tensor(inputs),
      attention_mask=torch.tensor(is_text.astype(int)),
      decoder_input_ids=torch.tensor(tokens),
    )
  return output.logits.float().numpy()


relative_error = references.relative_error
