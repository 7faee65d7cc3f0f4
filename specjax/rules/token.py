"""Token-by-token verification of a single path (Leviathan; Chen, 2023).

Drafted token x_i, with draft law p_i and target law q_i, is accepted with
probability `a_i = min(1, q_i(x_i) / p_i(x_i))`, in order, until one is
rejected:

  P(node n is the deepest) = a_1 .. a_n (1 - a_{n+1}),

and the next token follows `norm([q_{n+1} - p_{n+1}]_+)`, or the target's law
after the last drafted token. Lossless: `min(p, q) + [q - p]_+ = q` at every
position (Leviathan et al., ICML 2023, Appendix A.1; Chen et al., 2023, Theorem
1).
"""

import jax.numpy as jnp
from jax import Array

from specjax import laws
from specjax.rules import checks
from specjax.siblings import Siblings
from specjax.tree import Tree, take_node
from specjax.types import Draft, Rule, Verification


def path_laws(siblings: Siblings, draft: Draft) -> Array:
  """The law each token of a single path was drawn from, `f32[B, N + 1, V]`.

  Row n is about the token after node n, and all -inf after the last.
  """
  no_elders = jnp.zeros((*draft.tokens.shape, 0), jnp.int32)
  return siblings.child(draft.log_probs, no_elders, 1)


def verify(
  tree: Tree, siblings: Siblings, draft: Draft, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  del tree
  draft_laws = path_laws(siblings, draft)
  drafted = draft.tokens[:, 1:]  # [B, N]
  accept = laws.acceptance(
    laws.token_log_prob(target_log_probs[:, :-1], drafted),
    laws.token_log_prob(draft_laws[:, :-1], drafted),
  )  # [B, N]
  ones = jnp.ones_like(target_log_probs[:, :1, 0])
  reach = jnp.cumprod(jnp.concatenate([ones, accept], 1), axis=1)  # [B, N + 1]
  stop = jnp.concatenate([1 - accept, ones], axis=1)

  def next_log_probs(node):
    return laws.residual(
      take_node(target_log_probs, node), take_node(draft_laws, node)
    )

  return Verification(node_probs=reach * stop, next_log_probs=next_log_probs)


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless the tree is a single path."""
  del siblings
  checks.single_path("token", tree)


RULE = Rule(name="token", verify=verify, lossless=True, check=check)
