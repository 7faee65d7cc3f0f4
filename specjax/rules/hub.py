"""SpecHub: the optimal verification of hub pairs (EMNLP 2024).

With hub a = argmax p, the pair (x, a) has probability p(x) and (a, x) has
`p(a) p(x) / (1 - p(a))`, for x != a. Target mass is spent in four steps, each
on what the steps before left:

  1. pair (x, a) accepts x,   2. pair (a, x) accepts x,
  3. pair (a, x), if still unaccepted, accepts a,   4. pair (x, a) accepts a,

and the rest is the residual. It accepts as much as greedy drafts with k = 2,
the optimum for this draft distribution.
"""

import jax.numpy as jnp

from specjax import distributions, random
from specjax.rules import requirements
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.siblings import HUB
from specjax.types import Rule


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  del valid  # both are present
  draft_log_probs, drawn_from = draft_log_probs  # the first is drawn from p
  hub = random.argmax(draft_log_probs)
  vocab = jnp.arange(len(draft_log_probs))
  first = jnp.exp(draft_log_probs)  # of pairs (x, a), and of (a, .) at a
  after_hub = HUB.child(draft_log_probs, hub[None], 2)
  # The very distribution that x was drawn from: recomputed from p, it may be
  # rounded differently.
  after_hub = jnp.where(tokens[0] == hub, drawn_from, after_hub)
  second = first[hub] * jnp.exp(after_hub)  # of pairs (a, x)
  first = jnp.where(vocab == hub, 0, first)
  target = jnp.exp(target_log_probs)
  others = jnp.where(vocab == hub, 0, target)
  # Steps 1 and 2, for tokens other than the hub.
  unmet = jnp.maximum(others - first, 0)
  accept_first = distributions.share(others, first)  # by x
  accept_second = distributions.share(unmet, second)
  # Steps 3 and 4: the hub's own mass, for pairs still unaccepted.
  wanting_second = jnp.sum(jnp.maximum(second - unmet, 0))
  wanting_first = jnp.sum(jnp.maximum(first - others, 0))
  mass = target[hub]
  hub_second = distributions.share(mass, wanting_second)
  mass_left = jnp.maximum(mass - wanting_second, 0)
  hub_first = distributions.share(mass_left, wanting_first)
  rest = jnp.maximum(unmet - second, 0)
  rest = jnp.where(
    vocab == hub, jnp.maximum(mass_left - wanting_first, 0), rest
  )
  is_hub = tokens == hub  # [2], exactly one of them
  other = jnp.where(is_hub[0], tokens[1], tokens[0])
  by_other = jnp.where(is_hub[0], accept_second[other], accept_first[other])
  by_hub = (1 - by_other) * jnp.where(is_hub[0], hub_second, hub_first)
  return Decision(
    accept=jnp.where(is_hub, by_hub, by_other),
    next_log_probs=distributions.normalize(rest, target_log_probs),
  )


def check(tree, siblings) -> None:
  """Raises ValueError unless every inner node has a hub pair."""
  requirements.drawn("hub", tree, siblings, HUB)
  if any(len(children) not in (0, 2) for children in tree.children):
    raise ValueError(
      "rule 'hub' needs two children or none at every node "
      "(specjax.tree.k_ary(2, 2, ..); for two levels "
      f"tree=(-1, 0, 0, 1, 1, 2, 2)), got tree={tree.parents}"
    )


RULE = Rule(name="hub", verify=verify_nodes(decide), lossless=True, check=check)
