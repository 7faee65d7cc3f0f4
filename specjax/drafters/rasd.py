"""RASD: what a draft model says, and what was looked up, in one tree.

Retrieval-augmented speculative decoding (2025): the draft model draws its tree
as ever, the text and the corpus give a trie of continuations
(`specjax.drafters.suffix`), which the draft model prunes, and both are merged
where they begin alike. Nodes that both have are counted once, and what that
saves goes to further nodes that were looked up.

The draft model reads the trie in one pass, whatever its size, and of it the
nodes that it finds likeliest, by all tokens from the root on, fill what the
budget leaves.

Two forms, by how the draft model's tree is made:

- certain (`siblings=TOP_K`): every token is a function of the text, and the
  rule that fits is `match`;
- mixed (siblings that are drawn, as `IID` or `WITHOUT_REPLACEMENT`): drawn
  tokens first, with the laws they were drawn from, then certain ones among the
  same siblings. Rules that test one sibling after the other take that
  (`recursive`, `traversal`): what was looked up is tested last, against what is
  left of the target's law, so that whether it is there may depend on what was
  drawn.

What differs from the paper (no code of its authors is known): it prunes by the
draft model's law of the first token, this by that of all tokens; where a path
of its retrieved trie ends is a setting of its own, here of the budget.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import laws
from specjax import siblings as siblings_lib
from specjax.cache import Cache
from specjax.drafters import suffix
from specjax.drafters.model import (
  check_model,
  check_rolls_back,
  check_tree,
  draft_tree,
)
from specjax.drafters.shared import occurrences
from specjax.drafters.shared.tries import Trie
from specjax.siblings import GIVEN, TOP_K, Siblings
from specjax.structs import struct
from specjax.tree import Tree, data_topology, take_node
from specjax.types import Draft, Drafter, LanguageModel


@struct
class Parts:
  """What `Params.draft` is.

  Attributes:
    model: the draft model's parameters.
    corpus: a `specjax.drafters.shared.corpus.Corpus`, or None.
  """

  model: Any
  corpus: Any = None


def drafter(
  model: LanguageModel,
  *,
  tree: Tree,
  siblings: Siblings | str = TOP_K,
  num_nodes: int,
  depth: int,
  max_children: int | None = None,
  num_retrieved: int = 32,
  vocab_size: int,
  max_match: int = 16,
  max_hits: int = 64,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
  with_corpus: bool = False,
) -> Drafter:
  """Drafts with a model, and with what it thinks likely of what occurred.

  Args:
    model: the draft model, whose parameters are `Params.draft.model`.
    tree: what the draft model fills.
    siblings: how it does, or the name of it in `specjax.siblings`.
    num_nodes: N, tokens that are drafted at most, the model's among them.
    depth: G, of the deepest; at least that of `tree`.
    max_children: of one node; None for as many as there can be.
    num_retrieved: nodes that are looked up, of which the best are kept.
    vocab_size: V, the number of real tokens.
    max_match, max_hits, nodes_per_match, min_prob: see `suffix.drafter`.
    with_corpus: whether there is a `Params.draft.corpus`.

  Returns:
    The `Drafter`; its state is the draft model's `Cache`.

  Raises:
    ValueError: as `model.drafter` and `suffix.drafter`, or if the model's tree
      does not fit into the budget.
  """
  siblings = siblings_lib.get(siblings)
  check_model("draft", model, vocab_size)
  check_rolls_back("draft", model)
  check_tree(tree, siblings, vocab_size)
  if siblings.with_noise:
    raise ValueError(
      f"drafts with noise ({siblings.name}) hold no tokens that were looked up"
    )
  settings: dict[str, Any] = dict(
    num_nodes=num_retrieved,
    max_match=max_match,
    nodes_per_match=nodes_per_match,
    min_prob=min_prob,
  )
  occurrences.check(depth=depth, max_hits=max_hits, **settings)
  if tree.num_drafted >= num_nodes or tree.max_depth > depth:
    raise ValueError(
      f"the model's tree, of {tree.num_drafted} nodes and depth "
      f"{tree.max_depth}, must leave room in {num_nodes} nodes of depth {depth}"
    )
  whole = occurrences.bounds(num_nodes, depth, max_children)
  if tree.max_children > whole.max_children:
    raise ValueError(
      f"the model's tree has {tree.max_children} children of one node, and "
      f"{num_nodes} nodes of depth {depth} leave room for {whole.max_children}"
    )
  trie = occurrences.bounds(num_retrieved, depth, None)
  # All that a round may commit, and the newest token before it.
  width = depth + 2
  find = suffix.finder(
    depth=depth,
    max_hits=max_hits,
    max_match=max_match,
    own_text=True,
    with_corpus=with_corpus,
    vocab_size=vocab_size,
  )

  def init(params, batch, slots, inputs) -> Cache:
    most = max(tree.num_drafted, num_retrieved, width)
    return model.new_cache(
      params.draft.model, batch, slots + most, inputs if model.encode else None
    )

  def prefill(params, cache, commit) -> Cache:
    nothing = jnp.zeros((len(commit.tokens), 0), jnp.int32)
    _, cache = model.apply(
      params.draft.model,
      commit.tokens,
      cache.replace(length=commit.start),
      logits_at=nothing,
    )
    return cache.replace(length=commit.length)

  def propose(params, cache, target_cache, context):
    root_logits, cache = read(params.draft.model, cache, context)
    found = occurrences.together(find(params.draft.corpus, context), **settings)
    scores, cache = judged(
      params.draft.model, root_logits, cache, found, context
    )
    drawn, cache = draft_tree(
      model, params.draft.model, cache, root_logits, context, tree=tree,
      siblings=siblings, vocab_size=vocab_size,
    )  # fmt: skip
    draft = _merged(drawn, found, scores, whole)
    return draft, cache, target_cache

  def read(own, cache, context):
    """The logits after the root; fills in what was committed since."""
    start = jnp.maximum(context.length - width, 0)
    text = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))(
      context.tokens, start
    )
    output, cache = model.apply(own, text, cache.replace(length=start))
    logits = take_node(output.logits, context.length - 1 - start)
    return logits, cache.replace(length=context.length)

  def judged(own, root_logits, cache, found: Trie, context):
    """The draft model's log-probability of each beginning, `f32[B, R]`."""
    parents = jnp.pad(found.parents, ((0, 0), (1, 0)), constant_values=-1)
    topology = data_topology(trie, parents)
    there = topology.there[:, 1:]
    output, cache = model.apply(
      own,
      found.tokens,
      cache,
      positions=(context.length - 1)[:, None] + topology.depth[:, 1:],
      mask=topology.ancestors[:, 1:, 1:],
    )
    logits = jnp.concatenate([root_logits[:, None], output.logits], axis=1)
    law = jax.nn.log_softmax(
      logits[..., :vocab_size].astype(jnp.float32), axis=-1
    )
    after = jnp.take_along_axis(law, topology.parents[:, 1:, None], axis=1)
    each = laws.token_log_prob(after, found.tokens)
    each = jnp.where(there & ~jnp.isnan(each), each, -jnp.inf)
    above = topology.ancestors[:, 1:, 1:]
    total = jnp.sum(jnp.where(above, each[:, None], 0), axis=-1)
    return total, cache.replace(length=context.length)

  inner = (len(level) for level in tree.levels[1:-1])
  return Drafter(
    name="rasd",
    tree=whole,
    siblings=GIVEN,
    init=init,
    prefill=prefill,
    propose=propose,
    passes=(width, num_retrieved, *inner),
    max_positions=model.max_positions,
    again=width,
  )


