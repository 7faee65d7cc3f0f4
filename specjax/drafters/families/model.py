"""A separate draft model: a chain of tokens, K paths, or any static tree.

The draft model has its own cache and is fed only when it drafts, so a round
without a draft costs nothing. After a round its cache may lack the last
accepted token (a leaf is never fed to the draft), so each draft starts by
feeding the last *two* committed tokens; the older one is rewritten with the
same values, or filled in.

Under a depth policy a row may draft nothing for many rounds, and its cache
falls behind (`Cache.length` is what it holds). The row catches up in chunks
before it drafts again.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import cache as cache_lib
from specjax import recurrent
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.shared import arguments, levels
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree, take_node
from specjax.types import Commit, Context, Drafter, LanguageModel

_WINDOW = 2
_NUM_REFED = 2  # tokens fed again when a text continues
_CHUNK = 16  # tokens per chunk when a cache catches up


def model(
  draft: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """A smaller draft model (Leviathan et al., 2023).

  Args:
    draft: the draft model, whose parameters are `Params.draft`; its vocabulary
      may be padded differently.
    tokens: how many to draft on each path; 5 by default.
    tree: the tree of every draft; None for one path.
    siblings: how the children of a node are drawn, a `Siblings` or its name.
    policy: a `specjax.adaptive.policies` policy that ends a row's chain early;
      None for whole chains.
    vocab_size: V, the number of real tokens; by default the model's.

  Returns:
    The `Drafter`; its state is the draft model's `Cache`, and a policy's
    estimates.

  Raises:
    ValueError: if the tree drafts nothing or does not fit siblings or policy,
      or the model has fewer than V tokens.
    TypeError: if `tree` is not a tree, or `policy` not a `Policy`.
  """
  vocab_size = arguments.check_model("draft", draft, vocab_size)
  drawing = arguments.drawing(tokens, tree, siblings, vocab_size, policy)
  form = drawing.tree
  if policy or not form.is_chain:
    arguments.check_rolls_back("draft of a tree or with a policy", draft)

  def init(params, batch, slots, inputs):
    cache = draft.new_cache(
      params.draft, batch, slots, inputs if draft.encode else None
    )
    # Room for a round: no recurrent state then passes a point to roll back to.
    room = form.max_depth + 1 + _NUM_REFED
    return cache.replace(recurrent=recurrent.widen(cache.recurrent, room))

  def prefill(params, cache: Cache, commit: Commit) -> Cache:
    cached = cache.length
    cache = levels.prefill(draft, params.draft, cache, commit)
    # An earlier gap in the text is not filled by what comes after it.
    has_gap = cached < commit.start
    return cache.replace(length=jnp.where(has_gap, cached, cache.length))

  def commit(params, cache: Cache, commit: Commit) -> Cache:
    del params
    if form.is_chain:  # in order already
      return cache.replace(length=jnp.minimum(cache.length, commit.length - 1))
    return cache_lib.keep_path(
      cache,
      commit.start,
      commit.path[:, : form.max_depth],  # leaves were not fed
      commit.length,
      nodes=form.levels[-1].start,
    )

  def begin(params, cache: Cache, target_cache, context: Context):
    root, columns = context.length, context.tokens.shape[1]

    def feed_text(cache: Cache, start: Array, count: int):
      fed = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, count))(
        context.tokens, start
      )
      return draft.apply(params.draft, fed, cache.replace(length=start))

    def catch_up(cache: Cache, drafting: Array) -> Cache:
      """Fills the caches of drafting rows up to the window."""
      chunk = min(_CHUNK, columns)

      def feed_chunk(cache):
        cached = cache.length
        start = jnp.minimum(cached, columns - chunk)
        _, cache = feed_text(cache, start, chunk)
        length = jnp.maximum(cached, start + chunk)
        if cache.idle is not None:  # these rows were fed arbitrary tokens
          length = jnp.where(cache.idle, cached, length)
        return cache.replace(length=length)

      return lax.while_loop(
        lambda cache: jnp.any(drafting & (cache.length < root - _WINDOW)),
        feed_chunk,
        cache,
      )

    def first(carry, drafting):
      cache = catch_up(carry[0], drafting) if policy else carry[0]
      cached, start = cache.length, jnp.maximum(root - _WINDOW, 0)
      output, cache = feed_text(cache, start, _WINDOW)
      cached = jnp.where(cached >= start, root, cached)
      newest = take_node(output.logits, root - 1 - start)
      carry = cache.replace(length=root), cached, cached == root
      return newest[:, None], carry

    def feed(carry, depth, drawn):
      cache, *rest = carry
      output, cache = draft.apply(
        params.draft,
        drawn,
        cache.replace(length=root + levels.start(form, depth) - 1),
        positions=levels.positions(root - 1, depth, drawn),
        mask=levels.mask(form, depth, drawn),
      )
      return output.logits, (cache.replace(length=root), *rest)

    def close(carry, fed):
      cache, cached, is_complete = carry
      cached = jnp.where(is_complete, cached + jnp.maximum(fed, 0), cached)
      return cache.replace(length=cached), target_cache

    return chains.Passes(
      carry=(cache, cache.length, jnp.zeros(root.shape, bool)),
      first=first, feed=feed, close=close,
    )  # fmt: skip

  return levels.drafter(
    begin,
    drawing,
    name="model",
    loops=True,
    init=init,
    prefill=prefill,
    commit=commit,
    passes=(_WINDOW, *levels.fed(form)),
    max_positions=draft.max_positions,
    num_refed=_NUM_REFED,
    catches_up=policy is not None and policy.learn is None,
    has_states=draft.has_states,
  )
