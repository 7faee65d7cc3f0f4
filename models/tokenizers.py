"""Loads, trains and compares tokenizers in Hugging Face's format.

The `tokenizers` package reads `tokenizer.json` and `tokenizer_config.json`;
transformers reads all other files.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers as hf

from models.formats import json_files

END_OF_TEXT = "<|endoftext|>"
_STRUCTURE = re.compile(r"<[|｜][^<>]*[|｜]>")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text to ids and back.

  Attributes:
    backend: the `tokenizers.Tokenizer`.
    eos_token_id: id of the end-of-text token, or None if there is none.
    bos_token: the beginning-of-text token in the model's files, or None.
    chat_template: the Jinja chat template (`models.chat`), or None.
  """

  backend: hf.Tokenizer
  eos_token_id: int | None
  bos_token: str | None = None
  chat_template: str | None = None

  @property
  def eos_token(self) -> str | None:
    """The end-of-text token, or None if there is none."""
    end = self.eos_token_id
    return None if end is None else self.backend.id_to_token(end)

  @property
  def vocab_size(self) -> int:
    """The largest id plus one, including added tokens."""
    return max(self.vocabulary().values()) + 1

  def vocabulary(self) -> dict[str, int]:
    """Token to id."""
    return self.backend.get_vocab(with_added_tokens=True)

  def encode(self, text: str) -> list[int]:
    """Encodes a text, with the special tokens that the tokenizer adds."""
    text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    return self.backend.encode(text).ids

  def encode_text(self, text: str) -> list[int]:
    """Encodes plain text: names of special tokens are treated as text."""
    text.encode()
    return self._plain.encode(text, add_special_tokens=False).ids

  @functools.cached_property
  def _plain(self) -> hf.Tokenizer:
    return self.plain_copy()

  def plain_copy(self) -> hf.Tokenizer:
    """A copy of the backend that treats names of special tokens as text."""
    copy = hf.Tokenizer.from_str(self.backend.to_str())
    copy.add_special_tokens([*self.special_tokens().values()])
    copy.encode_special_tokens = True
    return copy

  def special_tokens(self) -> dict[str, hf.AddedToken]:
    """Special tokens by name.

    Besides tokens flagged special, these are added tokens named like
    `<｜User｜>`: some files forget the flag.
    """
    added = self.backend.get_added_tokens_decoder().values()
    return {
      token.content: token
      for token in added
      if token.special or _STRUCTURE.fullmatch(token.content)
    }

  def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
    """Decodes ids, without special tokens.

    Args:
      ids: the ids.
      after: the ids before them, such as the prompt of a completion. Many
        decoders drop a leading space at the start of a text.
    """
    before = self.context(after)
    text = self.backend.decode([*before, *(int(i) for i in ids)])
    return text[len(self.backend.decode(before)) :]

  def context(self, ids: Sequence[int]) -> list[int]:
    """A short `after` for `decode` that is equivalent to these ids.

    Any text is replaced by one whole word, because later bytes could change
    the last character of an incomplete one. Empty if the ids have no text.
    """
    if (word := self._word) is None:
      return []
    alone = self.backend.decode([word])
    adds_text = lambda i: self.backend.decode([word, int(i)]) != alone
    return [word] if any(map(adds_text, reversed(ids))) else []

  @functools.cached_property
  def _word(self) -> int | None:
    """A token that is a plain ASCII word; None if there is none."""
    for number in range(self.backend.get_vocab_size(with_added_tokens=False)):
      text = self.backend.decode([number])
      name = self.backend.id_to_token(number) or ""
      if text.isascii() and text.isalnum() and name.endswith(text):
        return number
    return None

  def token_bytes(self) -> np.ndarray:
    """Number of bytes of each token of a byte-level BPE, `i32[V]`.

    Such vocabularies spell each byte as one character. Special tokens have 0.
    """
    sizes = np.zeros(self.vocab_size, np.int32)
    for token, index in self.backend.get_vocab(with_added_tokens=False).items():
      sizes[index] = len(token)
    for index, token in self.backend.get_added_tokens_decoder().items():
      sizes[index] = 0 if token.special else len(token.content.encode())
    return sizes

  def fingerprint(self) -> str:
    """A hash of the vocabulary; equal if every token has the same id."""
    vocab = sorted(self.vocabulary().items())
    return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()


