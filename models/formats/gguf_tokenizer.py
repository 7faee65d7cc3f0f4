"""Reads the tokenizer in a GGUF file's metadata.

The metadata has the vocabulary, token types, and merges or scores, but only
names the pre-tokenizer, after the model that introduced it; its regular
expressions are those of that model's `tokenizer.json`. transformers'
`convert_gguf_tokenizer` is not used: it splits DeepSeek's control tokens,
merges text into control tokens, and leaves out NFC and `add_space_prefix`.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers as hf
from gguf import TokenType
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from models.formats import gguf_file
from models.tokenizers import Tokenizer

_KEY = "tokenizer.ggml."
# Pre-tokenizers whose expressions transformers has, and those like GPT-2's.
_SHARED = (
  "dbrx", "deepseek-r1-qwen", "gpt-4o", "llama-bpe", "llama-v3", "llama3",
  "qwen2", "tekken",
)  # fmt: skip
_LIKE_GPT2 = ("gpt-2", "olmo", "smollm")
_COMPOSED = ("olmo", "qwen2", "deepseek-r1-qwen")  # normalize text to NFC
# Words in the vocabulary skip the merges, and texts start with BOS.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
# Tokens that end a text or a turn whatever the metadata says: a chat model's
# file often has the EOS of its base model. llama.cpp has most of this list.
_ENDS = frozenset(
  {
    "<EOT>", "<end_of_turn>", "<end_of_utterance>", "<|end_of_text|>",
    "<|call|>", "<|calls|>", "<|endoftext|>", "<|end|>", "<|eom_id|>",
    "<|eot_id|>", "<|flush|>", "<|im_end|>", "<|return|>", "<turn|>",
    "<｜end▁of▁sentence｜>", "[EOS]", "[EOT]", "_<EOT>",
  }
)  # fmt: skip
_SPACE = "▁"  # sentencepiece's


def load(path: str) -> Tokenizer:
  """Loads the tokenizer of a GGUF file, without unused padding tokens.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it cannot be read, or its tokenizer is not supported.
  """
  metadata = gguf_file.read_header(path).metadata
  try:
    return _tokenizer(metadata)
  except Exception as error:  # the backend raises bare Exception
    reason = " ".join(str(error).split())
    raise ValueError(
      f"cannot read the tokenizer in {path}: {reason}"
    ) from error


def named_ends(metadata: Mapping[str, Any]) -> list[int]:
  """Ids of tokens whose names mark the end of a text or a turn."""
  tokens = metadata.get(f"{_KEY}tokens", ())
  return [number for number, token in enumerate(tokens) if token in _ENDS]


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
  value = lambda name, default=None: metadata.get(_KEY + name, default)
  model, tokens = value("model"), value("tokens", ())
  if model not in ("gpt2", "llama", "gemma4"):
    raise ValueError(
      f"{_KEY}model must be gpt2, llama or gemma4, got {model!r:.80}"
    )
  kinds = [*value("token_type", [TokenType.NORMAL] * len(tokens))]
  for number in named_ends(metadata):
    if kinds[number] != TokenType.UNUSED:
      kinds[number] = TokenType.CONTROL
  typed = [*zip(tokens, kinds, strict=True)]
  of_kind = lambda kind: [token for token, x in typed if x == kind]
  vocab = {
    token: i for i, (token, x) in enumerate(typed) if x != TokenType.UNUSED
  }
  if model == "gpt2":
    backend = _byte_level(metadata, vocab)
  else:
    backend = _sentencepiece(metadata, vocab, of_kind)
  # A token that the vocabulary has keeps its id.
  added = lambda kind, special: [
    hf.AddedToken(token, special=special, normalized=False)
    for token in of_kind(kind)
  ]
  backend.add_special_tokens(added(TokenType.CONTROL, True))
  backend.add_tokens(added(TokenType.USER_DEFINED, False))
  ids = [value(f"{end}_token_id") for end in ("bos", "eos")]
  bos, eos = (None if i is None else tokens[i] for i in ids)
  begins = model != "gpt2" or value("pre") in _WHOLE_WORDS
  first = [bos] if value("add_bos_token", begins) and bos else []
  last = [eos] if value("add_eos_token", False) and eos else []
  if first or last:
    backend.post_processor = processors.TemplateProcessing(
      single=[*first, "$A", *last],
      special_tokens=[(token, vocab[token]) for token in {*first, *last}],
    )
  return Tokenizer(
    backend,
    ids[1],
    bos_token=bos,
    chat_template=metadata.get("tokenizer.chat_template"),
  )


def _byte_level(
  metadata: Mapping[str, Any], vocab: dict[str, int]
) -> hf.Tokenizer:
  # Importing it takes a second.
  from transformers.integrations.gguf import gguf_tokenizer_mapping

  table = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
  splits = dict.fromkeys(_LIKE_GPT2, ()) | {"smollm": (r"\p{N}",)}
  splits |= {name: (table[name],) for name in _SHARED}
  name = metadata.get(f"{_KEY}pre")
  if name not in splits:
    raise ValueError(
      f"{_KEY}pre must be one of {sorted(splits)}, got {name!r:.80}"
    )
  backend = hf.Tokenizer(
    hf.models.BPE(vocab, _merges(metadata), ignore_merges=name in _WHOLE_WORDS)
  )
  if name in _COMPOSED:
    backend.normalizer = normalizers.NFC()
  words = [pre_tokenizers.Split(hf.Regex(e), "isolated") for e in splits[name]]
  in_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=name in _LIKE_GPT2
  )
  backend.pre_tokenizer = pre_tokenizers.Sequence([*words, in_bytes])
  backend.decoder = decoders.ByteLevel()
  return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, ...]]:
  return [tuple(x.split(" ", 1)) for x in metadata[f"{_KEY}merges"]]


def _sentencepiece(metadata, vocab, of_kind) -> hf.Tokenizer:
  """Sentencepiece's BPE: Gemma 4 has merges; others derive them from scores."""
  unknown = of_kind(TokenType.UNKNOWN)
  if metadata[f"{_KEY}model"] == "gemma4":
    merges = _merges(metadata)
  else:
    from transformers.tokenization_utils_base import generate_merges

    # Of normal tokens only: text must not merge into a control token.
    text = {token: vocab[token] for token in of_kind(TokenType.NORMAL)}
    scores = metadata[f"{_KEY}scores"]
    merges = generate_merges(text, {t: scores[i] for t, i in text.items()})
  backend = hf.Tokenizer(
    hf.models.BPE(
      vocab, merges, unk_token=unknown[0] if unknown else None, fuse_unk=True,
      byte_fallback=True,
    )
  )  # fmt: skip
  backend.add_special_tokens(unknown)
  backend.normalizer = normalizers.Replace(" ", _SPACE)
  words = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
  words.append(decoders.Fuse())
  if metadata.get(f"{_KEY}add_space_prefix", True):
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend(_SPACE), backend.normalizer]
    )
    words.append(decoders.Strip(" ", 1, 0))
  backend.decoder = decoders.Sequence(words)
  return backend
