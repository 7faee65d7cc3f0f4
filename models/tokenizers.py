"""Byte-level BPE tokenizers: load, train, compare.

A thin layer over the `tokenizers` package, so that decoding needs neither torch
nor a hub. Files are Hugging Face's: `tokenizer.json` (or `vocab.json` and
`merges.txt`) beside `tokenizer_config.json`
(`models.formats.vocabulary_files`).
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers as hf

from models.formats import vocabulary_files

END_OF_TEXT = "<|endoftext|>"


_STRUCTURE = re.compile(r"<[|｜][^<>]*[|｜]>")


def is_structure(name: str) -> bool:
  """True if a token's name has the form in which chat models mark turns."""
  return _STRUCTURE.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text to ids and back.

  Attributes:
    backend: the `tokenizers.Tokenizer`.
    eos_token_id: id of the end-of-text token, or None if there is none.
    bos_token: the token that begins a text, as the model's files name it.
    chat_template: the Jinja template of conversations (`models.chat`), or None.
  """

  backend: hf.Tokenizer
  eos_token_id: int | None
  bos_token: str | None = None
  chat_template: str | None = None

  @property
  def eos_token(self) -> str | None:
    """The end-of-text token, or None if there is none."""
    if self.eos_token_id is None:
      return None
    return self.backend.id_to_token(self.eos_token_id)

  @property
  def vocab_size(self) -> int:
    """The largest id plus one, added tokens included."""
    return max(self.vocabulary().values()) + 1

  def vocabulary(self) -> dict[str, int]:
    """Token to id."""
    return self.backend.get_vocab(with_added_tokens=True)

  def encode(self, text: str) -> list[int]:
    """Ids of a text, with whatever the tokenizer's own template adds."""
    return self.backend.encode(_checked(text)).ids

  def encode_text(self, text: str) -> list[int]:
    """Ids of plain text: names of special tokens are text too."""
    text = _checked(text)
    return self._without_special.encode(text, add_special_tokens=False).ids

  @functools.cached_property
  def _without_special(self) -> hf.Tokenizer:
    told = self.backend.to_str()
    added = self.backend.get_added_tokens_decoder().values()
    if any(
      is_structure(token.content) and not token.special for token in added
    ):
      parts = json.loads(told)
      for token in parts["added_tokens"]:
        token["special"] |= is_structure(token["content"])
      told = json.dumps(parts)
    copy = hf.Tokenizer.from_str(told)
    copy.encode_special_tokens = True
    return copy

  def special_tokens(self) -> dict[str, hf.AddedToken]:
    """Special tokens by their names.

    Those that are marked as special, and added ones whose names show it: some
    models' files have `<｜User｜>` without the mark.
    """
    added = self.backend.get_added_tokens_decoder().values()
    return {
      token.content: token
      for token in added
      if token.special or is_structure(token.content)
    }

  def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
    """Text of ids; special tokens are left out.

    Args:
      ids: the ids.
      after: ids before them, as a completion has its prompt: many decoders
        drop the space that a text begins with.
    """
    before = self.context(after)
    text = self.backend.decode([*before, *(int(i) for i in ids)])
    return text[len(self.backend.decode(before)) :]

  def context(self, ids: Sequence[int]) -> list[int]:
    """A shortest `after` of `decode` that gives the same text as these ids.

    One word stands for any text; bytes will not do, since later ones could
    change its last character. Empty where the ids have no text.
    """
    word = self._word
    if word is None:
      return []
    alone = self.backend.decode([word])
    says = lambda i: self.backend.decode([word, int(i)]) != alone
    return [word] if any(map(says, reversed(ids))) else []

  @functools.cached_property
  def _word(self) -> int | None:
    """A token of whole characters, spelled as they are; None if none is."""
    for number in range(self.backend.get_vocab_size(with_added_tokens=False)):
      text = self.backend.decode([number])
      name = self.backend.id_to_token(number) or ""
      if text.isascii() and text.isalnum() and name.endswith(text):
        return number
    return None

  def token_bytes(self) -> np.ndarray:
    """Bytes of text that each token of a byte-level BPE stands for, `i32[V]`.

    Its tokens are written with one character a byte; added tokens are special,
    and stand for none.
    """
    sizes = np.zeros(self.vocab_size, np.int32)
    for token, index in self.backend.get_vocab(with_added_tokens=False).items():
      sizes[index] = len(token)
    for index, token in self.backend.get_added_tokens_decoder().items():
      sizes[index] = 0 if token.special else len(token.content.encode())
    return sizes

  def fingerprint(self) -> str:
    """A hash, equal exactly if every token has the same id."""
    vocab = sorted(self.vocabulary().items())
    return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()


