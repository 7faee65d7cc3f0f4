"""Token-by-token verification of a single path (Leviathan; Chen, 2023).

In order, each drafted token x_i, with draft distribution p_i and target
distribution q_i, is accepted with probability `a_i = min(1, q_i(x_i) /
p_i(x_i))`, until one is rejected:

  P(node n is the deepest) = a_1 .. a_n (1 - a_{n+1}),

and the next token follows `norm([q_{n+1} - p_{n+1}]_+)`, or the target's
distribution after the last drafted token. Lossless: `min(p, q) + [q - p]_+ = q`
at every position (Leviathan et al., ICML 2023, Appendix A.1; Chen et al., 2023,
Theorem 1).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.rules import requirements
from specjax.siblings import Siblings
from specjax.tree import Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification


def verify(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  path = Path.of(draft, topology, target_log_probs)
  accept = distributions.acceptance(
    distributions.token_log_prob(target_log_probs[:, :-1], path.tokens),
    distributions.token_log_prob(path.distributions[:, 1:], path.tokens),
  )  # [B, N]
  accept = jnp.where(path.present, accept, 0)
  ones = jnp.ones_like(target_log_probs[:, :1, 0])
  reach = jnp.cumprod(jnp.concatenate([ones, accept], 1), axis=1)  # [B, N + 1]
  stop = jnp.concatenate([1 - accept, ones], axis=1)

  def next_log_probs(node):
    return distributions.residual(
      take_node(target_log_probs, node), path.after(node)
    )

  return Verification(node_probs=reach * stop, next_log_probs=next_log_probs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
  """A draft that is a single path, which may end early.

  Attributes:
    tokens: `i32[B, N]`, the drafted tokens.
    distributions: `f32[B, N + 1, V]`, the distribution that each node was drawn
      from.
    present: `bool[B or 1, N]`, False for masked tokens.
  """

  tokens: Array
  distributions: Array
  present: np.ndarray | Array

  @classmethod
  def of(cls, draft: Draft, topology: Topology, like: Array) -> "Path":
    """The path of a draft whose tree is a chain; see `Draft.distributions`."""
    nodes = draft.tree.num_nodes
    return cls(
      tokens=draft.tokens[:, 1:nodes],
      distributions=draft.distributions(like),
      present=topology.present[:, 1:nodes],
    )

  def after(self, node: Array) -> Array:
    """The draft's distribution after a node, `i32[B] -> f32[B, V]`.

    All -inf where there is none; the residual is then the target's
    distribution.
    """
    last = self.tokens.shape[1]
    log_probs = take_node(self.distributions, jnp.minimum(node + 1, last))
    present = jnp.pad(self.present, ((0, 0), (0, 1)))
    present = jnp.broadcast_to(present, (len(log_probs), last + 1))
    return jnp.where(
      jnp.take_along_axis(present, node[:, None], axis=1), log_probs, -jnp.inf
    )


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless the tree is a single path."""
  del siblings
  requirements.single_path("token", tree)


RULE = Rule(name="token", verify=verify, lossless=True, check=check)
