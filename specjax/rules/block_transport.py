"""Nearly the joint optimum of a whole draft of i.i.d. siblings.

Every path of the draft has a score, evenly distributed whatever the laws are;
the path of the largest is selected, and verified as a block (`block`). What the
score of a path through s is distributed as, mu_s, is computed along the path:
with C children at s, a child's score is to have the law nu whose largest of C
is mu_s, and the tokens share in it, `sum_x p(x | s) mu_sx = nu`. A token of
high q / p gets high scores as far as its acceptance needs it, and no further:
what is left is selection for the levels below (`score_transport`).

Scores of other paths are then distributed as if nothing were known of them, so
that the law of the selected path is known on the path. With W the weight of a
score for selection and P, A the laws of drafting and of accepting s,

  share_s = sum mu_s W = P(select a path through s) / P(s),   v_s = A(s) / P(s),
  v_sx = min(v_s q(x) / p(x), share_sx),
  S = sum_x [v_s q(x) - a(x)]_+,   h = S / (S + share_s - v_s)   (0 / 0 is 0),

h = v / share at a leaf: block verification, with a(x) = p(x) share_sx. For one
path this is `block`, for paths of one token `transport` (in the limit of many
bins). docs/joint.md proves that it is lossless and compares it with the joint
optimum, of which it has nearly all.

Scores come in bins and tokens in classes, which cost acceptance alone. To
differentiation, slopes and the laws of scores are constants.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.rules import block, requirements
from specjax.rules.nodewise import node_rows
from specjax.rules.ratio_classes import single_tokens
from specjax.rules.score_transport import hand_out, make_node
from specjax.siblings import Siblings
from specjax.tree import Form, Tree, take_node
from specjax.types import Draft, Rule, Verification

_NUM_BINS = 64


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["owed", "share", "scores", "rest", "total"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Walk:
  """What is known of every node; N + 1 nodes, I of them with children.

  Attributes:
    owed: `f32[B, N + 1]`, v.
    share: `f32[B, N + 1]`.
    scores: by level `f32[B, nodes, bins]`, the law of each node's score.
    rest: `f32[B, I, V]`, `[v q - a]_+` of the nodes with children.
    total: `f32[B, I]`, its sum S.
  """

  owed: Array
  share: Array
  scores: tuple[Array, ...]
  rest: Array
  total: Array


def verify(draft: Draft, target_log_probs: Array) -> Verification:
  """See `specjax.types.VerifyFn`."""
  tree = draft.tree
  if tree.is_chain:  # nothing to select
    return block.verify(draft, target_log_probs)
  walk = _walk_down(draft, target_log_probs)
  inner = [n for n in range(tree.num_nodes) if tree.children[n]]
  spare = walk.share - walk.owed
  passes = laws.share(walk.owed, walk.share)
  passes = passes.at[:, inner].set(
    laws.share(walk.total, walk.total + spare[:, inner])
  )
  node_probs = _deepest(
    tree, _selected(tree, walk.scores), passes.at[:, 0].set(1)
  )
  place = np.zeros(tree.num_nodes, np.int32)
  place[inner] = np.arange(len(inner))
  is_inner = np.isin(np.arange(tree.num_nodes), inner)

  def next_log_probs(node):
    law = take_node(target_log_probs, node)
    rest = laws.normalize(take_node(walk.rest, jnp.asarray(place)[node]), law)
    return jnp.where(jnp.asarray(is_inner)[node, None], rest, law)

  return Verification(node_probs=node_probs, next_log_probs=next_log_probs)


def _walk_down(draft: Draft, target_log_probs: Array) -> _Walk:
  """Hands scores out from the root to the leaves."""
  tree, given = draft.tree, draft.laws(target_log_probs)
  batch, dtype = len(draft.tokens), target_log_probs.dtype
  ones = jnp.ones((batch, 1), dtype)
  owed, share = [ones], [ones]
  edges = (np.arange(_NUM_BINS + 1) / _NUM_BINS) ** len(tree.children[0])
  even = jnp.asarray(np.diff(edges), dtype)
  scores = [jnp.broadcast_to(even, (batch, 1, _NUM_BINS))]
  weights = jnp.ones_like(scores[0])
  rests, totals = [], []
  for level in tree.levels[:-1]:
    here = [n for n in level if tree.children[n]]
    at = np.array(here, np.int32) - level.start
    counts = np.array([len(tree.children[n]) for n in here])
    below = np.array([c for n in here for c in tree.children[n]], np.int32)
    slots = np.array(
      [(*tree.children[n], *[tree.children[n][0]] * (max(counts) - len(
        tree.children[n]))) for n in here], np.int32
    )  # fmt: skip
    law, weight = _of_one_child(scores[-1][:, at], weights[:, at], counts)
    handed, rest = jax.vmap(jax.vmap(_hand_on))(
      node_rows(target_log_probs, np.array(here, np.int32)),
      node_rows(given, slots[:, 0]),
      draft.tokens[:, slots],
      law,
      weight,
      owed[-1][:, at],
    )
    # Children, in the order of the nodes.
    parent = np.searchsorted(at, np.array([tree.parents[c] for c in below])
      - level.start)  # fmt: skip
    pick = lambda x: x[:, parent, tree.rank[below]]  # noqa: B023
    owed.append(pick(handed[0]))
    share.append(pick(handed[1]))
    scores.append(pick(handed[2]))
    weights = weight[:, parent]
    rests.append(rest)
    totals.append(jnp.sum(rest, axis=-1))
  return _Walk(
    owed=jnp.concatenate(owed, axis=1),
    share=jnp.concatenate(share, axis=1),
    scores=tuple(scores),
    rest=jnp.concatenate(rests, axis=1),
    total=jnp.concatenate(totals, axis=1),
  )


def _of_one_child(
  scores: Array, weights: Array, counts: np.ndarray
) -> tuple[Array, Array]:
  """The law of one child's score, of which the node's is the largest.

  Args:
    scores, weights: `f32[B, n, bins]`, of nodes.
    counts: `int[n]`, their children.

  Returns:
    Both of a child, `f32[B, n, bins]`.
  """
  if (counts == 1).all():
    return scores, weights
  power = jnp.asarray(1 / counts[:, None], scores.dtype)
  one = jnp.diff(_edges(scores) ** power, axis=-1)
  return one, weights * jnp.where(one > 0, scores, 0) / jnp.where(
    one > 0, one, 1
  )


def _edges(scores: Array) -> Array:
  """Cumulated probability of the bins, 0 to 1: `f32[..., bins + 1]`."""
  total = jnp.cumsum(scores, axis=-1)
  last = total[..., -1:]
  total = jnp.minimum(total / jnp.where(last > 0, last, 1), 1)
  return jnp.concatenate([jnp.zeros_like(last), total], axis=-1)


def _hand_on(target_log_probs, draft_log_probs, tokens, scores, weights, owed):
  """What the drafted children of one node get, and what is left of it.

  Args:
    target_log_probs, draft_log_probs: `f32[V]`, the laws q and p.
    tokens: `i32[D]`, the children.
    scores, weights: `f32[bins]`, of a child's score.
    owed: `f32[]`, v.

  Returns:
    The children's v and share, `f32[D]`, and the laws of their scores,
    `f32[D, bins]`; and `f32[V]`, `[v q - a]_+`.
  """
  constant = jax.lax.stop_gradient(
    (target_log_probs, draft_log_probs, scores, weights, owed)
  )
  classes = single_tokens(*constant[:2])
  node = make_node(*constant[2:4], classes.draft, classes.target, constant[4])
  slopes, laws_of = hand_out(node, classes.ids[tokens])
  share = slopes[classes.ids[tokens]]
  draft, target = jnp.exp(draft_log_probs), owed * jnp.exp(target_log_probs)
  given = share * laws.share(target[tokens], draft[tokens] * share)
  rest = jnp.maximum(target - draft * slopes[classes.ids], 0)
  return (given, share, laws_of), rest


# ------------------------------------------------------------------ the leaves


def _selected(tree: Tree, scores: tuple[Array, ...]) -> Array:
  """The probability that each leaf has the largest score, `f32[B, leaves]`.

  Ties within a bin are broken evenly, between the children of a node: which of
  them is the largest is decided level by level.
  """
  levels = tree.levels
  cdfs = [_edges(law) for law in scores]
  among = []  # by level: the weight of each child against its siblings
  for depth in range(tree.max_depth - 1, -1, -1):
    level, below = levels[depth], levels[depth + 1]
    here = [n for n in level if tree.children[n]]
    width = max(len(tree.children[n]) for n in here)
    if width == 1:
      family = cdfs[depth + 1]
      among.append(None)
    else:
      pad = lambda nodes: [c - below.start for c in nodes] + [len(below)] * (
        width - len(nodes)  # noqa: B023
      )  # fmt: skip
      slots = np.array([pad(tree.children[n]) for n in here], np.int32)
      given = jnp.concatenate(
        [cdfs[depth + 1], jnp.ones_like(cdfs[depth + 1][:, :1])], axis=1
      )[:, slots]  # [B, n, C, bins + 1]
      parent = np.array([here.index(tree.parents[c]) for c in below])
      among.append(_beats_others(given)[:, parent, tree.rank[list(below)]])
      family = jnp.prod(given, axis=2)
    cdfs[depth] = cdfs[depth].at[:, np.array(here) - level.start].set(family)
  weight = jnp.ones_like(scores[0])
  found, leaves = [], []
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
      found.append(jnp.sum(mine * weight[:, at], axis=-1))
      leaves += ends
  return jnp.concatenate(found, axis=1)


def _beats_others(cdfs: Array) -> Array:
  """The probability that no sibling has more than a score of each bin.

  Args:
    cdfs: `f32[B, n, C, bins + 1]`, of the siblings' scores.

  Returns:
    `f32[B, n, C, bins]`, `int_0^1 prod_{others} (F + u f) du`.
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
  """The probability that each node is the deepest accepted one.

  Args:
    selected: `f32[B, leaves]`.
    passes: `f32[B, N + 1]`, that a node's own test passes; of the selected path
      the deepest that passes is accepted.

  Returns:
    `f32[B, N + 1]`.
  """
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
  """Raises ValueError unless siblings are independent, and all there.

  A single path may end early: then nothing is selected.
  """
  requirements.independent("block_transport", tree, siblings)
  if not tree.is_chain:
    requirements.form("block_transport", tree, Form.FIXED)


RULE = Rule(name="block_transport", verify=verify, lossless=True, check=check)
