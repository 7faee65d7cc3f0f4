"""Suffix decoding: drafts from earlier continuations of the last tokens.

It counts what followed earlier occurrences of the text's last m tokens, and
drafts the likeliest continuations as a deterministic tree. As in SuffixDecoding
(Oliaro et al., NeurIPS 2025) a match of m tokens drafts up to `nodes_per_match`
times m nodes; the m with the largest sum of node probabilities wins. Where
occurrences agree, the result is a long chain, as in SAM decoding (Hu et al.,
ACL 2025); where they do not, a tree.

It searches the row's own text, prompt and output, and a corpus shared by all
rows (`specjax.drafters.shared.corpus`), if there is one; the trees are merged
under one budget. With the corpus alone it is REST (He et al., NAACL 2024).

Differences from the authors' code: no suffix tree is kept, the text's buffer is
compared with its own end; `max_hits` occurrences are used, the longest and then
the latest matches; a continuation that reaches the text's end repeats
periodically. SuffixDecoding takes the better of the row's tree and the
corpus's; here a node has the larger of its two values. REST drafts the 64 most
frequent prefixes of continuations whatever the match.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from specjax.drafters.shared import corpus as corpus_lib
from specjax.drafters.shared import occurrences, tries
from specjax.drafters.shared.arguments import TOKENS
from specjax.drafters.shared.corpus import Corpus
from specjax.siblings import GIVEN
from specjax.tree import Tree
from specjax.types import Context, Draft, Drafter


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
  """Likely continuations, from the text and a corpus (SuffixDecoding).

  Args:
    tokens: G, the longest continuation.
    nodes: N, the most tokens to draft; 0 for twice `tokens`.
    corpus: whether to use `Params.draft`, a `shared.corpus.Corpus`.
    max_match: the longest match; longer ones count as this long.
    nodes_per_match: nodes to draft per matched token; 0 for always N.
    min_prob: the least probability of a drafted node.
    max_hits: the most occurrences to use, of text and corpus each.
    vocab_size: V, the number of real tokens; by default the corpus's.

  Raises:
    ValueError: for invalid sizes.
  """
  search = Search(
    depth=tokens, max_match=max_match, nodes_per_match=nodes_per_match,
    min_prob=min_prob, max_hits=max_hits, vocab_size=vocab_size, corpus=corpus,
  )  # fmt: skip
  return _drafter("suffix", nodes or 2 * tokens, search)


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
  """Likely continuations, from a corpus (REST, He et al., 2024).

  The corpus is `Params.draft`; otherwise like `suffix`.
  """
  search = Search(
    depth=tokens, max_match=max_match, nodes_per_match=nodes_per_match,
    min_prob=min_prob, max_hits=max_hits, vocab_size=vocab_size, corpus=True,
    own_text=False,
  )  # fmt: skip
  return _drafter("rest", nodes or 2 * tokens, search)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
  """Settings of a search for continuations.

  Attributes:
    depth: G, tokens of the longest continuation.
    max_match, nodes_per_match, min_prob, max_hits, vocab_size, corpus: as in
      `suffix`.
    own_text: whether to search the row's text.
  """

  depth: int
  max_match: int
  nodes_per_match: float
  min_prob: float
  max_hits: int
  vocab_size: int | None
  corpus: bool
  own_text: bool = True

  def bounds(self, num_nodes: int) -> Tree:
    """The bounds of trees of that many nodes; ValueError for invalid sizes."""
    occurrences.check(
      depth=self.depth, max_hits=self.max_hits, **self._selection(num_nodes)
    )
    return occurrences.bounds(num_nodes, self.depth)

  def trie(
    self, index: Corpus | None, context: Context, num_nodes: int
  ) -> tries.Trie:
    """The likeliest continuations of the texts, at most `num_nodes` nodes."""
    found = self.find(index, context)
    return occurrences.merge(found, **self._selection(num_nodes))

  def find(
    self, index: Corpus | None, context: Context
  ) -> list[occurrences.Occurrences]:
    """The occurrences in each source."""
    sizes: dict[str, Any] = dict(
      count=self.max_hits, depth=self.depth, max_match=self.max_match
    )
    sources, text = [], (context.tokens, context.length)
    if self.own_text:
      sources.append(occurrences.in_text(*text, **sizes))
    if self.corpus:
      assert index is not None
      matched = corpus_lib.in_corpus(index, *text, **sizes)
      if self.vocab_size is not None:
        # The corpus may have a larger vocabulary: drop ids beyond this one.
        unknown = matched.tokens >= self.vocab_size
        known = jnp.cumsum(unknown, axis=-1) == 0
        matched = dataclasses.replace(matched, present=matched.present & known)
      sources.append(matched)
    return sources

  def _selection(self, num_nodes: int) -> dict[str, Any]:
    return dict(
      num_nodes=num_nodes, max_match=self.max_match, min_prob=self.min_prob,
      nodes_per_match=self.nodes_per_match or math.inf,
    )  # fmt: skip


def _drafter(name: str, nodes: int, search: Search) -> Drafter:
  """A drafter around a search; see `suffix`."""
  tree = search.bounds(nodes)

  def propose(params, state, target_cache, context):
    trie = search.trie(params.draft, context, nodes)
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
