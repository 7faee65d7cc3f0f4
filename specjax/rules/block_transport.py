"""Block transport: close to the joint optimum for i.i.d. siblings.

Every path gets a score, uniform whatever the distributions are; the path with
the largest is selected and verified as a block (`block`). The distribution mu_s
of the largest score below s is computed along the path: with C children at s, a
child's score follows nu, where the largest of C draws from nu follows mu_s, and
the tokens split nu, `sum_x p(x | s) mu_sx = nu`. A token of high q / p gets
high scores only as far as its acceptance requires, which leaves selection to
the levels below (`score_transport`).

The scores of other paths then do not depend on their tokens, so the
distribution of the selected path can be computed along the path. With W the
weight of a score for selection and P, A the probabilities of drafting and of
accepting s,

  share_s = sum mu_s W = P(select a path through s) / P(s),   v_s = A(s) / P(s),
  S = sum_x [v_s q(x) - p(x) v_sx],   h = S / (S + share_s - v_s)

(0 / 0 is 0), h = v / share at a leaf: block verification. A token x is a
mixture u_xt of types t with knots z_t (`ratio_types`):

  share_sx = sum_t u_xt share_st,   v_sx = sum_t u_xt min(v_s z_t, share_st),

at most `min(v_s q(x) / p(x), share_sx)`, and equal to it if every token has a
knot. After a stop at s, x is drawn in proportion to `v_s q(x) - p(x) v_sx`. For
one path this is `block`, for paths of one token `transport` (in the limit of
many bins). docs/optimum.md proves that it is lossless and compares it with the
joint optimum, which it nearly attains.

Binning scores and grouping tokens into types only cost acceptance. Gradients
treat slopes and the distributions of scores as constants.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.rules import block, ratio_types, requirements
from specjax.rules.nodewise import node_rows
from specjax.rules.ratio_types import RatioTypes
from specjax.rules.score_transport import make_node, mixture
from specjax.siblings import Siblings
from specjax.tree import Form, Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification

_NUM_BINS, _NUM_TYPES = 64, 10

# Exact to rounding, also on devices that multiply in lower precision.
_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Walk:
  """Debts, shares and scores of every node; I of the N + 1 have children.

  Attributes:
    owed, share: `f32[B, N + 1]`, v and share.
    scores: per level `f32[B, nodes, bins + 1]`, cumulative distributions.
    taken: `f32[B, I, C]`, v of a child of each type.
    left: `f32[B, I]`, S.
  """

  owed: Array
  share: Array
  scores: tuple[Array, ...]
  taken: Array
  left: Array


def verify(
  draft: Draft,
  topology: Topology,
  target_log_probs: Array,
  *,
  bins: int = _NUM_BINS,
  types: int = _NUM_TYPES,
) -> Verification:
  """See `specjax.types.VerifyFn`; `bins` and `types` as in `rule`."""
  tree = draft.tree
  if tree.is_chain:  # nothing to select
    return block.verify(draft, topology, target_log_probs)
  given = draft.distributions(target_log_probs)
  inner = np.flatnonzero([bool(c) for c in tree.children]).astype(np.int32)
  eldest = np.array([tree.children[n][0] for n in inner], np.int32)
  of_nodes = ratio_types.types_of(
    node_rows(target_log_probs, inner), node_rows(given, eldest), types
  )
  row_of = np.zeros(tree.num_nodes, np.int32)
  row_of[inner] = np.arange(len(inner))
  above = np.array(tree.parents[1:], np.int32)
  # The mixture of types of each drafted token, [B, N, C].
  of_token = lambda x, nodes: jnp.exp(
    jax.vmap(lambda row, tokens: row[nodes, tokens])(x, draft.tokens[:, 1:])
  )
  parts = ratio_types.parts(
    of_token(target_log_probs, above)[..., None],
    of_token(given, np.arange(1, tree.num_nodes))[..., None],
    of_nodes.knots[:, row_of[above]],
  )[:, :, 0]
  walk = _walk_down(tree, of_nodes, parts, bins)
  spare = (walk.share - walk.owed)[:, inner]
  passes = distributions.share(walk.owed, walk.share)  # for leaves
  passes = passes.at[:, inner].set(
    distributions.share(walk.left, walk.left + spare)
  )
  node_probs = _deepest(
    tree, _selected(tree, walk.scores), passes.at[:, 0].set(1)
  )
  is_inner = np.isin(np.arange(tree.num_nodes), inner)

  def next_log_probs(node):
    row = jnp.asarray(row_of)[node]
    log_probs = take_node(target_log_probs, node)
    target = jnp.exp(log_probs)
    spent = ratio_types.mixed(
      target,
      jnp.exp(take_node(given, jnp.asarray(eldest)[row])),
      take_node(of_nodes.knots, row),
      take_node(walk.taken, row),
    )
    rest = _residual(take_node(walk.owed, node)[:, None], target, spent)
    rest = distributions.normalize(rest, log_probs)
    return jnp.where(jnp.asarray(is_inner)[node, None], rest, log_probs)

  return Verification(node_probs=node_probs, next_log_probs=next_log_probs)


def _walk_down(tree: Tree, types: RatioTypes, parts: Array, bins: int) -> _Walk:
  """Assigns scores from the root down; `parts` of each token, `[B, N, C]`."""
  batch, dtype = len(parts), parts.dtype
  edges = np.linspace(0, 1, bins + 1) ** len(tree.children[0])
  scores = [jnp.broadcast_to(jnp.asarray(edges, dtype), (batch, 1, len(edges)))]
  weights = jnp.ones_like(scores[0][..., 1:])
  owed = [jnp.ones((batch, 1), dtype)]
  share = [owed[0]]
  taken, left, start = [], [], 0
  fixed_parts = jax.lax.stop_gradient(parts)
  for level, children in itertools.pairwise(tree.levels):
    here = [n for n in level if tree.children[n]]
    counts = np.array([len(tree.children[n]) for n in here])
    below = np.array(children, np.int32)
    parent = np.array([here.index(tree.parents[n]) for n in below])
    mine = jax.tree.map(lambda x: x[:, start : start + len(here)], types)  # noqa: B023
    start += len(here)
    at = np.array(here, np.int32) - level.start
    score, weight = _of_one_child(
      node_rows(scores[-1], at), node_rows(weights, at), counts
    )
    owes = node_rows(owed[-1], at)
    wanted = owes[..., None] * mine.knots
    of_node = score, weight, mine.masses, wanted
    node = make_node(*jax.lax.stop_gradient(of_node))
    shared = mixture(node)  # [B, n, C, C]
    slopes = _dot(shared, node.mean[..., None])[..., 0]  # [B, n, C]
    takes = jnp.minimum(wanted, slopes)
    taken.append(takes)
    left.append(
      jnp.sum((wanted - takes) * mine.masses, axis=-1) + owes * mine.excess
    )
    of = node_rows(parts, below - 1)
    fixed = node_rows(fixed_parts, below - 1)
    owed.append(jnp.sum(of * node_rows(takes, parent), axis=-1))
    share.append(jnp.sum(fixed * node_rows(slopes, parent), axis=-1))
    scores.append(
      _absorbed(
        fixed, node_rows(shared, parent), node_rows(node.within, parent)
      )
    )
    weights = node_rows(weight, parent)
  return _Walk(
    owed=jnp.concatenate(owed, axis=1),
    share=jnp.concatenate(share, axis=1),
    scores=tuple(scores),
    taken=jnp.concatenate(taken, axis=1),
    left=jnp.concatenate(left, axis=1),
  )


def _residual(owed: Array, target: Array, spent: Array) -> Array:
  """Residual mass of the next token after a node, `[v q - p v_x]_+`."""
  return jnp.maximum(owed * target - spent, 0)


def _absorbed(parts: Array, shared: Array, within: Array) -> Array:
  """The cumulative distribution `f32[..., bins + 1]` of a token's score."""
  places = _dot(parts[..., None, :], shared)
  total = _dot(places, within)[..., 0, :]
  return jnp.minimum(total / total[..., -1:], 1)


