"""Greedy multi-path block verification of K i.i.d. paths.

After Thomas and Pal (2026). Order the tokens after every prefix strictly, here
by q / p, and select the lexicographically largest of the K paths. Its first i
tokens have probability `g(x^i) = F(x^i)^K - F^-(x^i)^K`, where F^- is the
draft's mass of length-i prefixes ranked below and `F = F^- + p(x^i)`. The
selected path is verified as a block with draft distribution `g(x^i) /
g(x^{i-1})`, which is lossless because the path follows that distribution. K = 1
is block verification. Any order would be lossless.

The walk along the path carries `m = p(x^i) / F(x^i)`. With E the draft's mass
of tokens ranked below y after x^i, `u = 1 - m (1 - E - p(y))` and `v = u -
m p(y)` are F and F^- of (x^i, y) over F(x^i), and

  g(x^i, y) / g(x^i) = p(y) sum_j u^j v^{K-1-j} / sum_j (1 - m)^j,

which neither underflows on long paths nor cancels.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions
from specjax.rules import requirements
from specjax.rules.block import verify_path
from specjax.rules.ratio_classes import log_ratio
from specjax.rules.token import Path
from specjax.siblings import Siblings
from specjax.tree import Topology, Tree, take_node
from specjax.types import Draft, Rule, Verification


def verify(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> Verification:
  """See `specjax.types.VerifyFn`."""
  del topology  # paths are whole
  tree = draft.tree
  given = draft.distributions(target_log_probs)
  batch, num_paths = draft.tokens.shape[0], max(len(tree.children[0]), 1)
  alive = jnp.ones((batch, num_paths), bool)
  best = jnp.zeros((batch,), jnp.int32)
  share = jnp.ones_like(target_log_probs[:, 0, 0])  # m
  nodes, draft_log_probs = [best], [given[:, 0]]
  for level in tree.levels[1:]:
    target = take_node(target_log_probs, nodes[-1])  # [B, V]
    # From the selected path's own child: equal paths have equal distributions.
    drafted = take_node(given, level.start + best)
    key = _order_keys(log_ratio(target, drafted))
    tokens = draft.tokens[:, level.start : level.stop]  # [B, K]
    # The token with the largest key among the surviving paths.
    keys = jnp.where(alive, jnp.take_along_axis(key, tokens, axis=1), 0)
    token = jnp.take_along_axis(
      tokens, jnp.argmax(keys + alive, axis=1, keepdims=True), axis=1
    )[:, 0]
    alive &= tokens == token[:, None]
    best = jnp.argmax(alive, axis=1).astype(jnp.int32)
    nodes.append(level.start + best)
    probs = jnp.exp(drafted)
    below = jax.vmap(_mass_below)(key, probs)
    upper = 1 - share[:, None] * jnp.maximum(1 - below - probs, 0)  # u
    lower = jnp.maximum(upper - share[:, None] * probs, 0)  # v
    powers = range(num_paths)
    top_sum = sum(
      (upper**j * lower ** (num_paths - 1 - j) for j in powers), 0.0
    )
    all_sum = sum(((1 - share) ** j for j in powers), jnp.zeros_like(share))
    draft_log_probs.append(drafted + jnp.log(top_sum / all_sum[:, None]))
    pick = lambda x: jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]  # noqa: B023
    share = distributions.share(share * pick(probs), pick(upper))
  path = jnp.stack(nodes, axis=1)  # [B, L + 1]
  along = lambda x: jax.vmap(lambda row, at: row[at])(x, path)
  selected = Path(
    tokens=along(draft.tokens)[:, 1:],
    distributions=jnp.stack(draft_log_probs, axis=1),
    present=np.ones((1, tree.max_depth), bool),
  )
  verification = verify_path(selected, along(target_log_probs))
  is_node = path[:, :, None] == jnp.arange(tree.num_nodes)  # [B, L + 1, N + 1]
  depth = jnp.asarray(tree.depth)
  return Verification(
    node_probs=jnp.sum(
      jnp.where(is_node, verification.node_probs[:, :, None], 0), axis=1
    ),
    next_log_probs=lambda node: verification.next_log_probs(depth[node]),
  )


def _order_keys(ratio: Array) -> Array:
  """A strict order `u32[..., V]`: log(q / p) in fine steps, then the token."""
  vocab = ratio.shape[-1]
  bits = max(vocab - 1, 1).bit_length()
  most = (1 << (31 - bits)) - 1
  place = jnp.clip(ratio / 32 + 0.5, 0, 1) * most
  token = jnp.arange(vocab, dtype=jnp.uint32)
  return (place.astype(jnp.uint32) << bits) | token


def _mass_below(key: Array, probs: Array) -> Array:
  """Mass of the tokens ordered before each, `f32[V]`.

  One integer operand sorts many times faster than two.
  """
  bits = max(len(key) - 1, 1).bit_length()
  order = (jnp.sort(key) & ((1 << bits) - 1)).astype(jnp.int32)
  ordered = probs[order]
  before = jnp.cumsum(ordered) - ordered
  return jnp.zeros_like(probs).at[order].set(before, unique_indices=True)


def check(tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError unless the tree is independent paths."""
  requirements.equal_paths("multipath_block", tree)
  requirements.independent("multipath_block", tree, siblings)


RULE = Rule(name="multipath_block", verify=verify, lossless=True, check=check)
