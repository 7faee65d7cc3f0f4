"""Toy drafters of every family of heads, on a toy target's features."""

import dataclasses

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import toys

from specjax import drafters
from specjax.shapes import dynamic
from specjax.siblings import WITHOUT_REPLACEMENT
from specjax.tree import Tree, bound, chain, delayed, paths
from specjax.types import Drafter, MarginalModel

LAYERS, DEPTHS = 3, 3
# The accepted path is 0, 1, 3: not the first nodes.
TREE, FAMILY = Tree((-1, 0, 0, 1, 1)), Tree((-1, 0, 0, 1))
WORDS = 3  # of the vocabulary that drafts are enumerated over
FEW_TARGET = toys.table(WORDS, seed=0).astype(np.float64)
FEW_DRAFT = toys.near(FEW_TARGET, noise=1.0, seed=1).astype(np.float64)


def target(vocab_size: int):
  """The model whose features all of them read."""
  return toys.table_model(vocab_size, layers=LAYERS)


def error(drafter: Drafter, rule: str, **more) -> float:
  """Of the law of a round's tokens, over all that may be drafted."""
  with jax.enable_x64(True):
    return exact_cases.round_error(
      drafter, rule, model=target(WORDS), target=FEW_TARGET, draft=FEW_DRAFT,
      **more,
    )  # fmt: skip


def marginals(params, features):
  """Heads that look up the feature of the last layer, each its own row."""
  context = (features[:, -1] - (LAYERS - 1) * toys.SHIFT).astype(jnp.int32)
  return params[
    toys.depth_row(context[:, None], np.arange(DEPTHS), params.shape[0])
  ]


def block_total(text, contexts: int) -> int:
  """What the row of `toys.block_model` is of, from a text in NumPy."""
  weights = np.asarray(toys.weight_at(np.arange(len(text))))
  features = np.cumsum((text + 1) * weights)[:-1] % contexts
  return (features * weights[:-1] % contexts).sum() + text[-1]


def with_masks(vocab_size: int, token: int = 0, state: int = 0):
  """P-EAGLE's head, whose masks are this token and this hidden state."""
  unknown = jnp.full(LAYERS, toys.SHIFT + state, jnp.float32)
  return dataclasses.replace(
    toys.feature_model(vocab_size, num_features=LAYERS),
    mask=lambda params: (token, unknown),
  )


def paths_of(draft, row: int) -> set:
  """The tokens after the root down to each node of a row's draft."""
  topology, drafted = draft.topology(), set()
  for node in np.flatnonzero(topology.present[row])[1:]:
    along = np.asarray(topology.paths[row, node])
    along = along[1 : int(topology.depth[row, node]) + 1]
    drafted.add(tuple(np.asarray(draft.tokens)[row, along].tolist()))
  return drafted


