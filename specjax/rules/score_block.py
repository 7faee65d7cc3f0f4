"""Block verification of the path with the best score, without replacement.

Every leaf has a score, in one of N bins; ties are broken at random. The path of
the best leaf is selected and verified as a block, against the distribution it
was selected from. Let F be the cumulative distribution of the best score below
a node (uniform at the root), p and q the draft's and target's distributions
after it, and B_x, chosen given p and q, those of the best score below child x.
The distributions of a family's best score and of the selected child are

  E[prod B] = sum_{x != y} p(x) p(y) / (1 - p(x)) B_x B_y,  required to be F,
  g(x) = sum_b W(b) P(x is in the family and its best, in bin b),

where W(b) is the probability that a node whose best score is in bin b is
selected: 1 at the root, then multiplied by `E[the other's B there | x is in the
family]` at each level. It is lossless:

- The best score below a node follows F, whatever is drafted below: at a leaf by
  construction, above by induction, since the children's bests are independent
  with distributions B_x given the family. (This needs equally many children at
  all nodes of a depth.)
- So g and W are known along the selected path: within bin b, of edges b and
  b + 1, the other child y is beaten with probability `(B_y(b) + B_y(b + 1)) /
  2`, as ties are broken evenly.
- Block verification needs the distribution a path was drawn from only along
  that path.

Scores have Gumbel form, `B_x = u^theta_x`: x beats y with probability `theta_x
/ (theta_x + theta_y)` (Bradley and Terry, 1952). The powers theta are fitted,
by Hunter's algorithm (Ann. Statist. 2004) in longer steps, to the distribution
`max(w q, lambda even)`, with w the node's debt and `even` the distribution of a
fair choice. Any powers are lossless; gradients treat B as constant.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.rules import requirements
from specjax.siblings import WITHOUT_REPLACEMENT, Siblings
from specjax.structs import static, struct
from specjax.tree import Form, Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification

_NUM_BINS = 32
_NUM_ROUNDS = 8
_STEP = 1.5
_MOST = 7.0  # |log theta|
# -log u, from u = 0 to 1; B is linear in between.
_TIMES = np.array([np.inf, *np.exp(np.linspace(_MOST + 3, -_MOST - 4, 32)), 0])


# Exact to rounding, also on devices that multiply in lower precision.
_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@struct
class _State:
  """A node's score and debt, from the distributions above it; any leading axes.

  Attributes:
    owed: `f32[]`, w, P(at least this node is accepted | it is selected).
    below: `f32[N + 1]`, F at the edges of the bins.
    weight: `f32[N]`, W.
  """

  owed: Array
  below: Array
  weight: Array


@struct
class _Family:
  """The distribution of a node's children: a pair, or a single child.

  Attributes:
    probs: `f32[V]`, p.
    odds: `f32[V]`, p / (1 - p), 0 for the most probable token `top`.
    after_top: `f32[V]`, the second child's distribution if the first is `top`,
      as it was drawn: p may have almost no other mass.
    pair: whether there are two children (static).
  """

  probs: Array
  odds: Array
  top: Array
  after_top: Array
  pair: bool = static()

  @classmethod
  def of(cls, log_probs: Array, tokens: Array) -> "_Family":
    """The family whose children were drawn from distributions `f32[C, V]`."""
    probs, top = jnp.exp(log_probs[0]), jnp.argmax(log_probs[0])
    second = WITHOUT_REPLACEMENT.child(log_probs[0], top[None], 2)
    second = jnp.where(tokens[0] == top, log_probs[-1], second)
    here = jnp.arange(len(probs)) == top
    return cls(
      probs=probs,
      odds=jnp.where(here, 0, probs / jnp.where(here, 1, 1 - probs)),
      top=top,
      after_top=jnp.exp(second),
      pair=len(tokens) == 2,
    )

  def product(self, x: Array) -> Array:
    """`E[prod of x over the family]`, `f32[n, V] -> f32[n]`."""
    every = _dot(x, self.probs)
    if not self.pair:
      return every
    of_top = self.probs[self.top] * x[:, self.top] * _dot(x, self.after_top)
    equal = _dot(x * x, self.odds * self.probs)
    return of_top + every * _dot(x, self.odds) - equal

  def with_other(self, x: Array) -> Array:
    """`E[x of the other child | the token is in the family]`, `f32[n, V]`."""
    if not self.pair:
      return jnp.broadcast_to(self.probs, x.shape)
    probs, odds = self.probs, self.odds
    first = odds * (_dot(x, probs)[:, None] - probs * x)
    second = probs * (_dot(x, odds)[:, None] - odds * x)
    of_top = self.after_top * x[:, self.top, None]
    of_top = of_top.at[:, self.top].set(_dot(x, self.after_top))
    return first + second + self.probs[self.top] * of_top


def _scores(family: _Family, log_power: Array, below: Array) -> Array:
  """`f32[N + 1, V]`, every B at the edges where their product is `below`."""
  times = jnp.asarray(_TIMES, log_power.dtype)
  raw = jnp.exp(-jnp.exp(log_power) * times[:, None])
  step = raw[1:] - raw[:-1]
  reached = family.product(raw)
  # Between two times the product is quadratic in the elapsed part.
  bend = family.product(step) * family.pair
  last = jnp.searchsorted(reached, below, side="right") - 1
  last = jnp.clip(last, 0, len(_TIMES) - 2)
  slope = (reached[1:] - reached[:-1] - bend)[last]
  missing = jnp.maximum(below - reached[last], 0)
  root = slope + jnp.sqrt(slope**2 + 4 * bend[last] * missing)
  part = jnp.clip(2 * missing / jnp.where(root > 0, root, 1), 0, 1)
  cumulated = raw[last] + part[:, None] * step[last]
  return cumulated.at[0].set(0).at[-1].set(1)


def _selected(family, scores, weight):
  """The selected child's distribution, `f32[V]`, and `with_other` per bin."""
  others = family.with_other((scores[1:] + scores[:-1]) / 2)
  probs = _dot(weight, jnp.diff(scores, axis=0) * others)
  total = jnp.sum(probs)
  return probs / jnp.where(total > 0, total, 1), others


