"""RASD: a draft model's tree merged with retrieved continuations.

Retrieval-augmented speculative decoding (2025): the draft model draws its tree
as usual; text and corpus yield a trie of continuations (`suffix`), which the
draft model prunes; the two are merged where they share prefixes. Shared nodes
count once, which leaves room for more looked-up ones.

The draft model scores the trie in one pass, and the nodes with the likeliest
paths fill the rest of the budget.

Two forms, by how the draft model's tree is made:

- deterministic (`siblings=TOP_K`), for `match`;
- mixed (drawn siblings, as `IID` or `WITHOUT_REPLACEMENT`): drawn tokens first,
  then deterministic ones among the same siblings, for rules that test siblings
  in turn (`recursive`, `traversal`). Looked-up tokens are tested last, so their
  presence may depend on what was drawn.

The paper (no code by its authors is known) prunes by the draft model's
distribution of the first token; this drafter, by all tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import distributions
from specjax.cache import Cache
from specjax.drafters.families.suffix import Search
from specjax.drafters.shared import arguments, levels
from specjax.drafters.shared.arguments import TOKENS
from specjax.drafters.shared.tries import Trie
from specjax.shapes import Shape
from specjax.siblings import GIVEN, IID, Siblings
from specjax.structs import struct
from specjax.tree import Tree, data_topology, take_node
from specjax.types import Draft, Drafter, LanguageModel


@struct
class Parts:
  """`Params.draft` of RASD.

  Attributes:
    model: the draft model's parameters.
    corpus: a `specjax.drafters.shared.corpus.Corpus`, or None.
  """

  model: Any
  corpus: Any = None


def rasd(
  draft: LanguageModel,
  *,
  nodes: int,
  tokens: int = TOKENS,
  tree: Tree | Shape | None = None,
  siblings: Siblings | str = IID,
  corpus: bool = False,
  max_match: int = 16,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
  max_hits: int = 64,
  num_retrieved: int | None = None,
  vocab_size: int | None = None,
) -> Drafter:
  """A draft model's tree plus retrieved continuations (RASD, 2025).

  Args:
    draft: the draft model, whose parameters are `Params.draft.model`.
    nodes: N, the most tokens to draft, including the model's.
    tokens: G, depth of the looked-up paths and of the model's.
    tree: the draft model's tree; None for one path.
    siblings: how it draws children, a `Siblings` or its name.
    corpus: whether to search `Params.draft.corpus` too.
    max_match, nodes_per_match, min_prob, max_hits: as in `suffix`.
    num_retrieved: R, nodes to look up, of which the best are kept; by default
      twice `nodes`.
    vocab_size: V, the number of real tokens; by default the model's.

  Raises:
    ValueError: as in `model` and `suffix`, or if the model's tree exceeds the
      budget.
    TypeError: if `tree` is not a tree.
  """
  if isinstance(tree, Shape) and tree.dynamic:
    raise ValueError("the draft's own tree cannot be dynamic")
  has_depth = isinstance(tree, Tree) or getattr(tree, "depth", None) is not None
  vocab_size = arguments.check_model("draft", draft, vocab_size)
  arguments.check_rolls_back("draft", draft)
  drawing = arguments.drawing(
    None if has_depth else tokens, tree, siblings, vocab_size
  )
  inner, siblings = drawing.tree, drawing.siblings
  depth = max(tokens, inner.max_depth)
  if nodes <= inner.num_drafted:
    raise ValueError(
      f"nodes must be above the {inner.num_drafted} of the draft's own tree, "
      f"got {nodes}"
    )
  search = Search(
    depth=depth, max_match=max_match, nodes_per_match=nodes_per_match,
    min_prob=min_prob, max_hits=max_hits, vocab_size=vocab_size, corpus=corpus,
  )  # fmt: skip
  count = max(2 * nodes, depth) if num_retrieved is None else num_retrieved
  if siblings.with_noise:
    raise ValueError(
      f"siblings {siblings.name!r} carry noise, which looked-up tokens cannot"
    )
  whole = search.bounds(nodes)
  if inner.max_children > whole.max_children:
    raise ValueError(
      f"the model's tree has a node with {inner.max_children} children, but "
      f"{nodes} nodes of depth {depth} leave room for {whole.max_children}"
    )
  trie = search.bounds(count)
  # The most that a round commits, and the newest token before it.
  width = depth + 2

  def init(params, batch, slots, inputs) -> Cache:
    most = max(inner.num_drafted, count, width)
    return draft.new_cache(
      params.draft.model, batch, slots + most, inputs if draft.encode else None
    )

  def propose(params, cache, target_cache, context):
    root_logits, cache = read(params.draft.model, cache, context)
    looked_up = search.trie(params.draft.corpus, context, count)
    scores, cache = score_trie(
      params.draft.model, root_logits, cache, looked_up, context
    )
    drawn, cache = levels.draft_tree(
      draft, params.draft.model, cache, root_logits, context, drawing
    )
    return _merged(drawn, looked_up, scores, whole), cache, target_cache

  def read(draft_params, cache, context):
    """Feeds newly committed tokens; returns the logits after the root."""
    start = jnp.maximum(context.length - width, 0)
    text = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, width))(
      context.tokens, start
    )
    output, cache = draft.apply(draft_params, text, cache.replace(length=start))
    logits = take_node(output.logits, context.length - 1 - start)
    return logits, cache.replace(length=context.length)

  def score_trie(draft_params, root_logits, cache, looked_up: Trie, context):
    """The draft model's log-probability of each path, `f32[B, R]`."""
    parents = jnp.pad(looked_up.parents, ((0, 0), (1, 0)), constant_values=-1)
    topology = data_topology(trie, parents)
    present = topology.present[:, 1:]
    output, cache = draft.apply(
      draft_params,
      looked_up.tokens,
      cache,
      positions=(context.length - 1)[:, None] + topology.depth[:, 1:],
      mask=topology.ancestors[:, 1:, 1:],
    )
    logits = jnp.concatenate([root_logits[:, None], output.logits], axis=1)
    log_probs = jax.nn.log_softmax(
      logits[..., :vocab_size].astype(jnp.float32), axis=-1
    )
    after = jnp.take_along_axis(
      log_probs, topology.parents[:, 1:, None], axis=1
    )
    each = distributions.token_log_prob(after, looked_up.tokens)
    each = jnp.where(present & ~jnp.isnan(each), each, -jnp.inf)
    above = topology.ancestors[:, 1:, 1:]
    total = jnp.sum(jnp.where(above, each[:, None], 0), axis=-1)
    return total, cache.replace(length=context.length)

  return Drafter(
    name="rasd",
    tree=whole,
    siblings=GIVEN,
    init=init,
    prefill=lambda params, cache, commit: levels.prefill(
      draft, params.draft.model, cache, commit
    ),
    propose=propose,
    passes=(width, count, *(len(x) for x in inner.levels[1:-1])),
    max_positions=draft.max_positions,
    num_refed=width,
  )


