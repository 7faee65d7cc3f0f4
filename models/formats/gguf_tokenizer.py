"""The tokenizer in a GGUF file's metadata.

llama.cpp's converter keeps the vocabulary, what each token is for, and the
merges or scores; how text is cut into words before merging it says by a name
alone, after the model that first did it so. Here such a name stands for what
that model's own `tokenizer.json` says (`models.word_cuts`), not for llama.cpp's
approximation of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import tokenizers as hf
from tokenizers import decoders, normalizers, pre_tokenizers

from models.formats import gguf_file, vocabulary_files
from models.tokenizers import Tokenizer, is_structure
from models.word_cuts import CUTS

_KIND = gguf.TokenType
_KEY = "tokenizer.ggml."

_ALIASES = {
  "llama3": "llama-bpe",
  "llama-v3": "llama-bpe",
  "deepseek-r1-qwen": "qwen2",
  "chatglm-bpe": "glm4",
}
_COMPOSED = ("mpt", "olmo", "qwen2")  # text is brought into the form NFC first
_WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is not merged
# Names of what ends a text or a turn, whatever the metadata say: a chat model's
# file often has its base model's end. llama.cpp knows most of these as well.
_ENDS = frozenset(
  {
    "<EOT>", "<end_of_turn>", "<end_of_utterance>", "<|end_of_text|>",
    "<|call|>", "<|calls|>", "<|endoftext|>", "<|end|>", "<|eom_id|>",
    "<|eot_id|>", "<|flush|>", "<|im_end|>", "<|return|>", "<turn|>",
    "<｜end▁of▁sentence｜>", "[EOS]", "[EOT]", "_<EOT>",
  }
)  # fmt: skip
_SPACE = "▁"  # how sentencepiece writes it


def load(path: str) -> Tokenizer:
  """Reads the tokenizer of a GGUF file.

  Args:
    path: of the file.

  Returns:
    The tokenizer; tokens that llama.cpp's converter has added to fill up the
    embedding are left out.

  Raises:
    FileNotFoundError, ValueError: as `models.formats.gguf_file.read_header`;
      ValueError also if there is no tokenizer in the file, or one that is not
      supported.
  """
  header = gguf_file.read_header(path)
  try:
    return _tokenizer(header.metadata)
  except ValueError as error:
    raise ValueError(f"the tokenizer in {header.path}: {error}") from None


def named_ends(metadata: Mapping[str, Any]) -> list[int]:
  """Ids of the tokens that end a text or a turn by their names."""
  tokens = metadata.get(_KEY + "tokens")
  numbered = enumerate(tokens if isinstance(tokens, list) else ())
  return [number for number, token in numbered if token in _ENDS]


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
  model = _get(metadata, _KEY + "model", str, None)
  builders = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _sentencepiece,
  }
  if model not in builders:
    raise ValueError(
      f"{_KEY}model must be one of {sorted(builders)}, got {model!r:.80}"
    )
  tokens = _strings(metadata, "tokens")
  kinds = metadata.get(_KEY + "token_type")
  if kinds is None:
    kinds = _supposed_kinds(metadata, tokens)
  if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
    raise ValueError(f"{_KEY}token_type must be a number for every token")
  kinds = kinds.copy()
  for number in named_ends(metadata):
    if kinds[number] != _KIND.UNUSED:
      kinds[number] = _KIND.CONTROL
  vocab = {
    token: i
    for i, token in enumerate(tokens)
    if kinds[i] != _KIND.UNUSED
  }  # fmt: skip
  if not vocab or len(vocab) != np.count_nonzero(kinds != _KIND.UNUSED):
    raise ValueError(f"{_KEY}tokens must be names, none of them twice")
  try:
    backend, adds_bos = builders[model](metadata, tokens, vocab, kinds)
    # A name is added to the vocabulary with the number that it has there.
    backend.add_special_tokens(
      [_added(t, True) for t, i in vocab.items() if kinds[i] == _KIND.CONTROL]
    )
    backend.add_tokens(
      [
        _added(t, False)
        for t, i in vocab.items()
        if kinds[i] == _KIND.USER_DEFINED
      ]
    )
  except ValueError:
    raise
  except Exception as error:  # the backend raises bare Exception
    raise ValueError(" ".join(str(error).split())) from None
  bos, eos = (
    _special(metadata, name, tokens, vocab) for name in ("bos", "eos")
  )
  vocabulary_files.frame(
    backend,
    bos if _get(metadata, _KEY + "add_bos_token", bool, adds_bos) else None,
    eos if _get(metadata, _KEY + "add_eos_token", bool, False) else None,
  )
  return Tokenizer(
    backend,
    None if eos is None else vocab[eos],
    bos_token=bos,
    chat_template=_get(metadata, "tokenizer.chat_template", str, None),
  )


def _supposed_kinds(metadata, tokens: Sequence[str]) -> np.ndarray:
  """Token types guessed from names and from the metadata's special ids."""
  kinds = np.full(len(tokens), _KIND.NORMAL)
  kinds[[i for i, token in enumerate(tokens) if is_structure(token)]] = (
    _KIND.CONTROL
  )
  for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
    number = metadata.get(f"{_KEY}{name}_token_id")
    if isinstance(number, int) and 0 <= number < len(tokens):
      kinds[number] = _KIND.UNKNOWN if name == "unknown" else _KIND.CONTROL
  return kinds


