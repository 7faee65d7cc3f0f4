"""An index of texts that all rows share: a suffix array, read in the loop.

REST (He et al., NAACL 2024). Every place of a corpus, sorted by what stands
from there on: places where the same tokens stand are neighbors, found by
bisection.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.shared.occurrences import Occurrences
from specjax.structs import struct

BREAK = -1  # stands between texts, and is no token


@struct
class Corpus:
  """Texts, and their places in order.

  Attributes:
    tokens: `i32[n]`, one text behind the other, `BREAK` after each.
    places: `i32[n]`, sorted by the tokens from there on.
  """

  tokens: Array | np.ndarray
  places: Array | np.ndarray


def build(texts: list[list[int]]) -> Corpus:
  """The index of texts of tokens, as NumPy arrays.

  Raises:
    ValueError: if there is no token, or more than 32 bits can number.
  """
  parts = [np.array([*text, BREAK], np.int64) for text in texts if text]
  if not parts:
    raise ValueError("a corpus needs a text with a token at least")
  tokens = np.concatenate(parts)
  if len(tokens) >= 2**31:
    raise ValueError(f"a corpus holds 2^31 - 1 tokens, got {len(tokens)}")
  if min(map(min, filter(len, texts))) < 0:
    raise ValueError("tokens of a corpus must not be negative")
  return Corpus(tokens=tokens.astype(np.int32), places=_sorted_places(tokens))


def _sorted_places(tokens: np.ndarray) -> np.ndarray:
  """The suffix array, by prefix doubling (Manber and Myers)."""
  count = len(tokens)
  _, rank = np.unique(tokens, return_inverse=True)
  width = 1  # tokens by which `rank` orders
  while True:
    behind = np.zeros(count, np.int64)  # nothing comes before anything
    behind[: count - width] = rank[width:] + 1
    key = rank * (count + 1) + behind
    places = np.argsort(key, kind="stable")
    step = np.diff(key[places]) > 0
    rank = np.empty(count, np.int64)
    rank[places] = np.concatenate([[0], np.cumsum(step)])
    width *= 2
    if step.all() or width >= count:
      return places.astype(np.int32)


def in_corpus(
  corpus: Corpus,
  tokens: Array,
  length: Array,
  *,
  count: int,
  depth: int,
  max_match: int,
) -> Occurrences:
  """Occurrences of the longest end of each text that the corpus has.

  Of more than K they are K evenly spaced ones in the order of the array, which
  is that of their continuations: each is had in its share.

  The other arguments are those of `occurrences.in_text`.
  """
  lengths = np.arange(1, max_match + 1)
  back = np.arange(max_match)

  def of_row(tokens, length):
    start = length - lengths[:, None]
    wanted = tokens[jnp.clip(start + back, 0, len(tokens) - 1)]  # [m, m]
    low, high = _ranges(corpus, wanted, lengths)
    is_match = (high > low) & (lengths <= length)
    best = max_match - 1 - jnp.argmax(is_match[::-1])
    match = jnp.where(is_match.any(), best + 1, 0)
    total = jnp.where(match > 0, high[best] - low[best], 0)
    each = np.arange(count)
    spaced = each * (total // count) + each * (total % count) // count
    at = low[best] + jnp.where(total > count, spaced, each)
    at = jnp.minimum(at, len(corpus.places) - 1)
    ahead = corpus.places[at][:, None] + match + np.arange(depth)
    inside = ahead < len(corpus.tokens)
    text = corpus.tokens[jnp.minimum(ahead, len(corpus.tokens) - 1)]
    present = inside & (text != BREAK) & (each < total)[:, None]
    present = jnp.cumsum(~present, axis=1) == 0
    matches = jnp.where(each < total, match, 0)
    return jnp.where(present, text, 0), present, matches

  followers, present, match = jax.vmap(of_row)(tokens, length)
  return Occurrences(
    tokens=followers.astype(jnp.int32),
    present=present,
    match=match.astype(jnp.int32),
  )


def _ranges(
  corpus: Corpus, wanted: Array, lengths: np.ndarray
) -> tuple[Array, Array]:
  """Ranges of the sorted places that begin with given tokens `i32[m, W]`.

  Of these the first `lengths` count. Returns `i32[m]` twice: the first place,
  and the first behind the range.
  """
  size, width = len(corpus.places), wanted.shape[1]
  counted = np.arange(width) < lengths[:, None]

  def compare(at):
    """True if the place comes before the wanted tokens, and if behind."""
    place = corpus.places[jnp.minimum(at, size - 1)][:, None] + np.arange(width)
    text = corpus.tokens[jnp.minimum(place, size - 1)]
    text = jnp.where(place < size, text, BREAK)
    differs = (text != wanted) & counted
    where = jnp.argmax(differs, axis=1)[:, None]
    take = lambda x: jnp.take_along_axis(x, where, axis=1)[:, 0]
    some = differs.any(axis=1)
    return (
      some & (take(text) < take(wanted)),
      some & (take(text) > take(wanted)),
    )

  def halve(_, bounds):
    (low, low_end), (high, high_end) = bounds
    middle = low + (low_end - low) // 2
    after = high + (high_end - high) // 2
    before, _ = compare(middle)
    _, behind = compare(after)
    before &= low < low_end
    not_behind = ~behind & (high < high_end)
    return (
      (jnp.where(before, middle + 1, low), jnp.where(before, low_end, middle)),
      (
        jnp.where(not_behind, after + 1, high),
        jnp.where(not_behind, high_end, after),
      ),
    )

  zero = jnp.zeros(len(lengths), jnp.int32)
  ends = jnp.full(len(lengths), size, jnp.int32)
  (low, _), (high, _) = jax.lax.fori_loop(
    0, size.bit_length(), halve, ((zero, ends), (zero, ends))
  )
  return low, high
