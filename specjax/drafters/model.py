"""A separate draft model: a chain of tokens, K paths, or any static tree.

The draft model keeps its own cache. After a step it may lack the last accepted
token (a leaf is never fed to the draft), so each proposal first feeds the last
*two* committed tokens: the older one is rewritten with the same values, or
filled in. No row needs to know which.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import cache as cache_lib
from specjax import drawing, laws, warp
from specjax import siblings as siblings_lib
from specjax.cache import Cache
from specjax.siblings import IID, Siblings
from specjax.tree import Form, Tree, take_node
from specjax.types import Context, Draft, Drafter, LanguageModel


def drafter(
  model: LanguageModel,
  *,
  tree: Tree,
  siblings: Siblings | str = IID,
  vocab_size: int,
) -> Drafter:
  """Drafts with `model`, whose parameters are `Params.draft`.

  Args:
    model: the draft model; its vocabulary may be padded differently.
    tree: what every proposal fills; `specjax.tree.chain(gamma)` is the
      simplest.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`.
    vocab_size: V, the number of real tokens.

  Returns:
    The `Drafter`; its state is the draft model's `Cache`.

  Raises:
    ValueError: if the tree drafts nothing or does not suit the siblings, or the
      model knows fewer than V tokens.
    TypeError: if the tree is not a `Tree`.
  """
  siblings = siblings_lib.get(siblings)
  check_model("draft", model, vocab_size)
  check_tree(tree, siblings, vocab_size)

  def prefill(params, cache, commit):
    nothing = jnp.zeros((len(commit.tokens), 0), jnp.int32)
    _, cache = model.apply(
      params.draft,
      commit.tokens,
      cache.replace(length=commit.start),
      logits_at=nothing,
    )
    return cache.replace(length=commit.length)

  def propose(params, cache, target_cache, context):
    start = jnp.maximum(context.length - 2, 0)
    window = jax.vmap(
      lambda row, at: lax.dynamic_slice_in_dim(row, at, _WINDOW)
    )(context.tokens, start)
    output, cache = model.apply(
      params.draft, window, cache.replace(length=start)
    )
    logits = take_node(output.logits, context.length - 1 - start)
    draft, cache = draft_tree(
      model,
      params.draft,
      cache.replace(length=context.length),
      logits,
      context,
      tree=tree,
      siblings=siblings,
      vocab_size=vocab_size,
    )
    return draft, cache, target_cache

  def commit(params, cache, commit):
    del params
    if tree.is_chain:
      return cache  # already in order; `propose` sets the length
    return cache_lib.keep_path(
      cache,
      commit.start,
      commit.path[:, : tree.max_depth],  # leaves were not fed
      commit.length,
      nodes=tree.levels[-1].start,
    )

  return Drafter(
    name="model",
    tree=tree,
    siblings=siblings,
    init=lambda params, batch, slots, inputs: model.new_cache(
      params.draft, batch, slots, inputs if model.encode else None
    ),
    prefill=prefill,
    propose=propose,
    commit=commit,
    passes=(_WINDOW, *(len(level) for level in tree.levels[1:-1])),
    max_positions=model.max_positions,
  )


_WINDOW = 2


def check_model(who: str, model: LanguageModel, vocab_size: int) -> None:
  """Raises ValueError if a model knows fewer tokens than are drafted."""
  if model.vocab_size < vocab_size:
    raise ValueError(
      f"the {who}'s vocabulary must hold {vocab_size} tokens, got "
      f"{model.vocab_size}"
    )


def check_tree(tree: Tree, siblings: Siblings, vocab_size: int) -> None:
  """Raises ValueError if a tree cannot be drafted that way."""
  if not isinstance(tree, Tree):
    raise TypeError(
      "tree must be a specjax.tree.Tree, as chain(6), paths(4, 2) or "
      f"Tree((-1, 0, 0)), got {tree!r}"
    )
  if not tree.num_drafted:
    raise ValueError(
      "a drafter's tree needs at least one drafted node "
      "(num_speculative_tokens >= 1; 0 is the plain drafter)"
    )
  if tree.form is not Form.FIXED or tree.lanes:
    raise ValueError(
      "a model drafts whole trees, whose form is fixed, without lanes: got "
      f"{tree.form.value}, lanes {tree.lanes}"
    )
  most = siblings.max_children
  if most is not None and tree.max_children > most:
    raise ValueError(
      f"siblings {siblings.name!r} are at most {most} a node, got a tree with "
      f"{tree.max_children}"
    )
  if not siblings.independent and tree.max_children > vocab_size:
    raise ValueError(
      f"siblings {siblings.name!r} are distinct tokens, got a tree with "
      f"{tree.max_children} children of one node for {vocab_size} tokens"
    )
  if siblings.with_noise and not tree.is_paths:
    raise ValueError(
      f"siblings {siblings.name!r} need separate paths of equal length, got "
      f"parents {tree.parents}"
    )


def draft_tree(
  model: LanguageModel,
  params,
  cache: Cache,
  root_logits: Array,
  context: Context,
  *,
  tree: Tree,
  siblings: Siblings,
  vocab_size: int,
) -> tuple[Draft, Cache]:
  """Samples a tree level by level; depth G costs G - 1 model calls.

  Args:
    model: the model that drafts.
    params: its parameters.
    cache: holds all committed tokens, the root included:
      `cache.length == context.length`.
    root_logits: `f32[B, V']`, the model's logits after the root.
    context: the round's context.
    tree: the token tree.
    siblings: how the children of a node are drawn.
    vocab_size: V, the number of real tokens.

  Returns:
    The draft, and the cache with all nodes but those of the deepest level in
    slots `context.length ..`, in node order. Where the model's logits are NaN
    the law is uniform.
  """
  noise = None
  if siblings.with_noise:
    ahead = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)
    noise = drawing.position_noise(
      context.row_keys,
      context.length[:, None] + ahead,
      len(tree.children[0]),
      vocab_size,
    )

  def law_of(logits):  # [B, W, V'] -> [B, W, V]
    logits = logits[..., :vocab_size]
    if siblings.deterministic:
      law = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    else:
      law = warp.warp(logits, context.sampling)
    return laws.heal(law)

  law = law_of(root_logits[:, None])
  tokens, all_laws = [context.root], [jnp.full_like(law, -jnp.inf)]
  for depth, level in enumerate(tree.levels[1:], start=1):
    if noise is not None:
      above = tree.levels[depth - 1].start
      parents = np.array([tree.parents[n] for n in level], np.int32) - above
      drawn_from = law[:, parents]
      drawn = drawing.race(noise[:, :, depth - 1], drawn_from)  # [B, K]
    else:
      drawn, drawn_from = _draw_level(tree, siblings, depth, law, context)
    tokens.append(drawn)
    all_laws.append(drawn_from)
    if depth == tree.max_depth:
      break
    output, cache = model.apply(
      params,
      drawn,
      cache,
      positions=jnp.broadcast_to(
        (context.length - 1 + depth)[:, None], drawn.shape
      ),
      mask=None
      if tree.is_chain
      else tree.ancestors[level.start : level.stop, 1 : level.stop],
    )
    law = law_of(output.logits)
  draft = Draft(
    tree=tree,
    siblings=siblings,
    tokens=jnp.concatenate(tokens, axis=1),
    log_probs=jnp.concatenate(all_laws, axis=1),
    noise=noise,
  )
  return draft, cache


def _draw_level(
  tree: Tree, siblings: Siblings, depth: int, law: Array, context: Context
) -> tuple[Array, Array]:
  """Draws the nodes of one depth, eldest siblings first.

  Args:
    tree: the token tree.
    siblings: how the children of a node are drawn.
    depth: at least 1.
    law: `f32[B, W, V]`, the model's laws at the nodes of the depth above.
    context: the round's, of which it draws.

  Returns:
    `i32[B, W']`, the tokens, and `f32[B, W', V]`, what each was drawn from.
  """
  level, above = tree.levels[depth], tree.levels[depth - 1]
  parents = np.array([tree.parents[n] for n in level], np.int32) - above.start
  if siblings.independent:
    drawn_from = law[:, parents]
    return context.draw(level, drawn_from), drawn_from
  heads, family = np.unique(parents, return_inverse=True)
  sizes, rank = np.bincount(family), tree.rank[level.start : level.stop]
  place = np.zeros((len(heads), sizes.max()), np.int32)  # in the level
  place[family, rank] = np.arange(len(level))

  def draw(found, r):  # child r of each node that has so many
    tokens, drawn_from = found  # [B, F, C], [B, F, C, V]
    some = np.flatnonzero(sizes > r) if isinstance(r, int) else slice(None)
    child_law = siblings.child(
      law[:, heads[some]],
      siblings_lib.elders(tokens[:, some], r),
      sizes[some],
    )
    nodes = level.start + (
      place[some, r] if isinstance(r, int) else jnp.asarray(place)[:, r]
    )
    tokens = tokens.at[:, some, r].set(context.draw(nodes, child_law))
    return (tokens, drawn_from.at[:, some, r].set(child_law)), None

  tokens = jnp.zeros((len(law), *place.shape), jnp.int32)
  empty = jnp.zeros((*tokens.shape, law.shape[-1]), law.dtype)
  (tokens, drawn_from), _ = siblings_lib.in_turn(
    draw, (tokens, empty), place.shape[1]
  )
  return tokens[:, family, rank], drawn_from[:, family, rank]
