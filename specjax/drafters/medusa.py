"""Heads on the target's features that say all depths at once: marginals.

Medusa's residual blocks (Cai et al., ICML 2024) and the outputs of blockwise
parallel decoding (Stern et al., NeurIPS 2018) read what the target knew when it
had read all tokens but the newest, and give a law for each depth: head k that
of the token k after the newest. The laws know nothing of each other, and drafts
are made of them as `specjax.drafters.shared.marginals` says: drawn, for any
rule, or certain, for `match`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax import siblings as siblings_lib
from specjax.drafters.shared import marginals as marginals_lib
from specjax.siblings import IID, Siblings
from specjax.tree import Tree
from specjax.types import Commit, Drafter, Idle

# `(parameters, features f[B, F]) -> f32[B, K, V]`, the logits of K depths.
Marginals = Callable[[Any, Array], Array]


def drafter(
  marginals: Marginals,
  *,
  num_heads: int,
  num_features: int,
  tree: Tree,
  siblings: Siblings | str = IID,
  vocab_size: int,
  name: str = "medusa",
) -> Drafter:
  """Drafts with heads, whose parameters are `Params.draft`.

  The features are those of the newest token that the target has read. Of a
  prompt of one token it has read none: the first round sees zeros.

  Args:
    marginals: the heads.
    num_heads: K, depths that they know.
    num_features: F, width of the target's features (`ModelOutput.features`).
    tree: what every proposal fills; not deeper than K. One whose parents are
      data (`specjax.tree.bound`) gets the likeliest nodes of the product law.
    siblings: how the children of a node are drawn, or the name of it in
      `specjax.siblings`. GIVEN: they are not drawn, but certain; child r of a
      node is the token of rank r in the law of its depth.
    vocab_size: V, the number of real tokens.
    name: for messages and reports.

  Returns:
    The `Drafter`; its state is `f[B, F]`.

  Raises:
    ValueError: if the tree does not suit the heads, the siblings or the
      vocabulary.
  """
  siblings = siblings_lib.get(siblings)
  marginals_lib.check(name, num_heads, tree, siblings, vocab_size)

  def propose(params, features, target_cache, context):
    logits = marginals(params.draft, features)
    draft = marginals_lib.draft(
      logits, context, tree=tree, siblings=siblings, vocab_size=vocab_size
    )
    return draft, features, target_cache

  return Drafter(
    name=name,
    tree=tree,
    siblings=siblings,
    init=lambda params, batch, slots, inputs: jnp.zeros((batch, num_features)),
    prefill=_newest,
    propose=propose,
    commit=_newest,
    row_axes=lambda state: 0,
    passes=(1,),
    idle=Idle.COMMIT,
    reads_anew=True,
  )


def _newest(params, features: Array, commit: Commit) -> Array:
  """The features of the newest token that was read and stands, `f[B, F]`."""
  del params
  found = commit.target_output.features
  if found is None:
    raise ValueError(
      "heads read the target's features, and it gives none (build it with "
      "features=)"
    )
  if found.shape[-1] != features.shape[-1]:
    raise ValueError(
      f"heads read {features.shape[-1]} features, the target gives "
      f"{found.shape[-1]}"
    )
  last = jnp.maximum(commit.count - 1, 0)[:, None]
  node = jnp.take_along_axis(commit.path, last, axis=1)[..., None]
  newest = jnp.take_along_axis(found, node, axis=1)[:, 0]
  return jnp.where(
    commit.count[:, None] > 0, newest.astype(features.dtype), features
  )


def tree_of_ranks(paths: tuple[tuple[int, ...], ...]) -> Tree:
  """The tree of Medusa's choices: a path of ranks for each node.

  Args:
    paths: of each node but the root, in any order: which child of which child
      of the root it is, from 0, as in `((0,), (1,), (0, 0))`. Elder siblings
      and all nodes above are among them.

  Raises:
    ValueError: if one of those is missing, or a path is there twice.
  """
  known = set(paths)
  if len(known) != len(paths) or () in known:
    raise ValueError("every node is named once, the root is not")
  for path in paths:
    *above, rank = path
    for need in (tuple(above), (*above, rank - 1)):
      if need and need[-1] >= 0 and need not in known:
        raise ValueError(f"{path} is there, and {need} is not")
  ordered = [(), *sorted(known, key=lambda p: (len(p), p))]
  index = {path: n for n, path in enumerate(ordered)}
  return Tree((-1, *(index[path[:-1]] for path in ordered[1:])))


def _ranks(*levels: str) -> tuple[tuple[int, ...], ...]:
  """Paths as published: digits, "0-3" for a range of the last one."""
  found = []
  for word in " ".join(levels).split():
    first, _, last = word.partition("-")
    head = tuple(map(int, first[:-1]))
    found += [
      (*head, r) for r in range(int(first[-1]), int((last or first)[-1]) + 1)
    ]
  return tuple(found)


# Static trees that were published, by name: of 63 nodes and the root for
# Vicuna-7B (Medusa), and of 25 (EAGLE-1, under the same name there).
TREES = {
  "mc_sim_7b_63": tree_of_ranks(
    _ranks(
      "0-9",
      "00-09 10-16 20-22 30 31 40 50 60 70 80 90",
      "000-009 010 011 012 020 021 030 040 050 060 070 100 101 200",
      "0000 0001",
    )
  ),
  "eagle_25": tree_of_ranks(
    _ranks(
      "0-3",
      "00 01 02 10 11 20 21 30",
      "000 001 002 010 011 020 021 100",
      "0000 0001 0002",
      "00000 00001",
    )
  ),
}
