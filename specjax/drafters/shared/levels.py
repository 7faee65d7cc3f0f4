"""Trees drawn level by level, from any source of distributions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import distributions, random, warp
from specjax import siblings as siblings_lib
from specjax.adaptive import chains
from specjax.adaptive.chains import Passes
from specjax.cache import Cache
from specjax.drafters.shared.arguments import Drawing
from specjax.tree import Tree
from specjax.types import (
  Commit,
  Context,
  Draft,
  Drafter,
  LanguageModel,
  Params,
  pick_nodes,
)

# `(carry, depth, i32[B, W]) -> (f32[B, W, V'], carry)`: the logits after the W
# nodes of a depth, given their newly drawn tokens.
Feed = Callable[[Any, int, Array], tuple[Array, Any]]


def draw_tree(
  root_logits: Array,
  feed: Feed,
  carry: Any,
  context: Context,
  drawing: Drawing,
  *,
  loops: bool = False,
) -> tuple[Draft, Any]:
  """Draws a static tree, each node from its own distribution.

  Args:
    root_logits: `f32[B, V']`, the logits after the root.
    feed: computes the logits after a level; not called for the deepest.
    carry: the first carry of `feed`.
    context, drawing: the round's.
    loops: whether `feed` takes a traced depth, and its carry keeps its shapes.
      The passes of equal paths are then a loop, of which XLA compiles one pass.

  Returns:
    The draft, and the last carry. NaN logits become uniform distributions.
  """
  tree, siblings = drawing.tree, drawing.siblings
  vocab_size = drawing.vocab_size
  noise = None
  if siblings.with_noise:
    ahead = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)
    noise = random.position_noise(
      context.row_keys,
      context.length[:, None] + ahead,
      len(tree.children[0]),
      vocab_size,
    )

  def log_probs_of(logits):  # [B, W, V'] -> [B, W, V], and before the warp
    logits = logits[..., :vocab_size]
    if siblings.deterministic:
      log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    else:
      log_probs = warp.warp(logits, context.sampling)
    return distributions.replace_nans(log_probs), logits

  log_probs, ranking = log_probs_of(root_logits[:, None])
  tokens, all_log_probs = [context.root], [jnp.full_like(log_probs, -jnp.inf)]
  loops &= tree.is_paths and siblings.independent and noise is None
  loops &= tree.max_depth > 2  # at least two passes
  # `specjax.exact` records draws while the round is traced, so it checks the
  # unrolled form; tests compare the two.
  loops &= context.draws is pick_nodes
  for depth in range(1, tree.max_depth + 1):
    if noise is not None:
      drawn_from = log_probs[:, parents(tree, depth)]
      drawn = random.race(noise[:, :, depth - 1], drawn_from)  # [B, K]
    else:
      drawn, drawn_from = _draw_level(
        drawing, depth, log_probs, ranking, context
      )
    tokens.append(drawn)
    all_log_probs.append(drawn_from)
    if depth == tree.max_depth:
      break
    if loops:

      def step(so_far, depth):
        logits, carry = feed(so_far[0], depth, so_far[1])
        drawn_from, _ = log_probs_of(logits)
        nodes = start(tree, depth + 1) + jnp.arange(drawn_from.shape[1])
        drawn = context.draw(nodes, drawn_from)
        return (carry, drawn), (drawn, drawn_from)

      depths = jnp.arange(1, tree.max_depth, dtype=jnp.int32)
      (carry, _), passed = lax.scan(step, (carry, drawn), depths)
      drawn, drawn_from = (jnp.concatenate(x, axis=1) for x in passed)
      tokens.append(drawn)
      all_log_probs.append(drawn_from)
      break
    logits, carry = feed(carry, depth, drawn)
    log_probs, ranking = log_probs_of(logits)
  draft = Draft(
    tree=tree,
    siblings=siblings,
    tokens=jnp.concatenate(tokens, axis=1),
    log_probs=jnp.concatenate(all_log_probs, axis=1),
    noise=noise,
  )
  return draft, carry


def draft_tree(
  model: LanguageModel,
  params,
  cache: Cache,
  root_logits: Array,
  context: Context,
  drawing: Drawing,
) -> tuple[Draft, Cache]:
  """Samples a tree level by level; depth G costs G - 1 model calls.

  Args:
    model, params: the model that drafts.
    cache: holds all committed tokens, the root included.
    root_logits: `f32[B, V']`, the model's logits after the root.
    context, drawing: the round's.

  Returns:
    The draft, and the cache with all nodes but the deepest level's in slots
    `context.length ..`, in node order.
  """

  def feed(cache, depth, drawn):
    output, cache = model.apply(
      params,
      drawn,
      cache,
      positions=positions(context.length - 1, depth, drawn),
      mask=mask(drawing.tree, depth, drawn),
    )
    return output.logits, cache

  return draw_tree(root_logits, feed, cache, context, drawing)


def prefill(
  model: LanguageModel, params: Any, cache: Cache, commit: Commit
) -> Cache:
  """Prefills a draft model's cache with a prompt, without logits."""
  nothing = jnp.zeros((len(commit.tokens), 0), jnp.int32)
  cache = cache.replace(length=commit.start)
  _, cache = model.apply(params, commit.tokens, cache, logits_at=nothing)
  return cache.replace(length=commit.length)


