"""Traversal verification: block verification on a tree, from the leaves up.

Weng et al. (NeurIPS 2025), with the update derived here. A node v owes the
target a mass w_v (1 at the root); its children, drawn from d_v given their
previous siblings, should deliver `min(w_v q_v, d_v)`. In sampling order,

  child x starts with  w_x = min(1, w_v q_v(x) / d_v(x)),
  and once its whole subtree has been rejected,
  S = sum [w_v q_v - d_v]_+,  q_v <- norm([w_v q_v - d_v]_+),
  w_v <- S / (S + 1 - w_v)                               (0 / 0 counts as 0).

A node is tested after all its children, and passes with probability w_v; then
it is the deepest accepted node and the next token follows q_v. Children deliver
`w_v - S` and are rejected with probability `S + 1 - w_v`, so the update is the
remaining debt given the rejection. On a chain this is block verification.
Lossless for any siblings.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax import siblings as siblings_lib
from specjax.rules.nodewise import node_rows
from specjax.siblings import Siblings
from specjax.tree import Form, Topology, Tree, child_table, take_node
from specjax.types import Draft, Rule, Verification


class SettleFn(Protocol):
  """The debts at one node, before and after its children are tested."""

  def __call__(
    self,
    owed: Array,
    target_log_probs: Array,
    draft_log_probs: Array,
    tokens: Array,
    valid: Array,
  ) -> tuple[Array, Array, Array]:
    """Passes a node's debt on to its C children.

    Args:
      owed: `f32[]`, w_v before the children are tested.
      target_log_probs: `f32[V]`.
      draft_log_probs: `f32[C, V]`, the distribution that each child was drawn
        from.
      tokens, valid: `i32[C]`, `bool[C]`.

    Returns:
      `f32[C]`, the debts `w_x` of the children, 0 for masked ones; and, after
      they are rejected, `f32[]`, w_v, and `f32[V]`, log q_v.
    """


def verify(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  return verify_by(_settle, draft, topology, target_log_probs)


def verify_by(
  settle: SettleFn, draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """Tests every node after its subtree; its debt is its chance of passing.

  Args:
    settle: the debts at one node; each child's must be at most 1.
    draft, topology, target_log_probs: see `specjax.types.VerifyFn`.
  """
  tree = draft.tree
  if not tree.num_drafted:
    return Verification(
      node_probs=jnp.ones_like(target_log_probs[:, :, 0]),
      next_log_probs=lambda node: take_node(target_log_probs, node),
    )
  slots, valid = child_table(tree, topology)
  batch = len(draft.tokens)
  family = _Family(
    settle_one=settle,
    tree=tree,
    target=target_log_probs,
    distributions=draft.distributions(target_log_probs),
    tokens=draft.tokens,
    slots=slots,
    valid=jnp.broadcast_to(valid, (batch, *valid.shape[1:])),
  )
  # w of every node, before its children are tested, and after.
  owed = jnp.zeros_like(target_log_probs[:, :, 0]).at[:, 0].set(1)
  debts = owed, owed
  if tree.form is Form.FREE:  # one node at a time
    debts = jax.lax.fori_loop(
      0,
      tree.num_nodes,
      lambda node, debts: family.update(debts, jnp.full((batch, 1), node)),
      debts,
    )
    owed, passes = debts
    before = _tested_before(topology.ancestors[:, : tree.num_nodes])
    passes = passes.at[:, 0].set(1)
    others = jnp.where(before, 1 - passes[:, None, :], 1)
    node_probs = passes * jnp.prod(others, axis=-1)
  else:
    for level in tree.levels[:-1]:
      inner = [n for n in level if tree.children[n]]
      debts = family.update(debts, np.array(inner, np.int32))
    owed, passes = debts
    leaf = np.array([not children for children in tree.children])
    passes = jnp.where(leaf, owed, passes).at[:, 0].set(1)
    order = _post_order(tree)
    fails = jnp.cumprod(1 - passes[:, order], axis=1)
    fails = jnp.concatenate([jnp.ones_like(fails[:, :1]), fails[:, :-1]], 1)
    node_probs = (passes[:, order] * fails)[:, np.argsort(order)]

  def next_log_probs(node):
    _, _, rest = family.settle(owed, node[:, None])
    some = take_node(family.valid, node).any(axis=1, keepdims=True)
    return jnp.where(some, rest[:, 0], take_node(target_log_probs, node))

  return Verification(node_probs=node_probs, next_log_probs=next_log_probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
  """The children of all nodes, `slots: int[1 or B, N + 1, C]` where `valid`."""

  settle_one: SettleFn
  tree: Tree
  target: Array
  distributions: Array
  tokens: Array
  slots: np.ndarray | Array
  valid: Array

  def children(self, nodes: np.ndarray | Array):
    """The children of I nodes, and which are valid."""
    if isinstance(nodes, np.ndarray):
      most = max(len(self.tree.children[n]) for n in nodes)
      return self.slots[0, nodes, :most], self.valid[:, nodes, :most]
    slots = jnp.broadcast_to(self.slots, self.valid.shape)
    return node_rows(slots, nodes), node_rows(self.valid, nodes)

  def settle(self, owed: Array, nodes: np.ndarray | Array):
    """`settle_one` at I nodes, given all nodes' debts."""
    slots, valid = self.children(nodes)
    return jax.vmap(jax.vmap(self.settle_one))(
      node_rows(owed, nodes),
      node_rows(self.target, nodes),
      node_rows(self.distributions, slots),
      node_rows(self.tokens, slots),
      valid,
    )

  def update(self, debts: tuple[Array, Array], nodes: np.ndarray | Array):
    """Debts `f32[B, N + 1]` before and after tests, updated at some nodes."""
    owed, passes = debts
    given, left, _ = self.settle(owed, nodes)
    slots, valid = self.children(nodes)
    rows = np.arange(len(owed))
    owed = owed.at[rows[:, None, None], slots].add(jnp.where(valid, given, 0))
    return owed, passes.at[rows[:, None], nodes].set(left)