def _merged(drawn: Draft, looked_up: Trie, scores: Array, whole: Tree) -> Draft:
  """The model's tree, followed by the best looked-up nodes not in it.

  A looked-up node's score, `f32[B, R]`, is never above its parent's.
  """
  tree = drawn.tree
  num_drawn = tree.num_nodes
  duplicates = _duplicates(drawn, looked_up)  # [B, R]
  new = (looked_up.parents >= 0) & (duplicates < 0)
  # The trie lists parents first, so they also come first among equal scores.
  left = whole.num_drafted - tree.num_drafted
  ranked = jnp.where(new, scores, -jnp.inf)
  count = min(left, ranked.shape[1])
  best, kept = lax.top_k(ranked, count)
  take = lambda x: jnp.take_along_axis(x, kept, axis=1)
  above = take(looked_up.parents) - 1  # in the trie, -1 the root
  duplicate = jnp.take_along_axis(duplicates, jnp.maximum(above, 0), axis=1)
  chosen = jnp.argmax(kept[:, None] == above[..., None], axis=-1) + num_drawn
  parents = jnp.where(
    above < 0, 0, jnp.where(duplicate >= 0, duplicate, chosen)
  )
  parents = jnp.where(best > -jnp.inf, parents, -1).astype(jnp.int32)
  fill = ((0, 0), (0, left - count))
  tokens = jnp.pad(take(looked_up.tokens), fill)
  parents = jnp.pad(parents, fill, constant_values=-1)
  rows = len(tokens)
  log_probs = None
  if not drawn.siblings.deterministic and drawn.log_probs is not None:
    vocab = drawn.log_probs.shape[-1]
    point = tokens[..., None] == np.arange(vocab)
    certain = jnp.where(point, 0, -jnp.inf).astype(drawn.log_probs.dtype)
    log_probs = jnp.concatenate([drawn.log_probs, certain], axis=1)
  fixed = jnp.broadcast_to(np.array(tree.parents, np.int32), (rows, num_drawn))
  return Draft(
    tree=whole,
    siblings=GIVEN,
    tokens=jnp.concatenate([drawn.tokens, tokens], axis=1),
    log_probs=log_probs,
    parents=jnp.concatenate([fixed, parents], axis=1),
  )


def _duplicates(drawn: Draft, looked_up: Trie) -> Array:
  """`i32[B, R]`: the drawn node equal to each node of the trie, or -1."""
  tree = drawn.tree
  above = np.array(tree.parents, np.int32)
  equal = looked_up.tokens[..., None] == drawn.tokens[:, None]  # [B, R, n + 1]
  equal &= (np.arange(tree.num_nodes) > 0) & (looked_up.parents >= 0)[..., None]
  duplicates = jnp.full_like(looked_up.parents, -1)
  for _ in range(tree.max_depth):
    parent = jnp.take_along_axis(
      duplicates, jnp.maximum(looked_up.parents - 1, 0), axis=1
    )
    parent = jnp.where(looked_up.parents == 0, 0, parent)
    both = equal & (above == parent[..., None]) & (parent >= 0)[..., None]
    duplicates = jnp.where(both.any(axis=-1), jnp.argmax(both, axis=-1), -1)
  return duplicates.astype(jnp.int32)