def _fit(family: _Family, wanted: Array, state: _State) -> Array:
  """Fits powers so that the selected child follows `wanted`, `f32[V]`."""
  even = family.with_other(jnp.ones_like(wanted)[None])[0]
  even = even / jnp.sum(even)
  wanted = jnp.where(even > 0, wanted, 0)

  def lower(_, level):  # Newton's steps, from above
    excess = jnp.sum(jnp.maximum(wanted, level * even)) - 1
    rate = jnp.sum(jnp.where(level * even > wanted, even, 0))
    return level - excess / jnp.where(rate > 0, rate, 1)

  level = jax.lax.fori_loop(0, 8, lower, jnp.ones_like(wanted[0]))
  goal = jnp.maximum(wanted, level * even)

  def climb(_, log_power):
    scores = _scores(family, log_power, state.below)
    probs, _ = _selected(family, scores, state.weight)
    known = (goal > 0) & (probs > 0)
    log = lambda x: jnp.log(jnp.where(known, x, 1))
    off = log(goal) - log(probs)
    off = jnp.where((goal > 0) | (probs <= 0), off, -2 * _MOST)  # not wanted
    return jnp.clip(log_power + _STEP * off, -_MOST, _MOST)

  return jax.lax.fori_loop(0, _NUM_ROUNDS, climb, jnp.zeros_like(wanted))


def _descend(state, target_log_probs, draft_log_probs, tokens):
  """One node's `[w q - g]_+`, P(it passes), and its children's states.

  Takes its state and the arguments of `specjax.rules.nodewise.DecideFn`.
  """
  family = _Family.of(draft_log_probs, tokens)
  wanted = state.owed * jnp.exp(target_log_probs)
  constant = jax.lax.stop_gradient((family, wanted, state))
  scores = _scores(constant[0], _fit(*constant), constant[2].below)
  probs, others = _selected(family, scores, state.weight)
  rest = jnp.maximum(wanted - probs, 0)
  total = jnp.sum(rest)
  drawn = family.with_other(jnp.ones_like(wanted)[None])[0, tokens, None]
  children = _State(
    owed=distributions.share(wanted[tokens], probs[tokens]),
    below=scores[:, tokens].T,
    weight=state.weight * others[:, tokens].T / jnp.where(drawn > 0, drawn, 1),
  )
  return rest, distributions.share(total, total + (1 - state.owed)), children


def _descend_level(state, inputs):
  """`_descend` for a level: the children's states, residuals and passes."""
  rest, passing, children = jax.vmap(jax.vmap(_descend))(state, *inputs)
  return jax.tree.map(jax.vmap(jnp.concatenate), children), (rest, passing)


