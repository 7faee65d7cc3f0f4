"""Prompt look-up: the tokens after the last occurrence of the newest n-gram.

No model and no cache. The draft is a function of the committed tokens, so every
token is deterministic, and any lossless rule accepts token x with probability
q(x). Longer matches win, then more recent ones. A continuation that reaches the
end of the text repeats periodically. Without a match the last token is
repeated: a poor draft, but a valid one.
"""

import jax.numpy as jnp
from jax import Array

from specjax.drafters.shared.arguments import TOKENS
from specjax.drafters.shared.occurrences import in_text
from specjax.siblings import IID
from specjax.tree import chain
from specjax.types import Draft, Drafter


def ngram(*, tokens: int = TOKENS, max_ngram: int = 3) -> Drafter:
  """The tokens that followed the newest n-gram earlier in the text.

  Args:
    tokens: how many to draft, at least 1.
    max_ngram: longest suffix to match, at least 1.

  Returns:
    A `Drafter` without state.

  Raises:
    ValueError: if either is less than 1.
  """
  if tokens < 1 or max_ngram < 1:
    raise ValueError("tokens and max_ngram must be >= 1")
  tree = chain(tokens)

  def propose(params, state, target_cache, context):
    del params
    drafted, _ = look_up(
      context.tokens, context.length, count=tokens, max_ngram=max_ngram
    )
    draft = Draft(
      tree=tree,
      siblings=IID,
      tokens=jnp.concatenate([context.root, drafted], axis=1),
      log_probs=None,
    )
    return draft, state, target_cache

  return Drafter(
    name="ngram",
    tree=tree,
    siblings=IID,
    propose=propose,
    accepts_foreign_drafts=True,
  )


def look_up(
  tokens: Array, length: Array, *, count: int, max_ngram: int
) -> tuple[Array, Array]:
  """Continues texts from the best earlier occurrence of their suffix.

  For example `[5 6 7 8 5 6]` with count 3 gives `[7 8 5]`, matched by 2 tokens.

  Args:
    tokens: `i32[B, L]`, stale from `length` on.
    length: `i32[B]`, at least 1.
    count: tokens to propose.
    max_ngram: longest suffix to match.

  Returns:
    `i32[B, count]`, and how many tokens before them matched, `i32[B]`.
  """
  found = in_text(tokens, length, count=1, depth=count, max_match=max_ngram)
  newest = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
  followers = jnp.where(found.match > 0, found.tokens[:, 0], newest)
  return followers, found.match[:, 0]
