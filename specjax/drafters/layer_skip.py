"""Self-speculative decoding: the target drafts for itself, skipping sub-layers.

Draft and Verify (Zhang et al., ACL 2024): no second model and no second cache.
Drafting runs on the target's own cache, which holds full-depth keys and values
for every committed token; drafted tokens go to the slots after them, in the
kept layers only. Verification then writes all layers of those slots anew, so
the cache is correct after every commit without any work here.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax import siblings as siblings_lib
from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.drafters.model import (
  check_model,
  check_rolls_back,
  check_tree,
  draft_tree,
)
from specjax.drafters.shared import levels
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, Idle, LanguageModel, Params


def drafter(
  model: LanguageModel,
  *,
  tree: Tree,
  siblings: Siblings | str = IID,
  vocab_size: int,
  depth: Policy | None = None,
  weights: Callable[[Params], Any] = lambda params: params.target,
) -> Drafter:
  """Drafts with a thinned target, on `Params.target` and the target's cache.

  Args:
    model: the target with sub-layers left out; it must take the target's
      parameters and cache
      (`models.networks.transformer.as_language_model(module, skipped=...)`).
    tree: what every proposal fills.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`.
    vocab_size: V, the number of real tokens.
    depth: when a row of a chain ends before that (`specjax.adaptive.policies`);
      None: never.
    weights: the model's among all parameters; by default the target's.

  Returns:
    A `Drafter` without state of its own but what a policy remembers.

  Raises:
    ValueError: if the tree drafts nothing or does not suit the siblings or the
      policy, or the model knows fewer than V tokens.
    TypeError: if the tree is not a `Tree`, or the policy no `Policy`.
  """
  siblings = siblings_lib.get(siblings)
  check_model("target", model, vocab_size)
  check_rolls_back("target", model)
  check_tree(tree, siblings, vocab_size)

  def propose(params, state, target_cache, context):
    start = context.length - 1
    output, cache = model.apply(
      weights(params), context.root, target_cache.replace(length=start)
    )
    draft, cache = draft_tree(
      model,
      weights(params),
      cache,
      output.logits[:, 0],
      context,
      tree=tree,
      siblings=siblings,
      vocab_size=vocab_size,
    )
    return draft, state, cache.replace(length=start)

  whole = Drafter(
    name="layer_skip",
    tree=tree,
    siblings=siblings,
    propose=propose,
    passes=(1, *(len(level) for level in tree.levels[1:-1])),
    max_positions=model.max_positions,
    idle=Idle.COMMIT,
    reads_anew=True,
  )
  if depth is None:
    return whole

  def begin(params, state, target_cache, context):
    root = context.length - 1

    def first(cache, goes):
      del goes  # the target's cache lacks nothing
      output, cache = model.apply(
        weights(params), context.root, cache.replace(length=root)
      )
      said = chains.said(output, jnp.zeros_like(root))
      return said, cache.replace(length=root), jnp.ones((), jnp.int32)

    def feed(cache, depth, drawn):
      output, cache = model.apply(
        weights(params),
        drawn,
        cache.replace(length=root + depth),
        positions=levels.positions(root, depth, drawn),
      )
      said = chains.said(output, jnp.zeros_like(root))
      return said, cache.replace(length=root)

    return chains.Passes(
      carry=target_cache.replace(length=root),
      first=first,
      feed=feed,
      close=lambda cache, fed: (state, cache),
    )

  return chains.drafter(begin, inner=whole, policy=depth, vocab_size=vocab_size)
