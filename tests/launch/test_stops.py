"""Stop strings: where a text ends, also across tokens."""

import types

import pytest
import tokenizers as hf

from launch import stops
from launch.prompts import Prompt
from models import tokenizers

TEXT = "a = 1\n\ndef f(größe):\n  return '🙂'  # end\nEND"


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizers.load("models/pretrained/target")


def cut(tokenizer, stop, *, piece=3):
  """What is left of TEXT, and how many tokens stand, given in pieces."""
  ids = tokenizer.encode(TEXT)
  look = stops.watch(tokenizer, stop)
  for start in range(0, len(ids), piece):
    stand = look(ids[start : start + piece])
    if stand is not None:
      row = {"token_ids": ids[: start + stand], "stop_reason": "stop_string"}
      prompt = Prompt(0, 0, "", (1,), stop=tuple(stop))
      return stops.text_of(prompt, row, tokenizer), start + stand
  return None


@pytest.mark.parametrize("piece", [1, 2, 5, 100])
@pytest.mark.parametrize(
  "stop", [["\n\n"], ["f(gr"], ["öß"], ["🙂"], ["return", "def"], ["1\n\nd"]]
)
def test_a_text_ends_before_the_first_stop_string(tokenizer, stop, piece):
  text, count = cut(tokenizer, stop, piece=piece)
  assert text == TEXT[: min(TEXT.index(x) for x in stop)]
  ids = tokenizer.encode(TEXT)
  whole = [any(x in tokenizer.decode(ids[:n]) for x in stop)
           for n in (count - 1, count)]  # fmt: skip
  assert whole == [False, True]  # it ends with the token that completes it


def test_of_two_that_one_token_completes_the_one_that_begins_first_counts(
  tokenizer,
):
  assert cut(tokenizer, ["eturn", "  return"])[0] == TEXT[: TEXT.index("  ret")]


def test_what_does_not_occur_ends_nothing(tokenizer):
  assert cut(tokenizer, ["def g", "ENDE"]) is None
  assert stops.watch(tokenizer, ()) is None


def test_bytes_that_undo_a_character_end_nothing_and_raise_nothing():
  """Two bytes are one character, and a third makes all of them none."""
  vocab = {"<0xC3>": 0, "<0xA9>": 1, "<0xFF>": 2, "a": 3, "b": 4}
  backend = hf.Tokenizer(hf.models.BPE(vocab, [], byte_fallback=True))
  backend.decoder = hf.decoders.Sequence(
    [hf.decoders.ByteFallback(), hf.decoders.Fuse()]
  )
  odd = types.SimpleNamespace(backend=backend, decode=backend.decode)
  step = stops.stepper(odd)
  assert "".join(map(step, [0, 1])) == "é"
  step(2)
  assert "".join(map(step, [3, 4])).endswith("ab")
  assert stops.watch(odd, ["ab"])([0, 1, 2, 3, 4, 3]) == 5
