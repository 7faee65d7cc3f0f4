"""Self-speculative decoding: the target drafts for itself, skipping sub-layers.

Draft and Verify (Zhang et al., ACL 2024): no second model and no second cache.
Drafting runs on the target's own cache, which holds full-depth keys and values
for every committed token; drafted tokens go to the slots after them, in the
kept layers only. Verification then writes all layers of those slots anew, so
the cache is correct after every commit without any work here.
"""

import jax.numpy as jnp

from specjax.drafters.model import draft_tree
from specjax.tree import drafted_paths
from specjax.types import Drafter, LanguageModel, Siblings


def drafter(
  model: LanguageModel,
  *,
  num_speculative_tokens: int,
  num_drafts: int = 1,
  vocab_size: int,
) -> Drafter:
  """Drafts with a thinned target, on `Params.target` and the target's cache.

  Args:
    model: the target with sub-layers left out; it must take the target's
      parameters and cache (`models.transformer.as_language_model(module,
      skipped=...)`).
    num_speculative_tokens: gamma >= 1, tokens on each path.
    num_drafts: K >= 1, paths sampled independently from the root.
    vocab_size: V, the number of real tokens.

  Returns:
    A `Drafter` without state of its own.

  Raises:
    ValueError: if gamma or K is less than 1.
  """
  tree = drafted_paths(num_speculative_tokens, num_drafts)

  def propose(params, state, target_cache, context):
    root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, 1)
    output, cache = model.apply(
      params.target, root, target_cache.replace(length=context.length - 1)
    )
    draft, cache = draft_tree(
      model,
      params.target,
      cache,
      output.logits[:, 0],
      context,
      tree=tree,
      vocab_size=vocab_size,
    )
    return draft, state, cache.replace(length=context.length - 1)

  return Drafter(
    name="layer_skip",
    tree=tree,
    siblings=Siblings.IID,
    init=lambda params, batch, slots: (),
    prefill=lambda params, state, tokens, lengths: state,
    propose=propose,
    commit=lambda params, state, commit: state,
    max_positions=model.max_positions,
  )
