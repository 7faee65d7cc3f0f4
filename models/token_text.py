"""The bytes of single tokens, which need not be whole characters."""

import functools
import re
from collections.abc import Mapping

import tokenizers as hf

from models.tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u0120"  # the byte 32 in a byte-level BPE


# The byte for each character of a byte-level BPE's tokens.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PLAIN})
_SHOWN = {chr(byte): byte for byte in _PLAIN} | {
  chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}


def fallback_byte(tokenizer: Tokenizer, token: int) -> int | None:
  """The byte of a fallback token, or None for any other token.

  Such tokens form characters only in combination: an invalid one invalidates
  its neighbors.
  """
  match = _BYTE.fullmatch(tokenizer.backend.id_to_token(token) or "")
  if not match or not _decodes(tokenizer, "<0x41>", "A"):
    return None
  return int(match[1], 16)


def is_silent(tokenizer: Tokenizer, token: int) -> bool:
  """True if a token adds no text: it is special or unknown."""
  added = _added(tokenizer.backend).get(token)
  if added is not None:
    return added.special
  return tokenizer.backend.id_to_token(token) is None


@functools.lru_cache(maxsize=8)
def _added(backend: hf.Tokenizer) -> Mapping[int, hf.AddedToken]:
  return backend.get_added_tokens_decoder()


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
  """The bytes that a token adds after others; empty if special."""
  if is_silent(tokenizer, token):
    return b""
  piece = tokenizer.backend.id_to_token(token)
  byte = fallback_byte(tokenizer, token)
  if byte is not None:
    return bytes([byte])
  if _decodes(tokenizer, _BLANK, " ") and all(x in _SHOWN for x in piece):
    return bytes(_SHOWN[x] for x in piece)
  return tokenizer.decode([token], after=[token]).encode()


def name_of(tokenizer: Tokenizer, token: int) -> str:
  """A token in readable form; a special one by its name."""
  if is_silent(tokenizer, token):
    return tokenizer.backend.id_to_token(token) or ""
  return bytes_of(tokenizer, token).decode("utf-8", "replace")


def _decodes(tokenizer: Tokenizer, piece: str, text: str) -> bool:
  """True if the tokenizer decodes a token's spelling to this text."""
  decoder = tokenizer.backend.decoder
  return decoder is not None and decoder.decode([piece]) == text
