"""Tokenizers in GGUF files: the ids of those that they were written from."""

import functools
import json

import gguf as package
import numpy as np
import pytest
import tokenizers as hf
import transformers
from gguf import TokenType
from tokenizers import decoders, normalizers, pre_tokenizers

from models.formats import gguf_tokenizer

SPECIAL = ("<|begin|>", "<|end|>")
# What tokenizers stumble over: case, digits, runs of spaces, scripts, marks,
# names of special tokens, what is no character of any language.
NASTY = [
  "",
  " ",
  "  lead and trail  ",
  "I'll I'LL they've don'T 'S's",
  "1 12 123 1234 12345.678 a1b22c333 ٣٤٥ ½ Ⅷ x²",
  "a  1   22    333\t4\n5",
  "line\nline\r\n\r\n  indented\n\n\n\tTab  \n ",
  "camelCaseWord HTTPServer XMLHttp iPhone ǅ",
  "naïve café Ünïcödé ångström",
  "日本語 テスト 中文字符 한국어 ไทย हिन्दी العربية",
  "🚀👩‍👩‍👧‍👦 🇨🇭 ✅\u200d",
  '$$$ <=> ^~|` "quotes" (brackets) [x]{y} -- ... !!?',
  f"{SPECIAL[0]}text{SPECIAL[1]} and {SPECIAL[1]}\n",
  "\u00a0nbsp\u2003em\u3000wide\ufeff",
  "\x00\x01\x7f\ufffd",
  "cafe\u0301 A\u030angstrom \u1112\u1161\u11ab",  # in the form NFD
]
CORPUS = [
  *NASTY,
  *(["the cat sat on the mat (2024), and 2024 was the year"] * 20),
]

# What their own tokenizer.json files say of models that have these names.
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s"
  r"\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
  r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
  r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip


def _split(*expressions):
  return pre_tokenizers.Sequence(
    [
      *(pre_tokenizers.Split(hf.Regex(e), "isolated") for e in expressions),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
ORIGINALS = {
  "gpt-2": (None, _BYTES),
  "smollm": (None, pre_tokenizers.Sequence([_DIGITS, _BYTES])),
  "llama-bpe": (None, _split(_LLAMA3)),
  "tekken": (None, _split(_TEKKEN)),
  "qwen2": (normalizers.NFC(), _split(_LLAMA3.replace("{1,3}", ""))),
}
# Another name of one of them.
ALSO = {"deepseek-r1-qwen": "qwen2"}


def write(folder, tokens, kinds, **values):
  """A file with a tokenizer and no tensors; values by key."""
  path = folder / "x.gguf"
  writer = package.GGUFWriter(str(path), "llama")
  writer.add_block_count(0)  # transformers asks for some configuration
  writer.add_token_list(tokens)
  if kinds is not None:
    writer.add_token_types(kinds)
  for key, value in values.items():
    key = "tokenizer." + ("" if key == "chat_template" else "ggml.") + key
    if isinstance(value, list):
      writer.add_array(key, value)
    else:
      kind = {str: "string", bool: "bool", int: "uint32"}[type(value)]
      getattr(writer, f"add_{kind}")(key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return path


@functools.cache
def trained(name):
  """A byte-level BPE with the words of a name; tokens and merges in order."""
  normalizer, backend = ORIGINALS[name][0], hf.Tokenizer(hf.models.BPE())
  backend.pre_tokenizer = ORIGINALS[name][1]
  if normalizer is not None:
    backend.normalizer = normalizer
  backend.decoder = decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=420, show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  backend.train_from_iterator(CORPUS, trainer)
  backend.add_special_tokens(list(SPECIAL))
  return backend


def parts(backend):
  """Arguments of `write` for a byte-level BPE."""
  vocab = backend.get_vocab(with_added_tokens=True)
  tokens = sorted(vocab, key=vocab.get)
  merges = json.loads(backend.to_str())["model"]["merges"]
  kinds = [
    TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL
    for token in tokens
  ]
  return tokens, kinds, [" ".join(merge) for merge in merges]


@pytest.mark.parametrize("name", [*ORIGINALS, *ALSO])
def test_ids_match_the_source_tokenizer(tmp_path, name):
  backend = trained(ALSO.get(name, name))
  tokens, kinds, merges = parts(backend)
  path = write(
    tmp_path, tokens, kinds, model="gpt2", pre=name, merges=merges,
    add_bos_token=False, bos_token_id=tokens.index(SPECIAL[0]),
    eos_token_id=tokens.index(SPECIAL[1]),
  )  # fmt: skip
  tokenizer = gguf_tokenizer.load(str(path))
  assert tokenizer.vocabulary() == backend.get_vocab(with_added_tokens=True)
  assert (tokenizer.bos_token, tokenizer.eos_token) == SPECIAL
  for text in NASTY:
    ids = backend.encode(text).ids
    assert tokenizer.encode(text) == ids, text
    assert tokenizer.decode(ids) == backend.decode(ids)
  sizes = tokenizer.token_bytes()
  ids = tokenizer.encode(NASTY[3])
  assert sizes[ids].sum() == len(NASTY[3].encode())


def test_llama3_skips_merges_for_whole_word_tokens(tmp_path):
  tokens = ["a", "b", "c", "ab", "bc", "abc"]
  kinds = [TokenType.NORMAL] * len(tokens)
  results = {}
  for name in ("llama-bpe", "gpt-2"):
    path = write(
      tmp_path, tokens, kinds, model="gpt2", pre=name, merges=["a b", "b c"],
      add_bos_token=False,
    )  # fmt: skip
    results[name] = gguf_tokenizer.load(str(path)).encode("abc")
  assert results == {"llama-bpe": [5], "gpt-2": [3, 2]}


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe"])
def test_bos_and_eos_follow_file_settings(name, tmp_path):
  backend = trained(name)
  tokens, kinds, merges = parts(backend)
  bos, eos = map(tokens.index, SPECIAL)
  inner = backend.encode("the cat").ids
  for said, first, last in [
    ({}, [bos] * (name == "llama-bpe"), []),
    ({"add_bos_token": True, "add_eos_token": True}, [bos], [eos]),
    ({"add_bos_token": False}, [], []),
  ]:
    path = write(
      tmp_path, tokens, kinds, model="gpt2", pre=name, merges=merges,
      bos_token_id=bos, eos_token_id=eos, **said,
    )  # fmt: skip
    tokenizer = gguf_tokenizer.load(str(path))
    assert tokenizer.encode("the cat") == [*first, *inner, *last]
    assert tokenizer.encode_text("the cat") == inner


# ------------------------------------------------------------- sentencepiece


def sentencepiece(folder, **values):
  """A small vocabulary of sentencepiece's, with bytes; best scores first."""
  text = " ".join(CORPUS[-1:] * 3)
  pieces = {"▁": 0, "▁▁": 0, "▁▁▁▁": 0}
  for size in range(1, 6):
    for start in range(len(text) - size + 1):
      piece = text[start : start + size].replace(" ", "▁")
      if "▁" not in piece[1:]:
        pieces[piece] = pieces.get(piece, 0) + size
  # A third of the longer ones is missing, so that it matters what is joined.
  chance = np.random.default_rng(0)
  pieces = {
    piece: count
    for piece, count in pieces.items()
    if len(piece) == 1 or "▁▁" in piece or chance.random() < 2 / 3
  }
  words = sorted(pieces, key=lambda p: (len(p) > 1, -pieces[p], p))
  tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
  kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2]
  kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(words)
  scores = [0.0] * len(tokens) + [-float(i) for i in range(len(words))]
  defaults = dict(
    model="llama", scores=scores, bos_token_id=1, eos_token_id=2,
    unknown_token_id=0,
  )  # fmt: skip
  return write(folder, [*tokens, *words], kinds, **(defaults | values))


PLAIN = [text for text in NASTY if text and not text[0].isspace()]


def test_sentencepiece_ids_match_transformers(tmp_path):
  path = sentencepiece(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  tokenizer = gguf_tokenizer.load(str(path))
  assert tokenizer.bos_token == "<s>"
  assert tokenizer.eos_token_id == 2
  merged = 0
  for text in [*PLAIN, "the  cats sat  on\nmats </s> year", *CORPUS[-1:]]:
    if "</s>" not in text:
      ids = tokenizer.encode(text)
      assert ids == theirs(text).input_ids, text
      assert tokenizer.decode(ids) == text.replace("<s>", "")
      merged += sum(i > 300 for i in ids)
  assert merged > 10


def test_text_never_encodes_to_a_control_token(tmp_path):
  path = write(
    tmp_path, ["<unk>", "<s>", "</s>", "▁", "<s", ">", "<", "s", "<s>s"],
    [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.NORMAL] * 6],
    model="llama", scores=[0.0] * 3 + [-1.0] * 6, bos_token_id=1,
    eos_token_id=2, unknown_token_id=0, add_space_prefix=False,
  )  # fmt: skip
  tokenizer = gguf_tokenizer.load(str(path))
  ids = tokenizer.encode_text("<s>")
  assert tokenizer.decode(ids) == "<s>"
  assert 1 not in ids


def test_leading_spaces_survive_the_added_prefix_space(tmp_path):
  tokenizer = gguf_tokenizer.load(str(sentencepiece(tmp_path)))
  vocab = tokenizer.vocabulary()
  assert tokenizer.encode(" ") == [1, vocab["▁▁"]]
  assert tokenizer.encode("   ") == [1, vocab["▁▁▁▁"]]
  assert tokenizer.decode(tokenizer.encode("  the cat")) == "  the cat"
  prompt, more = tokenizer.encode("the cat"), tokenizer.encode("sat  on")
  assert tokenizer.decode(more, after=prompt) == " sat  on"
  assert tokenizer.decode(more, after=prompt[:1]) == "sat  on"
  bare = gguf_tokenizer.load(
    str(sentencepiece(tmp_path, add_space_prefix=False))
  )
  assert bare.encode(" ") == [1, vocab["▁"]]
  assert bare.decode(bare.encode("  the cat")) == "  the cat"


def test_gemma4_merges_spaces_and_falls_back_to_bytes(tmp_path):
  """As Gemma's `tokenizer.json` has it: spaces are written, words never cut."""
  space = normalizers.Replace(" ", "▁")
  learner = hf.Tokenizer(hf.models.BPE())
  learner.normalizer = space
  known = [text for text in CORPUS if text.isascii() and "<|" not in text]
  learner.train_from_iterator(
    known, hf.trainers.BpeTrainer(vocab_size=300, show_progress=False)
  )
  merges = json.loads(learner.to_str())["model"]["merges"]
  pieces = learner.get_vocab()
  special = ["<pad>", "<eos>", "<bos>", "<unk>"]
  tokens = [*special, *(f"<0x{i:02X}>" for i in range(256))]
  tokens += sorted(pieces, key=pieces.get)
  backend = hf.Tokenizer(
    hf.models.BPE(
      {token: i for i, token in enumerate(tokens)},
      [tuple(merge) for merge in merges],
      unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )
  )  # fmt: skip
  backend.normalizer = space
  backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
  kinds = [*[TokenType.CONTROL] * 3, TokenType.UNKNOWN]
  kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(pieces)
  path = write(
    tmp_path, tokens, kinds, model="gemma4", bos_token_id=2, eos_token_id=1,
    unknown_token_id=3, add_bos_token=True, add_space_prefix=False,
    merges=[" ".join(merge) for merge in merges],
  )  # fmt: skip
  tokenizer = gguf_tokenizer.load(str(path))
  merged = 0
  for text in [*NASTY, CORPUS[-1]]:
    if "<|" in text:
      continue
    ids = tokenizer.encode(text)
    assert ids == [2, *backend.encode(text).ids], text
    assert tokenizer.decode(ids) == text
    merged += sum(len(tokens[i]) > 1 for i in ids if i >= 260)
  assert merged > 10


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    ({"model": "bert"}, "model must be gpt2, llama or gemma4, got 'bert'"),
    ({"pre": "deepseek-llm"}, "pre must be one of .*, got 'deepseek-llm'"),
    ({"merges": ["a z"]}, "z"),
    ({"eos_token_id": 9}, "out of range"),
  ],
)
def test_unsupported_tokenizers_are_rejected_in_one_line(
  tmp_path, values, expected
):
  defaults = dict(model="gpt2", pre="gpt-2", merges=["a b"])
  path = write(tmp_path, ["a", "b", "ab"], [1, 1, 1], **(defaults | values))
  with pytest.raises(ValueError, match=f"{path}: .*{expected}.*\\Z"):
    gguf_tokenizer.load(str(path))