def make(name: str, vocab_size: int) -> Drafter:
  """The drafter of that name; its parameters are one table.

  Args:
    name: one of `RULES`.
    vocab_size: V.
  """
  family, form = name.split(", ")
  kind = {
    "drawn chain": dict(tree=chain(2)),
    "one token": dict(tree=chain(1)),
    "drawn tree": dict(tree=TREE),
    "drawn paths": dict(tree=paths(2, 2)),
    "delayed paths": dict(tree=delayed(1, 2, 1)),
    "distinct": dict(tree=FAMILY, siblings=WITHOUT_REPLACEMENT),
    "certain chain": dict(tree=chain(2), siblings="given"),
    "certain tree": dict(tree=TREE, siblings="given"),
    "best tree": dict(tree=bound(4, 2, 2), siblings="given"),
    "families": dict(tokens=3, tree=dynamic(7, top_k=2, families=True)),
    "dynamic tree": dict(tree=bound(4, 2, 2)),
    "cut chain": dict(tree=chain(2), threshold=0.5),
    "cut tree": dict(tree=TREE, threshold=0.5),
  }[form]
  kind["vocab_size"] = vocab_size
  if family == "eagle":
    head = toys.feature_model(vocab_size, num_features=LAYERS)
    return drafters.eagle(head, **kind)
  if family == "p_eagle":
    return drafters.p_eagle(with_masks(vocab_size), **kind)
  if family == "mtp":
    head = toys.layered_head(vocab_size, num_features=LAYERS, num_depths=2)
    return drafters.mtp(head, **kind)
  if family == "assistant":
    reader = toys.cache_reader(vocab_size, num_features=LAYERS, num_own=2)
    return drafters.assistant(reader, **kind)
  if family == "dflash":
    head = toys.block_model(vocab_size, num_features=LAYERS, num_depths=DEPTHS)
    return drafters.dflash(head, **kind)
  if family == "dflash2":  # a second child may find all candidates taken
    few = 1 if form == "distinct" else 2
    head = toys.markov_block(
      vocab_size, num_features=LAYERS, num_depths=DEPTHS, candidates=few
    )
    return drafters.dflash2(head, **kind)
  if family == "dspark":
    head = toys.markov_block(vocab_size, num_features=LAYERS, num_depths=DEPTHS)
    return drafters.dspark(head, **kind)
  head = MarginalModel(
    vocab_size=vocab_size, num_features=LAYERS, num_depths=DEPTHS,
    apply=marginals,
  )  # fmt: skip
  return drafters.medusa(head, **kind)


# Every form of every family, and lossless rules that fit it; the first accepts
# most.
_CHAIN, _TREE = ("block", "token"), ("recursive", "traversal")
_PATHS = ("block_transport", "kseq", "transport", "recursive")
_DELAYED = (*_PATHS, "traversal")
_DISTINCT, _CERTAIN = ("recursive", "traversal"), ("match", "recursive")
RULES = {
  "eagle, drawn chain": _CHAIN,
  "eagle, drawn tree": _TREE,
  "eagle, delayed paths": _DELAYED,
  "eagle, distinct": _DISTINCT,
  "eagle, dynamic tree": _CERTAIN,
  "p_eagle, one token": _CHAIN,
  "p_eagle, drawn tree": _TREE,
  "p_eagle, best tree": _CERTAIN,
  "medusa, drawn chain": _CHAIN,
  "medusa, drawn tree": _TREE,
  "medusa, distinct": _DISTINCT,
  "medusa, certain tree": _CERTAIN,
  "medusa, best tree": _CERTAIN,
  "dflash, drawn chain": _CHAIN,
  "dflash, drawn tree": _TREE,
  "dflash, distinct": _DISTINCT,
  "dflash, certain chain": _CERTAIN,
  "dflash, best tree": _CERTAIN,
  "dflash, families": _CERTAIN,
  "dflash2, drawn chain": _CHAIN,
  "dflash2, drawn tree": _TREE,
  "dflash2, drawn paths": _PATHS,
  "dflash2, distinct": _DISTINCT,
  "dflash2, dynamic tree": _CERTAIN,
  "dspark, drawn chain": _CHAIN,
  "dspark, drawn tree": _TREE,
  "dspark, delayed paths": _DELAYED,
  "dspark, drawn paths": _PATHS,
  "dspark, distinct": _DISTINCT,
  "dspark, dynamic tree": _CERTAIN,
  "dspark, cut chain": ("block", "token", "recursive", "traversal"),
  "dspark, cut tree": ("recursive", "kseq", "transport", "traversal"),
  "mtp, drawn chain": _CHAIN,
  "mtp, drawn tree": _TREE,
  "mtp, distinct": _DISTINCT,
  "mtp, dynamic tree": _CERTAIN,
  "assistant, drawn chain": _CHAIN,
  "assistant, drawn tree": _TREE,
  "assistant, distinct": _DISTINCT,
  "assistant, dynamic tree": _CERTAIN,
}