def drafter(
  begin: Callable[[Params, Any, Cache, Context], Passes],
  drawing: Drawing,
  *,
  name: str,
  loops: bool = False,
  **fields: Any,
) -> Drafter:
  """A drafter that runs one pass per level, of whole trees or under a policy.

  `begin` is as in `specjax.adaptive.chains.drafter`, `loops` as in `draw_tree`,
  `fields` the `Drafter`'s.
  """

  def propose(params, state, target_cache, context):
    passes = begin(params, state, target_cache, context)
    every_row = jnp.ones(context.length.shape, bool)
    logits, carry = passes.first(passes.carry, every_row)
    draft, carry = draw_tree(
      logits[:, 0], passes.feed, carry, context, drawing, loops=loops
    )
    return draft, *passes.close(carry, jnp.int32(drawing.tree.max_depth - 1))

  whole = Drafter(
    name=name, tree=drawing.tree, siblings=drawing.siblings, propose=propose,
    **fields,
  )  # fmt: skip
  if drawing.policy is None:
    return whole
  return chains.drafter(
    begin, inner=whole, policy=drawing.policy, vocab_size=drawing.vocab_size
  )


def fed(tree: Tree) -> tuple[int, ...]:
  """How many nodes of each level a model is fed to draft the next level."""
  return tuple(len(level) for level in tree.levels[1:-1])


def start(tree: Tree, depth: int | Array) -> int | Array:
  """A depth's first node; the depth is traced only in the loop of paths."""
  if isinstance(depth, int):
    return tree.levels[depth].start
  return 1 + (depth - 1) * len(tree.children[0])


def parents(tree: Tree, depth: int) -> np.ndarray:
  """`i32[W]`, a depth's parents, as indices into the depth above."""
  level, above = tree.levels[depth], tree.levels[depth - 1]
  return np.array([tree.parents[n] for n in level], np.int32) - above.start


def positions(root: Array, depth: int, drawn: Array) -> Array:
  """`i32[B, W]`, positions of a depth's tokens, given the root's."""
  return jnp.broadcast_to((root + depth)[:, None], drawn.shape)


def mask(
  tree: Tree, depth: int | Array, drawn: Array
) -> np.ndarray | Array | None:
  """Mask of a depth's tokens over all nodes fed so far, without the root.

  In the loop of paths, over the last K (G - 1) slots, including the text's.
  """
  if tree.is_chain or (isinstance(depth, int) and not depth):
    return None
  if isinstance(depth, int):
    level = tree.levels[depth]
    return tree.ancestors[level.start : level.stop, 1 : level.stop]
  path = np.arange(len(tree.children[0]))
  slots = np.arange(len(path) * (1 - tree.max_depth), 0)
  node = start(tree, depth + 1) + slots
  seen = (node < 1) | (slots % len(path) == path[:, None])
  return jnp.broadcast_to(seen, (len(drawn), *seen.shape))


def _draw_level(
  drawing: Drawing,
  depth: int,
  log_probs: Array,
  ranking: Array,
  context: Context,
) -> tuple[Array, Array]:
  """Draws a depth's tokens; returns them and the distributions used."""
  tree, siblings = drawing.tree, drawing.siblings
  level, above = tree.levels[depth], parents(tree, depth)
  if siblings.independent:
    drawn_from = log_probs[:, above]
    return context.draw(level, drawn_from), drawn_from
  heads, family = np.unique(above, return_inverse=True)
  sizes, rank = np.bincount(family), tree.rank[level.start : level.stop]
  place = np.zeros((len(heads), sizes.max()), np.int32)  # in the level
  place[family, rank] = np.arange(len(level))

  def draw(so_far, r):  # child r of each node that has one
    tokens, drawn_from = so_far  # [B, F, C], [B, F, C, V]
    some = np.flatnonzero(sizes > r) if isinstance(r, int) else slice(None)
    child_law = siblings.child(
      log_probs[:, heads[some]],
      siblings_lib.previous(tokens[:, some], r),
      sizes[some],
      ranking[:, heads[some]],
    )
    nodes = level.start + (
      place[some, r] if isinstance(r, int) else jnp.asarray(place)[:, r]
    )
    tokens = tokens.at[:, some, r].set(context.draw(nodes, child_law))
    return (tokens, drawn_from.at[:, some, r].set(child_law)), None

  tokens = jnp.zeros((len(log_probs), *place.shape), jnp.int32)
  empty = jnp.zeros((*tokens.shape, log_probs.shape[-1]), log_probs.dtype)
  (tokens, drawn_from), _ = siblings_lib.scan_siblings(
    draw, (tokens, empty), place.shape[1]
  )
  return tokens[:, family, rank], drawn_from[:, family, rank]
