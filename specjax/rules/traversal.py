"""Traversal verification: block verification on a tree, from the leaves up.

Weng et al. (NeurIPS 2025), with the update derived here. A node v owes the
target a mass w_v (1 at the root); its children, drawn from d_v given their
elders, are to deliver `min(w_v q_v, d_v)`. In sampling order,

  child x starts with  w_x = min(1, w_v q_v(x) / d_v(x)),
  and once its whole subtree has been rejected,
  S = sum [w_v q_v - d_v]_+,  q_v <- norm([w_v q_v - d_v]_+),
  w_v <- S / (S + 1 - w_v)                               (0 / 0 counts as 0).

A node is tested, and passes with probability w_v, after all its children; if it
passes, it is the deepest accepted node and the next token follows q_v. The
children deliver `w_v - S`, a rejection has probability `S + 1 - w_v`, hence the
update: it is the debt that is left, given the rejection. On a chain this is
block verification. Lossless for any siblings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax import siblings as siblings_lib
from specjax.rules import nodewise
from specjax.siblings import Siblings
from specjax.tree import Tree, take_node
from specjax.types import Draft, Rule, Verification


def verify(
  tree: Tree, siblings: Siblings, draft: Draft, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  slots, filled = _child_table(tree)
  candidates = draft.tokens[:, slots]  # [B, N + 1, C]
  settle = jax.vmap(functools.partial(_settle, siblings), (0, 0, 0, 0, 0))
  owed = jnp.ones_like(target_log_probs[:, :, 0])  # w of unvisited nodes
  passes = owed
  for level in tree.levels[:-1]:
    here = np.array([n for n in level if tree.children[n]], np.int32)
    width = max(len(tree.children[n]) for n in here)
    there = jnp.broadcast_to(
      filled[here, :width], (len(owed), len(here), width)
    )
    given, left, _ = jax.vmap(settle, 1, 1)(
      owed[:, here],
      nodewise.node_rows(target_log_probs, here),
      nodewise.node_rows(draft.log_probs, here),
      candidates[:, here, :width],
      there,
    )
    passes = passes.at[:, here].set(left)
    below = np.array([c for n in here for c in tree.children[n]], np.int32)
    above = np.array(tree.parents, np.int32)[below]
    parent = np.searchsorted(here, above).astype(np.int32)
    start = given[:, parent, tree.rank[below]]
    owed, passes = owed.at[:, below].set(start), passes.at[:, below].set(start)
  passes = passes.at[:, 0].set(1)
  order = _post_order(tree)
  fails = jnp.cumprod(1 - passes[:, order], axis=1)
  before = jnp.concatenate([jnp.ones_like(fails[:, :1]), fails[:, :-1]], axis=1)
  node_probs = (passes[:, order] * before)[
    :, np.argsort(order).astype(np.int32)
  ]

  def next_log_probs(node):
    law = take_node(target_log_probs, node)
    if not tree.num_drafted:
      return law
    there = jnp.asarray(filled)[node]
    _, _, rest = settle(
      take_node(owed, node),
      law,
      take_node(draft.log_probs, node),
      take_node(candidates, node),
      there,
    )
    return jnp.where(there.any(axis=1, keepdims=True), rest, law)

  return Verification(node_probs=node_probs, next_log_probs=next_log_probs)


def _settle(siblings, owed, target_log_probs, draft_log_probs, tokens, valid):
  """One node's debts: `w_x` of its C children, `w_v` and log q_v after them.

  Args:
    siblings: how the children were drawn.
    owed: `f32[]`, w_v before them.
    target_log_probs, draft_log_probs: `f32[V]`.
    tokens, valid: `i32[C]`, `bool[C]`.

  Returns:
    `f32[C]`, `f32[]`, `f32[V]`.
  """

  def reject(carry, i):
    mass, owed = carry  # w_v q_v, w_v
    elders, token = siblings_lib.elders(tokens, i), tokens[i]
    law = jnp.exp(siblings.child(draft_log_probs, elders, jnp.sum(valid)))
    given = laws.share(mass[token], law[token])
    excess = jnp.where(mass > law, mass - law, 0)
    total = jnp.sum(excess)
    kept = total + (1 - owed)
    excess = excess / jnp.where(kept > 0, kept, 1)
    mass = jnp.where(valid[i], excess, mass)
    owed = jnp.where(valid[i], laws.share(total, kept), owed)
    return (mass, owed), given

  (mass, owed), given = siblings_lib.in_turn(
    reject, (owed * jnp.exp(target_log_probs), owed), len(tokens)
  )
  return given, owed, laws.normalize(mass, target_log_probs)


@functools.cache
def _child_table(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
  """Children of each node, `int[N + 1, C]`, and which entries are real."""
  width = max(tree.max_children, 1)
  pad = lambda children: [*children, *[0] * (width - len(children))]
  slots = np.array([pad(c) for c in tree.children], np.int32)
  counts = np.array([len(c) for c in tree.children])
  return slots, np.arange(width) < counts[:, None]


@functools.cache
def _post_order(tree: Tree) -> np.ndarray:
  """Nodes in the order they are tested: children first, eldest first."""
  order = []

  def visit(node):
    for child in tree.children[node]:
      visit(child)
    order.append(node)

  visit(0)
  return np.array(order, np.int32)


def check(tree: Tree, siblings: Siblings) -> None:
  """Any tree and any siblings will do."""
  del tree, siblings


RULE = Rule(name="traversal", verify=verify, lossless=True, check=check)
