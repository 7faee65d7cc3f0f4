"""A tokenizer that falls back to bytes, as Sentencepiece's do."""

import functools

import tokenizers as hf

from models import tokenizers

_SPACE = "\u2581"
WORDS = (
  _SPACE, f"{_SPACE}a", "b", f"{_SPACE}the", "日", "é", "x\n", _SPACE * 2, "ST",
  "OP",
)  # fmt: skip


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
  """Token i < 256 is the byte i; then words, two special tokens, a name."""
  vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
  vocab |= {word: 256 + number for number, word in enumerate(WORDS)}
  backend = hf.Tokenizer(hf.models.BPE(vocab, [], byte_fallback=True))
  backend.decoder = hf.decoders.Sequence(
    [
      hf.decoders.Replace(_SPACE, " "),
      hf.decoders.ByteFallback(),
      hf.decoders.Fuse(),
      hf.decoders.Strip(" ", 1, 0),
    ]
  )
  backend.add_special_tokens(["<s>", "</s>"])
  backend.add_tokens(["<tool>"])
  return tokenizers.Tokenizer(backend, backend.token_to_id("</s>"))


@functools.cache
def metaspace() -> tokenizers.Tokenizer:
  """Words with what Sentencepiece writes for spaces, and two special tokens."""
  vocab = {word: number for number, word in enumerate(WORDS)}
  backend = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token=WORDS[0]))
  backend.pre_tokenizer = hf.pre_tokenizers.Metaspace()
  backend.decoder = hf.decoders.Metaspace()
  backend.add_special_tokens(["<s>", "</s>"])
  return tokenizers.Tokenizer(backend, backend.token_to_id("</s>"))


def noise(rng, *, count=8) -> list[int]:
  """Characters in bytes, bytes of none, words, special and unknown tokens."""
  ids: list[int] = []
  for _ in range(rng.integers(1, count)):
    kind = rng.random()
    if kind < 0.4:
      ids += rng.choice(["日", "é", "🙂", "ß"]).encode()
    elif kind < 0.55:
      ids.append(int(rng.integers(256)))
    else:
      ids.append(int(rng.integers(256, tokenizer().vocab_size + 2)))
  return ids
