"""Typical acceptance (Medusa; Cai et al., ICML 2024): lossy.

A drafted token x is acceptable if `q(x) > min(epsilon, delta exp(-H(q)))` with
H the target's entropy. On a single path tokens are accepted until one is not
acceptable; on a tree of deterministic drafts the longest acceptable path wins,
ties going to the more probable. The next token follows q.

The distance reported is exact: on a path, TV(b p + Z q, q); on a deterministic
tree the token after an accepted inner node is deterministic, so it is `1 -
q(x)`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions, random
from specjax.rules import relaxed, requirements
from specjax.siblings import Siblings
from specjax.tree import Form, Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification


def rule(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
  """Typical acceptance with Medusa's defaults.

  Args:
    epsilon: > 0; a larger probability is always acceptable.
    delta: > 0, factor of `exp(-entropy)`.

  Raises:
    ValueError: if either is not positive.
  """
  if not (epsilon > 0 and delta > 0):
    raise ValueError(
      f"epsilon and delta must be positive, got {epsilon} and {delta}"
    )

  def acceptable(target_log_probs: Array) -> Array:  # [..., V] -> bool
    probs = jnp.exp(target_log_probs)
    each = jnp.where(probs > 0, probs * target_log_probs, 0)
    entropy = -jnp.sum(each, axis=-1, keepdims=True)
    return probs > jnp.minimum(epsilon, delta * jnp.exp(-entropy))

  path = relaxed.single_path_rule(
    "typical",
    lambda target, draft: acceptable(target).astype(target.dtype),
    relaxed.after_target,
  )

  def verify(
    draft: Draft, topology: Topology, target_log_probs: Array
  ) -> Verification:
    if draft.tree.is_chain:
      return path.verify(draft, topology, target_log_probs)
    return _verify_tree(draft, topology, target_log_probs, acceptable)

  def check(tree: Tree, siblings: Siblings) -> None:
    requirements.form("typical", tree, Form.FIXED, Form.MASKED)
    if not tree.is_chain and not siblings.deterministic:
      raise ValueError(
        "rule 'typical' verifies a single path, or a tree of deterministic "
        f"siblings ('top_k'), got a tree with siblings {siblings.name!r}"
      )

  return dataclasses.replace(path, verify=verify, check=check)


def _verify_tree(draft, topology, target_log_probs, acceptable) -> Verification:
  """The longest acceptable path of a deterministic tree."""
  tree, nodes = draft.tree, draft.tree.num_nodes
  tokens = draft.tokens[:, :nodes]
  parents = np.maximum(tree.parents, 0).astype(np.int32)
  above = target_log_probs[:, parents]  # [B, N + 1, V]
  log_prob = distributions.token_log_prob(above, tokens)  # [B, N + 1]
  passes = jnp.take_along_axis(acceptable(above), tokens[..., None], -1)[..., 0]
  passes = passes.at[:, 0].set(True) & topology.present[:, :nodes]
  path_passes = jnp.all(passes[:, None, :] | ~tree.ancestors, axis=-1)
  # By depth, then by the path's log-probability.
  below_root = tree.ancestors & (np.arange(tree.num_nodes) > 0)
  likelihood = jnp.sum(
    jnp.where(below_root, jnp.maximum(log_prob, -1e30)[:, None, :], 0), axis=-1
  )
  depth = jnp.where(path_passes, tree.depth, -1)
  longest = depth == depth.max(axis=1, keepdims=True)
  node = random.argmax(jnp.where(longest, likelihood, -jnp.inf))
  on_path = jnp.asarray(tree.ancestors)[node]  # [B, N + 1]
  # The token after an inner node of the path is deterministic.
  is_child = np.array(tree.parents) == np.arange(tree.num_nodes)[:, None]
  certain = jnp.sum(
    jnp.where(is_child & on_path[:, None, :], jnp.exp(log_prob)[:, None], 0), -1
  )
  continues = jnp.any(is_child & on_path[:, None, :], axis=-1)
  here = node[:, None] == jnp.arange(tree.num_nodes)
  return Verification(
    node_probs=here.astype(target_log_probs.dtype),
    next_log_probs=lambda n: take_node(target_log_probs, n),
    total_variation=jnp.where(continues, 1 - certain, 0),
  )