def _descend_levels(state, inputs):
  """`_descend` for levels of one size, `[L, B, n, ..]`, in one loop."""
  if len(inputs[0]) > 1:
    return jax.lax.scan(_descend_level, state, inputs)
  state, outputs = _descend_level(state, [x[0] for x in inputs])
  return state, [x[None] for x in outputs]


def verify(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  del topology  # trees are whole
  tree, given = draft.tree, draft.distributions(target_log_probs)
  one = jnp.ones_like(target_log_probs[:, :1, 0])  # [B, 1]
  state = _State(
    owed=one,
    below=one[..., None] * jnp.linspace(0, 1, _NUM_BINS + 1, dtype=one.dtype),
    weight=jnp.broadcast_to(one[..., None], (len(one), 1, _NUM_BINS)),
  )
  inner = tree.levels[:-1]
  counts = [len(tree.children[level.start]) for level in inner]
  rests, passes = [], []
  alike = lambda level: (len(level), len(tree.children[level.start]))
  for (size, count), some in itertools.groupby(inner, alike):
    levels = [*some]
    shape = len(levels), size
    here = slice(levels[0].start, levels[-1].stop)
    below = slice(levels[0].stop, levels[-1].stop + size * count)
    state, (rest, passing) = _descend_levels(
      state,
      (
        _by_level(target_log_probs[:, here], *shape),
        _by_level(given[:, below], *shape, count),
        _by_level(draft.tokens[:, below], *shape, count),
      ),
    )
    rests += [*rest]
    passes += [*passing]
  rests.append(jnp.zeros_like(target_log_probs[:, tree.levels[-1].start :]))
  rest = jnp.concatenate(rests, axis=1)
  passes = [one, *passes[1:], state.owed] if inner else [one]
  came = [_chosen(counts, state.below)]  # selected, and all tests below fail
  for count, passing in zip(counts[::-1], passes[:0:-1], strict=True):
    came.append(_families(came[-1] * (1 - passing), count).sum(axis=2))
  probs = [x * y for x, y in zip(came[::-1], passes, strict=True)]
  return Verification(
    node_probs=jnp.concatenate(probs, axis=1),
    next_log_probs=lambda node: distributions.normalize(
      take_node(rest, node), take_node(target_log_probs, node)
    ),
  )


def _by_level(x: Array, *shape: int) -> Array:
  """Groups nodes by level, `[B, L n .., ..] -> [L, B, n, .., ..]`."""
  return jnp.moveaxis(x.reshape(len(x), *shape, *x.shape[2:]), 1, 0)


def _families(x: Array, count: int) -> Array:
  """Groups a level's nodes by parent, `[B, n C, ..] -> [B, n, C, ..]`."""
  return x.reshape(len(x), x.shape[1] // count, count, *x.shape[2:])


def _chosen(counts: list[int], below: Array) -> Array:
  """P(each leaf is selected), `f32[B, n]`, from all leaves' `below`."""
  best = [below]  # of the best leaf below every node, deepest first
  for count in counts[::-1]:
    best.append(_families(best[-1], count).prod(axis=2))
  chosen = jnp.diff(best.pop())  # by the bin of the best
  for count in counts:
    mine = _families(best.pop(), count)
    part = jnp.diff(mine)  # [B, n, C, N]
    if count == 2:
      part = part * (mine[..., 1:] + mine[..., :-1])[:, :, ::-1] / 2
    total = jnp.sum(part, axis=2, keepdims=True)
    part = part / jnp.where(total > 0, total, 1)
    chosen = jax.vmap(jnp.concatenate)(chosen[:, :, None] * part)
  return jnp.sum(chosen, axis=-1)


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless all nodes of a depth have one child, or two."""
  requirements.form("score_block", tree, Form.FIXED)
  if tree.max_children > 1:
    requirements.drawn("score_block", tree, siblings, WITHOUT_REPLACEMENT)
  counts = [{len(tree.children[n]) for n in level} for level in tree.levels]
  uneven = any(len(count) > 1 or max(count) > 2 for count in counts)
  if uneven or list(tree.parents) != sorted(tree.parents):
    raise ValueError(
      "rule 'score_block' needs one or two children at every node, as many as "
      "at others of its depth, leaves of equal depth and nodes in the order of "
      f"their parents, got parents {tree.parents}"
    )


RULE = Rule(name="score_block", verify=verify, lossless=True, check=check)