def load(directory: str) -> Tokenizer:
  """Reads the tokenizer of a checkpoint directory.

  Raises:
    FileNotFoundError: if there are no tokenizer files.
    ValueError: if they cannot be read.
  """
  path = pathlib.Path(directory)
  config = vocabulary_files.read_config(path)
  try:
    if (path / "tokenizer.json").exists():
      backend = hf.Tokenizer.from_file(str(path / "tokenizer.json"))
      # What a tokenizer was used for last: transformers asks anew as well.
      backend.no_truncation()
      backend.no_padding()
      vocabulary_files.mark_special(backend, config)
    elif (path / "vocab.json").exists() and (path / "merges.txt").exists():
      backend = vocabulary_files.read(path, config)
    elif not path.is_dir():
      raise FileNotFoundError(f"no such directory: {directory}")
    else:
      raise FileNotFoundError(
        f"no tokenizer in {directory}: expected tokenizer.json, or vocab.json "
        "with merges.txt"
      )
  except FileNotFoundError:
    raise
  except Exception as error:  # the backend raises bare Exception
    raise ValueError(
      f"cannot read the tokenizer in {directory}: {error}"
    ) from None
  return Tokenizer(
    backend,
    backend.token_to_id(
      vocabulary_files.name_in(config, "eos_token") or END_OF_TEXT
    ),
    bos_token=vocabulary_files.name_in(config, "bos_token"),
    chat_template=_chat_template(path, config),
  )


def _chat_template(path: pathlib.Path, config: dict) -> str | None:
  """The template of its own file, or the config's (the default of several)."""
  template_file = path / "chat_template.jinja"
  if template_file.exists():
    return template_file.read_text("utf-8")
  template = config.get("chat_template")
  if isinstance(template, list):
    named = [t for t in template if isinstance(t, dict)]
    named = {t.get("name"): t.get("template") for t in named}
    template = named.get("default")
  if not isinstance(template, str | None):
    raise ValueError(
      f"chat_template in {path / 'tokenizer_config.json'} must be a string"
    )
  return template


def train(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE whose last id is the end-of-text token."""
  backend = hf.Tokenizer(hf.models.BPE())
  backend.pre_tokenizer = hf.pre_tokenizers.Sequence(
    [
      # Runs of spaces stay together up to the one before a word, so that an
      # indentation is one token.
      hf.pre_tokenizers.Split(
        hf.Regex(r"\n+| +(?= )| ?\w+| ?[^\s\w]+|\s+"), "isolated"
      ),
      hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=vocab_size - 1,
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  backend.add_special_tokens([END_OF_TEXT])
  return Tokenizer(backend, backend.token_to_id(END_OF_TEXT))


def train_encoder(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
  """Trains a byte-level BPE for an encoder-decoder, as T5's ids are.

  0 is padding and what the decoder begins with, 1 ends what is encoded. Digits
  are tokens of their own.
  """
  backend = hf.Tokenizer(hf.models.BPE())
  backend.pre_tokenizer = hf.pre_tokenizers.Sequence(
    [
      hf.pre_tokenizers.Split(
        hf.Regex(r"\d| ?[^\W\d]+| ?[^\s\w]|\s+"), "isolated"
      ),
      hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = hf.decoders.ByteLevel()
  pad, end = "<pad>", "</s>"
  trainer = hf.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[pad, end],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  backend.post_processor = hf.processors.TemplateProcessing(
    single=f"$A {end}", special_tokens=[(end, backend.token_to_id(end))]
  )
  return Tokenizer(backend, backend.token_to_id(end))


def save(tokenizer: Tokenizer, directory: str) -> None:
  """Writes `tokenizer.json` and `tokenizer_config.json`."""
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  tokenizer.backend.save(str(path / "tokenizer.json"))
  end = tokenizer.eos_token_id
  end = None if end is None else tokenizer.backend.id_to_token(end)
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": end,
    "bos_token": end,
    "clean_up_tokenization_spaces": False,
  }
  (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def save_if_missing(tokenizer: Tokenizer, directory: str) -> None:
  """`save`, unless a tokenizer is there, or a file that has one."""
  try:
    if not pathlib.Path(directory).is_file():
      load(directory)
  except FileNotFoundError:
    save(tokenizer, directory)


def _checked(text: str) -> str:
  """The text; ValueError if it is none, half of a pair of surrogates in it."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    half = f"U+{ord(text[error.start]):04X}"
    raise ValueError(
      f"the text has half a character at place {error.start} ({half}, one of "
      "two surrogates)"
    ) from None
  return text
