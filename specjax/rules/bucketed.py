"""k-SEQ in classes of q / p, the highest ratio first.

k-SEQ tests every candidate alike, in the order they were drawn. Here the
vocabulary is split into classes by q / p, and candidates of a higher class are
tested first, each with its own coin `c(x) = min(1, q(x) / (r_g p(x)))` in class
g. If s is the probability that one draft has not been accepted by any higher
class, and m = sum of p c over the class, then k drafts are accepted by class g
with probability `A(m) = s^k - (s - m)^k`, token x of it with `p(x) c(x) A(m) /
m`. This is at most q(x) iff `A(m) <= r_g m`; then s becomes `s - m`, and the
residual is q less all that was accepted. With a single class this is k-SEQ; any
classes, any order and any such r_g are lossless.

The choice of classes may depend on the laws, so the rule takes the best of
k-SEQ, 16 classes and 64 classes, and never accepts less than `kseq`. Scales r_g
are looked for among the floors of 1,024 fine classes, from above (exact if a
whole class is accepted, or saturated: all of its target mass handed out). To
differentiation, the plan is a constant.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.rules import checks, kseq
from specjax.rules.nodewise import Decision, verify_nodes
from specjax.rules.ratio_classes import RatioClasses, histogram
from specjax.types import Rule

_NUM_FINE = 1024
_PARTITIONS = (16, 64)


def decide(target_log_probs, draft_log_probs, tokens, valid):
  """See `specjax.rules.nodewise.DecideFn`."""
  most = len(tokens)
  if most == 1:
    return kseq.decide(target_log_probs, draft_log_probs, tokens, valid)
  draft_log_probs = draft_log_probs[0]
  target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
  constant = jax.lax.stop_gradient((target_log_probs, draft_log_probs))
  ids, plan = solve(*constant, jnp.sum(valid), most=most)
  scale = plan.scales[ids]
  taken = jnp.minimum(draft, jnp.where(scale > 0, target / scale, draft))
  taken *= plan.factors[ids]
  tests = jnp.where(
    scale[tokens] > 0,
    laws.share(target[tokens], scale[tokens] * draft[tokens]),
    1,
  )
  tests = jnp.where(valid, tests, 0)
  # A candidate's turn comes after those of higher classes, and its elders'.
  group = plan.classes[ids[tokens]]
  elder = np.tri(most, k=-1, dtype=bool)
  before = (group[None, :] > group[:, None]) | (
    (group[None, :] == group[:, None]) & elder
  )
  untaken = jnp.prod(jnp.where(before, 1 - tests[None, :], 1), axis=1)
  return Decision(
    accept=tests * untaken,
    next_log_probs=laws.normalize(
      jnp.maximum(target - taken, 0), target_log_probs
    ),
  )


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["accepted", "scales", "factors", "classes"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A partition of the F fine classes, solved.

  Attributes:
    accepted: `f32[]`, the probability that a candidate is accepted.
    scales: `f32[F]`, r_g of the class that each fine class belongs to.
    factors: `f32[F]`, A(m) / m of it.
    classes: `i32[F]`, the class; higher ones are tested first.
  """

  accepted: Array
  scales: Array
  factors: Array
  classes: Array


