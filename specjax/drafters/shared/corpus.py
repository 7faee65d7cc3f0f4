"""A suffix array over texts that all rows share, searched inside the loop.

As in REST (He et al., NAACL 2024), the positions of a corpus are sorted by the
tokens that follow, so occurrences of the same tokens are neighbors, found by
bisection.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.shared.occurrences import Occurrences
from specjax.structs import struct

BREAK = -1  # separates texts


@struct
class Corpus:
  """Texts and their suffix array.

  Attributes:
    tokens: `i32[n]`, the texts concatenated, `BREAK` after each.
    places: `i32[n]`, positions sorted by the tokens from there on.
  """

  tokens: Array | np.ndarray
  places: Array | np.ndarray


def build(texts: list[list[int]]) -> Corpus:
  """Indexes texts of token ids; arrays are NumPy.

  Raises:
    ValueError: for no tokens, too many for 32 bits, or negative ids.
  """
  parts = [np.array([*text, BREAK], np.int64) for text in texts if text]
  if not parts:
    raise ValueError("a corpus needs at least one token")
  tokens = np.concatenate(parts)
  if len(tokens) >= 2**31:
    raise ValueError(f"a corpus is at most 2^31 - 1 tokens, got {len(tokens)}")
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
  """Occurrences in the corpus of the longest suffix of each text.

  If there are more than K, K evenly spaced ones in the suffix array are taken.
  It is sorted by continuation, so each continuation gets its share.

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
  """Ranges of the suffix array that begin with given tokens `i32[m, W]`.

  Only the first `lengths` tokens count. Returns `i32[m]` twice: each range's
  first entry and the one after its last.
  """
  size, width = len(corpus.places), wanted.shape[1]
  counted = np.arange(width) < lengths[:, None]

  def compare(at):
    """Whether a position sorts before the wanted tokens, and whether after."""
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