def load(directory: str) -> Tokenizer:
  """Loads the tokenizer of a checkpoint directory.

  Uses transformers, whose import takes seconds, only if `tokenizer.json` is
  not enough.

  Raises:
    FileNotFoundError: if the directory or its tokenizer files are missing.
    ValueError: if they cannot be read.
  """
  path = pathlib.Path(directory)
  if not path.is_dir():
    raise FileNotFoundError(f"no such directory: {directory}")
  kinds = ("tokenizer.*", "vocab.*", "*.model")
  if not any([*path.glob(kind)] for kind in kinds):
    raise FileNotFoundError(f"no tokenizer in {directory}")
  try:
    file = path / "tokenizer_config.json"
    config = json_files.read_object(file) if file.exists() else {}
    backend = _from_json(path, config)
    bos, eos = (_name(config.get(f"{end}_token")) for end in ("bos", "eos"))
    if backend is None:
      os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
      from transformers import AutoTokenizer

      made = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
      backend, bos, eos = made.backend_tokenizer, made.bos_token, made.eos_token
    # Files may keep the settings of their last use; transformers resets them.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
      backend,
      None if eos is None else backend.token_to_id(eos),
      bos_token=bos,
      chat_template=_chat_template(path, config),
    )
  except Exception as error:  # the libraries raise bare Exception
    reason = " ".join(str(error).split())
    raise ValueError(
      f"cannot read the tokenizer in {directory}: {reason}"
    ) from error


def _from_json(
  path: pathlib.Path, config: Mapping[str, Any]
) -> hf.Tokenizer | None:
  """Loads `tokenizer.json` alone; None if other files are needed as well."""
  file, older = path / "tokenizer.json", path / "special_tokens_map.json"
  if not file.exists() or "eos_token" not in config:
    return None  # its class in transformers has a default
  if "added_tokens_decoder" not in config and older.exists():
    return None
  backend = hf.Tokenizer.from_file(str(file))
  added = backend.get_added_tokens_decoder()
  special = {token.content for token in added.values() if token.special}
  named = [x for key, x in config.items() if key.endswith("_token")]
  for key in ("additional_special_tokens", "extra_special_tokens"):
    more = config.get(key) or ()
    named += more.values() if isinstance(more, Mapping) else more
  names = {name for x in named if isinstance(name := _name(x), str)}
  # Transformers would add a token for a name outside the vocabulary.
  names &= {*backend.get_vocab(with_added_tokens=True)}
  listed = config.get("added_tokens_decoder", {}).items()
  as_listed = all(added.get(int(i)) == hf.AddedToken(**x) for i, x in listed)
  return backend if names <= special and as_listed else None


def _name(token: Any) -> Any:
  """The name of a token that a config gives as a string or an object."""
  return token.get("content") if isinstance(token, Mapping) else token


def _chat_template(path: pathlib.Path, config: Mapping[str, Any]) -> str | None:
  """The template in its own file, or the (default) one in the config."""
  file = path / "chat_template.jinja"
  if file.exists():
    return file.read_text("utf-8")
  template = config.get("chat_template")
  if isinstance(template, list):
    named = {each["name"]: each["template"] for each in template}
    return named.get("default")
  return template


def train(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE whose last id is the end-of-text token."""
  # Runs of spaces stay together, except the one before a word: an indentation
  # is one token.
  words = r"\n+| +(?= )| ?\w+| ?[^\s\w]+|\s+"
  backend = _trained(texts, words, vocab_size - 1, [])
  backend.add_special_tokens([END_OF_TEXT])
  return Tokenizer(backend, backend.token_to_id(END_OF_TEXT))


def train_encoder(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE for an encoder-decoder, with T5's special ids.

  0 is padding and the decoder's start token, 1 ends an encoded text. Each
  digit is its own token.
  """
  words, end = r"\d| ?[^\W\d]+| ?[^\s\w]|\s+", "</s>"
  backend = _trained(texts, words, vocab_size, ["<pad>", end])
  backend.post_processor = hf.processors.TemplateProcessing(
    single=f"$A {end}", special_tokens=[(end, backend.token_to_id(end))]
  )
  return Tokenizer(backend, backend.token_to_id(end))


def _trained(
  texts: Iterable[str], words: str, vocab_size: int, special: list[str]
) -> hf.Tokenizer:
  """Trains a byte-level BPE on words split by a regular expression."""
  backend = hf.Tokenizer(hf.models.BPE())
  backend.pre_tokenizer = hf.pre_tokenizers.Sequence(
    [
      hf.pre_tokenizers.Split(hf.Regex(words), "isolated"),
      hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=special,
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  return backend


def save(tokenizer: Tokenizer, directory: str) -> None:
  """Writes `tokenizer.json` and `tokenizer_config.json`."""
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  tokenizer.backend.save(str(path / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": tokenizer.eos_token,
    "bos_token": tokenizer.eos_token,
    "clean_up_tokenization_spaces": False,
  }
  (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def save_if_missing(tokenizer: Tokenizer, directory: str) -> None:
  """Saves a tokenizer unless one is there, or the path is a (GGUF) file."""
  try:
    if not pathlib.Path(directory).is_file():
      load(directory)
  except FileNotFoundError:
    save(tokenizer, directory)
