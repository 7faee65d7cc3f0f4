"""Draw from the target, go on while the token was drafted: the naive baseline.

Lossless for any tree and however the siblings were drawn, because the tokens
are the target's own draws; the draft's laws are not looked at. With X the
distinct drafted tokens after a node, the walk goes to x in X with probability
q(x), and ends there with probability `1 - q(X)`, the next token then following
q restricted to the tokens not in X. This is also how EAGLE's and Medusa's
greedy trees are verified, and one-hot (n-gram) drafts.

Siblings may carry equal tokens (independent paths); equal paths count once, as
their first node (`specjax.tree.first_equal_node`).
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.tree import Tree, first_equal_node, take_node
from specjax.types import Draft, Rule, Siblings, Verification


def verify(tree: Tree, draft: Draft, target_log_probs: Array) -> Verification:
  """See `specjax.types.VerifyFn`."""
  tokens = draft.tokens  # [B, N + 1]
  nodes = np.arange(tree.num_nodes)
  above = np.maximum(tree.parents, 0)
  first = first_equal_node(tree, tokens)  # [B, N + 1]
  parent = first[:, above]  # [B, N + 1], a representative
  counts = (first == nodes) & (nodes > 0)  # [B, N + 1], once per hypothesis
  step = jnp.exp(laws.token_log_prob(target_log_probs[:, above], tokens))
  step = jnp.where(counts, step, 0)  # [B, N + 1]
  is_child = counts[:, None, :] & (
    parent[:, None, :] == nodes[:, None]
  )  # [B, parent, child]
  onward = jnp.sum(jnp.where(is_child, step[:, None, :], 0), axis=-1)
  reach = [jnp.ones_like(step[:, 0])]
  for node in range(1, tree.num_nodes):
    so_far = jnp.stack(reach, axis=1)  # [B, node]
    reach.append(step[:, node] * take_node(so_far, parent[:, node]))
  node_probs = jnp.stack(reach, axis=1) * jnp.maximum(1 - onward, 0)

  def next_log_probs(node):
    law = take_node(target_log_probs, node)  # [B, V]
    children = take_node(is_child, node)  # [B, N + 1]
    vocab = jnp.arange(law.shape[-1])
    drafted = jnp.any(
      children[:, :, None] & (tokens[:, :, None] == vocab), axis=1
    )
    return laws.normalize(jnp.where(drafted, 0, jnp.exp(law)), law)

  return Verification(node_probs=node_probs, next_log_probs=next_log_probs)


def check(tree: Tree, siblings: Siblings) -> None:
  """Any tree and any siblings will do."""
  del tree, siblings


RULE = Rule(name="match", verify=verify, lossless=True, check=check)
