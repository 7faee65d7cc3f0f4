"""Lossy rules with a known output distribution.

Each rule computes a distribution pi from the target's distribution q and the
draft's distribution p after the same text, and verifies against pi with a
lossless rule. So a token's distribution is exactly pi, at the known distance
TV(pi, q) from the target.

With the token rule a drafted token is rejected with probability TV(p, pi), and

  TV(p, pi) + TV(pi, q) >= TV(p, q),

the triangle inequality, with equality exactly if pi(x) is between p(x) and q(x)
for every x. That is the Pareto front of Yin et al. (NeurIPS 2024, Theorem 5).
`ensemble`, `lenient`, `fuzzy`, `cactus`, and cascades that choose between p and
q are on it; `cascade_token` and `contrastive` need not be.

Each rule below is given by its distribution `pi(q, p, parameters)`, as
unnormalized probabilities `f[..., V]`; `base`, one of `BASES`, is the lossless
rule that verifies against it. The distance reported at a node is TV(pi, q). p
is the draft distribution of a node's first child; where nothing is drafted, the
token follows q. Distributions are warped: at temperature 0 they are point
masses.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.rules import block, kseq, recursive, token, transport, traversal
from specjax.siblings import GIVEN, GREEDY, Siblings
from specjax.tree import Form, Topology, Tree, representative
from specjax.types import Draft, Rule, Verification

TargetFn = Callable[..., Array]

BASES: dict[str, Rule] = {
  module.RULE.name: module.RULE
  for module in (token, block, recursive, traversal, kseq, transport)
}

RULES: dict[str, Callable[..., Rule]] = {}

# Ranges of parameters: in words, and as a test.
_UNIT = "in [0, 1]", lambda x: 0 <= x <= 1
_POSITIVE = "in (0, 1]", lambda x: 0 < x <= 1
_SIGNED = "in [-1, 1]", lambda x: -1 <= x <= 1
_NOT_NEGATIVE = ">= 0", lambda x: x >= 0
_ANY = "a number", lambda x: x == x


def _rule(**ranges: tuple[str, Callable[[Any], bool]]):
  """Adds the rule of a distribution with these parameters to `RULES`."""

  def make(target_of: TargetFn) -> Callable[..., Rule]:
    @functools.wraps(target_of)
    def factory(*, base: str = "token", **parameters) -> Rule:
      for name, value in parameters.items():
        words, inside = ranges[name]
        if not inside(value):
          raise ValueError(f"{name} must be {words}, got {value}")
      chosen = functools.partial(target_of, **parameters)
      return relaxed(target_of.__name__, chosen, base)

    # The signature to call it with: its own parameters, and the base.
    _, _, *own = inspect.signature(target_of).parameters.values()
    by_name = inspect.Parameter.KEYWORD_ONLY
    base = inspect.Parameter("base", by_name, default="token", annotation=str)
    known = [*(one.replace(kind=by_name) for one in own), base]
    factory.__signature__ = inspect.Signature(known)  # type: ignore[attr-defined]
    factory.__annotations__ = {one.name: one.annotation for one in known}
    RULES[target_of.__name__] = factory
    return factory

  return make


def relaxed(name: str, target_of: TargetFn, base: str = "token") -> Rule:
  """The lossless rule `base`, verifying against pi.

  Raises:
    ValueError: if there is no such base.
  """
  if base not in BASES:
    raise ValueError(f"base must be one of {sorted(BASES)}, got {base!r}")
  lossless = BASES[base]

  def verify(
    draft: Draft, topology: Topology, target_log_probs: Array
  ) -> Verification:
    stated = known_target(target_of, draft, topology, target_log_probs)
    verification = lossless.verify(draft, topology, stated)
    excess = jnp.exp(stated) - jnp.exp(target_log_probs)
    distance = jnp.sum(jnp.where(excess > 0, excess, 0), axis=-1)
    return dataclasses.replace(verification, total_variation=distance)

  def check(tree: Tree, siblings: Siblings) -> None:
    lossless.check(tree, siblings)
    deterministic = siblings.deterministic or siblings in (GREEDY, GIVEN)
    if deterministic and not tree.is_chain:
      raise ValueError(
        f"rule {name!r} needs the draft's distribution at every node, got "
        f"siblings={siblings.name!r}, whose first child may be deterministic"
      )

  return Rule(name=name, verify=verify, lossless=False, check=check)


def known_target(
  target_of: TargetFn, draft: Draft, topology: Topology, target_log_probs: Array
) -> Array:
  """The distribution pi of the token after every node.

  Args:
    target_of: pi, for all nodes at once.
    draft: the draft; a node's first unmasked child has the draft's distribution
      p. Equal paths of independent siblings share their children.
    topology: its shape.
    target_log_probs: `f32[B, N + 1, V]`, log q.

  Returns:
    `f32[B, N + 1, V]`, log pi; log q where nothing was drafted.
  """
  nodes = draft.tree.num_nodes
  index = np.arange(nodes)
  present = topology.present[:, :nodes] & (index > 0)
  parents = topology.parents[:, :nodes]
  children = (parents[:, None] == index[:, None]) & present[:, None]
  if draft.siblings.independent and draft.tree.form is not Form.FREE:
    children = _of_equals(draft, topology.present[:, :nodes], children)
  some, eldest = children.any(-1)[..., None], children.argmax(-1)
  drafted = draft.distributions(target_log_probs)
  if isinstance(eldest, np.ndarray):
    drafted = drafted[:, eldest[0]]
  else:
    drafted = jnp.take_along_axis(drafted, eldest[..., None], axis=1)
  target = jnp.exp(target_log_probs)
  mass = target_of(target, jnp.where(some, jnp.exp(drafted), target))
  stated = distributions.normalize(mass, target_log_probs)
  return jnp.where(some, stated, target_log_probs)


def _of_equals(draft: Draft, present, children):
  """Joins children, `bool[B or 1, N + 1, N + 1]`, of nodes with equal paths."""
  if draft.tree.is_chain:
    return children
  tokens = draft.tokens[:, : draft.tree.num_nodes]
  same = representative(draft.tree, tokens, present)
  same = (same[:, :, None] == same[:, None]).astype(jnp.float32)
  return jnp.matmul(same, jnp.asarray(children, jnp.float32)) > 0


# ----------------------------------------------------- between draft and target


@_rule(weight=_UNIT)
def ensemble(target: Array, draft: Array, weight: float = 0.9):
  """`pi = w q + (1 - w) p`: a mixture of both models.

  Speculative ensembles (Fu et al., 2025, arXiv 2502.01662). A token is rejected
  with probability w TV(p, q), and the distance is (1 - w) TV(p, q).

  Args:
    weight: w in [0, 1], the target's share; 1 is lossless.
  """
  return weight * target + (1 - weight) * draft


@_rule(lenience=_POSITIVE)
def lenient(target: Array, draft: Array, lenience: float = 0.5):
  """`pi = min(p, q / l) + Z norm([q - p]_+)`, where Z makes it sum to 1.

  Lenience of Leviathan et al. (2023, A.5) and DistillSpec (Zhou et al., ICLR
  2024), which accept with `min(1, q / (l p))`: no token gets more than q / l.
  This is the distribution of that test with its best residual.

  Args:
    lenience: l in (0, 1]; 1 is lossless.
  """
  kept = jnp.minimum(draft, target / lenience)
  missing = jnp.where(target > draft, target - draft, 0)
  distance = jnp.sum(missing, axis=-1, keepdims=True)
  rejected = jnp.sum(draft - kept, axis=-1, keepdims=True)
  some = distance > 0
  return kept + missing * (
    jnp.where(some, rejected, 0) / jnp.where(some, distance, 1)
  )


@_rule(threshold=_NOT_NEGATIVE)
def fuzzy(target: Array, draft: Array, threshold: float = 0.1):
  """`pi = p` where `JS(p, q) <= T`, else q.

  Fuzzy speculative decoding (Holsman, Huang, Dhingra, Findings of ACL 2025)
  with the Jensen-Shannon divergence. Above the threshold the paper rejects
  every token; here the token rule accepts `sum min(p, q)` of them.

  Args:
    threshold: T in nats, at least 0; from log 2 on every drafted token is
      accepted.
  """
  middle = (target + draft) / 2
  each = _x_log_ratio(target, middle) + _x_log_ratio(draft, middle)
  near = jnp.sum(each, axis=-1, keepdims=True) / 2 <= threshold
  return jnp.where(near, draft, target)


# -------------------------------------------------------------------- cascades


@_rule(alpha=_UNIT)
def cascade_chow(target: Array, draft: Array, alpha: float = 0.6):
  """`pi = p` where `max p >= 1 - a`, else q: trusts a confident draft.

  A speculative cascade with Chow's rule (Narasimhan et al., ICLR 2025, arXiv
  2405.19261, equation 2).

  Args:
    alpha: a in [0, 1]; at 0 only where the draft is deterministic.
  """
  return jnp.where(_largest(draft) >= 1 - alpha, draft, target)


@_rule(alpha=_SIGNED)
def cascade_diff(target: Array, draft: Array, alpha: float = 0.1):
  """`pi = p` where `max p >= max q - a`, else q: compares confidences.

  Narasimhan et al. (ICLR 2025), equation 5; a in [-1, 1].
  """
  enough = _largest(target) - alpha
  return jnp.where(_largest(draft) >= enough, draft, target)


@_rule(alpha=_ANY)
def cascade_opt(target: Array, draft: Array, alpha: float = 0.1):
  """`pi = p` where `max p >= max q - a TV(p, q)`, else q.

  Narasimhan et al. (ICLR 2025), equation 10: deferring to the target costs
  rejections, TV(p, q) of the drafted tokens; a, any number, is their price.
  """
  excess = jnp.where(target > draft, target - draft, 0)
  distance = jnp.sum(excess, -1, keepdims=True)
  enough = _largest(target) - alpha * distance
  return jnp.where(_largest(draft) >= enough, draft, target)


@_rule(alpha=_SIGNED, version=("1, 2 or 3", lambda x: x in (1, 2, 3)))
def cascade_token(
  target: Array, draft: Array, alpha: float = 0.5, version: int = 3
):
  """`pi = p 1_A + (1 - p(A)) q`: keeps the draft's acceptable tokens.

  Narasimhan et al. (ICLR 2025), equations 13 to 15. A has the tokens v with

    version 1: p(v) >= max q - a,
    version 2: q(v) >= max q - a,
    version 3: q(v) >= (1 - a) max q.

  Args:
    alpha: a in [-1, 1].
    version: 1, 2 or 3.
  """
  largest = _largest(target)
  enough = largest * (1 - alpha) if version == 3 else largest - alpha
  kept = jnp.where((draft if version == 1 else target) >= enough, draft, 0)
  return kept + (1 - jnp.sum(kept, axis=-1, keepdims=True)) * target


# --------------------------------------------------------------------- others


@_rule(alpha=_UNIT, beta=_NOT_NEGATIVE)
def contrastive(
  target: Array, draft: Array, alpha: float = 0.1, beta: float = 0.5
):
  """`pi ~ q (q / p)^b` over the tokens with `q >= a max q`.

  Speculative contrastive decoding (Yuan et al., ACL 2024, arXiv 2311.08981):
  contrasts the target with the draft, for better text. In logits z it is the
  softmax of `(1 + b) z_q - b z_p`. A token that the draft cannot draw keeps q.

  Args:
    alpha: a in [0, 1], how plausible to the target a token must be.
    beta: b, at least 0; at 0, with `alpha=0`, it is lossless.
  """
  plausible = (target > 0) & (target >= alpha * _largest(target))
  log_q = jnp.log(jnp.where(target > 0, target, 1))
  log_p = jnp.where(draft > 0, jnp.log(jnp.where(draft > 0, draft, 1)), log_q)
  score = jnp.where(plausible, log_q + beta * (log_q - log_p), -jnp.inf)
  most = jnp.max(score, axis=-1, keepdims=True)
  return jnp.exp(score - jnp.where(jnp.isfinite(most), most, 0))


@_rule(delta=_NOT_NEGATIVE)
def cactus(target: Array, draft: Array, delta: float = 0.1):
  """The distribution of Cactus (Hao and Mou, ICLR 2026, arXiv 2604.04987).

  Cactus accepts x with `min(1, h(x) / p(x))`, where

    h(x) = min(1, q(x) + sqrt(2 d q(x) (1 - q(x))))

  is, to second order, the most that a distribution d nats from q can have at x.
  After rejecting x it draws from `norm([c_x q - p]_+)` with `c_x = (1 - h(x)) /
  (1 - q(x))`. The token's distribution is a sum over x,

    pi(y) = min(p, h)(y) + sum over x of
            [p(x) - h(x)]_+ [c_x q(y) - p(y)]_+ / sum([c_x q - p]_+).

  No token that may be rejected is drawn after a rejection, so the token rule
  accepts the same against pi as Cactus does. The sums take two sorts of V
  numbers: the order of c_x and p(y) / q(y) decides which terms are nonzero.

  Args:
    delta: d in nats, at least 0; 0 is lossless.
  """

  @functools.partial(jnp.vectorize, signature="(v),(v)->(v)")
  def target_of(target, draft):
    rest = jnp.where(target < 1, 1 - target, 0)
    most = jnp.minimum(1, target + jnp.sqrt(2 * delta * target * rest))
    kept = jnp.minimum(draft, most)
    rejected = draft - kept  # by x
    scale = jnp.where(rest > 0, 1 - most, 0) / jnp.where(rest > 0, rest, 1)
    offered = jnp.where(target > 0, draft, jnp.inf)
    ratio = offered / jnp.where(target > 0, target, 1)
    # sum([c q - p]_+) of each x: over the tokens whose ratio is below its c.
    by_ratio = jnp.argsort(ratio)
    below = jnp.searchsorted(ratio[by_ratio], scale)
    before = lambda mass: jnp.pad(jnp.cumsum(mass[by_ratio]), (1, 0))[below]
    total = scale * before(target) - before(draft)
    total = jnp.maximum(total, jnp.sum(rejected))  # true but for rounding
    some = rejected > 0
    share = jnp.where(some, rejected, 0) / jnp.where(some, total, 1)
    # By y: over the x whose c is above its ratio.
    by_scale = jnp.argsort(scale)
    above = jnp.searchsorted(scale[by_scale], ratio, side="right")
    after = lambda mass: jnp.pad(
      jnp.cumsum(mass[by_scale][::-1])[::-1], (0, 1)
    )[above]
    return kept + jnp.maximum(
      target * after(share * scale) - draft * after(share), 0
    )

  return target_of(target, draft)


def _largest(probs: Array) -> Array:
  """The largest entry, `f[..., V] -> f[..., 1]`."""
  return jnp.max(probs, axis=-1, keepdims=True)


def _x_log_ratio(x: Array, y: Array) -> Array:
  """`x log(x / y)`, 0 where x is; y > 0 where x is."""
  some = x > 0
  return jnp.where(
    some, x * jnp.log(jnp.where(some, x, 1) / jnp.where(some, y, 1)), 0
  )
