"""Block verification: the best valid verification of a single path.

Sun et al. (ICLR 2025). With draft laws p, target laws q and path X_1..X_L,

  w_0 = 1,  w_i = min(1, w_{i-1} q(X_i | X^{i-1}) / p(X_i | X^{i-1}))
  S_i = sum_x [w_i q(x | X^i) - p(x | X^i)]_+
  h_i = S_i / (S_i + 1 - w_i)  for i < L,  h_L = w_L     (0 / 0 counts as 0)

Every i is tested on its own, and the largest that passes is the number of
accepted tokens; 0 needs no test. The next token follows `norm([w_i q - p]_+)`,
or q after the whole path. P(at least i accepted | X^i) = w_i, so it never
accepts less than `token` (their Theorems 1 and 2); at temperature 0 they are
the same.
"""

import jax.numpy as jnp
from jax import Array

from specjax import laws
from specjax.rules import checks
from specjax.rules.token import path_laws
from specjax.siblings import Siblings
from specjax.tree import Tree, take_node
from specjax.types import Draft, Rule, Verification


def verify(
  tree: Tree, siblings: Siblings, draft: Draft, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  del tree
  return verify_path(draft.tokens, path_laws(siblings, draft), target_log_probs)


def verify_path(
  tokens: Array, draft_log_probs: Array, target_log_probs: Array
) -> Verification:
  """Block verification of one path a row.

  Args:
    tokens: `i32[B, L + 1]`, the root and the path.
    draft_log_probs: `f32[B, L + 1, V]`, the law of the token after each; the
      last row is all -inf.
    target_log_probs: `f32[B, L + 1, V]`.

  Returns:
    The `Verification` of that path as a chain.
  """
  drafted = tokens[:, 1:]
  ratio_up = laws.token_log_prob(target_log_probs[:, :-1], drafted)
  ratio_down = laws.token_log_prob(draft_log_probs[:, :-1], drafted)
  debts = [jnp.zeros_like(target_log_probs[:, 0, 0])]  # log w_i
  for i in range(drafted.shape[1]):
    owed = debts[-1] + ratio_up[:, i]
    # A drafted token has p > 0; where it has not, 0 / 0 must not be NaN.
    ratio = jnp.where(owed == -jnp.inf, -jnp.inf, owed - ratio_down[:, i])
    debts.append(jnp.minimum(0, ratio))
  debt = jnp.stack(debts, axis=1)  # [B, L + 1]
  weight = jnp.exp(debt)
  # After the whole path S is w itself, and the root passes whatever happened.
  passes = weight.at[:, 0].set(1)
  if drafted.shape[1] > 1:
    owed = jnp.exp(debt[:, 1:-1, None] + target_log_probs[:, 1:-1])
    offered = jnp.exp(draft_log_probs[:, 1:-1])
    excess = jnp.where(owed > offered, owed - offered, 0)
    total = jnp.sum(excess, axis=-1)  # S_i, [B, L - 1]
    inner = laws.share(total, total + (1 - weight[:, 1:-1]))
    passes = passes.at[:, 1:-1].set(inner)
  # The largest that passes: nothing deeper does.
  deeper_fails = jnp.cumprod((1 - passes)[:, ::-1], axis=1)[:, ::-1]
  deeper_fails = jnp.concatenate(
    [deeper_fails[:, 1:], jnp.ones_like(weight[:, :1])], axis=1
  )

  def next_log_probs(node):
    law = take_node(target_log_probs, node)
    owed = jnp.exp(take_node(debt, node)[:, None] + law)
    rest = owed - jnp.exp(take_node(draft_log_probs, node))
    return laws.normalize(jnp.maximum(rest, 0), law)

  return Verification(
    node_probs=passes * deeper_fails, next_log_probs=next_log_probs
  )


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless the tree is a single path."""
  del siblings
  checks.single_path("block", tree)


RULE = Rule(name="block", verify=verify, lossless=True, check=check)
