"""Dynamic trees: the likeliest continuations, without drawing.

EAGLE-2's dynamic tree (Li et al., EMNLP 2024, section 4) scores the likeliest
continuations of a few nodes at each depth, and keeps the nodes with the largest
cumulative probability of all that it scored. For heads that predict all depths
at once, that is the best tree of their product distribution. No token is drawn,
so the shape may depend on tokens, and the rule that fits is `match`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.drafters.shared.arguments import Drawing
from specjax.siblings import GIVEN
from specjax.types import Context, Draft

# `(carry, depth, tokens i32[B, W], parents i32[B, W]) -> (f32[B, W, V'],
# carry)`: the logits after the expanded nodes of a depth. Parents are indices
# among the nodes of the call before, 0 for the root at first.
Feed = Callable[[Any, int, Array, Array], tuple[Array, Any]]


def draft_tree(
  root_logits: Array,
  feed: Feed,
  carry: Any,
  context: Context,
  drawing: Drawing,
  *,
  width: int,
) -> tuple[Draft, Any]:
  """Scores continuations depth by depth, and keeps the best of all.

  Args:
    root_logits: `f32[B, V']`, the logits after the root.
    feed: computes the logits after the expanded nodes.
    carry: the first carry of `feed`.
    context: the round's.
    drawing: its tree is `specjax.tree.bound(N, G, C)`: C continuations of each
      expanded node are scored, and the best N nodes kept.
    width: how many nodes to expand at each depth, those with the largest
      cumulative probability.

  Returns:
    The draft, with parents before children of equal probability, and the last
    carry. NaN logits give a token no mass.
  """
  tree, rows = drawing.tree, len(context.length)
  children = tree.max_children

  scores, words = (x[:, 0] for x in _likeliest(root_logits[:, None], drawing))
  parents = jnp.zeros(words.shape, jnp.int32)  # among the fed nodes
  every = [(words, jnp.full(words.shape, -1), scores)]
  first = 0  # of this depth's nodes, among all
  for depth in range(1, tree.max_depth):
    kept = jnp.broadcast_to(np.arange(words.shape[1]), words.shape)
    if words.shape[1] > width:
      _, kept = jax.lax.top_k(scores, width)
    take = lambda x: jnp.take_along_axis(x, kept, axis=1)  # noqa: B023
    logits, carry = feed(carry, depth, take(words), take(parents))
    more, next_words = _likeliest(logits, drawing)  # [B, W, C]
    above = jnp.repeat(first + kept, children, axis=1)
    first += words.shape[1]
    scores = (take(scores)[..., None] + more).reshape(rows, -1)
    words = next_words.reshape(rows, -1)
    parents = jnp.broadcast_to(
      np.arange(words.shape[1], dtype=np.int32) // children, words.shape
    )
    every.append((words, above, scores))
  tokens, above, scores = (
    jnp.concatenate(x, axis=1) for x in zip(*every, strict=True)
  )
  tokens, parents = _best(tokens, above, scores, tree.num_drafted)
  draft = Draft(
    tree=tree,
    siblings=GIVEN,
    tokens=jnp.concatenate([context.root, tokens], axis=1).astype(jnp.int32),
    log_probs=None,
    parents=jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1),
  )
  return draft, carry


def draft_families(logits: Array, context: Context, drawing: Drawing) -> Draft:
  """Expands the likeliest node by C children at once, until there are N nodes.

  JetSpec's tree (2026), for distributions that are the same at all nodes of a
  depth; its published budget counts the root, N does not. At equal N its nodes
  are less likely than those of `draft_tree`.

  Args:
    logits: `f32[B, K, V']`, for K depths.
    context, drawing: as in `draft_tree`.
  """
  tree, rows = drawing.tree, np.arange(len(context.length))
  more, words = _likeliest(logits, drawing)  # [B, K, C]
  count, size = tree.max_children, tree.num_nodes
  zeros = jnp.zeros((len(rows), size + count), jnp.int32)
  depths, tokens, parents = zeros, zeros.at[:, :1].set(context.root), zeros - 1
  scores = jnp.full(zeros.shape, -jnp.inf).at[:, 0].set(0)
  waits = zeros > -1
  for first in range(1, size, count):
    able = waits & (depths < tree.max_depth) & (np.arange(size + count) < first)
    floor = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
    node = jnp.argmax(jnp.where(able, floor, -jnp.inf), axis=1)
    waits = waits.at[rows, node].set(False)
    above, last = depths[rows, node], slice(first, first + count)
    depths = depths.at[:, last].set(above[:, None] + 1)
    tokens = tokens.at[:, last].set(words[rows, above])
    parents = parents.at[:, last].set(node[:, None].astype(jnp.int32))
    scores = scores.at[:, last].set(
      scores[rows, node][:, None] + more[rows, above]
    )
  parents = jnp.where(scores > -jnp.inf, parents, -1)
  return Draft(
    tree=tree, siblings=GIVEN, tokens=tokens[:, :size], log_probs=None,
    parents=parents[:, :size],
  )  # fmt: skip


def _likeliest(logits: Array, drawing: Drawing) -> tuple[Array, Array]:
  """The C largest log-probabilities, `[B, W, V'] -> [B, W, C]`, and tokens."""
  logits = logits[..., : drawing.vocab_size].astype(jnp.float32)
  log_probs = jax.nn.log_softmax(logits, axis=-1)
  log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
  return jax.lax.top_k(log_probs, drawing.tree.max_children)


def check(drawing: Drawing, *, width: int) -> None:
  """Raises ValueError if the search scores too few nodes for the tree."""
  tree, children = drawing.tree, drawing.tree.max_children
  if not 1 <= children <= drawing.vocab_size:
    raise ValueError(
      f"top_k must be in 1..{drawing.vocab_size}, got {children}"
    )
  level = scored = children
  for _ in range(tree.max_depth - 1):
    level = min(level, width) * children
    scored += level
  if tree.num_drafted > scored:
    raise ValueError(
      f"depth {tree.max_depth} and top_k {children} score {scored} nodes, "
      f"fewer than the {tree.num_drafted} to keep"
    )


def _best(
  tokens: Array, above: Array, scores: Array, count: int
) -> tuple[Array, Array]:
  """The best nodes by cumulative probability: tokens and parents `i32[B, N]`.

  Inputs are tokens, `above` (parents, -1 for the root) and cumulative
  log-probabilities of M nodes, by depth. Returned parents are indices of the
  draft's nodes, 0 for the root; -1 for nodes without mass, and those below.
  """
  # The sort is stable, so at equal scores shallower nodes come first: a parent,
  # whose score is never below its child's, is always kept with it.
  order = jnp.argsort(-scores, axis=1, stable=True)[:, :count]
  kept = jnp.sort(order, axis=1)  # by level
  take = lambda x: jnp.take_along_axis(x, kept, axis=1)
  of_kept = take(above)
  place = jnp.argmax(kept[:, None] == of_kept[..., None], axis=-1) + 1
  parents = jnp.where(of_kept < 0, 0, place)
  parents = jnp.where(take(scores) > -jnp.inf, parents, -1)
  return take(tokens), parents.astype(jnp.int32)
