"""Text that streams: whole characters, and nothing of a stop string."""

import fallback
import numpy as np
import pytest
import served

from launch import stops
from launch.prompts import Prompt
from launch.serving.texts import Reader


def in_pieces(ids, stop=(), *, sizes=(1,), tokenizer=None, before=(1,)):
  """Pieces that a reader gives out of a completion that its watch may end."""
  tokenizer = tokenizer or served.tokenizer()
  watch = stops.watch(tokenizer, stop, before)
  reader = Reader(tokenizer, stop, before)
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
    {
      "token_ids": ids[:at],
      "stop_reason": "stop_string" if cut else "length",
    },
    tokenizer,
  )
  return pieces, whole


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_the_text_of_all_tokens(seed):
  """Halves of characters too, and bytes that are of none."""
  rng = np.random.default_rng(seed)
  tokenizer = served.tokenizer()
  text = "naïve 日本語 🙂🙃 Ünïcödé ещё раз"
  odd = tokenizer.encode(text)
  assert len(odd) > len(text)  # characters do lie across tokens
  for _ in range(20):
    noise = rng.integers(0, tokenizer.vocab_size, rng.integers(0, 6)).tolist()
    cut = rng.integers(0, len(odd))
    ids = [*odd[cut:], *noise, *odd[:cut], *noise[::-1]]
    pieces, whole = in_pieces(ids, sizes=rng.integers(1, 5, 4).tolist())
    assert "".join(pieces) == whole == tokenizer.decode(ids)


@pytest.mark.parametrize("before", ["▁a", "</s>"])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_the_text_where_bytes_undo_characters(seed, before):
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
