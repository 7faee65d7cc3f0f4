"""Acceptance at given rates, to measure speed: not a way to decode.

How fast would decoding be with a head that does not exist yet? A round costs
the same whatever it emits, so accept drafted tokens at random at given rates,
and time the rounds. vLLM and tpu-inference have such a switch; their rates are
unconditional, so divide each by the one before. The text is meaningless:
drafted tokens are accepted whatever they are, and a rejection is followed by a
token of the target's. The reported distance from the target's distribution is
exact. On a tree only each node's first child can be accepted.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.siblings import Siblings
from specjax.tree import Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification


def rule(acceptance: float = 0.8, *deeper: float) -> Rule:
  """Accepts at given rates, whatever the models predict; for timing only.

  Args:
    acceptance: the probability of accepting a path's first token, in [0, 1].
    *deeper: those of later tokens, each given that the one before was accepted;
      the last rate holds for all depths beyond.

  Raises:
    ValueError: for rates outside [0, 1].
  """
  rates = (acceptance, *deeper)
  if not all(0 <= rate <= 1 for rate in rates):
    raise ValueError(f"acceptance rates must be in [0, 1], got {rates}")

  def verify(
    draft: Draft, topology: Topology, target_log_probs: Array
  ) -> Verification:
    tree = draft.tree
    nodes, depth = tree.num_nodes, tree.max_depth
    last = [rates[min(i, len(rates) - 1)] for i in range(depth + 1)]
    accept = jnp.array(last, target_log_probs.dtype)  # of depth i + 1
    survival = jnp.concatenate(
      [jnp.ones(1, accept.dtype), jnp.cumprod(accept[:depth])]
    )
    present = jnp.asarray(topology.present)[:, :nodes]
    first = (jnp.asarray(topology.rank) == 0) & present
    rows = np.arange(len(first))[:, None, None]
    on_path = jnp.all(first[rows, topology.paths], axis=-1)
    at = jnp.asarray(topology.depth)[:, :nodes]
    continues = jnp.where(topology.num_children > 0, accept[at], 0)
    probs = jnp.where(on_path, survival[at] * (1 - continues), 0)
    shape = len(draft.tokens), nodes
    parents = jnp.broadcast_to(topology.parents[:, :nodes], shape)
    above = jnp.take_along_axis(target_log_probs, parents[..., None], axis=1)
    away = jnp.abs(
      jnp.exp(draft.distributions(target_log_probs)) - jnp.exp(above)
    )
    away = jnp.where(first & (np.arange(nodes) > 0), away.sum(-1) / 2, 0)
    of_child = jnp.zeros(shape, away.dtype)
    of_child = of_child.at[np.arange(len(parents))[:, None], parents].add(away)
    return Verification(
      node_probs=jnp.broadcast_to(probs, shape),
      next_log_probs=lambda node: take_node(target_log_probs, node),
      total_variation=continues * of_child,
    )

  def check(tree: Tree, siblings: Siblings) -> None:
    """Accepts any tree."""

  shown = ", ".join(f"{rate:g}" for rate in rates)
  return Rule(
    name=f"synthetic({shown})", verify=verify, lossless=False, check=check
  )
