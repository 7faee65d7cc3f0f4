"""Earlier occurrences of a text's last tokens, and their continuations.

They are searched for in the row's own buffer each time: there is no table to
fill, evict from or clear.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.drafters.shared import tries
from specjax.structs import struct
from specjax.tree import Tree, bound


@struct
class Occurrences:
  """The continuations found: K per row, of D tokens each.

  Attributes:
    tokens: `i32[B, K, D]`.
    present: `bool[B, K, D]`; a prefix of each continuation.
    match: `i32[B, K]`, how many of the text's last tokens precede each, 0 if
      nothing was found; nonincreasing in k.
  """

  tokens: Array
  present: Array
  match: Array


def in_text(
  tokens: Array, length: Array, *, count: int, depth: int, max_match: int
) -> Occurrences:
  """The best occurrences in the text itself.

  Longer matches come first, then later ones. A continuation that reaches the
  text's end repeats periodically.

  Args:
    tokens: `i32[B, L]`, stale from `length` on.
    length: `i32[B]`, at least 1.
    count: K.
    depth: D.
    max_match: the longest match; longer ones count as this long.
  """

  def of_row(tokens, length):
    last = length - 1
    place = jnp.arange(len(tokens), dtype=jnp.int32)
    matched = jnp.zeros_like(place)  # tokens matched, ending at each place
    matches = place < last
    for back in range(max_match):
      earlier = jnp.roll(tokens, back)  # earlier[i] == tokens[i - back]
      wanted = tokens[jnp.maximum(last - back, 0)]
      matches &= (place >= back) & (last >= back) & (earlier == wanted)
      matched += matches
    ranked = jnp.where(matched > 0, matched * len(tokens) + place, 0)
    _, end = lax.top_k(ranked, min(count, len(tokens)))
    end = jnp.pad(end, (0, max(count - len(tokens), 0)), constant_values=last)
    match = jnp.where(end < last, matched[end], 0)
    period = jnp.maximum(last - end, 1)[:, None]
    ahead = end[:, None] + 1 + np.arange(depth) % period
    return tokens[jnp.clip(ahead, 0, last)], match

  followers, match = jax.vmap(of_row)(tokens, length)
  present = jnp.broadcast_to((match > 0)[..., None], followers.shape)
  return Occurrences(tokens=followers, present=present, match=match)


def select_prefixes(
  occurrences: Occurrences,
  same: Array,
  *,
  num_nodes: int,
  max_match: int,
  nodes_per_match: float,
  min_prob: float,
) -> Array:
  """Selects the likeliest prefixes of continuations, with their probabilities.

  For every match length m, the likeliest prefixes among occurrences that match
  at least m tokens are selected, as many as m allows. The m with the largest
  sum of probabilities wins; ties go to the longest. A prefix is never likelier
  than a prefix of its own, so the selection is a tree.

  Args:
    occurrences: the occurrences.
    same: `bool[B, K, K, D]`, from `tries.shared_prefixes`.
    num_nodes: M, the most prefixes to select.
    max_match: the longest m.
    nodes_per_match: at most this many times m prefixes are selected.
    min_prob: the least probability to select.

  Returns:
    `f32[B, K, D]`, 0 where a prefix is not selected or an earlier occurrence
    has it too.
  """
  rows, count, depth = occurrences.tokens.shape
  lengths = np.arange(1, max_match + 1)
  member = (occurrences.match[:, None] >= lengths[:, None]).astype(jnp.float32)
  total = jnp.maximum(member.sum(axis=-1), 1)  # [B, m]
  times = jnp.einsum("bmj,bkjd->bmkd", member, same.astype(jnp.float32))
  # Occurrences are sorted: the first with a given prefix has the best match.
  earlier = np.tri(count, k=-1, dtype=bool)[..., None]
  first = occurrences.present & ~(same & earlier).any(axis=2)
  mine = first[:, None] & (member > 0)[..., None]
  share = jnp.where(mine, times / total[..., None, None], 0)
  flat = jnp.swapaxes(share, -1, -2).reshape(rows, max_match, -1)
  best, at = lax.top_k(flat, min(num_nodes, count * depth))
  budget = np.floor(np.minimum(nodes_per_match * lengths, num_nodes))
  taken = (np.arange(best.shape[-1]) < budget[:, None]) & (
    best >= np.float32(min_prob)
  )
  best = jnp.where(taken, best, 0)
  score = best.sum(axis=-1)
  chosen = max_match - 1 - jnp.argmax(score[:, ::-1], axis=1)  # the longest
  pick = lambda x: jnp.take_along_axis(x, chosen[:, None, None], axis=1)[:, 0]
  value = jax.vmap(lambda at, best: jnp.zeros(depth * count).at[at].set(best))(
    pick(at), pick(best)
  )
  return jnp.swapaxes(value.reshape(rows, depth, count), 1, 2)


def merge(
  sources: list[Occurrences], *, num_nodes: int, **settings: Any
) -> tries.Trie:
  """Merges the occurrences of several sources into one tree and budget.

  A node's value is the largest that any source gives it, by `select_prefixes`.
  """
  shared = [tries.shared_prefixes(s.tokens, s.present) for s in sources]
  values = [
    select_prefixes(source, same, num_nodes=num_nodes, **settings)
    for source, same in zip(sources, shared, strict=True)
  ]
  join = lambda parts: jnp.concatenate(parts, axis=1)
  tokens = join([s.tokens for s in sources])
  same = shared[0]
  if len(sources) > 1:
    same = tries.shared_prefixes(tokens, join([s.present for s in sources]))
  return tries.best_trie(tokens, same, join(values), num_nodes)


def check(
  *,
  num_nodes: int,
  depth: int,
  max_match: int,
  max_hits: int,
  nodes_per_match: float,
  min_prob: float,
) -> None:
  """Raises ValueError for invalid settings of a retrieval drafter."""
  least = dict(depth=depth, max_match=max_match, max_hits=max_hits)
  for name, value in least.items():
    if value < 1:
      raise ValueError(f"{name} must be >= 1, got {value}")
  if num_nodes < depth:
    raise ValueError(
      f"num_nodes must be at least the depth of a draft ({depth}), got "
      f"{num_nodes}"
    )
  if nodes_per_match < 1:
    raise ValueError(f"nodes_per_match must be >= 1, got {nodes_per_match}")
  if not 0 <= min_prob <= 1:
    raise ValueError(f"min_prob must be in [0, 1], got {min_prob}")


def bounds(num_nodes: int, depth: int) -> Tree:
  """The bounds of `FREE` trees of N nodes and depth G.

  A node may have N - G + 1 children, so N should be well above G.
  """
  return bound(num_nodes, depth, num_nodes - depth + 1)
