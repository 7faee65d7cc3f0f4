"""Random instances of one position, and a rule's acceptance on them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.types import Draft

# The example that theory and literature use throughout.
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])

_LEAST = 64


def random_laws(count, vocab, *, seed, zeros=False):
  """Draft and target laws, `f64[count, V]` each; q is near p, or far."""
  rng = np.random.default_rng(seed)
  p = rng.dirichlet(np.ones(vocab), count)
  bend = rng.uniform(0.3, 1.5, (count, 1))
  q = p**bend * np.exp(rng.normal(size=p.shape) * rng.uniform(0, 2, (count, 1)))
  if zeros:
    rows = np.arange(count)
    for law in (p, q):
      law[rows, rng.integers(vocab, size=count)] = 0
  return p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)


def log(law):
  with np.errstate(divide="ignore"):
    return jnp.asarray(np.log(law))


def make_draft(tree, siblings, tokens, model_log_probs, noise=None):
  """A draft whose tokens were drawn from a model's laws after each node."""
  return Draft(
    tree=tree,
    siblings=siblings,
    tokens=tokens,
    log_probs=siblings_lib.log_probs_of_tokens(
      tree, siblings, tokens, model_log_probs
    ),
    noise=noise,
  )


def first_shape(rule, shapes):
  """The first tree and siblings, of some, that a rule is for."""
  for tree, siblings in shapes:
    if siblings.with_noise == rule.with_noise:
      try:
        rule.check(tree, siblings)
      except ValueError:
        continue
      return tree, siblings
  raise AssertionError(rule.name)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _verify(rule, tree, siblings, tokens, model_log_probs, target_log_probs):
  draft = make_draft(tree, siblings, tokens, model_log_probs)
  verification = rule.verify(draft, draft.topology(), target_log_probs)
  root = jnp.zeros(len(draft.tokens), jnp.int32)
  return verification.node_probs, jnp.exp(verification.next_log_probs(root))


def at_one_position(rule, p, q, count, siblings=siblings_lib.IID):
  """Acceptance and output law of a rule for `count` drafts of one token.

  Args:
    rule: the rule.
    p, q: `f64[I, V]`.
    count: K.
    siblings: how they are drawn.

  Returns:
    `f64[I]` and `f64[I, V]`; exact.
  """
  instances, vocab = p.shape
  if instances < _LEAST and vocab**count <= _LEAST:  # one program for all
    more = [(0, _LEAST - instances), (0, 0)]
    padded = (np.pad(law, more, mode="edge") for law in (p, q))
    padded_laws = at_one_position(rule, *padded, count, siblings)
    return tuple(x[:instances] for x in padded_laws)
  drafts = np.array(list(itertools.product(range(vocab), repeat=count)))
  size = len(drafts)
  tree = tree_lib.paths(1, count)
  rule.check(tree, siblings)
  tokens = np.tile(np.pad(drafts, ((0, 0), (1, 0))), (instances, 1))
  rows = np.repeat(log(p), size, axis=0)
  laws = np.full((len(rows), count + 1, vocab), -np.inf)
  laws[:, 0] = rows
  target = np.zeros_like(laws)
  target[:, 0] = np.repeat(log(q), size, axis=0)
  probs = np.ones(len(rows))
  for i in range(count):
    law = siblings.child(
      jnp.asarray(rows), jnp.asarray(tokens[:, 1 : 1 + i], jnp.int32), count
    )
    probs *= np.exp(np.asarray(law))[np.arange(len(rows)), tokens[:, 1 + i]]
  node_probs, after = map(
    np.asarray,
    _verify(
      rule,
      tree,
      siblings,
      jnp.asarray(tokens, jnp.int32),
      jnp.asarray(laws),
      jnp.asarray(target),
    ),
  )
  assert np.isfinite(node_probs).all()
  assert np.isfinite(after).all()
  output = (probs * node_probs[:, 0])[:, None] * after
  for node in range(1, count + 1):
    output[np.arange(len(rows)), tokens[:, node]] += probs * node_probs[:, node]
  accepted = probs * node_probs[:, 1:].sum(1)
  return (
    accepted.reshape(instances, size).sum(1),
    output.reshape(instances, size, vocab).sum(1),
  )
