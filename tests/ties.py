"""Comparison of greedy completions, which may differ at near-ties only."""

import jax
import numpy as np


def count(models, prompts, actual, expected, *, margin, longest=128) -> int:
  """Completions that differ, after checking that each had a reason to.

  A pass over one token and a pass over several add in another order, so two
  logits that are nearly equal may change places.

  Args:
    models: a `launch.assembly.pair.Pair`.
    prompts: what was completed.
    actual, expected: token ids of every completion.
    margin: how far apart the logits of two tokens that changed places may be.
    longest: no prompt with its completion has more tokens.

  Raises:
    AssertionError: where completions part at no near-tie of the target.
  """
  apply = jax.jit(models.target.apply)
  cache = models.target.init_cache(1, longest)
  ties = 0
  for prompt, ours, theirs in zip(prompts, actual, expected, strict=True):
    if ours == theirs:
      continue
    at = next(
      i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b
    )
    context = np.array([[*prompt.token_ids, *theirs[:at]]])
    padded = np.pad(context, ((0, 0), (0, longest - context.shape[1])))
    output, _ = apply(models.params.target, padded, cache)
    logits = np.asarray(output.logits[0, context.shape[1] - 1])
    assert abs(logits[ours[at]] - logits[theirs[at]]) < margin
    ties += 1
  return ties
