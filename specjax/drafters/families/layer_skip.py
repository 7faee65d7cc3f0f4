"""Self-speculative decoding: a cheaper version of the target drafts for it.

Draft and Verify (Zhang et al., ACL 2024) skips sub-layers; QuantSpec (Tiwari et
al., ICML 2025) quantizes weights, and its cache, to four bits. There is no
second cache: the draft uses the target's own, which holds full-depth keys and
values of every committed token. Drafted tokens go to the slots after them, in
the kept layers only. Verification then rewrites all layers of those slots, so
the cache is correct after every commit.
"""

from collections.abc import Callable
from typing import Any

from specjax.adaptive import chains
from specjax.adaptive.policies import Policy
from specjax.drafters.shared import arguments, levels
from specjax.drafters.shared.arguments import Drawing
from specjax.shapes import Shape
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel, Params


def layer_skip(
  skipped: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """The target without some sub-layers (Draft and Verify, ACL 2024).

  It drafts with `Params.target` and the target's cache.

  Args:
    skipped: the target with sub-layers left out; it must take the target's
      parameters and cache
      (`models.networks.transformer.as_language_model(module, skipped=...)`).
    tokens, tree, siblings, policy, vocab_size: as in `specjax.drafters.model`.

  Returns:
    The `Drafter`; it has no state but a policy's.

  Raises:
    ValueError, TypeError: as in `specjax.drafters.model`.
  """
  vocab_size = arguments.check_model("target", skipped, vocab_size)
  drawing = arguments.drawing(tokens, tree, siblings, vocab_size, policy)
  return _on_targets_cache(
    "layer_skip", skipped, lambda params: params.target, drawing
  )


def quantized_self(
  low: LanguageModel,
  *,
  tokens: int | None = None,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  policy: Policy | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """The target with quantized weights, on its own cache (QuantSpec, 2025).

  Otherwise like `layer_skip`.

  Args:
    low: the quantized target, whose parameters are `Params.draft`; it must take
      the target's cache.
    tokens, tree, siblings, policy, vocab_size: as in `layer_skip`.
  """
  vocab_size = arguments.check_model("target", low, vocab_size)
  drawing = arguments.drawing(tokens, tree, siblings, vocab_size, policy)
  return _on_targets_cache(
    "quantized_self", low, lambda params: params.draft, drawing
  )


def _on_targets_cache(
  name: str,
  model: LanguageModel,
  weights: Callable[[Params], Any],
  drawing: Drawing,
) -> Drafter:
  """A drafter that runs a model with these weights on the target's cache."""
  arguments.check_rolls_back("target", model)
  tree = drawing.tree

  def begin(params, state, target_cache, context):
    root = context.length - 1

    def feed(cache, depth, drawn):
      output, cache = model.apply(
        weights(params),
        drawn,
        cache.replace(length=root + levels.start(tree, depth)),
        positions=levels.positions(root, depth, drawn),
        mask=levels.mask(tree, depth, drawn),
      )
      return output.logits, cache.replace(length=root)

    def first(cache, drafting):
      del drafting  # the target's cache lacks nothing
      return feed(cache, 0, context.root)

    return chains.Passes(
      carry=target_cache.replace(length=root),
      first=first,
      feed=feed,
      close=lambda cache, fed: (state, cache),
    )

  return levels.drafter(
    begin,
    drawing,
    name=name,
    passes=(1, *levels.fed(tree)),
    loops=True,
    max_positions=model.max_positions,
    accepts_foreign_drafts=True,
  )
