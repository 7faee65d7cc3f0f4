"""Prompt look-up: the tokens after the last occurrence of the newest n-gram.

No model and no cache. The proposal is a function of the committed tokens, so
every token is certain, and any lossless rule accepts token x with probability
q(x). Longer matches win; among equal lengths the most recent.
If the continuation runs into the end of the text it is read on periodically.
Without a match the last token is repeated: still a valid proposal, only a poor
one.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specjax.drafters.shared.arguments import TOKENS
from specjax.siblings import IID
from specjax.tree import chain
from specjax.types import Draft, Drafter, EmptyRoundPolicy


def ngram(*, tokens: int = TOKENS, max_ngram: int = 3) -> Drafter:
  """The tokens after an earlier occurrence of the text's last ones.

  Args:
    tokens: drafted, at least 1.
    max_ngram: longest suffix looked for, at least 1.

  Returns:
    A `Drafter` without state.

  Raises:
    ValueError: if one of them is less than 1.
  """
  if tokens < 1 or max_ngram < 1:
    raise ValueError("tokens and max_ngram must be >= 1")
  tree = chain(tokens)

  def propose(params, state, target_cache, context):
    del params
    drafted, _ = jax.vmap(
      lambda text, length: look_up(
        text, length, count=tokens, max_ngram=max_ngram
      )
    )(context.tokens, context.length)
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
    empty_rounds=EmptyRoundPolicy.COMMIT,
  )


def look_up(
  tokens: Array, length: Array, *, count: int, max_ngram: int
) -> tuple[Array, Array]:
  """Continues a text from the best earlier occurrence of its suffix.

  For example `[5 6 7 8 5 6]` with count 3 gives `[7 8 5]`, matched by 2 tokens.

  Args:
    tokens: `i32[L]`, stale from `length` on.
    length: `i32[]`, at least 1.
    count: tokens to propose.
    max_ngram: longest suffix to match.

  Returns:
    `i32[count]`, and how many tokens before them matched, `i32[]`.
  """
  last = length - 1
  place = jnp.arange(tokens.shape[0])
  matched = jnp.zeros_like(place)  # tokens matched, ending at each place
  alive = place < last
  for back in range(max_ngram):
    earlier = jnp.roll(tokens, back)  # earlier[i] == tokens[i - back]
    wanted = tokens[jnp.maximum(last - back, 0)]
    alive &= (place >= back) & (last >= back) & (earlier == wanted)
    matched += alive
  best = jnp.argmax(matched * tokens.shape[0] + place * (matched > 0))
  most = jnp.max(matched)
  best = jnp.where(most > 0, best, last - 1)
  period = last - best  # >= 1
  ahead = best + 1 + jnp.arange(count) % period
  return tokens[jnp.clip(ahead, 0, last)], most
