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
  TEXT, " " + TEXT, "word", "cafe\u0301", f"a{END}b", "<s> x </s>",
  "<|im_start|>x <|im_end|>", "x <tool> y", "<pad>",
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


@pytest.fixture
def folder(tmp_path):
  """Makes a folder without tokenizer.json: of files by their names."""

  def made(*, words=(), **files):
    model = json.loads(trained().to_str())["model"]
    for word in words:
      model["vocab"][word] = len(model["vocab"])
    merges = "".join(f"{' '.join(pair)}\n" for pair in model["merges"])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    for name, content in files.items():
      (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path

  return made


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


GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
IM = ["<|im_start|>", "<|im_end|>"]


def listed(*tokens, start=None, **more):
  """Entries of added_tokens_decoder for tokens behind the vocabulary."""
  start = size() if start is None else start
  return {
    str(start + place): {"content": token, "special": True} | more
    for place, token in enumerate(tokens)
  }


CASES = {
  "the class's own end, which is in the vocabulary": lambda: dict(
    words=[END], tokenizer_config=GPT2
  ),
  "the class's own end, which is not": lambda: dict(tokenizer_config=GPT2),
  "a space before texts": lambda: dict(
    words=[END], tokenizer_config={**GPT2, "add_prefix_space": True}
  ),
  "a list in the config": lambda: dict(
    tokenizer_config={
      **GPT2, "bos_token": None, "eos_token": "<|im_end|>",
      "added_tokens_decoder": {
        **listed(END, *IM, normalized=False),
        **listed("<tool>", start=size() + 3, special=False, normalized=True),
      },
      "additional_special_tokens": IM,
    },
  ),
  "white space that a token takes along": lambda: dict(
    tokenizer_config={
      **GPT2,
      "added_tokens_decoder": listed(END, "<tool>", lstrip=True, rstrip=True),
    },
  ),
  "a list in a file of its own": lambda: dict(
    words=[END],
    tokenizer_config={**GPT2, "additional_special_tokens": ["<|im_start|>"]},
    added_tokens={t: size() + 1 + i for i, t in enumerate([*IM, "<tool>"])},
  ),
  "a map of special tokens": lambda: dict(
    words=["<s>", "</s>", "<pad>"],
    tokenizer_config=GPT2,
    special_tokens_map={
      "bos_token": {"content": "<s>", "lstrip": False, "normalized": True},
      "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
    },
  ),
  "a map whose end takes white space along": lambda: dict(
    words=["<s>"],
    tokenizer_config=GPT2,
    special_tokens_map={
      "eos_token": {"content": "<tool>", "lstrip": True, "rstrip": True},
      "bos_token": {"content": "<s>", "rstrip": True},
    },
  ),
  "a map that the config's list stands above": lambda: dict(
    words=[END],
    tokenizer_config={
      **GPT2, "eos_token": END, "added_tokens_decoder": listed(END)
    },
    special_tokens_map={"eos_token": "!", "bos_token": "!"},
  ),
  "texts that begin and end": lambda: dict(
    words=["<s>", "</s>"],
    tokenizer_config={
      **GPT2, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>",
      "add_bos_token": True, "add_eos_token": True,
    },
  ),
  "a token with a name of the model's": lambda: dict(
    words=[END, "<tool>"], tokenizer_config={**GPT2, "tool_token": "<tool>"}
  ),
  "Qwen2's words": lambda: dict(
    words=[END, *IM],
    tokenizer_config={
      "tokenizer_class": "Qwen2TokenizerFast", "bos_token": None,
      "eos_token": "<|im_end|>", "pad_token": END,
      "additional_special_tokens": IM,
    },
  ),
  "a class that the model's type says": lambda: dict(
    words=[END], config={"model_type": "qwen2"}
  ),
  "CodeGen's": lambda: dict(
    words=[END], tokenizer_config={"tokenizer_class": "CodeGenTokenizer"}
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_vocabulary_with_merges_is_what_transformers_makes_of_it(
  folder, case
):
  assert_the_same(folder(**CASES[case]()))


def test_special_tokens_of_a_vocabulary_are_no_text(folder):
  made = tokenizers.load(str(folder(words=[END], tokenizer_config=GPT2)))
  assert made.encode(END) == [made.eos_token_id]
  assert made.decode([made.eos_token_id]) == ""
  assert END in made.special_tokens()
  assert made.eos_token_id not in made.encode_text(END)


@pytest.mark.parametrize(
  ("files", "words"),
  [
    ({"tokenizer_config": {"tokenizer_class": "RobertaTokenizer"}}, "Roberta"),
    ({"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}},
     "expected tokenizer.json"),
    ({"config": {"model_type": "llama"}}, "of class 'llama'"),
    ({"tokenizer_config": GPT2, "added_tokens": {"<tool>": 7000}},
     "said to have the id 7000"),
    ({"special_tokens_map": {"bos_token": 3}}, "bos_token in .* a string"),
    ({"special_tokens_map": []}, "special_tokens_map.json must hold"),
    ({"tokenizer_config": {"added_tokens_decoder": 3}}, "cannot read"),
    ({"added_tokens": {"a": "b"}}, "cannot read"),
  ],
)  # fmt: skip
def test_a_vocabulary_that_cannot_be_read_as_it_is_meant_is_refused(
  folder, files, words
):
  with pytest.raises(ValueError, match=words):
    tokenizers.load(str(folder(**files)))


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


@pytest.mark.parametrize("direction", ["left", "right"])
def test_a_text_is_neither_cut_nor_padded_as_it_was_once(whole, direction):
  def used(backend):
    backend.add_special_tokens([END])
    backend.enable_truncation(8, direction=direction)
    backend.enable_padding(
      length=100, direction=direction, pad_token=END, pad_id=size()
    )

  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
  ours = assert_the_same(whole(used, tokenizer_config=config))
  assert 8 < len(ours.encode(TEXT)) < 100
  assert ours.encode_text(TEXT) == ours.encode(TEXT)
  assert ours.backend.truncation is ours.backend.padding is None


@pytest.mark.parametrize("lists", [True, False])
def test_a_map_of_special_tokens_is_read_beside_a_tokenizer(whole, lists):
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
    {"additional_special_tokens": ["<tool>"]},
    {"eos_token": "<tool>"},
    {"eos_token": {"content": "<tool>", "__type": "AddedToken", **STRIPS}},
    {"tool_token": "<tool>"},
    {"added_tokens_decoder": listed("<tool>", **STRIPS)},
    {"eos_token": "<tool>", "added_tokens_decoder": listed("<tool>")},
    {"added_tokens_decoder": listed("<tool>", **STRIPS | {"special": False})},
  ],
)
def test_how_an_added_token_is_looked_for_is_what_its_list_says(
  whole, config, special
):
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


@pytest.mark.parametrize("special", [True, False])
def test_a_list_of_its_own_does_not_change_a_whole_tokenizer(whole, special):
  token = hf.AddedToken("<tool>", special=special, normalized=False)
  folder = whole(
    lambda backend: backend.add_tokens([token]),
    added_tokens={"<tool>": size()},
  )
  (actual,) = (
    assert_the_same(folder).backend.get_added_tokens_decoder().values()
  )
  assert (actual.special, actual.normalized) == (special, False)


def test_what_the_files_call_special_is_so_where_it_is_a_word(whole):
  ours = assert_the_same(
    whole(
      words=["<s>", "</s>"],
      special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"},
    )
  )
  assert ours.decode(ours.encode("<s>word</s>")) == "word"


@pytest.mark.parametrize(
  ("make", "drops"),
  [
    (fallback.tokenizer, True),
    (fallback.metaspace, True),
    (lambda: tokenizers.load(files.EMBEDDED), False),
  ],
)
def test_a_text_and_what_goes_on_with_it_are_the_text_of_both(make, drops):
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
