"""Exact laws by enumeration: what a rule really outputs.

A rule flips no coins, so the law of its output is a finite sum over drafts,
nodes and next tokens. Summing it *through the shipped rule* proves losslessness
to rounding error, where sampling would miss a bias of half a percent. Models
are functions of the whole context, so an index that is off by one cannot hide.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.tree import Tree
from specjax.types import Draft, Rule, Siblings

# A law for every context: `(tokens so far) -> probabilities[V]`.
ContextLaw = Callable[[tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLaw:
  """The exact outcome of one verification round.

  Attributes:
    output: `f64[V, .., V]` with G + 1 axes: the joint law of the next G + 1
      tokens, where tokens after the emitted ones follow the target.
    expected_accepted: expected number of accepted drafted tokens.
    accepted_at_least: `f64[G + 1]`, P(at least g accepted), g = 0..G.
  """

  output: np.ndarray
  expected_accepted: float
  accepted_at_least: np.ndarray


def target_block_law(
  target: ContextLaw, *, length: int, prefix: tuple[int, ...] = (0,)
) -> np.ndarray:
  """The target's joint law of the next `length` tokens, `f64[V, .., V]`."""
  vocab = len(target(prefix))
  law = np.zeros((vocab,) * length)
  for tokens in itertools.product(range(vocab), repeat=length):
    law[tokens] = _path_prob(target, prefix, tokens)
  return law


def block_law(
  rule: Rule,
  tree: Tree,
  draft: ContextLaw,
  target: ContextLaw,
  *,
  siblings: Siblings = Siblings.IID,
  prefix: tuple[int, ...] = (0,),
  dtype=jnp.float64,
) -> BlockLaw:
  """Enumerates all drafts and sums the rule's output.

  Args:
    rule: the rule, called once on a batch of all drafts. Drafts that cannot
      be drawn are among them: they have weight 0, and must not give NaN.
    tree: the token tree; V ** N drafts must be affordable.
    draft: the law each drafted token is sampled from, given its path.
    target: the target's law.
    siblings: how siblings are drawn; IID, or DETERMINISTIC with one-hot laws.
    prefix: committed tokens, at least one.
    dtype: of the laws given to the rule; float64 needs `jax.enable_x64`.

  Returns:
    The `BlockLaw`.

  Raises:
    ValueError: if float64 is asked for but not enabled, or the siblings' law
      cannot be enumerated.
  """
  if dtype == jnp.float64 and not jax.config.jax_enable_x64:
    raise ValueError("float64 laws need jax.enable_x64(True)")
  if siblings not in (Siblings.IID, Siblings.DETERMINISTIC):
    raise ValueError(f"cannot enumerate siblings {siblings}")
  rule.check(tree, siblings)
  vocab, nodes = len(target(prefix)), tree.num_nodes
  drafts, probs = _all_drafts(tree, draft, prefix, vocab)
  rows = len(drafts)
  leaves = np.array([not c for c in tree.children])
  draft_laws = np.zeros((rows, nodes, vocab))
  target_laws = np.zeros((rows, nodes, vocab))
  for r, tokens in enumerate(drafts):
    for node in range(nodes):
      context = prefix + _path_tokens(tree, tokens, node)
      target_laws[r, node] = target(context)
      if not leaves[node]:
        draft_laws[r, node] = draft(context)
  with np.errstate(divide="ignore"):
    batch = Draft(
      tokens=jnp.asarray([(prefix[-1], *d) for d in drafts], jnp.int32),
      log_probs=jnp.asarray(np.log(draft_laws), dtype),
    )
    target_log_probs = jnp.asarray(np.log(target_laws), dtype)
  node_probs, next_laws = (
    np.asarray(x, np.float64)
    for x in _evaluate(rule, tree, batch, target_log_probs)
  )
  depth = tree.max_depth
  output = np.zeros((vocab,) * (depth + 1))
  at_least = np.zeros(depth + 1)
  for node in range(nodes):
    at_least[: tree.depth[node] + 1] += probs @ node_probs[:, node]
    for r, tokens in enumerate(drafts):
      weight = probs[r] * node_probs[r, node]
      if weight == 0:
        continue
      path = _path_tokens(tree, tokens, node)
      for token in np.flatnonzero(next_laws[node, r]):
        emitted = (*path, int(token))
        rest = depth + 1 - len(emitted)
        for tail in itertools.product(range(vocab), repeat=rest):
          output[(*emitted, *tail)] += (
            weight
            * next_laws[node, r, token]
            * _path_prob(target, prefix + emitted, tail)
          )
  return BlockLaw(
    output=output,
    expected_accepted=float(at_least[1:].sum()),
    accepted_at_least=at_least,
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(rule, tree, draft, target_log_probs):
  """The rule's `node_probs [R, N + 1]` and next-token laws `[N + 1, R, V]`."""
  verification = rule.verify(tree, draft, target_log_probs)
  rows = draft.tokens.shape[0]
  after = [
    verification.next_log_probs(jnp.full((rows,), node))
    for node in range(tree.num_nodes)
  ]
  return verification.node_probs, jnp.exp(jnp.stack(after))


def _all_drafts(tree, draft, prefix, vocab):
  """Every drafted tree, impossible ones too, and its probability."""
  drafts, probs = [], []
  for tokens in itertools.product(range(vocab), repeat=tree.num_drafted):
    prob = 1.0
    for node in range(1, tree.num_nodes):
      path = _path_tokens(tree, tokens, node)
      prob *= draft(prefix + path[:-1])[path[-1]]
    drafts.append(tokens)
    probs.append(prob)
  return drafts, np.array(probs)


def _path_tokens(tree, drafted, node) -> tuple[int, ...]:
  """Drafted tokens from below the root to `node`."""
  path = tree.paths[node][1 : tree.depth[node] + 1]
  return tuple(drafted[n - 1] for n in path)


def _path_prob(law, prefix, tokens) -> float:
  prob = 1.0
  for i, token in enumerate(tokens):
    prob *= law(prefix + tuple(tokens[:i]))[token]
  return prob
