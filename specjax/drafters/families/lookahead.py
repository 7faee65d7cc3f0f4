"""Lookahead decoding: n-grams from the target's own Jacobi iterations.

Fu et al. (ICML 2024). Every round also feeds a window of W columns and N - 1
levels: level 0 guesses the text to come, and the target's likeliest token after
each column becomes the column's next level (Jacobi iteration: a column's tokens
settle as rounds pass). So each round completes W sequences of N tokens, which
go into a pool. Up to G that begin with the newest token are drafted:
deterministic tokens, merged where they share a prefix, which `match` (or
another rule for deterministic trees) verifies losslessly at any temperature.

The window's cells are lanes: scored, but never verified. With the newest token
in front of level 0, cell (l, i) is l + i positions after it, and sees level 0
up to column i and its own column: a tree.

    level 0   root - a1 - a2          W = 3, N = 4
               |      |    |
    level 1   b0     b1   b2
               |      |    |
    level 2   c0     c1   c2          new: what follows c0, c1, c2

Differences from the authors' code: all levels are full from the first round,
with evenly spaced sequences of the prompt; a round may emit N tokens, not
N - 1; guesses are merged into a tree; the pool drops the oldest sequences, over
all first tokens together.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax.drafters.shared import tries
from specjax.drafters.shared.arguments import TOKENS
from specjax.siblings import GIVEN
from specjax.structs import struct
from specjax.tree import Tree, bound
from specjax.types import Commit, Draft, Drafter

_CHUNK = 32  # sequences of a prompt inserted together


@struct
class _Pool:
  """The newest P sequences, `i32[B, P, N]`, and their times; 0 is empty."""

  grams: Array
  stamps: Array
  clock: Array


@struct
class _State:
  """State of lookahead, rows first.

  Attributes:
    window: `i32[B, N - 1, W]`; entry (0, 0) stands for the newest token.
    pool: the sequences.
    tail: `i32[B, N - 1]`, the newest tokens that the target was fed, -1 before
      the first.
  """

  window: Array
  pool: _Pool
  tail: Array


def _form(window: int, ngram: int, num_guesses: int) -> Tree:
  """The draft's tree for W, N and G, with the window as lanes."""
  if min(window, num_guesses, ngram - 1) < 1:
    raise ValueError(
      "lookahead needs window, num_guesses and tokens >= 1, got "
      f"{window}, {num_guesses} and {ngram - 1}"
    )
  depth = ngram - 1
  tree = bound(num_guesses * depth, depth, num_guesses)
  cells = _cells(window, ngram)
  above = {int(cells[0, i]): int(cells[0, i - 1]) for i in range(1, window)}
  above |= {
    int(cells[level, i]): int(cells[level - 1, i])
    for level in range(1, depth)
    for i in range(window)
  }
  place = lambda cell: cell and tree.num_drafted + cell
  lanes = tuple(place(above[cell]) for cell in sorted(above))
  return Tree(tree.parents, form=tree.form, lanes=lanes)


def _cells(window: int, ngram: int) -> np.ndarray:
  """`int[N - 1, W]`: 0 for the newest token, e + 1 for lane e."""
  return np.arange((ngram - 1) * window).reshape(ngram - 1, window)


