"""The optimal verification of greedy drafts (Hu et al., ICLR 2025).

The first k - 1 candidates T are the most probable tokens; the last, X, is drawn
from d = norm(p without T). X is accepted with probability `min(1, q(X) /
d(X))`; otherwise y is drawn from `norm([q - d]_+)` over the whole vocabulary,
and counts as accepted if it is in T. The rule accepts with probability `q(T) +
sum_{x not in T} min(q, d)`, the optimum for this draft distribution.
"""

import jax.numpy as jnp

from specjax import distributions
from specjax.rules import requirements
from specjax.rules.nodewise import Decision, decide_single, verify_nodes
from specjax.siblings import GREEDY
from specjax.types import Rule


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  if len(tokens) == 1:
    return decide_single(target_log_probs, draft_log_probs, tokens, valid)
  count = jnp.sum(valid)
  index = jnp.arange(len(tokens))
  is_top = valid & (index < count - 1)
  last = tokens[jnp.maximum(count - 1, 0)]
  draft = draft_log_probs[jnp.maximum(count - 1, 0)]
  test = distributions.acceptance(target_log_probs[last], draft[last])
  rest = jnp.exp(distributions.residual(target_log_probs, draft))
  by_rest = jnp.where(is_top, (1 - test) * rest[tokens], 0)
  listed = jnp.any(
    is_top[:, None] & (tokens[:, None] == jnp.arange(len(rest))), axis=0
  )
  return Decision(
    accept=jnp.where(valid & (index == count - 1), test, by_rest),
    next_log_probs=distributions.normalize(
      jnp.where(listed, 0, rest), target_log_probs
    ),
  )


def check(tree, siblings) -> None:
  """Raises ValueError unless siblings are greedy drafts."""
  requirements.drawn("greedy_draft", tree, siblings, GREEDY)


RULE = Rule(
  name="greedy_draft", verify=verify_nodes(decide), lossless=True, check=check
)
