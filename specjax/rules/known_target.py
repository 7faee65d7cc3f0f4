"""Lossy rules with a known output law: lossless verification against it.

A rule of this file states a law pi, made of the target's law q and the draft's
law p after the same text, and verifies against pi with a lossless rule. So a
token's law is pi exactly, whatever was drafted, and its distance from the
target, TV(pi, q), is known before a coin is flipped.

With the token rule a drafted token is rejected with probability TV(p, pi), and

  TV(p, pi) + TV(pi, q) >= TV(p, q),

the triangle inequality, with equality exactly if pi(x) is between p(x) and q(x)
for every x. That is the Pareto front of Yin et al. (NeurIPS 2024, Theorem 5).
On it are `ensemble`, `lenient`, `fuzzy`, `cactus`, and cascades that choose
between p and q; `cascade_token` and `contrastive` need not be.

Every rule of a single path that accepts x ~ p with probability b(x) and draws
from P after a rejection has such a law, `A = b p + Z P`, and against it the
token rule accepts `sum min(p, A) >= sum b p`: no less.

Where nothing is drafted, after the last token of a path too, there is no p; the
token that comes there follows q. Laws are those after the warp: at temperature
0 they are certain, and what compares their largest entries sees equal ones.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.rules import block, kseq, recursive, token, transport, traversal
from specjax.rules.relaxed import after_residual, single_path_rule
from specjax.siblings import GIVEN, GREEDY, Siblings
from specjax.tree import Form, Tree, representative
from specjax.types import Draft, Rule, Verification

# pi before it is normalised: `(q f[..., V], p f[..., V]) -> f[..., V]`.
LawFn = Callable[[Array, Array], Array]

# Lossless rules that verify against a law, by the parameter `base`.
BASES: dict[str, Rule] = {
  rule.name: rule
  for rule in (
    token.RULE,
    block.RULE,
    recursive.RULE,
    traversal.RULE,
    kseq.RULE,
    transport.RULE,
  )
}


def relaxed(name: str, law: LawFn, base: str = "token") -> Rule:
  """The lossless rule `base` with the law pi for its target.

  The distance that it reports at a node is TV(pi, q) there: of the law that the
  token has given the text before it.

  Args:
    name: the rule's, as a call: `"ensemble(weight=0.5)"`.
    law: pi, of all nodes at once.
    base: one of `BASES`; what it verifies, and how siblings must be drawn, is
      its own. All siblings of a node are of one draft law, the eldest's: where
      several are certain, as `top_k` and the first of `greedy` are, there is
      none, and they are refused.

  Returns:
    The `Rule`.

  Raises:
    ValueError: if there is no such base.
  """
  if base not in BASES:
    raise ValueError(f"base must be one of {sorted(BASES)}, got {base!r}")
  lossless = BASES[base]

  def verify(draft: Draft, target_log_probs: Array) -> Verification:
    stated = known_target(law, draft, target_log_probs)
    verification = lossless.verify(draft, stated)
    excess = jnp.exp(stated) - jnp.exp(target_log_probs)
    distance = jnp.sum(jnp.where(excess > 0, excess, 0), axis=-1)
    return dataclasses.replace(verification, total_variation=distance)

  def check(tree: Tree, siblings: Siblings) -> None:
    lossless.check(tree, siblings)
    certain = siblings.deterministic or siblings in (GREEDY, GIVEN)
    if certain and not tree.is_chain:
      raise ValueError(
        f"rule {name!r} needs the draft's law at every node, got siblings="
        f"{siblings.name!r}, of which the first may be certain"
      )

  if base != "token":
    name = f"{name[:-1]}, base={base!r})"
  return Rule(name=name, verify=verify, lossless=False, check=check)


def known_target(law: LawFn, draft: Draft, target_log_probs: Array) -> Array:
  """The law pi of the token after every node.

  Args:
    law: pi.
    draft: what was drafted; of a node's children the eldest unmasked one has
      the draft's law p. Equal paths of independent siblings are one text, and
      share their children.
    target_log_probs: `f32[B, N + 1, V]`, log q.

  Returns:
    `f32[B, N + 1, V]`, log pi; log q where nothing was drafted.
  """
  nodes, topology = draft.tree.num_nodes, draft.topology()
  index = np.arange(nodes)
  present = topology.present[:, :nodes] & (index > 0)
  parents = topology.parents[:, :nodes]
  children = (parents[:, None] == index[:, None]) & present[:, None]
  if draft.siblings.independent and draft.tree.form is not Form.FREE:
    children = _of_equals(draft, topology.present[:, :nodes], children)
  some, eldest = children.any(-1)[..., None], children.argmax(-1)
  drafted = draft.laws(target_log_probs)
  if isinstance(eldest, np.ndarray):
    drafted = drafted[:, eldest[0]]
  else:
    drafted = jnp.take_along_axis(drafted, eldest[..., None], axis=1)
  target = jnp.exp(target_log_probs)
  mass = law(target, jnp.where(some, jnp.exp(drafted), target))
  stated = laws.normalize(mass, target_log_probs)
  return jnp.where(some, stated, target_log_probs)


def _of_equals(draft: Draft, present, children):
  """Children `bool[B or 1, N + 1, N + 1]`, and those of nodes of equal text."""
  if draft.tree.is_chain:
    return children
  tokens = draft.tokens[:, : draft.tree.num_nodes]
  same = representative(draft.tree, tokens, present)
  same = (same[:, :, None] == same[:, None]).astype(jnp.float32)
  return jnp.matmul(same, jnp.asarray(children, jnp.float32)) > 0


# ----------------------------------------------------- between draft and target


@functools.cache
def ensemble(weight: float = 0.9, base: str = "token") -> Rule:
  """`pi = w q + (1 - w) p`: a mixture of both models.

  Speculative ensembles (Fu et al., 2025, arXiv 2502.01662). A token is rejected
  with probability w TV(p, q), and the distance is (1 - w) TV(p, q).

  Args:
    weight: w in [0, 1], the target's share; 1 is lossless.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if `weight` is not in [0, 1], or there is no such base.
  """
  _within("weight", weight, 0, 1)
  return relaxed(
    f"ensemble(weight={weight})",
    lambda target, draft: weight * target + (1 - weight) * draft,
    base,
  )


@functools.cache
def lenient(lenience: float = 0.5, base: str = "token") -> Rule:
  """`pi = min(p, q / l) + Z norm([q - p]_+)`, Z what the first term lacks of 1.

  Lenience of Leviathan et al. (2023, A.5) and DistillSpec (Zhou et al., ICLR
  2024), which accept with `min(1, q / (l p))`: no token is over 1/l times too
  likely. This is the law of that test with the residual that is the best for
  it. Against it the token rule is that test, which costs less and is taken.

  Args:
    lenience: l in (0, 1]; 1 is lossless.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if `lenience` is not in (0, 1], or there is no such base.
  """
  if not 0 < lenience <= 1:
    raise ValueError(f"lenience must be in (0, 1], got {lenience}")
  name = f"lenient(lenience={lenience})"
  if base == "token":
    return single_path_rule(
      name,
      lambda target, draft: laws.share(
        jnp.exp(target), lenience * jnp.exp(draft)
      ),
      after_residual,
    )

  def law(target, draft):
    kept = jnp.minimum(draft, target / lenience)
    missing = jnp.where(target > draft, target - draft, 0)
    distance = jnp.sum(missing, axis=-1, keepdims=True)
    rejected = jnp.sum(draft - kept, axis=-1, keepdims=True)
    some = distance > 0
    share = jnp.where(some, rejected, 0) / jnp.where(some, distance, 1)
    return kept + share * missing

  return relaxed(name, law, base)


@functools.cache
def fuzzy(threshold: float = 0.1, base: str = "token") -> Rule:
  """`pi = p` where `JS(p, q) <= T`, else q.

  Fuzzy speculative decoding (Holsman, Huang, Dhingra, Findings of ACL 2025)
  with the Jensen-Shannon divergence. The paper decides by the divergence alone,
  which refuses every token of a position above the threshold; the token rule
  accepts `sum min(p, q)` of them, of the same law.

  Args:
    threshold: T in nats, at least 0; from log 2 on all that is drafted is
      accepted.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if `threshold` is negative, or there is no such base.
  """
  _within("threshold", threshold, 0, np.inf)

  def law(target, draft):
    middle = (target + draft) / 2
    each = _x_log_ratio(target, middle) + _x_log_ratio(draft, middle)
    near = jnp.sum(each, axis=-1, keepdims=True) / 2 <= threshold
    return jnp.where(near, draft, target)

  return relaxed(f"fuzzy(threshold={threshold})", law, base)


# -------------------------------------------------------------------- cascades


@functools.cache
def cascade_chow(alpha: float = 0.6, base: str = "token") -> Rule:
  """`pi = p` where `max p >= 1 - a`, else q: the draft where it is sure.

  A speculative cascade with Chow's rule (Narasimhan et al., ICLR 2025, arXiv
  2405.19261, equation 2).

  Args:
    alpha: a in [0, 1]; at 0 only where the draft is certain.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if `alpha` is not in [0, 1], or there is no such base.
  """
  _within("alpha", alpha, 0, 1)
  return _cascade(
    f"cascade_chow(alpha={alpha})", lambda target, draft: 1 - alpha, base
  )


@functools.cache
def cascade_diff(alpha: float = 0.1, base: str = "token") -> Rule:
  """`pi = p` where `max p >= max q - a`, else q: where it is about as sure.

  Narasimhan et al. (ICLR 2025), equation 5.

  Args:
    alpha: a in [-1, 1].
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if `alpha` is not in [-1, 1], or there is no such base.
  """
  _within("alpha", alpha, -1, 1)
  return _cascade(
    f"cascade_diff(alpha={alpha})",
    lambda target, draft: _largest(target) - alpha,
    base,
  )


@functools.cache
def cascade_opt(alpha: float = 0.1, base: str = "token") -> Rule:
  """`pi = p` where `max p >= max q - a TV(p, q)`, else q.

  Narasimhan et al. (ICLR 2025), equation 10: what deferring costs is the
  rejections, TV(p, q) of the drafted tokens.

  Args:
    alpha: a, the price of a rejection; any number.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if there is no such base.
  """

  def enough(target, draft):
    excess = jnp.where(target > draft, target - draft, 0)
    return _largest(target) - alpha * jnp.sum(excess, -1, keepdims=True)

  return _cascade(f"cascade_opt(alpha={alpha})", enough, base)


@functools.cache
def cascade_token(
  alpha: float = 0.5, version: int = 3, base: str = "token"
) -> Rule:
  """`pi = p 1_A + (1 - p(A)) q`: the draft's tokens where they will do.

  Narasimhan et al. (ICLR 2025), equations 13 to 15. A has the tokens v with

    version 1: p(v) >= max q - a,
    version 2: q(v) >= max q - a,
    version 3: q(v) >= (1 - a) max q.

  Args:
    alpha: a in [-1, 1], of version 3 in [0, 1].
    version: 1, 2 or 3.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if either is out of range, or there is no such base.
  """
  if version not in (1, 2, 3):
    raise ValueError(f"version must be 1, 2 or 3, got {version}")
  _within("alpha", alpha, 0 if version == 3 else -1, 1)

  def law(target, draft):
    largest = _largest(target)
    enough = largest * (1 - alpha) if version == 3 else largest - alpha
    kept = jnp.where((draft if version == 1 else target) >= enough, draft, 0)
    return kept + (1 - jnp.sum(kept, axis=-1, keepdims=True)) * target

  return relaxed(f"cascade_token(alpha={alpha}, version={version})", law, base)


def _cascade(
  name: str, enough: Callable[[Array, Array], Array | float], base: str
) -> Rule:
  """Follows p where its largest entry is at least `enough(q, p)`, else q."""

  def law(target, draft):
    return jnp.where(_largest(draft) >= enough(target, draft), draft, target)

  return relaxed(name, law, base)


# ------------------------------------------------------------------ and others


@functools.cache
def contrastive(
  alpha: float = 0.1, beta: float = 0.5, base: str = "token"
) -> Rule:
  """`pi ~ q (q / p)^b` over the tokens with `q >= a max q`.

  Speculative contrastive decoding (Yuan et al., ACL 2024, arXiv 2311.08981):
  away from the draft, for the sake of quality. In logits z it is the softmax of
  `(1 + b) z_q - b z_p`. A token that the draft cannot draw has its own q.

  Args:
    alpha: a in [0, 1], how plausible to the target a token must be.
    beta: b, at least 0; at 0, with `alpha=0`, it is lossless.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if either is out of range, or there is no such base.
  """
  _within("alpha", alpha, 0, 1)
  _within("beta", beta, 0, np.inf)

  def law(target, draft):
    plausible = (target > 0) & (target >= alpha * _largest(target))
    log_q = jnp.log(jnp.where(target > 0, target, 1))
    log_p = jnp.where(draft > 0, jnp.log(jnp.where(draft > 0, draft, 1)), log_q)
    score = jnp.where(plausible, log_q + beta * (log_q - log_p), -jnp.inf)
    most = jnp.max(score, axis=-1, keepdims=True)
    return jnp.exp(score - jnp.where(jnp.isfinite(most), most, 0))

  return relaxed(f"contrastive(alpha={alpha}, beta={beta})", law, base)


@functools.cache
def cactus(delta: float = 0.1, base: str = "token") -> Rule:
  """The law of Cactus (Hao and Mou, ICLR 2026, arXiv 2604.04987).

  Cactus accepts x with `min(1, h(x) / p(x))`, where

    h(x) = min(1, q(x) + sqrt(2 d q(x) (1 - q(x))))

  is as much as a law may have at x that is d nats from q, to second order, and
  after rejecting x draws from `norm([c_x q - p]_+)` with `c_x = (1 - h(x)) /
  (1 - q(x))`. The token's law is the sum over x,

    pi(y) = min(p, h)(y) + sum over x of
            [p(x) - h(x)]_+ [c_x q(y) - p(y)]_+ / sum([c_x q - p]_+).

  No token that may be rejected is drawn after a rejection, so that the token
  rule accepts against pi what Cactus does. And pi is on the front: the sum that
  is divided by is `Z = sum [p - h]_+` or more (it is [p(x) - h(x)]_+ and what p
  has above c_x q elsewhere, c_x q <= h), so the last sum is at most [q - p]_+.
  It takes two sorts of V numbers: whether a term is there is a matter of the
  order of c_x and p(y) / q(y).

  Args:
    delta: d in nats, at least 0; 0 is lossless.
    base: the lossless rule, see `relaxed`.

  Raises:
    ValueError: if `delta` is negative, or there is no such base.
  """
  _within("delta", delta, 0, np.inf)

  @functools.partial(jnp.vectorize, signature="(v),(v)->(v)")
  def law(target, draft):
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
    total = jnp.maximum(total, jnp.sum(rejected))  # but for rounding it is
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

  return relaxed(f"cactus(delta={delta})", law, base)


# --------------------------------------------------------------------- helpers


def _within(name: str, value: float, least: float, most: float) -> None:
  """Raises ValueError unless the value is in [least, most]."""
  if not least <= value <= most:
    wanted = f">= {least}" if most == np.inf else f"in [{least}, {most}]"
    raise ValueError(f"{name} must be {wanted}, got {value}")


def _largest(law: Array) -> Array:
  """The largest entry, `f[..., V] -> f[..., 1]`."""
  return jnp.max(law, axis=-1, keepdims=True)


def _x_log_ratio(x: Array, y: Array) -> Array:
  """`x log(x / y)`, 0 where x is; y > 0 where x is."""
  some = x > 0
  return jnp.where(
    some, x * jnp.log(jnp.where(some, x, 1) / jnp.where(some, y, 1)), 0
  )