def lookahead(
  *,
  tokens: int = TOKENS,
  window: int = 7,
  num_guesses: int = 7,
  vocab_size: int | None = None,
  pool_size: int = 1024,
  from_text: bool = True,
) -> Drafter:
  """N-grams from the target's Jacobi trajectories (Fu et al., ICML 2024).

  Args:
    tokens: N - 1, drafted tokens per sequence.
    window: W, the number of columns.
    num_guesses: G, the most sequences to draft.
    vocab_size: V, the number of real tokens; by default all of the target's.
    pool_size: P, the number of sequences in a row's pool.
    from_text: whether sequences of the prompt and of emitted tokens enter the
      pool too.

  Raises:
    ValueError: if a size is too small.
  """
  ngram = tokens + 1
  tree = _form(window, ngram, num_guesses)
  least = max(num_guesses, window + ngram, _CHUNK)
  if pool_size < least:
    raise ValueError(f"pool_size must be at least {least}, got {pool_size}")
  cells = _cells(window, ngram)
  # The fed tokens whose logits predict what follows the last level.
  last = np.where(cells[-1] > 0, tree.num_drafted + cells[-1], 0)
  nothing = np.array(tree.lanes, np.int32)

  def init(params, batch, slots, inputs) -> _State:
    del params, slots, inputs
    return _State(
      window=jnp.zeros((batch, ngram - 1, window), jnp.int32),
      pool=_Pool(
        grams=jnp.zeros((batch, pool_size, ngram), jnp.int32),
        stamps=jnp.zeros((batch, pool_size), jnp.int32),
        clock=jnp.zeros((batch,), jnp.int32),
      ),
      tail=jnp.full((batch, ngram - 1), -1, jnp.int32),
    )

  def propose(params, state: _State, target_cache, context):
    del params
    rows, root = len(context.length), context.root
    pool = state.pool
    fits = jnp.where(pool.grams[..., 0] == root, pool.stamps, 0)
    newest, at = lax.top_k(fits, num_guesses)
    guesses = jnp.take_along_axis(pool.grams, at[..., None], axis=1)[..., 1:]
    present = jnp.broadcast_to((newest > 0)[..., None], guesses.shape)
    guessed, parents = tries.merge(guesses, present)
    ahead = state.window.reshape(rows, -1)[:, 1:]
    draft = Draft(
      tree=tree,
      siblings=GIVEN,
      tokens=jnp.concatenate([root, guessed, ahead], axis=1),
      log_probs=None,
      parents=jnp.concatenate(
        [
          jnp.full_like(root, -1),
          parents,
          jnp.broadcast_to(nothing, ahead.shape),
        ],
        axis=1,
      ),
    )
    return draft, state, target_cache

  def prefill(params, state: _State, commit: Commit) -> _State:
    del params
    known = commit.length - commit.start  # tokens of `commit.tokens`
    spread = np.arange(window) * known[:, None] // window
    ahead = spread[:, None] + np.arange(ngram - 1)[:, None]
    first = jax.vmap(lambda text, at: text[at])(
      commit.tokens, ahead % known[:, None, None]
    )
    is_new = state.tail[:, -1] < 0
    first = jnp.where(is_new[:, None, None], first, state.window)
    state = dataclasses.replace(state, window=first)
    return read(state, commit.tokens, commit.num_refed, commit.count)

  def commit(params, state: _State, commit: Commit) -> _State:
    del params
    logits = commit.target_output.logits[:, last, :vocab_size]
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    new = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [B, W]
    columns = state.window.at[:, 0, 0].set(commit.tokens[:, 0])
    columns = jnp.concatenate([columns, new[:, None]], axis=1)
    committed = commit.count > 0
    pool = _insert(
      state.pool,
      jnp.swapaxes(columns, 1, 2),
      jnp.broadcast_to(committed[:, None], new.shape),
    )
    ahead = jnp.where(committed[:, None, None], columns[:, 1:], state.window)
    state = dataclasses.replace(state, window=ahead, pool=pool)
    text = jnp.take_along_axis(commit.tokens, commit.path, axis=1)
    return read(state, text, jnp.zeros_like(commit.count), commit.count)

  def read(state: _State, text, num_refed, count) -> _State:
    """Adds tokens `num_refed .. count - 1` of `i32[B, T]`."""
    most = text.shape[1]
    whole = jnp.concatenate(
      [state.tail, jax.vmap(jnp.roll)(text, -num_refed)], axis=1
    )
    new = jnp.maximum(count - num_refed, 0)
    window_of = lambda row, at: lax.dynamic_slice_in_dim(row, at, ngram - 1)
    tail = jax.vmap(window_of)(whole, new)
    pool = state.pool
    if from_text:
      each = np.arange(most)[:, None] + np.arange(ngram)
      grams = whole[:, each]  # [B, T, N], by their last token
      kept = (jnp.arange(most) < new[:, None]) & (grams[..., 0] >= 0)
      pool = _insert_many(pool, grams, kept)
    return dataclasses.replace(state, pool=pool, tail=tail)

  return Drafter(
    name="lookahead",
    tree=tree,
    siblings=GIVEN,
    init=init,
    prefill=prefill,
    propose=propose,
    commit=commit,
    row_axes=lambda state: jax.tree.map(lambda x: 0, state),
  )


def _insert_many(pool: _Pool, grams: Array, kept: Array) -> _Pool:
  """`_insert` for any number of sequences, a few at a time."""
  rows, count, size = grams.shape
  if count <= _CHUNK:
    return _insert(pool, grams, kept)
  missing = -count % _CHUNK
  grams = jnp.pad(grams, ((0, 0), (0, missing), (0, 0)))
  kept = jnp.pad(kept, ((0, 0), (0, missing)))
  chunks = (
    jnp.moveaxis(grams.reshape(rows, -1, _CHUNK, size), 1, 0),
    jnp.moveaxis(kept.reshape(rows, -1, _CHUNK), 1, 0),
  )
  return lax.scan(lambda p, x: (_insert(p, *x), None), pool, chunks)[0]


def _insert(pool: _Pool, grams: Array, kept: Array) -> _Pool:
  """Puts sequences `i32[B, J, N]` into the pool, replacing the oldest.

  Only those in `kept`, `bool[B, J]`, are inserted; one that is already in the
  pool becomes the newest. J is at most P.
  """
  count = grams.shape[1]

  def of_row(old, stamps, clock, new, kept):
    same = (old[:, None] == new).all(axis=-1) & kept  # [P, J]
    stamps = jnp.where(same.any(axis=1), 0, stamps)
    twice = (new[:, None] == new).all(axis=-1) & kept  # [J, J]
    later = np.triu(np.ones((count, count), bool), k=1)
    kept = kept & ~(twice & later).any(axis=1)
    _, oldest = lax.top_k(-stamps, count)
    place = oldest[jnp.maximum(jnp.cumsum(kept) - 1, 0)]
    place = jnp.where(kept, place, len(stamps))  # nowhere
    when = clock + 1 + np.arange(count)
    return (
      old.at[place].set(new, mode="drop"),
      stamps.at[place].set(when.astype(jnp.int32), mode="drop"),
      clock + count,
    )

  old, stamps, clock = jax.vmap(of_row)(
    pool.grams, pool.stamps, pool.clock, grams, kept
  )
  return _Pool(grams=old, stamps=stamps, clock=clock)
