"""Texts of single tokens, in both kinds of vocabulary."""

import fallback
import files
import numpy as np
import pytest

from models import token_text, tokenizers


@pytest.mark.parametrize("seed", range(3))
def test_token_bytes_concatenate_to_decoded_text(seed):
  """Bytes that are no character stand for themselves, and none is decoded."""
  rng = np.random.default_rng(seed)
  tokenizer = tokenizers.load(files.EMBEDDED)
  for _ in range(50):
    ids = rng.integers(0, tokenizer.vocab_size, 6).tolist()
    actual = b"".join(token_text.bytes_of(tokenizer, token) for token in ids)
    assert actual.decode("utf-8", "replace") == tokenizer.decode(ids)


def test_byte_fallback_tokens_yield_their_bytes():
  tokenizer = fallback.tokenizer()
  ids = tokenizer.backend.token_to_id
  text = [ids("▁a"), ids("b"), *"é🙂".encode(), ids("</s>"), ids("▁the")]
  actual = b"".join(token_text.bytes_of(tokenizer, token) for token in text)
  assert actual.decode() == " abé🙂 the"
  assert tokenizer.decode(text) == "abé🙂 the"  # a text begins without it
  assert token_text.fallback_byte(tokenizer, 0xC3) == 0xC3
  assert token_text.fallback_byte(tokenizer, ids("b")) is None
  plain = tokenizers.load(files.EMBEDDED)
  assert token_text.fallback_byte(plain, 65) is None


def test_name_of_handles_special_byte_and_padding_tokens():
  tokenizer = fallback.tokenizer()
  ids = tokenizer.backend.token_to_id
  name = lambda token: token_text.name_of(tokenizer, token)
  assert [name(ids(x)) for x in ("▁a", "</s>", "<tool>", "日")] == [
    " a", "</s>", "<tool>", "日",
  ]  # fmt: skip
  assert name(0xFF) == "\ufffd"
  assert name(10_000) == ""  # beyond the vocabulary, as padding is
  assert token_text.bytes_of(tokenizer, ids("</s>")) == b""
  assert token_text.bytes_of(tokenizer, ids("<tool>")) == b"<tool>"
