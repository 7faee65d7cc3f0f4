"""The first difference of greedy completions, and the margin of the logits."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.runtime.engine import Engine

_MIN_WIDTH = 64

# `(token ids so far) -> f32[V]`, the logits of the next token.
NextLogits = Callable[[tuple[int, ...]], np.ndarray]


def difference(
  prompt: Sequence[int],
  tokens: Sequence[int],
  reference: Sequence[int],
  next_logits: NextLogits | None,
) -> dict | None:
  """The first difference between two completions of one prompt.

  Returns:
    None if they are equal. Otherwise `place`, the number of equal tokens;
    `token` and `reference_token` after these (None if a completion has ended);
    and `margin`, the second's logit minus the first's, None if one has ended or
    without `next_logits`.
  """
  if list(tokens) == list(reference):
    return None
  pairs = zip(tokens, reference, strict=False)
  place = next(
    (i for i, (a, b) in enumerate(pairs) if a != b),
    min(len(tokens), len(reference)),
  )
  at = lambda ids: ids[place] if place < len(ids) else None
  mine, theirs = at(tokens), at(reference)
  margin = None
  if next_logits is not None and mine is not None and theirs is not None:
    logits = next_logits((*prompt, *reference[:place]))
    margin = float(logits[theirs]) - float(logits[mine])
  return {
    "place": place,
    "token": mine,
    "reference_token": theirs,
    "margin": margin,
  }


def next_logits_of(engine: Engine) -> NextLogits:
  """Computes the target's logits in one pass, padded to one of a few widths."""
  target = engine.decoder.target

  @jax.jit
  def run(params, tokens, last):
    cache = target.new_cache(params, 1, tokens.shape[1])
    output, _ = target.apply(params, tokens, cache, logits_at=last)
    return output.logits[0, 0].astype(jnp.float32)

  @functools.lru_cache(maxsize=16)  # several systems may differ at one place
  def next_logits(token_ids: tuple[int, ...]) -> np.ndarray:
    width = max(_MIN_WIDTH, 1 << (len(token_ids) - 1).bit_length())
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(token_ids)] = token_ids
    last = np.array([[len(token_ids) - 1]], np.int32)
    with engine.on_mesh():
      return np.asarray(run(engine.params.target, tokens, last))

  return next_logits