def _of_one_child(
  scores: Array, weights: Array, counts: np.ndarray
) -> tuple[Array, Array]:
  """A child's scores `f32[B, n, bins + 1]` and weights, from its parent's."""
  if (counts == 1).all():
    return scores, weights
  one = scores ** jnp.asarray(1 / counts[:, None], scores.dtype)
  of_all, of_one = jnp.diff(scores), jnp.diff(one)
  positive = of_one > 0
  part = jnp.where(positive, of_all, 0) / jnp.where(positive, of_one, 1)
  return one, weights * part


# ------------------------------------------------------------------ the leaves


def _selected(tree: Tree, scores: tuple[Array, ...]) -> Array:
  """The probability that each leaf has the largest score, `f32[B, leaves]`.

  Ties within a bin are broken evenly among the children of a node.
  """
  levels = tree.levels
  cdfs = list(scores)
  among: list[Array | None] = []  # by level, each child against its siblings
  for depth in range(tree.max_depth - 1, -1, -1):
    level, below = levels[depth], levels[depth + 1]
    here = [n for n in level if tree.children[n]]
    width = max(len(tree.children[n]) for n in here)
    if width == 1:
      only = np.array([tree.children[n][0] for n in here]) - below.start
      family = cdfs[depth + 1][:, only]
      among.append(None)
    else:
      slots = np.full((len(here), width), len(below), np.int32)
      for row, node in enumerate(here):
        for rank, child in enumerate(tree.children[node]):
          slots[row, rank] = child - below.start
      given = jnp.concatenate(
        [cdfs[depth + 1], jnp.ones_like(cdfs[depth + 1][:, :1])], axis=1
      )[:, slots]  # [B, n, C, bins + 1]
      parent = np.array([here.index(tree.parents[c]) for c in below])
      among.append(_beats_others(given)[:, parent, tree.rank[list(below)]])
      family = jnp.prod(given, axis=2)
    cdfs[depth] = cdfs[depth].at[:, np.array(here) - level.start].set(family)
  weight = jnp.ones_like(scores[0][..., 1:])
  selected, leaves = [], []
  for depth, level in enumerate(levels):
    if depth:
      parent = np.array([tree.parents[n] for n in level]) - levels[depth - 1][0]
      weight = weight[:, parent]
      part = among[tree.max_depth - depth]
      weight = weight if part is None else weight * part
    ends = [n for n in level if not tree.children[n]]
    if ends:
      at = np.array(ends) - level.start
      mine = jnp.diff(cdfs[depth], axis=-1)[:, at]
      selected.append(jnp.sum(mine * weight[:, at], axis=-1))
      leaves += ends
  return jnp.concatenate(selected, axis=1)


