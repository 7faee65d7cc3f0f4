"""Block verification: the best valid verification of a single path.

Sun et al. (ICLR 2025). With draft distributions p, target distributions q and
path X_1..X_L,

  w_0 = 1,  w_i = min(1, w_{i-1} q(X_i | X^{i-1}) / p(X_i | X^{i-1}))
  S_i = sum_x [w_i q(x | X^i) - p(x | X^i)]_+
  h_i = S_i / (S_i + 1 - w_i)  for i < L,  h_L = w_L     (0 / 0 counts as 0)

Every i is tested on its own, and the largest that passes is the number of
accepted tokens; 0 always passes. The next token follows `norm([w_i q - p]_+)`,
or q after the whole path. P(at least i accepted | X^i) = w_i, so it never
accepts less than `token` (their Theorems 1 and 2); at temperature 0 they are
the same.
"""

import jax.numpy as jnp
from jax import Array

from specjax import distributions
from specjax.rules import requirements
from specjax.rules.token import Path
from specjax.siblings import Siblings
from specjax.tree import Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification


def verify(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  return verify_path(
    Path.of(draft, topology, target_log_probs), target_log_probs
  )


def verify_path(path: Path, target_log_probs: Array) -> Verification:
  """Block verification of one path per row.

  If a path ends early, nothing is drafted after its last token: S is w there,
  as after the whole path, and w is 0 beyond.

  Args:
    path: L drafted tokens per row.
    target_log_probs: `f32[B, L + 1, V]`.

  Returns:
    The `Verification` of that path as a chain.
  """
  drafted = path.tokens
  ratio_up = distributions.token_log_prob(target_log_probs[:, :-1], drafted)
  ratio_up = jnp.where(path.present, ratio_up, -jnp.inf)
  ratio_down = distributions.token_log_prob(path.distributions[:, 1:], drafted)
  debts = [jnp.zeros_like(target_log_probs[:, 0, 0])]  # log w_i
  for i in range(drafted.shape[1]):
    owed = debts[-1] + ratio_up[:, i]
    # Drafted tokens have p > 0; elsewhere 0 / 0 must not be NaN.
    ratio = jnp.where(owed == -jnp.inf, -jnp.inf, owed - ratio_down[:, i])
    debts.append(jnp.minimum(0, ratio))
  debt = jnp.stack(debts, axis=1)  # [B, L + 1]
  weight = jnp.exp(debt)
  # After the whole path S is w itself; the root always passes.
  passes = weight.at[:, 0].set(1)
  if drafted.shape[1] > 1:
    owed = jnp.exp(debt[:, 1:-1, None] + target_log_probs[:, 1:-1])
    offered = jnp.where(
      path.present[:, 1:, None], path.distributions[:, 2:], -jnp.inf
    )
    offered = jnp.exp(offered)
    excess = jnp.where(owed > offered, owed - offered, 0)
    total = jnp.sum(excess, axis=-1)  # S_i, [B, L - 1]
    inner = distributions.share(total, total + (1 - weight[:, 1:-1]))
    passes = passes.at[:, 1:-1].set(inner)
  # The deepest that passes.
  deeper_fails = jnp.cumprod((1 - passes)[:, ::-1], axis=1)[:, ::-1]
  deeper_fails = jnp.concatenate(
    [deeper_fails[:, 1:], jnp.ones_like(weight[:, :1])], axis=1
  )

  def next_log_probs(node):
    log_probs = take_node(target_log_probs, node)
    owed = jnp.exp(take_node(debt, node)[:, None] + log_probs)
    rest = owed - jnp.exp(path.after(node))
    return distributions.normalize(jnp.maximum(rest, 0), log_probs)

  return Verification(
    node_probs=passes * deeper_fails, next_log_probs=next_log_probs
  )


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless the tree is a single path."""
  del siblings
  requirements.single_path("block", tree)


RULE = Rule(name="block", verify=verify, lossless=True, check=check)
