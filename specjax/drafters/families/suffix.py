"""Suffix decoding: drafts from earlier continuations of the last tokens.

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

import math
from typing import Any

import jax.numpy as jnp

from specjax.drafters.shared import corpus as corpus_lib
from specjax.drafters.shared import occurrences
from specjax.drafters.shared.arguments import TOKENS
from specjax.siblings import GIVEN
from specjax.types import Draft, Drafter


def suffix(
  *,
  tokens: int = TOKENS,
  nodes: int = 0,
  corpus: bool = False,
  max_match: int = 16,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
  max_hits: int = 64,
  vocab_size: int | None = None,
) -> Drafter:
  """Continuations of earlier occurrences, a corpus's too (SuffixDecoding).

  Args:
    tokens: G, the longest continuation.
    nodes: N, tokens that are drafted at most; 0 for twice as many as `tokens`.
    corpus: whether `Params.draft` is a `shared.corpus.Corpus`, and counts.
    max_match: the longest match that is told from longer ones.
    nodes_per_match: nodes that a match is worth, for each of its tokens; 0 for
      always N.
    min_prob: a node that is less likely is not drafted.
    max_hits: occurrences that count, of the text and of the corpus each.
    vocab_size: V, the number of real tokens; by default the corpus's.

  Returns:
    The `Drafter`, without state.

  Raises:
    ValueError: for sizes that cannot be.
  """
  return _drafter(
    "suffix", tokens, nodes, max_match, nodes_per_match, min_prob, max_hits,
    vocab_size, own_text=True, corpus=corpus,
  )  # fmt: skip


def rest(
  *,
  tokens: int = TOKENS,
  nodes: int = 0,
  max_match: int = 16,
  nodes_per_match: float = 1.0,
  min_prob: float = 0.1,
  max_hits: int = 64,
  vocab_size: int | None = None,
) -> Drafter:
  """Continuations of occurrences in a corpus (REST, He et al., 2024).

  The corpus is `Params.draft`; else as `suffix`.
  """
  return _drafter(
    "rest", tokens, nodes, max_match, nodes_per_match, min_prob, max_hits,
    vocab_size, own_text=False, corpus=True,
  )  # fmt: skip


def _drafter(
  name: str,
  tokens: int,
  nodes: int,
  max_match: int,
  nodes_per_match: float,
  min_prob: float,
  max_hits: int,
  vocab_size: int | None,
  *,
  own_text: bool,
  corpus: bool,
) -> Drafter:
  """The drafter of these sources, under its name; see `suffix`."""
  nodes = nodes or 2 * tokens
  settings: dict[str, Any] = dict(
    num_nodes=nodes, max_match=max_match, min_prob=min_prob,
    nodes_per_match=nodes_per_match or math.inf,
  )  # fmt: skip
  occurrences.check(depth=tokens, max_hits=max_hits, **settings)
  tree = occurrences.bounds(nodes, tokens)
  find = finder(
    depth=tokens, max_hits=max_hits, max_match=max_match, own_text=own_text,
    corpus=corpus, vocab_size=vocab_size,
  )  # fmt: skip

  def propose(params, state, target_cache, context):
    trie = occurrences.together(find(params.draft, context), **settings)
    root = context.root
    draft = Draft(
      tree=tree,
      siblings=GIVEN,
      tokens=jnp.concatenate([root, trie.tokens], axis=1),
      log_probs=None,
      parents=jnp.concatenate([jnp.full_like(root, -1), trie.parents], axis=1),
    )
    return draft, state, target_cache

  return Drafter(name=name, tree=tree, siblings=GIVEN, propose=propose)


def finder(
  *,
  depth: int,
  max_hits: int,
  max_match: int,
  own_text: bool,
  corpus: bool,
  vocab_size: int | None,
):
  """`(Corpus or None, context) -> list[Occurrences]`; see `suffix`."""
  sizes = dict(count=max_hits, depth=depth, max_match=max_match)

  def find(index, context):
    sources = []
    if own_text:
      sources.append(
        occurrences.in_text(context.tokens, context.length, **sizes)
      )
    if corpus:
      matched = corpus_lib.in_corpus(
        index, context.tokens, context.length, **sizes
      )
      if vocab_size is not None:
        # An index made for another vocabulary proposes nothing beyond this one.
        known = jnp.cumsum(matched.tokens >= vocab_size, axis=-1) == 0
        matched = occurrences.Occurrences(
          tokens=matched.tokens,
          present=matched.present & known,
          match=matched.match,
        )
      sources.append(matched)
    return sources

  return find