def _beats_others(cdfs: Array) -> Array:
  """The probability that no sibling's score is above a child's in each bin.

  With F, `f32[B, n, C, bins + 1]`, the siblings' score distributions, it is
  `int_0^1 prod_{others} (F + u f) du`, `f32[B, n, C, bins]`.
  """
  count = cdfs.shape[2]
  points, masses = np.polynomial.legendre.leggauss((count + 1) // 2)
  low, step = cdfs[..., :-1], jnp.diff(cdfs, axis=-1)
  total = jnp.zeros_like(low)
  for point, mass in zip((points + 1) / 2, masses / 2, strict=True):
    below = low + point.astype(low.dtype) * step
    others = jnp.where(
      np.eye(count, dtype=bool)[:, :, None], 1, below[:, :, None]
    )
    total += mass.astype(low.dtype) * jnp.prod(others, axis=3)
  return total


def _deepest(tree: Tree, selected: Array, passes: Array) -> Array:
  """`node_probs`: the deepest passing node on the selected leaf's path."""
  leaves = np.array([n for n in range(tree.num_nodes) if not tree.children[n]])
  paths = tree.paths[leaves]  # [leaves, G + 1]
  real = np.arange(tree.max_depth + 1) <= tree.depth[leaves, None]
  mine = jnp.where(real, passes[:, paths], 0)
  fails = jnp.cumprod(1 - mine[..., ::-1], axis=-1)[..., ::-1]
  deeper = jnp.concatenate(
    [fails[..., 1:], jnp.ones_like(fails[..., :1])], axis=-1
  )
  ends = selected[..., None] * mine * deeper
  return jnp.zeros_like(passes).at[:, paths].add(ends)


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless siblings are independent and all present."""
  requirements.independent("block_transport", tree, siblings)
  if not tree.is_chain:
    requirements.form("block_transport", tree, Form.FIXED)


def rule(bins: int = _NUM_BINS, types: int = _NUM_TYPES) -> Rule:
  """The rule, lossless at any resolution; coarser is faster and accepts less.

  Args:
    bins: number of score bins.
    types: number of token types, for all but tiny vocabularies.

  Raises:
    ValueError: for fewer than one bin or two types.
  """
  if bins < 1 or types < 2:
    raise ValueError(
      f"bins must be >= 1 and types >= 2, got {bins} and {types}"
    )
  return Rule(
    name="block_transport",
    verify=functools.partial(verify, bins=bins, types=types),
    lossless=True,
    check=check,
  )


RULE = rule()