def _byte_level(metadata, tokens, vocab, kinds) -> tuple[hf.Tokenizer, bool]:
  """Byte-level BPE; and whether texts begin with a token if nothing is said."""
  del tokens, kinds
  said = _get(metadata, _KEY + "pre", str, None)
  name = _ALIASES.get(said, said)
  if name not in CUTS:
    known = sorted({*CUTS, *_ALIASES})
    raise ValueError(f"{_KEY}pre must be one of {known}, got {said!r:.80}")
  merges, whole = _said_merges(metadata), name in _WHOLE_WORDS
  backend = hf.Tokenizer(hf.models.BPE(vocab, merges, ignore_merges=whole))
  if name in _COMPOSED:
    backend.normalizer = normalizers.NFC()
  cuts = [pre_tokenizers.Split(hf.Regex(e), "isolated") for e in CUTS[name]]
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
  )
  backend.decoder = decoders.ByteLevel()
  return backend, name in _WHOLE_WORDS


def _sentencepiece(metadata, tokens, vocab, kinds) -> tuple[hf.Tokenizer, bool]:
  """Sentencepiece's BPE; Gemma 4's has merges, others' follow from scores."""
  for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
    value = metadata.get(_KEY + key)
    if value is not None and np.any(value):
      raise ValueError(f"{_KEY}{key} is set, which is not supported")
  unknown = [t for t, i in vocab.items() if kinds[i] == _KIND.UNKNOWN]
  if metadata[_KEY + "model"] == "gemma4":
    merges = _said_merges(metadata)
  else:
    scores = metadata.get(_KEY + "scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
      raise ValueError(f"{_KEY}scores must be a number for every token")
    text = {t: i for t, i in vocab.items() if kinds[i] == _KIND.NORMAL}
    merges = _merges(text, scores)
  backend = hf.Tokenizer(
    hf.models.BPE(
      vocab,
      merges,
      unk_token=unknown[0] if unknown else None,
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  backend.add_special_tokens([_added(token, True) for token in unknown])
  spaces = normalizers.Replace(" ", _SPACE)
  words = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
  backend.normalizer = spaces
  backend.decoder = decoders.Sequence([*words, decoders.Fuse()])
  if _get(metadata, _KEY + "add_space_prefix", bool, True):
    backend.normalizer = normalizers.Sequence(
      [normalizers.Prepend(_SPACE), spaces]
    )
    backend.decoder = decoders.Sequence(
      [*words, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
  return backend, True


def _said_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
  """The merges that a file lists, the first ones first."""
  merges = []
  for merge in _strings(metadata, "merges"):
    left, space, right = merge.partition(" ")
    if not (left and space and right):
      raise ValueError(f"a merge must be of two tokens, got {merge!r:.80}")
    merges.append((left, right))
  return merges


def _merges(
  vocab: Mapping[str, int], scores: np.ndarray
) -> list[tuple[str, str]]:
  """All ways to make a token of two others, those of the best score first.

  Of tokens of text alone: no text may become a token that ends or begins one.

  Sentencepiece joins the neighbours whose union has the best score, which is
  what merging by rank does then. Ties are broken as transformers breaks them.
  """
  ways = []
  for token, number in vocab.items():
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in vocab and right in vocab:
        ways.append((-float(scores[number]), -cut, left, right))
  ways.sort(key=lambda way: (*way[:2], -len(way[3])))
  return [way[2:] for way in ways]


def _added(token: str, special: bool) -> hf.AddedToken:
  return hf.AddedToken(token, special=special, normalized=False)


def _special(metadata, name: str, tokens, vocab) -> str | None:
  """The token whose id a key of the metadata has."""
  key = f"{_KEY}{name}_token_id"
  number = _get(metadata, key, int, None)
  if number is None:
    if _get(metadata, f"{_KEY}add_{name}_token", bool, False):
      raise ValueError(f"{_KEY}add_{name}_token is set, and {key} is missing")
    return None
  if not 0 <= number < len(tokens) or tokens[number] not in vocab:
    raise ValueError(f"{key} is {number}, which is no token's id")
  return tokens[number]


def _get(metadata, key: str, kind: type, default: Any) -> Any:
  """A value of a type, or what stands for one that is left out."""
  value = metadata.get(key, default)
  if value is not default and type(value) is not kind:
    raise ValueError(f"{key} must be a {kind.__name__}, got {value!r:.40}")
  return value


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
  strings = metadata.get(_KEY + name)
  if not isinstance(strings, list):
    raise ValueError(f"{_KEY}{name} must be a list of strings")
  return strings
