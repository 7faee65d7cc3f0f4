"""Self-speculative decoding: the target drafts for itself, made cheaper.

Draft and Verify (Zhang et al., ACL 2024) skips sub-layers, QuantSpec (Tiwari et
al., ICML 2025) has weights, and there a cache, in four bits. No second cache:
drafting runs on the target's own, as it is stored, which holds full-depth keys
and values for every committed token; drafted tokens go to the slots after them,
in the kept layers only. Verification then writes all layers of those slots
anew, so the cache is correct after every commit without any work here.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.drafters.shared import arguments, levels
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, EmptyRoundPolicy, LanguageModel, Params


def layer_skip(
  skipped: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """The target without some sub-layers (Draft and Verify, ACL 2024).

  It drafts on `Params.target` and the target's cache.

  Args:
    skipped: the target with sub-layers left out; it must take the target's
      parameters and cache
      (`models.networks.transformer.as_language_model(module, skipped=...)`).
    tokens, tree, siblings, policy, vocab_size, longest: as of
      `specjax.drafters.model`.

  Returns:
    A `Drafter` without state of its own but what a policy remembers.

  Raises:
    ValueError, TypeError: as `specjax.drafters.model`.
  """
  form = arguments.drawn(tokens, tree, siblings, policy)
  return on_targets_cache(
    "layer_skip", skipped, lambda params: params.target, *form, policy,
    vocab_size, longest,
  )  # fmt: skip


def quantised_self(
  low: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
  longest: int | None = None,
) -> Drafter:
  """The target's weights in few bits, on its own cache (QuantSpec, 2025).

  All else is as of `layer_skip`.

  Args:
    low: the target in few bits, whose parameters are `Params.draft`; it must
      take the target's cache.
    tokens, tree, siblings, policy, vocab_size, longest: as of `layer_skip`.
  """
  form = arguments.drawn(tokens, tree, siblings, policy)
  return on_targets_cache(
    "quantised_self", low, lambda params: params.draft, *form, policy,
    vocab_size, longest,
  )  # fmt: skip


def on_targets_cache(
  name: str,
  model: LanguageModel,
  weights: Callable[[Params], Any],
  tree: Tree,
  siblings: Siblings,
  policy: Policy | None,
  vocab_size: int | None,
  longest: int | None,
) -> Drafter:
  """The drafter of a model that takes the target's cache.

  Args:
    name: of the drafter.
    model: what drafts.
    weights: its parameters among all.
    tree, siblings, policy, vocab_size, longest: as of `layer_skip`.
  """
  vocab_size = vocab_size or model.vocab_size
  arguments.check_model("target", model, vocab_size)
  arguments.check_rolls_back("target", model)
  arguments.check_tree(tree, siblings, vocab_size)
  policy = arguments.ending(tree, policy, longest)

  def begin(params, state, target_cache, context):
    root = context.length - 1

    def feed(cache, depth, drawn):
      output, cache = model.apply(
        weights(params),
        drawn,
        cache.replace(length=root + tree.levels[depth].start),
        positions=levels.positions(root, depth, drawn),
        mask=levels.mask(tree, depth),
      )
      return output.logits, cache.replace(length=root)

    def first(cache, goes):
      del goes  # the target's cache lacks nothing
      return *feed(cache, 0, context.root), jnp.ones((), jnp.int32)

    return chains.Passes(
      carry=target_cache.replace(length=root),
      first=first,
      feed=feed,
      close=lambda cache, fed: (state, cache),
    )

  whole = Drafter(
    name=name,
    tree=tree,
    siblings=siblings,
    propose=levels.proposer(
      begin, tree=tree, siblings=siblings, vocab_size=vocab_size
    ),
    passes=(1, *(len(level) for level in tree.levels[1:-1])),
    max_positions=model.max_positions,
    empty_rounds=EmptyRoundPolicy.COMMIT,
    accepts_foreign_drafts=True,
  )
  if policy is None:
    return arguments.with_longer(
      whole,
      lambda tree, policy: on_targets_cache(
        name, model, weights, tree, siblings, policy, vocab_size, None
      ),
    )

  return chains.drafter(
    begin, inner=whole, policy=policy, vocab_size=vocab_size
  )
