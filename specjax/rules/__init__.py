"""Verification rules: which drafted tokens to accept, and what comes next.

Each rule is one file; `get` finds it by name, and the common tests run it over
every tree and siblings that its `check` allows. A rule that decides one node at
a time is a single function without a batch axis (`nodewise`).
"""

import functools
from collections.abc import Callable

from specjax.calls import Grammar
from specjax.rules import (
  block,
  block_transport,
  by_rank,
  greedy_draft,
  gumbel_list,
  hub,
  known_target,
  kseq,
  match,
  multipath_block,
  recursive,
  relaxed,
  score_block,
  synthetic,
  token,
  transport,
  traversal,
  typical,
)
from specjax.types import Rule

RULES: dict[str, Rule | Callable[..., Rule]] = {
  **{
    rule.name: rule
    for rule in (
      token.RULE, match.RULE, block.RULE, recursive.BATCH, recursive.RULE,
      kseq.RULE, transport.RULE, greedy_draft.RULE, hub.RULE, traversal.RULE,
      score_block.RULE, multipath_block.RULE, gumbel_list.RULE,
    )
  },
  # Rules with parameters; all have defaults.
  "block_transport": block_transport.rule,
  "typical": typical.rule,
  "synthetic": synthetic.rule,
  "top_beta": by_rank.top_beta,
  "blockwise": by_rank.blockwise,
  "decoding_opt": relaxed.decoding_opt,
  "decoding_uno": relaxed.decoding_uno,
  **known_target.RULES,
}  # fmt: skip

GRAMMAR = Grammar(kind="rule", entries=RULES, custom=Rule, with_names=True)


@functools.cache
def get(name: str) -> Rule:
  """The rule of that name.

  Args:
    name: one of `RULES`, perhaps with parameters, as in
      `"typical(epsilon=0.1)"`. Your own is `"package.module.RULE"`.

  Returns:
    The rule, the same object for the same text; its `name` is the canonical
    text.

  Raises:
    ValueError: for an unknown rule, listing the known ones; for unknown or
      out-of-range parameters; for a module that is missing or lacks the rule.
  """
  return GRAMMAR.make(name)
