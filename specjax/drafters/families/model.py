"""A separate draft model: a chain of tokens, K paths, or any static tree.

The draft model keeps its own cache. After a step it may lack the last accepted
token (a leaf is never fed to the draft), so each proposal first feeds the last
*two* committed tokens: the older one is rewritten with the same values, or
filled in. No row needs to know which.

Under a depth policy a row may draft nothing for many rounds, and its cache then
lacks more. It says how much it holds (`Cache.length`), and is filled in pieces
before the row drafts again.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from specjax import cache as cache_lib
from specjax import recurrent
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.shared import arguments, levels
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree, take_node
from specjax.types import Context, Drafter, EmptyRoundPolicy, LanguageModel


def model(
  draft: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """A smaller model (Leviathan et al., 2023).

  Args:
    draft: the draft model, whose parameters are `Params.draft`; its vocabulary
      may be padded differently.
    tokens: drafted on each path; 5 by default.
    tree: what every proposal fills; None for one path.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`.
    policy: when a row of a chain ends before that, of
      `specjax.adaptive.policies`; None: never.
    vocab_size: V, the number of real tokens; by default the model's.
    longest: G of the deepest chain whose rounds go on with the same state
      (`specjax.adaptive.rungs`), if there are others than this one's.

  Returns:
    The `Drafter`; its state is the draft model's `Cache`, beside estimates if
    there is a policy.

  Raises:
    ValueError: if the tree drafts nothing or does not suit the siblings or the
      policy, or the model knows fewer than V tokens.
    TypeError: if the tree is none, or the policy no `Policy`.
  """
  tree, siblings = arguments.drawn(tokens, tree, siblings, policy)
  vocab_size = vocab_size or draft.vocab_size
  arguments.check_model("draft", draft, vocab_size)
  if policy or longest or not tree.is_chain:
    arguments.check_rolls_back("draft of a tree or with a policy", draft)
  arguments.check_tree(tree, siblings, vocab_size)
  policy = arguments.ending(tree, policy, longest)

  def propose(params, cache, target_cache, context):
    start = jnp.maximum(context.length - 2, 0)
    window = jax.vmap(
      lambda row, at: lax.dynamic_slice_in_dim(row, at, _WINDOW)
    )(context.tokens, start)
    output, cache = draft.apply(
      params.draft, window, cache.replace(length=start)
    )
    logits = take_node(output.logits, context.length - 1 - start)
    drawn, cache = levels.draft_tree(
      draft,
      params.draft,
      cache.replace(length=context.length),
      logits,
      context,
      tree=tree,
      siblings=siblings,
      vocab_size=vocab_size,
    )
    return drawn, cache, target_cache

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

  def init(params, batch, slots, inputs):
    cache = draft.new_cache(
      params.draft, batch, slots, inputs if draft.encode else None
    )
    # With room for a round no state holds what the next one goes back to.
    room = tree.max_depth + 1 + _NUM_REFED
    return cache.replace(recurrent=recurrent.widened(cache.recurrent, room))

  whole = Drafter(
    name="model",
    tree=tree,
    siblings=siblings,
    init=init,
    prefill=lambda params, cache, commit: levels.read_prompt(
      draft, params.draft, cache, commit
    ),
    propose=propose,
    commit=commit,
    passes=(_WINDOW, *(len(level) for level in tree.levels[1:-1])),
    max_positions=draft.max_positions,
    num_refed=_NUM_REFED,
    has_states=draft.has_states,
  )
  if policy is None:
    return whole
  return _with_policy(draft, whole, policy, vocab_size)


_WINDOW = 2
_NUM_REFED = 2  # tokens of a text that goes on which are re-fed
_PIECE = 16  # tokens that a cache which lacks more is given at once


def _with_policy(
  model: LanguageModel, whole: Drafter, policy: Policy, vocab_size: int
) -> Drafter:
  """The drafter whose rows end by a policy.

  Between rounds `Cache.length` is how many tokens of the text a row holds: all
  but the newest two, or fewer where it has not drafted.
  """

  def begin(params, cache: Cache, target_cache, context: Context):
    root = context.length
    held = cache.length

    def feed_at(cache, start, count):
      fed = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, count))(
        context.tokens, start
      )
      return model.apply(params.draft, fed, cache.replace(length=start))

    def first(carry, goes):
      cache, held, _ = carry
      piece = min(_PIECE, context.tokens.shape[1])

      def lags(carry):
        return jnp.any(goes & (carry[1] < root - _WINDOW))

      def catch_up(carry):
        cache, held, count = carry
        start = jnp.minimum(held, context.tokens.shape[1] - piece)
        _, cache = feed_at(cache, start, piece)
        held = jnp.maximum(held, start + piece)
        return cache.replace(length=held), held, count + 1

      cache, held, count = lax.while_loop(
        lags, catch_up, (cache, held, jnp.ones((), jnp.int32))
      )
      start = jnp.maximum(root - _WINDOW, 0)
      output, cache = feed_at(cache, start, _WINDOW)
      held = jnp.where(held >= start, root, held)
      carry = (cache.replace(length=root), held, held == root)
      newest = take_node(output.logits, root - 1 - start)
      return newest[:, None], carry, count

    def feed(carry, depth, drawn):
      cache, *rest = carry
      output, cache = model.apply(
        params.draft,
        drawn,
        cache.replace(length=root + depth - 1),
        positions=levels.positions(root - 1, depth, drawn),
      )
      carry = (cache.replace(length=root), *rest)
      return output.logits, carry

    def close(carry, fed):
      cache, held, whole = carry
      held = jnp.where(whole, held + jnp.maximum(fed, 0), held)
      return cache.replace(length=held), target_cache

    nobody = jnp.zeros(root.shape, bool)
    return chains.Passes(
      carry=(cache, held, nobody), first=first, feed=feed, close=close
    )

  def prefill(params, cache, commit):
    held = cache.length
    cache = whole.prefill(params, cache, commit)
    # What it lacks of the text before is not filled by what comes after.
    lacks = held < commit.start
    return cache.replace(length=jnp.where(lacks, held, cache.length))

  def commit(params, cache, commit):
    del params
    return cache.replace(length=jnp.minimum(cache.length, commit.length - 1))

  inner = dataclasses.replace(
    whole, prefill=prefill, commit=commit, empty_rounds=EmptyRoundPolicy.NOTHING
  )
  return chains.drafter(
    begin, inner=inner, policy=policy, vocab_size=vocab_size
  )
