"""Stop strings: where a text ends, also across tokens."""

import fallback
import numpy as np
import pytest

from launch import stops
from launch.prompts import Prompt
from models import tokenizers

TEXT = "a = 1\n\ndef f(größe):\n  return '🙂'  # end\nEND"


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizers.load("models/pretrained/target")


def cut(tokenizer, stop, *, piece=3):
  """The rest of TEXT, and the number of tokens kept, given in pieces."""
  ids = tokenizer.encode(TEXT)
  look = stops.watch(tokenizer, stop)
  for start in range(0, len(ids), piece):
    kept = look(ids[start : start + piece])
    if kept is not None:
      row = {"token_ids": ids[: start + kept], "stop_reason": "stop_string"}
      prompt = Prompt(0, 0, "", (1,), stop=tuple(stop))
      return stops.text_of(prompt, row, tokenizer), start + kept
  return None


@pytest.mark.parametrize("piece", [1, 2, 5, 100])
@pytest.mark.parametrize(
  "stop", [["\n\n"], ["öß"], ["🙂"], ["return", "def"], ["1\n\nd"]]
)
def test_text_ends_before_the_first_stop_string(tokenizer, stop, piece):
  text, count = cut(tokenizer, stop, piece=piece)
  assert text == TEXT[: min(TEXT.index(x) for x in stop)]
  ids = tokenizer.encode(TEXT)
  whole = [any(x in tokenizer.decode(ids[:n]) for x in stop)
           for n in (count - 1, count)]  # fmt: skip
  assert whole == [False, True]  # it ends with the token that completes it


def test_stop_string_from_byte_tokens_ends_at_its_last_byte():
  """Though more bytes would have made another text of them."""
  tokenizer = fallback.tokenizer()
  ids = [*"aé日".encode(), 0xE6, 0xFF]
  for stop, count in (("é", 3), ("日", 6), ("é日", 6)):
    assert stops.watch(tokenizer, [stop])(ids) == count
    row = {"token_ids": ids[:count], "stop_reason": "stop_string"}
    prompt = Prompt(0, 0, "", (1,), stop=(stop,))
    text = "aé日"
    assert stops.text_of(prompt, row, tokenizer) == text[: text.index(stop)]
  assert stops.watch(tokenizer, ["\ufffd"])(ids) is None


def test_stop_string_across_word_and_byte_tokens_is_found():
  tokenizer = fallback.tokenizer()
  word = tokenizer.backend.token_to_id
  ids = [word("▁a"), word("ST"), word("<s>"), word("OP"), *"é".encode()]
  assert stops.watch(tokenizer, ["STOP"])(ids) == 4
  assert stops.watch(tokenizer, ["OPé"])(ids) == 6
  assert stops.watch(tokenizer, ["TOPS"])(ids) is None


@pytest.mark.parametrize("make", [fallback.tokenizer, fallback.metaspace])
def test_leading_space_is_kept_and_matched_by_stop_strings(make):
  """Such a decoder drops the space that a whole text begins with."""
  tokenizer = make()
  the, a, end = map(tokenizer.backend.token_to_id, ("▁the", "▁a", "</s>"))
  for prompt, text in (((a,), " the a a"), ((end,), "the a a")):
    ids, given = [the, a, a], stops.Detokenizer(tokenizer, prompt)
    assert "".join(map(given.add, ids)) + given.rest() == text
    row = {"token_ids": ids, "stop_reason": "length"}
    actual = stops.text_of(Prompt(0, 0, "", prompt), row, tokenizer)
    assert actual == text
  assert stops.watch(tokenizer, [" the"], [a])([the, a]) == 1
  row = {"token_ids": [the], "stop_reason": "stop_string"}
  prompt = Prompt(0, 0, "", (a,), stop=(" the",))
  assert stops.text_of(prompt, row, tokenizer) == ""


def in_pieces(ids, stop=(), *, sizes, tokenizer, before=(1,)):
  """Pieces that a reader gives out of a completion that its watch may end."""
  watch = stops.watch(tokenizer, stop, before)
  reader = stops.Reader(tokenizer, stop, before)
  pieces, at, cut, turn = [], 0, False, 0
  while at < len(ids) and not cut:
    new = ids[at : at + sizes[turn % len(sizes)]]
    stand = watch(new) if watch else None
    if stand is not None:
      new, cut = new[:stand], True
    pieces.append(reader.read(new))
    at, turn = at + len(new), turn + 1
  pieces.append(reader.finish(cut=cut))
  whole = stops.text_of(
    Prompt(0, 0, "", before, stop=tuple(stop)),
    {"token_ids": ids[:at], "stop_reason": "stop_string" if cut else "length"},
    tokenizer,
  )
  return pieces, whole


@pytest.mark.parametrize("seed", range(4))
def test_streamed_pieces_concatenate_to_the_full_text(seed):
  """Halves of characters too, and bytes that are of none."""
  rng = np.random.default_rng(seed)
  tokenizer = tokenizers.load("models/pretrained/target")
  text = "naïve 日本語 🙂🙃 Ünïcödé ещё раз"
  odd = tokenizer.encode(text)
  assert len(odd) > len(text)  # characters do lie across tokens
  for _ in range(20):
    noise = rng.integers(0, tokenizer.vocab_size, rng.integers(0, 6)).tolist()
    cut = rng.integers(0, len(odd))
    ids = [*odd[cut:], *noise, *odd[:cut], *noise[::-1]]
    pieces, whole = in_pieces(
      ids, sizes=rng.integers(1, 5, 4).tolist(), tokenizer=tokenizer
    )
    assert "".join(pieces) == whole == tokenizer.decode(ids)


@pytest.mark.parametrize("before", ["▁a", "</s>"])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_pieces_match_the_text_with_byte_fallback(seed, before):
  """Such a vocabulary has bytes for what it has no words for."""
  rng = np.random.default_rng(seed)
  tokenizer, cut = fallback.tokenizer(), 0
  before = (tokenizer.backend.token_to_id(before),)
  for _ in range(100):
    ids = fallback.noise(rng, count=12)
    stop = [["STOP"], ["é"], ["b", "日é"], []][rng.integers(4)]
    sizes = rng.integers(1, 5, 4).tolist()
    pieces, whole = in_pieces(
      ids, stop, sizes=sizes, tokenizer=tokenizer, before=before
    )
    assert "".join(pieces) == whole
    assert not any(text in whole for text in stop)
    cut += whole != tokenizer.decode(ids, after=before)
  assert cut > 10
