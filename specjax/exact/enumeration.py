"""Exact output law of a rule, by enumeration of drafts.

A rule draws nothing, so the law of its output is a finite sum over drafts,
nodes and next tokens. Summing it *through the shipped rule* shows losslessness
on these models to rounding error, where sampling would miss a bias of half a
percent. Models are functions of the whole context, so off-by-one indices cannot
hide.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.siblings import IID, Siblings, log_probs_of_tokens
from specjax.tree import Tree
from specjax.types import Draft, Rule

# A law for every context: `(tokens so far) -> probabilities[V]`.
ContextLaw = Callable[[tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLaw:
  """The exact outcome of one verification round.

  Attributes:
    output: `f64[V, .., V]` with G + 1 axes: the joint law of the next G + 1
      tokens, where tokens after the emitted ones follow the target.
    emitted: G + 1 arrays; `emitted[g]`, `f64[V, .., V]` with g + 1 axes, is the
      mass of rounds that accept g drafted tokens, by the g + 1 emitted tokens.
    expected_accepted: expected number of accepted drafted tokens.
    accepted_at_least: `f64[G + 1]`, P(at least g accepted), g = 0..G.
    expected_rejections: probability that the round ends with a residual token,
      after a rejection, not with a bonus token.
    total_variation: the distance of the first token's law from the target's.
    reported_total_variation: that distance as the rule reports it, averaged
      over drafts; None if it reports none.
  """

  output: np.ndarray
  emitted: tuple[np.ndarray, ...]
  expected_accepted: float
  accepted_at_least: np.ndarray
  expected_rejections: float
  total_variation: float
  reported_total_variation: float | None


def target_block_law(
  target: ContextLaw, *, length: int, prefix: tuple[int, ...] = (0,)
) -> np.ndarray:
  """The target's joint law of the next `length` tokens, `f64[V, .., V]`."""
  law = np.ones(())
  for depth in range(length):
    law = law[..., None] * _next_laws(target, prefix, depth)
  return law


def block_law(
  rule: Rule,
  tree: Tree,
  draft: ContextLaw,
  target: ContextLaw,
  *,
  siblings: Siblings = IID,
  prefix: tuple[int, ...] = (0,),
  dtype=jnp.float64,
) -> BlockLaw:
  """Enumerates all drafts and sums the rule's output.

  Args:
    rule: the rule, called once on a batch of all drafts. These include
      impossible ones, which have weight 0 and must not give NaN.
    tree: the token tree; V ** N drafts must be affordable.
    draft: the draft model's law after each context, from which children are
      drawn according to `siblings`.
    target: the target's law after each context.
    siblings: how the children of a node are drawn; without noise.
    prefix: committed tokens, at least one.
    dtype: of the laws given to the rule; float64 needs `jax.enable_x64`.

  Returns:
    The `BlockLaw`.

  Raises:
    ValueError: if float64 is requested but not enabled, laws are invalid or of
      different lengths, or rule, tree and siblings are incompatible.
    TypeError: if the rule is not a `Rule`.
  """
  if not isinstance(rule, Rule):
    raise TypeError(
      f"rule must be a specjax.Rule (specjax.rules.get(name)), got {rule!r}"
    )
  if dtype == jnp.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
    raise ValueError("float64 laws need jax.enable_x64(True)")
  rule.check(tree, siblings)
  if siblings.with_noise:
    raise ValueError(f"drafts with noise ({siblings.name}) are not enumerable")
  vocab, nodes, depth = len(target(prefix)), tree.num_nodes, tree.max_depth
  most = vocab if siblings.max_children is None else siblings.max_children
  if not siblings.independent and tree.max_children > min(most, vocab):
    raise ValueError(
      f"siblings {siblings.name!r} are at most {min(most, vocab)} per node for "
      f"{vocab} tokens, got a tree with {tree.max_children}"
    )
  drafts = np.array(
    list(itertools.product(range(vocab), repeat=tree.num_drafted)), np.int32
  ).reshape(vocab**tree.num_drafted, tree.num_drafted)
  tokens = np.concatenate(
    [np.full((len(drafts), 1), prefix[-1], np.int32), drafts], axis=1
  )  # [R, N + 1]
  draft_laws = np.zeros((*tokens.shape, vocab))
  target_laws = np.zeros((*tokens.shape, vocab))
  for node in range(nodes):
    below_root = tree.paths[node][1 : tree.depth[node] + 1]
    path = tuple(tokens[:, below_root].T)  # depth arrays [R]
    for law, table in ((draft, draft_laws), (target, target_laws)):
      if law is target or tree.children[node]:
        laws_here = _next_laws(law, prefix, len(path))
        _check_laws("target" if law is target else "draft", laws_here, vocab)
        table[:, node] = laws_here[path]
  with np.errstate(divide="ignore"):
    log_draft, log_target = np.log(draft_laws), np.log(target_laws)
  # Drafts are drawn from the very laws that the rule gets: rounding may decide
  # ties, and with them which children are certain.
  drawn_from = _laws_of_tokens(
    tree, siblings, jnp.asarray(tokens), jnp.asarray(log_draft, dtype)
  )
  probs = np.asarray(
    _draft_probs(jnp.asarray(tokens), drawn_from.astype(float))
  )
  batch = Draft(
    tree=tree,
    siblings=siblings,
    tokens=jnp.asarray(tokens),
    log_probs=drawn_from,
  )
  node_probs, next_laws, distance = jax.tree.map(
    lambda x: np.asarray(x, np.float64),
    _evaluate(rule, batch, jnp.asarray(log_target, dtype)),
  )
  return block_law_of(
    probs=probs,
    draft=batch,
    node_probs=node_probs,
    next_laws=next_laws,
    distance=distance,
    target=[_next_laws(target, prefix, g) for g in range(depth + 1)],
  )