def solve(
  target_log_probs: Array, draft_log_probs: Array, count: Array, *, most: int
) -> tuple[Array, Plan]:
  """The best of k-SEQ and the partitions.

  Args:
    target_log_probs, draft_log_probs: `f32[V]`.
    count: `i32[]`, k.
    most: a static bound on k.

  Returns:
    Each token's fine class, `i32[V]`, and the plan.
  """
  target, draft = jnp.exp(target_log_probs), jnp.exp(draft_log_probs)
  # Above log(k) nothing depends on the ratio any more.
  fine = histogram(
    target_log_probs,
    draft_log_probs,
    num_classes=_NUM_FINE,
    high=max(math.log(most), 0.1),
  )
  # What is never drafted is never accepted: its target mass is not on offer.
  fine = dataclasses.replace(fine, target=fine.target.at[-1].set(0))
  scale = kseq.solve(target, draft, count, most=most)
  one = jnp.sum(jnp.minimum(draft, target / scale))
  spread = lambda x: jnp.broadcast_to(x, (_NUM_FINE,))
  best = Plan(
    accepted=1 - jnp.maximum(1 - one, 0) ** count,
    scales=spread(scale),
    factors=spread(kseq.accepted_per_try(one, count, most=most)),
    classes=spread(jnp.zeros((), jnp.int32)),
  )
  for num_classes in _PARTITIONS:
    found = _solve(fine, count, num_classes=num_classes, most=most)
    better = found.accepted > best.accepted
    pick = functools.partial(jnp.where, better)
    best = jax.tree.map(pick, found, best)
  return fine.ids, best


def _solve(
  fine: RatioClasses, count: Array, *, num_classes: int, most: int
) -> Plan:
  """Solves all classes of one partition, the highest first.

  Args:
    fine: the fine classes; a class is a run of them.
    count: `i32[]`, k.
    num_classes: classes of this partition.
    most: a static bound on k.

  Returns:
    The `Plan`.
  """
  width = _NUM_FINE // num_classes
  powers = np.arange(most)
  used = powers < count
  # s^{k-1-j}, without a negative power for the unused j.
  rest = jnp.maximum(count - 1 - powers, 0)

  def factor(alive, mass):  # A(m) / m = sum_j s^{k-1-j} (s - m)^j
    left = jnp.maximum(alive - mass, 0)[..., None]
    return jnp.sum(jnp.where(used, alive**rest * left**powers, 0), axis=-1)

  def turn(alive, given):
    draft, target, floors, ceiling = given
    scales = jnp.concatenate([floors, ceiling[None]])  # [width + 1]
    above = jnp.concatenate(
      [jnp.cumsum(draft[::-1])[::-1], jnp.zeros_like(draft[:1])]
    )
    below = jnp.concatenate([jnp.zeros_like(target[:1]), jnp.cumsum(target)])
    masses = above + jnp.where(below > 0, below, 0) / jnp.where(
      scales > 0, scales, 1
    )
    factors = factor(alive, masses)
    valid = factors <= scales
    pick = jnp.argmax(valid)
    # Saturated: A(m) is all of the class's target mass.
    total = below[-1]
    root = 1 / jnp.maximum(count, 1).astype(alive.dtype)
    left = jnp.maximum(alive**count - total, 0) ** root
    scale = jnp.maximum(factor(alive, alive - left), ceiling)
    mass = jnp.where(total > 0, total, 0) / jnp.where(scale > 0, scale, 1)
    some = valid.any()
    scale = jnp.where(some, scales[pick], scale)
    mass = jnp.where(some, masses[pick], mass)
    # Nothing is accepted by chance twice: m may not exceed what is alive.
    mass = jnp.minimum(mass, alive)
    left = jnp.maximum(alive - mass, 0)
    return left, (scale, factor(alive, mass))

  fold = lambda x: x.reshape(num_classes, width)
  floors = fold(fine.floors)
  ceilings = jnp.concatenate([floors[1:, 0], floors[-1:, -1]])
  alive, (scales, factors) = jax.lax.scan(
    turn,
    jnp.ones_like(fine.draft[0]),
    (fold(fine.draft), fold(fine.target), floors, ceilings),
    reverse=True,
  )
  spread = lambda x: jnp.repeat(x, width, total_repeat_length=_NUM_FINE)
  return Plan(
    accepted=1 - alive**count,
    scales=spread(scales),
    factors=spread(factors),
    classes=spread(jnp.arange(num_classes, dtype=jnp.int32)),
  )


def check(tree, siblings) -> None:
  """Raises ValueError unless siblings are independent."""
  checks.independent("bucketed", tree, siblings)


RULE = Rule(
  name="bucketed", verify=verify_nodes(decide), lossless=True, check=check
)
