"""Families of `launch.drafting` that look continuations up, or look ahead.

All draft trees whose form is data, which `num_speculative_tokens` and
`num_nodes` bound.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch import corpora
from specjax import drafters, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.siblings import GIVEN, Siblings
from specjax.tree import Tree
from specjax.types import Drafter, LanguageModel

_CERTAIN = "match"


def form_of_lookahead(config) -> tuple[Tree, Siblings]:
  """Guesses of `num_speculative_tokens` tokens, and the window beside them."""
  tree = drafters.lookahead.form(
    window=config.window,
    ngram=config.num_speculative_tokens + 1,
    num_guesses=config.num_guesses,
  )
  return tree, GIVEN


def make_lookahead(config, draft, *, tree, siblings, vocab_size) -> Drafter:
  """See `launch.drafting`."""
  del draft, siblings
  return drafters.lookahead.drafter(
    window=config.window,
    ngram=tree.max_depth + 1,
    num_guesses=config.num_guesses,
    vocab_size=vocab_size,
  )


def form_of_lookup(config) -> tuple[Tree, Siblings]:
  """`num_nodes` nodes, by default twice as many as a path has."""
  depth = config.num_speculative_tokens
  nodes = config.num_nodes or 2 * depth
  _settings(config, depth)
  return drafters.shared.occurrences.bounds(nodes, depth, None), GIVEN


def make_suffix(config, draft, *, tree, siblings, vocab_size) -> Drafter:
  """See `launch.drafting`."""
  del draft, siblings
  return drafters.suffix.drafter(
    num_nodes=tree.num_drafted,
    depth=tree.max_depth,
    vocab_size=vocab_size,
    own_text=config.drafter != "rest",
    with_corpus=bool(config.corpus),
    **_settings(config, tree.max_depth),
  )


def form_of_rasd(config) -> tuple[Tree, Siblings]:
  """The draft's own tree, and what else there is room for."""
  own = _own_tree(config)
  depth = max(config.num_speculative_tokens, own.max_depth)
  nodes = config.num_nodes
  if nodes <= own.num_drafted:
    raise ValueError(
      f"drafter 'rasd' needs num_nodes above the {own.num_drafted} nodes of "
      f"the draft's own tree, got {nodes}"
    )
  _settings(config, depth)
  return drafters.shared.occurrences.bounds(nodes, depth, None), GIVEN


def make_rasd(
  config, draft: LanguageModel, *, tree, siblings, vocab_size
) -> Drafter:
  """See `launch.drafting`."""
  del siblings
  return drafters.rasd.drafter(
    draft,
    tree=_own_tree(config),
    siblings=siblings_lib.get(config.siblings),
    num_nodes=tree.num_drafted,
    depth=tree.max_depth,
    num_retrieved=max(2 * tree.num_drafted, tree.max_depth),
    vocab_size=vocab_size,
    with_corpus=bool(config.corpus),
    **_settings(config, tree.max_depth),
  )


def _own_tree(config) -> Tree:
  if config.tree:
    return Tree(tuple(config.tree))
  return tree_lib.paths(config.num_speculative_tokens, config.num_drafts)


def _settings(config, depth: int) -> dict[str, Any]:
  """What all that look up have in common, checked."""
  found: dict[str, Any] = dict(
    max_match=config.max_match,
    max_hits=64,
    nodes_per_match=config.nodes_per_match or math.inf,
    min_prob=config.min_prob_drafted,
  )
  drafters.shared.occurrences.check(
    num_nodes=config.num_nodes or depth, depth=depth, **found
  )
  return found


def index(config, models) -> Any:
  """The corpus that `config.corpus` names, where the models are; or None."""
  if not config.corpus:
    return None
  found = corpora.read(config.corpus, models.tokenizer)
  if models.mesh is None:
    return jax.tree.map(jax.numpy.asarray, found)
  whole = NamedSharding(models.mesh, P())
  return jax.tree.map(
    lambda x: jax.make_array_from_callback(
      x.shape, whole, lambda i, x=x: np.asarray(x)[i]
    ),
    found,
  )


def nothing_but_index(config, models) -> tuple[None, Any]:
  """No model drafts; the parameters are the corpus, if there is one."""
  return None, index(config, models)


def check(config, tree: Tree, siblings: Siblings) -> None:
  """Raises ValueError for a rule that does not verify such trees.

  And if a tree is asked for that this drafter makes by itself.
  """
  wanted = _CERTAIN
  if config.drafter == "rasd":
    drawn = not siblings_lib.get(config.siblings).deterministic
    wanted = "recursive" if drawn else _CERTAIN
  elif config.tree or config.num_drafts != 1 or config.siblings != "iid":
    raise ValueError(
      f"drafter {config.drafter!r} makes its trees by itself, without tree, "
      "num_drafts and siblings"
    )
  if config.drafter == "rest" and not config.corpus:
    raise ValueError(
      "drafter 'rest' looks into a corpus: give config.corpus, a file of "
      "launch.tools.corpus_index"
    )
  if config.drafter == "lookahead" and config.num_nodes:
    raise ValueError(
      "drafter 'lookahead' has num_guesses, of num_speculative_tokens tokens, "
      "and no num_nodes"
    )
  try:
    rules.get(config.rule).check(tree, siblings)
  except ValueError as error:
    raise ValueError(
      f"{error}; drafter {config.drafter!r} drafts trees that follow from the "
      f"text: config.rule={wanted} verifies them"
    ) from None
