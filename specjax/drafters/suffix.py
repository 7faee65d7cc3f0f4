"""Suffix decoding: how did texts go on that ended as this one does?

The tokens that followed the text's last m tokens, wherever those occurred, are
counted, and the likeliest continuations are drafted as a tree of certain
tokens. How many a match is worth, and which m, is the rule of SuffixDecoding
(Oliaro et al., NeurIPS 2025): of m matched tokens `nodes_per_match` times m
nodes, and of all m the one whose nodes' probabilities add up to the most. Where
occurrences agree, that is a long chain, as SAM decoding drafts (Hu et al., ACL
2025); where they do not, a tree.

Occurrences are those in the row's own text, prompt and output, and those in a
corpus that all rows share (`specjax.drafters.shared.corpus`), if there is one:
then each gives its tree, and both are merged under one budget. The corpus alone
is REST (He et al., NAACL 2024).

What differs from the authors' code. No suffix tree is kept: the text's buffer
is compared with its own end, so that all of it counts, whatever its length. Of
more than `max_hits` occurrences those of the longest matches count, and of
equal ones the latest. Probabilities are of the occurrences that are left,
theirs of all, that at the text's end among them. A continuation that runs into
the text's end is read on periodically. SuffixDecoding takes the better of the
row's tree and the corpus's; here a node is worth what the one that believes in
it more gives it. REST drafts the 64 most frequent beginnings whatever the
match.

A round feeds as many tokens whether nodes are there or not, unless the decoder
has passes of several widths (`specjax.adaptive.widths`): then short matches are
cheap.
"""

from typing import Any

import jax.numpy as jnp

from specjax.drafters.shared import corpus as corpus_lib
from specjax.drafters.shared import occurrences
from specjax.siblings import GIVEN
from specjax.types import Draft, Drafter


def drafter(
  *,
  num_nodes: int = 16,
  depth: int = 8,
  max_children: int | None = None,
  vocab_size: int,
  max_match: int = 16,
  max_hits: int = 64,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
  own_text: bool = True,
  with_corpus: bool = False,
) -> Drafter:
  """Drafts how texts went on.

  Args:
    num_nodes: N, tokens that are drafted at most.
    depth: G, the longest continuation.
    max_children: of one node; None for as many as there can be.
    vocab_size: V, the number of real tokens.
    max_match: the longest match that is told from longer ones.
    max_hits: occurrences that count, of the text and of the corpus each.
    nodes_per_match: nodes that a match is worth, for each of its tokens;
      `math.inf` for always N.
    min_prob: a node that is less likely is not drafted.
    own_text: whether occurrences in the row's own text count.
    with_corpus: whether `Params.draft` is a `corpus.Corpus`, and counts.

  Returns:
    The `Drafter`, without state; named "rest" if the corpus alone counts.

  Raises:
    ValueError: for sizes that cannot be, or if nothing is to be looked at.
  """
  settings: dict[str, Any] = dict(
    num_nodes=num_nodes,
    max_match=max_match,
    nodes_per_match=nodes_per_match,
    min_prob=min_prob,
  )
  occurrences.check(depth=depth, max_hits=max_hits, **settings)
  if not (own_text or with_corpus):
    raise ValueError("neither the text nor a corpus is looked at")
  tree = occurrences.bounds(num_nodes, depth, max_children)
  find = finder(
    depth=depth,
    max_hits=max_hits,
    max_match=max_match,
    own_text=own_text,
    with_corpus=with_corpus,
    vocab_size=vocab_size,
  )

  def propose(params, state, target_cache, context):
    found = occurrences.together(find(params.draft, context), **settings)
    root = context.root
    draft = Draft(
      tree=tree,
      siblings=GIVEN,
      tokens=jnp.concatenate([root, found.tokens], axis=1),
      log_probs=None,
      parents=jnp.concatenate([jnp.full_like(root, -1), found.parents], axis=1),
    )
    return draft, state, target_cache

  return Drafter(
    name="suffix" if own_text else "rest",
    tree=tree,
    siblings=GIVEN,
    propose=propose,
  )


def finder(
  *,
  depth: int,
  max_hits: int,
  max_match: int,
  own_text: bool,
  with_corpus: bool,
  vocab_size: int,
):
  """`(corpus or None, context) -> list[Occurrences]`; see `drafter`."""
  sizes = dict(count=max_hits, depth=depth, max_match=max_match)

  def find(corpus, context):
    sources = []
    if own_text:
      sources.append(
        occurrences.in_text(context.tokens, context.length, **sizes)
      )
    if with_corpus:
      found = corpus_lib.in_corpus(
        corpus, context.tokens, context.length, **sizes
      )
      # An index made for another vocabulary proposes nothing beyond this one.
      known = jnp.cumsum(found.tokens >= vocab_size, axis=-1) == 0
      sources.append(
        occurrences.Occurrences(
          tokens=found.tokens,
          there=found.there & known,
          match=found.match,
        )
      )
    return sources

  return find