def _settle(owed, target_log_probs, draft_log_probs, tokens, valid):
  """Tests a node's children in turn; see the module and `SettleFn`."""

  def reject(carry, i):
    mass, owed = carry  # w_v q_v, w_v
    draft, token = jnp.exp(draft_log_probs[i]), tokens[i]
    share = distributions.share(mass[token], draft[token])
    given = jnp.where(valid[i], share, 0)
    excess = jnp.where(mass > draft, mass - draft, 0)
    total = jnp.sum(excess)
    kept = total + (1 - owed)
    excess = excess / jnp.where(kept > 0, kept, 1)
    mass = jnp.where(valid[i], excess, mass)
    owed = jnp.where(valid[i], distributions.share(total, kept), owed)
    return (mass, owed), given

  (mass, owed), given = siblings_lib.scan_siblings(
    reject, (owed * jnp.exp(target_log_probs), owed), len(tokens)
  )
  return given, owed, distributions.normalize(mass, target_log_probs)


@functools.cache
def _post_order(tree: Tree) -> np.ndarray:
  """Nodes in the order they are tested: post-order."""
  order = []

  def visit(node):
    for child in tree.children[node]:
      visit(child)
    order.append(node)

  visit(0)
  return np.array(order, np.int32)


def _tested_before(ancestors: Array | np.ndarray) -> Array:
  """`bool[B, n, m]`: true if m is tested before n, in post-order.

  Descendants of n are; of unrelated nodes the one on the earlier branch is.
  """
  nodes = ancestors.shape[1]
  beside = ancestors[:, :, None, :nodes] & ~ancestors[:, None, :, :nodes]
  branch = jnp.where(beside, jnp.arange(nodes), nodes).min(-1)  # of n, not m
  other = jnp.swapaxes(branch, 1, 2)
  below = (branch == nodes) & (other < nodes)  # n is above m
  return below | ((other < branch) & (branch < nodes))


def check(tree: Tree, siblings: Siblings) -> None:
  """Accepts any tree and any siblings."""
  del tree, siblings


RULE = Rule(name="traversal", verify=verify, lossless=True, check=check)
