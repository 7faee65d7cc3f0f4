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
from jax import Array, lax

from specjax import cache as cache_lib
from specjax import recurrent
from specjax import siblings as siblings_lib
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.cache import Cache
from specjax.drafters.shared import levels
from specjax.siblings import IID, Siblings
from specjax.tree import Form, Tree, take_node
from specjax.types import Context, Draft, Drafter, Idle, LanguageModel


def drafter(
  model: LanguageModel,
  *,
  tree: Tree,
  siblings: Siblings | str = IID,
  vocab_size: int,
  depth: Policy | None = None,
) -> Drafter:
  """Drafts with `model`, whose parameters are `Params.draft`.

  Args:
    model: the draft model; its vocabulary may be padded differently.
    tree: what every proposal fills; `specjax.tree.chain(gamma)` is the
      simplest.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`.
    vocab_size: V, the number of real tokens.
    depth: when a row of a chain ends before that (`specjax.adaptive.policies`);
      None: never.

  Returns:
    The `Drafter`; its state is the draft model's `Cache`, beside estimates if
    there is a policy.

  Raises:
    ValueError: if the tree drafts nothing or does not suit the siblings or the
      policy, or the model knows fewer than V tokens.
    TypeError: if the tree is not a `Tree`, or the policy no `Policy`.
  """
  siblings = siblings_lib.get(siblings)
  check_model("draft", model, vocab_size)
  if depth is not None or not (isinstance(tree, Tree) and tree.is_chain):
    check_rolls_back("draft of a tree or with a policy", model)
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

  def init(params, batch, slots, inputs):
    cache = model.new_cache(
      params.draft, batch, slots, inputs if model.encode else None
    )
    # With room for a round no state holds what the next one goes back to.
    room = tree.max_depth + 1 + _AGAIN
    return cache.replace(recurrent=recurrent.widened(cache.recurrent, room))

  whole = Drafter(
    name="model",
    tree=tree,
    siblings=siblings,
    init=init,
    prefill=prefill,
    propose=propose,
    commit=commit,
    passes=(_WINDOW, *(len(level) for level in tree.levels[1:-1])),
    max_positions=model.max_positions,
    again=_AGAIN,
    has_states=model.has_states,
  )
  if depth is None:
    return whole
  return _with_depth(model, whole, depth, vocab_size)


_WINDOW = 2
_AGAIN = 2  # tokens of a text that goes on which are fed again
_PIECE = 16  # tokens that a cache which lacks more is given at once


def _with_depth(
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
      return chains.said(output, root - 1 - start), carry, count

    def feed(carry, depth, drawn):
      cache, *rest = carry
      output, cache = model.apply(
        params.draft,
        drawn,
        cache.replace(length=root + depth - 1),
        positions=levels.positions(root - 1, depth, drawn),
      )
      carry = (cache.replace(length=root), *rest)
      return chains.said(output, jnp.zeros_like(root)), carry

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
    whole, prefill=prefill, commit=commit, idle=Idle.NOTHING
  )
  return chains.drafter(
    begin, inner=inner, policy=policy, vocab_size=vocab_size
  )


def check_model(who: str, model: LanguageModel, vocab_size: int) -> None:
  """Raises ValueError if a model knows fewer tokens than are drafted."""
  if model.vocab_size < vocab_size:
    raise ValueError(
      f"the {who}'s vocabulary must hold {vocab_size} tokens, got "
      f"{model.vocab_size}"
    )


def check_rolls_back(who: str, model: LanguageModel) -> None:
  """Raises ValueError if a model cannot draft, for want of its old states."""
  if model.has_states:
    raise ValueError(
      f"the {who} drafts in passes that are taken back, and a cache of "
      "recurrent states goes back by one: draft with a model without them, a "
      "head, or look-ups"
    )


def check_tree(
  tree: Tree, siblings: Siblings, vocab_size: int, *, certain: bool = False
) -> None:
  """Raises ValueError if a tree cannot be drafted that way.

  Args:
    tree: the token tree.
    siblings: how the children of a node are drawn.
    vocab_size: V.
    certain: whether they may be not drawn at all (`siblings.GIVEN`).
  """
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
  if siblings is siblings_lib.GIVEN and not certain:
    raise ValueError(
      "siblings 'given' are tokens that are not drawn, and this drafter draws"
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

  def feed(cache, depth, drawn):
    output, cache = model.apply(
      params,
      drawn,
      cache,
      positions=levels.positions(context.length - 1, depth, drawn),
      mask=levels.mask(tree, depth),
    )
    return output.logits, cache

  return levels.draw_tree(
    root_logits,
    feed,
    cache,
    context,
    tree=tree,
    siblings=siblings,
    vocab_size=vocab_size,
  )
