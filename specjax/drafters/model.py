"""A separate draft model: a chain of gamma tokens, or K independent paths.

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
from specjax import sampling, warp
from specjax.cache import Cache
from specjax.tree import Tree, drafted_paths, take_node
from specjax.types import Context, Draft, Drafter, LanguageModel, Siblings


def drafter(
  model: LanguageModel,
  *,
  num_speculative_tokens: int,
  num_drafts: int = 1,
  vocab_size: int,
) -> Drafter:
  """Drafts with `model`, whose parameters are `Params.draft`.

  Args:
    model: the draft model; its vocabulary may be padded differently.
    num_speculative_tokens: gamma >= 1, tokens on each path.
    num_drafts: K >= 1, paths sampled independently from the root.
    vocab_size: V, the number of real tokens.

  Returns:
    The `Drafter`; its state is the draft model's `Cache`.

  Raises:
    ValueError: if gamma or K is less than 1, or the model knows fewer than V
      tokens.
  """
  if model.vocab_size < vocab_size:
    raise ValueError(
      f"the draft's vocabulary must hold {vocab_size} tokens, got "
      f"{model.vocab_size}"
    )
  tree = drafted_paths(num_speculative_tokens, num_drafts)

  def prefill(params, cache, tokens, lengths):
    _, cache = model.apply(params.draft, tokens, cache)
    return cache.replace(length=lengths)

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
    siblings=Siblings.IID,
    init=lambda params, batch, slots: model.init_cache(batch, slots),
    prefill=prefill,
    propose=propose,
    commit=commit,
    max_positions=model.max_positions,
  )


_WINDOW = 2


def draft_tree(
  model: LanguageModel,
  params,
  cache: Cache,
  root_logits: Array,
  context: Context,
  *,
  tree: Tree,
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
    tree: the token tree; siblings are drawn independently.
    vocab_size: V, the number of real tokens.

  Returns:
    The draft, and the cache with all nodes but those of the deepest level in
    slots `context.length ..`, in node order.
  """
  root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)

  def law_of(logits):  # [B, W, V'] -> [B, W, V]
    return warp.warp(logits[..., :vocab_size], context.sampling)

  law = law_of(root_logits[:, None])
  tokens, all_laws = [root], [law]
  for depth, level in enumerate(tree.levels[1:], start=1):
    above = tree.levels[depth - 1]
    parents = np.array([tree.parents[n] for n in level]) - above.start
    drawn = sampling.categorical(
      sampling.drafted_node_keys(context.keys, level), law[:, parents]
    )  # [B, W]
    tokens.append(drawn)
    if depth == tree.max_depth:
      all_laws.append(jnp.full((*drawn.shape, vocab_size), -jnp.inf, law.dtype))
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
    leaves = np.array([not tree.children[n] for n in level])
    if leaves.any():
      law = jnp.where(leaves[:, None], -jnp.inf, law)
    all_laws.append(law)
  draft = Draft(
    tokens=jnp.concatenate(tokens, axis=1),
    log_probs=jnp.concatenate(all_laws, axis=1),
  )
  return draft, cache