def block_law_of(
  *,
  probs: np.ndarray,
  draft: Draft,
  node_probs: np.ndarray,
  next_laws: np.ndarray,
  distance: np.ndarray | None,
  target: Sequence[np.ndarray],
) -> BlockLaw:
  """Sums a rule's output over R drafts of N nodes, G deep.

  Args:
    probs: `f64[R]`, the probability of each draft.
    draft: R drafts.
    node_probs: `f64[R, N + 1]`.
    next_laws: `f64[N + 1, R, V]`, the law of the token after each node.
    distance: `f64[R, N + 1]`, as the rule reports it, or None.
    target: entry g is the target's law after g tokens, `f64[V, .., V]`.
  """
  vocab, deepest = next_laws.shape[-1], len(target) - 1
  tokens, form = np.asarray(draft.tokens), draft.topology()
  paths, depth, num_children = (
    np.broadcast_to(x, (len(tokens), *x.shape[1:]))
    for x in (form.paths, form.depth, form.num_children)
  )
  emitted = [np.zeros((vocab,) * (g + 1)) for g in range(deepest + 1)]
  rejections = 0.0
  for node in range(node_probs.shape[1]):
    weight = probs * node_probs[:, node]
    for g in range(deepest + 1):
      rows = np.flatnonzero(depth[:, node] == g)
      along = np.take_along_axis(tokens, paths[:, node], axis=1)[rows]
      np.add.at(
        emitted[g],
        tuple(along[:, 1 : g + 1].T) or (slice(None),),
        weight[rows, None] * next_laws[node, rows]
        if g
        else weight[rows] @ next_laws[node, rows],
      )
    rejections += weight @ (num_children[:, node] > 0)
  output = emitted[0]
  for g in range(1, deepest + 1):
    output = output[..., None] * target[g] + emitted[g]
  sizes = np.array([e.sum() for e in emitted])
  at_least = sizes[::-1].cumsum()[::-1]
  first = output.sum(axis=tuple(range(1, output.ndim)))
  return BlockLaw(
    output=output,
    emitted=tuple(emitted),
    expected_accepted=float(at_least[1:].sum()),
    accepted_at_least=at_least,
    expected_rejections=float(rejections),
    total_variation=float(np.abs(first - target[0]).sum() / 2),
    reported_total_variation=None
    if distance is None
    else float(probs @ np.asarray(distance)[:, 0]),
  )


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(rule, draft, target_log_probs):
  """Node probabilities, next-token laws and distances of all drafts.

  Returns:
    `[R, N + 1]`, `[N + 1, R, V]`, and `[R, N + 1]` or None.
  """
  verification = rule.verify(draft, draft.topology(), target_log_probs)
  rows = draft.tokens.shape[0]
  after = jax.lax.map(
    lambda node: verification.next_log_probs(jnp.full((rows,), node)),
    jnp.arange(draft.tree.num_nodes),
  )
  return verification.node_probs, jnp.exp(after), verification.total_variation


_laws_of_tokens = jax.jit(log_probs_of_tokens, static_argnums=(0, 1))


@jax.jit
def _draft_probs(tokens, log_probs):
  """The probability of each drafted tree, `f64[R]`."""
  each = jnp.take_along_axis(log_probs[:, 1:], tokens[:, 1:, None], axis=-1)
  return jnp.exp(jnp.sum(each[..., 0], axis=1))


def _check_laws(name: str, laws: np.ndarray, vocab: int) -> None:
  """Raises ValueError unless the rows are laws over V tokens."""
  if laws.shape[-1] != vocab:
    raise ValueError(
      f"the {name}'s laws must be over {vocab} tokens, as the target's first, "
      f"got {laws.shape[-1]}"
    )
  off = np.abs(laws.sum(-1) - 1).max()
  if (laws < 0).any() or not off <= 1e-6:
    raise ValueError(
      f"the {name}'s laws must be probabilities that sum to 1; one is off by "
      f"{off:g}"
    )


def _next_laws(law: ContextLaw, prefix, depth: int) -> np.ndarray:
  """The law after every continuation of `depth` tokens, `f64[V, .., V]`."""
  vocab = len(law(prefix))
  laws = [
    law(prefix + tokens)
    for tokens in itertools.product(range(vocab), repeat=depth)
  ]
  return np.array(laws, float).reshape((*(vocab,) * depth, -1))
