"""Naive verification: sample from the target until a token was not drafted.

Lossless for any tree and any siblings, because the tokens are the target's own
samples; the draft's distributions are not used. With X the distinct drafted
tokens after a node, the walk goes to x in X with probability q(x), and ends at
the node with probability `1 - q(X)`; the next token then follows q restricted
to tokens not in X. K i.i.d. drafts are accepted with probability `sum(q (1 -
(1 - p)^K))`. EAGLE's and Medusa's greedy trees are verified this way.
"""

import jax.numpy as jnp
import numpy as np

from specjax import distributions
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.types import Rule


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  del draft_log_probs
  earlier = np.tri(len(tokens), k=-1, dtype=bool)  # [C, C]
  repeated = jnp.any(
    earlier & valid & (tokens[:, None] == tokens[None, :]), axis=1
  )
  target = jnp.exp(target_log_probs)
  accept = jnp.where(valid & ~repeated, target[tokens], 0)
  drafted = jnp.any(
    valid[:, None] & (tokens[:, None] == jnp.arange(len(target))), axis=0
  )
  rest = jnp.where(drafted, 0, target)
  return Decision(
    accept=accept,
    next_log_probs=distributions.normalize(rest, target_log_probs),
  )


def check(tree, siblings) -> None:
  """Accepts any tree and any siblings."""
  del tree, siblings


RULE = Rule(
  name="match",
  verify=verify_nodes(decide, needs_draft=False),
  lossless=True,
  check=check,
)