def _merged(drawn: Draft, found: Trie, scores: Array, whole: Tree) -> Draft:
  """The model's tree, and behind it the best of what it has not drawn.

  Args:
    drawn: the model's own, of n nodes.
    found: what was looked up; R nodes, parents first.
    scores: `f32[B, R]`, never more than the parent's.
    whole: N nodes at most.
  """
  tree = drawn.tree
  own = tree.num_nodes
  twins = _twins(drawn, found)  # [B, R]
  new = (found.parents >= 0) & (twins < 0)
  # In the trie's order parents come first, and so they do among equals.
  left = whole.num_drafted - tree.num_drafted
  ranked = jnp.where(new, scores, -jnp.inf)
  count = min(left, ranked.shape[1])
  best, kept = lax.top_k(ranked, count)
  take = lambda x: jnp.take_along_axis(x, kept, axis=1)
  above = take(found.parents) - 1  # in the trie, -1 the root
  twin = jnp.take_along_axis(twins, jnp.maximum(above, 0), axis=1)
  beside = jnp.argmax(kept[:, None] == above[..., None], axis=-1) + own
  parents = jnp.where(above < 0, 0, jnp.where(twin >= 0, twin, beside))
  parents = jnp.where(best > -jnp.inf, parents, -1).astype(jnp.int32)
  fill = ((0, 0), (0, left - count))
  tokens = jnp.pad(take(found.tokens), fill)
  parents = jnp.pad(parents, fill, constant_values=-1)
  rows = len(tokens)
  log_probs = None
  if not drawn.siblings.deterministic and drawn.log_probs is not None:
    vocab = drawn.log_probs.shape[-1]
    point = tokens[..., None] == np.arange(vocab)
    certain = jnp.where(point, 0, -jnp.inf).astype(drawn.log_probs.dtype)
    log_probs = jnp.concatenate([drawn.log_probs, certain], axis=1)
  fixed = jnp.broadcast_to(np.array(tree.parents, np.int32), (rows, own))
  return Draft(
    tree=whole,
    siblings=GIVEN,
    tokens=jnp.concatenate([drawn.tokens, tokens], axis=1),
    log_probs=log_probs,
    parents=jnp.concatenate([fixed, parents], axis=1),
  )


def _twins(drawn: Draft, found: Trie) -> Array:
  """`i32[B, R]`: the drawn node that stands for each of the trie, or -1."""
  tree = drawn.tree
  above = np.array(tree.parents, np.int32)
  equal = found.tokens[..., None] == drawn.tokens[:, None]  # [B, R, n + 1]
  equal &= (np.arange(tree.num_nodes) > 0) & (found.parents >= 0)[..., None]
  twins = jnp.full_like(found.parents, -1)
  for _ in range(tree.max_depth):
    parent = jnp.take_along_axis(
      twins, jnp.maximum(found.parents - 1, 0), axis=1
    )
    parent = jnp.where(found.parents == 0, 0, parent)
    both = equal & (above == parent[..., None]) & (parent >= 0)[..., None]
    twins = jnp.where(both.any(axis=-1), jnp.argmax(both, axis=-1), -1)
  return twins.astype(jnp.int32)
