"""Tokenizers of people's folders, beside what transformers makes of them."""

import functools
import json

import fallback
import files
import numpy as np
import pytest
import tokenizers as hf
import transformers

from models import chat, tokenizers

END = "<|endoftext|>"
TEXT = "def größe(x, y): # it's 1234 things\n\n    return  '🙂'\n"
SAMPLES = (
  TEXT, " " + TEXT, f"a{END}b", "<s> x </s>", "<|im_start|>x <|im_end|>",
  "x <tool> y",
)  # fmt: skip
# A template that begins with what begins a text.
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@functools.cache
def trained():
  """A byte-level BPE that knows some words of TEXT, and END as its last."""
  backend = hf.ByteLevelBPETokenizer()
  backend.train_from_iterator(
    [TEXT] * 8, vocab_size=300, special_tokens=[], show_progress=False
  )
  return backend._tokenizer


def size():
  return trained().get_vocab_size()


def assert_the_same(folder):
  """Ids, text, ends and rendered conversations are transformers'."""
  ours = tokenizers.load(str(folder))
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  for text in SAMPLES:
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
  assert ours.vocabulary() == theirs.get_vocab()
  assert ours.eos_token_id == theirs.eos_token_id
  assert ours.bos_token == theirs.bos_token
  talk = [{"role": "user", "content": "word"}]
  if theirs.bos_token is not None:
    rendered = theirs.apply_chat_template(
      talk, chat_template=TEMPLATE, tokenize=False
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chatty = tokenizers.load(str(folder))
    assert chat.render(chatty, talk) == rendered == f"{ours.bos_token}word"
  return ours


IM = ["<|im_start|>", "<|im_end|>"]


def listed(*tokens, start=None, **more):
  """Entries of added_tokens_decoder for tokens behind the vocabulary."""
  start = size() if start is None else start
  return {
    str(start + place): {"content": token, "special": True} | more
    for place, token in enumerate(tokens)
  }


@pytest.fixture
def whole(tmp_path):
  """Makes a folder with a tokenizer.json."""

  def made(change=lambda backend: None, words=(), **files):
    content = json.loads(trained().to_str())
    for word in words:
      content["model"]["vocab"][word] = len(content["model"]["vocab"])
    backend = hf.Tokenizer.from_str(json.dumps(content))
    change(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    files.setdefault(
      "tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    for name, content in files.items():
      (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path

  return made


def test_saved_truncation_and_padding_are_ignored(whole):
  def used(backend):
    backend.add_special_tokens([END])
    backend.enable_truncation(8)
    backend.enable_padding(length=100, pad_token=END, pad_id=size())

  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
  ours = assert_the_same(whole(used, tokenizer_config=config))
  assert 8 < len(ours.encode(TEXT)) < 100
  assert ours.encode_text(TEXT) == ours.encode(TEXT)
  assert ours.backend.truncation is ours.backend.padding is None


@pytest.mark.parametrize("lists", [True, False])
def test_special_tokens_map_is_read_unless_config_lists_tokens(whole, lists):
  """Unless the config lists the added tokens itself: then it says it all."""
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
    "eos_token": "</s>",
  }  # fmt: skip
  if lists:
    config["added_tokens_decoder"] = listed("<s>", "</s>", *IM)
  ours = assert_the_same(
    whole(
      lambda backend: backend.add_special_tokens(["<s>", "</s>", *IM]),
      tokenizer_config=config,
      special_tokens_map={
        "bos_token": {"content": IM[0], "lstrip": False},
        "eos_token": IM[1],
      },
    )
  )
  assert (ours.bos_token, ours.eos_token) == (
    ("<s>", "</s>") if lists else tuple(IM)
  )


STRIPS = {"special": True, "lstrip": True, "rstrip": True}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
  "config",
  [
    {"eos_token": {"content": "<tool>", "__type": "AddedToken", **STRIPS}},
    {"added_tokens_decoder": listed("<tool>", **STRIPS)},
    {"added_tokens_decoder": listed("<tool>", **STRIPS | {"special": False})},
  ],
)
def test_added_token_flags_match_transformers(whole, config, special):
  token = hf.AddedToken("<tool>", special=special)
  folder = whole(
    lambda backend: backend.add_tokens([token]),
    tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config},
  )
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  # As they print, with how they are looked for.
  assert repr(
    assert_the_same(folder).backend.get_added_tokens_decoder()
  ) == repr(theirs.backend_tokenizer.get_added_tokens_decoder())


def test_unreadable_tokenizers_are_rejected_in_one_line(whole, tmp_path):
  with pytest.raises(FileNotFoundError, match="no tokenizer in"):
    tokenizers.load(str(tmp_path))
  folder = whole(tokenizer_config={"eos_token": 7})
  with pytest.raises(ValueError, match=f"cannot read .*{folder}: .*\\Z"):
    tokenizers.load(str(folder))


@pytest.mark.parametrize(
  ("make", "drops"),
  [
    (fallback.tokenizer, True),
    (fallback.metaspace, True),
    (lambda: tokenizers.load(files.EMBEDDED), False),
  ],
)
def test_decoded_continuations_concatenate_to_the_full_text(make, drops):
  """Wherever it is cut between characters; special tokens say nothing."""
  rng, tokenizer, dropped = np.random.default_rng(0), make(), 0
  words = [
    number
    for number in range(tokenizer.vocab_size)
    if "\ufffd" not in tokenizer.decode([number, number])
  ]
  for _ in range(300):
    ids = rng.choice(words, 6)
    cut = rng.integers(7)
    text = tokenizer.decode(ids[cut:], after=ids[:cut])
    assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)
    dropped += text != tokenizer.decode(ids[cut:])
  assert (dropped > 10) == drops
