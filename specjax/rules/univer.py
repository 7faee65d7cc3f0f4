"""Conditional optimal transport, from the leaves up: UniVer, reconstructed.

After UniVer (2026), of which the abstract and a summary were read and not the
algorithm: this is a reconstruction by the abstract's words, optimal transport
at a node for the target scaled by the prefix's acceptance probability, and a
decision in post-order.

The tree is walked as in `traversal`. A node that owes w hands its children X,
drawn together, the optimal plan for the *scaled* target `w q`: child j is to be
accepted with probability `c_j(X)`, such that `E sum_j c_j = w - S` is as large
as it can be. Subtrees are tested in turn, and the node after them,

  child j owes  w_j = c_j / (1 - sum_{i<j} c_i),
  the node then  S / (S + 1 - w),  S = sum [w q - E c]_+    (0 / 0 counts as 0),

and the next token follows `norm([w q - E c]_+)`. Lossless, because a subtree is
accepted with exactly what it owes, given the family it is in, and subtrees of a
family are independent. It is the optimum family by family, and not that of the
whole tree. The plans are those of two rules with q scaled:

- i.i.d. siblings: `transport`. One is selected, with law a, `c = P(selected)
  min(1, w q / a)`.
- greedy drafts: `greedy_draft`. The last, X ~ d, gets `min(1, w q(X) / d(X))`,
  and a certain one y `(1 - c(X)) w q(y) / R`, `R = 1 - sum min(w q, d)`.

With one child a node it is block verification. To differentiation the levels
and slopes of `transport` are constants.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specjax import laws
from specjax.rules import requirements, transport, traversal
from specjax.siblings import GREEDY, Siblings
from specjax.tree import Tree
from specjax.types import Draft, Rule, Verification

# `(w q f32[V], laws f32[C, V], tokens i32[C], valid bool[C]) -> c f32[C], E c`,
# where E c is `f32[V]`, the mass that each token is accepted with over drafts.
# It may be more than w q, by which it is then cut.
_PlanFn = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def verify(draft: Draft, target_log_probs: Array) -> Verification:
  """See `specjax.types.VerifyFn`."""
  plan = _independent if draft.siblings.independent else _greedy
  return traversal.verify_by(
    functools.partial(_settle, plan), draft, target_log_probs
  )


def _settle(
  plan: _PlanFn,
  owed: Array,
  target_log_probs: Array,
  draft_log_probs: Array,
  tokens: Array,
  valid: Array,
) -> tuple[Array, Array, Array]:
  """See `specjax.rules.traversal.SettleFn`."""
  wanted = owed * jnp.exp(target_log_probs)
  chosen, offered = plan(wanted, draft_log_probs, tokens, valid)
  chosen = jnp.where(valid, chosen, 0)
  before = jnp.cumsum(chosen) - chosen
  excess = jnp.maximum(wanted - jnp.where(valid.any(), offered, 0), 0)
  total = jnp.sum(excess)
  return (
    laws.share(chosen, jnp.maximum(1 - before, 0)),
    laws.share(total, total + (1 - owed)),
    laws.normalize(excess, target_log_probs),
  )


def _independent(wanted, draft_log_probs, tokens, valid):
  """The plan of `transport` for a scaled target; equal tokens share alike."""
  drafted = draft_log_probs[jnp.argmax(valid)]  # of a child that is there
  law, picked = jnp.exp(drafted), valid.astype(wanted.dtype)
  if len(tokens) > 1:
    some = wanted > 0
    scaled = jnp.where(some, jnp.log(jnp.where(some, wanted, 1)), -jnp.inf)
    constant = jax.lax.stop_gradient((scaled, drafted))
    classes = transport.classes_of(*constant, len(tokens))
    levels, slopes = transport.selection(
      classes.draft, classes.target, jnp.sum(valid), most=len(tokens)
    )
    law = law * slopes[classes.ids]
    picked = transport.pick_probs(levels, classes.ids[tokens], valid)
  return picked * laws.share(wanted[tokens], law[tokens]), law


def _greedy(wanted, draft_log_probs, tokens, valid):
  """The plan of `greedy_draft` for a scaled target."""
  last = jnp.maximum(jnp.sum(valid) - 1, 0)
  index = jnp.arange(len(tokens))
  law = jnp.exp(draft_log_probs[last])
  test = laws.share(wanted[tokens[last]], law[tokens[last]])
  left = 1 - jnp.sum(jnp.minimum(wanted, law))
  shares = (1 - test) * laws.share(wanted[tokens], left)
  certain = (valid & (index < last))[:, None] & (
    tokens[:, None] == jnp.arange(len(law))
  )
  offered = jnp.where(certain.any(axis=0), wanted, law)
  return jnp.where(index == last, test, shares), offered


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless siblings are i.i.d. or greedy drafts."""
  if siblings.independent or not tree.num_drafted:
    requirements.independent("univer", tree, siblings)
  elif siblings is GREEDY:
    requirements.drawn("univer", tree, siblings, GREEDY)
  else:
    raise ValueError(
      "rule 'univer' needs siblings='iid' or siblings='greedy', got "
      f"siblings={siblings.name!r}"
    )


RULE = Rule(name="univer", verify=verify, lossless=True, check=check)
