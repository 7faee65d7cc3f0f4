"""Verification rules: each maps the drafted laws and the target's to a law.

A rule is one short file; `get` finds it by name, and the common tests run it
over every tree and sibling law that its `check` allows. Rules that decide at
one node at a time are a single function without a batch (`nodewise`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

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
  token,
  transport,
  traversal,
  typical,
)
from specjax.types import Rule

# Rules with parameters: `(**parameters) -> Rule`, all with defaults.
FACTORIES: dict[str, Callable[..., Rule]] = {
  "block_transport": block_transport.rule,
  "typical": typical.rule,
  "lenient": known_target.lenient,
  "top_beta": by_rank.top_beta,
  "decoding_opt": relaxed.decoding_opt,
  "decoding_uno": relaxed.decoding_uno,
  "blockwise": by_rank.blockwise,
  "ensemble": known_target.ensemble,
  "fuzzy": known_target.fuzzy,
  "cascade_chow": known_target.cascade_chow,
  "cascade_diff": known_target.cascade_diff,
  "cascade_opt": known_target.cascade_opt,
  "cascade_token": known_target.cascade_token,
  "contrastive": known_target.contrastive,
  "cactus": known_target.cactus,
}

RULES: dict[str, Rule] = {
  rule.name: rule
  for rule in (
    token.RULE, match.RULE, block.RULE, recursive.BATCH, recursive.RULE,
    kseq.RULE, transport.RULE, greedy_draft.RULE, hub.RULE, traversal.RULE,
    score_block.RULE, multipath_block.RULE, gumbel_list.RULE,
  )
} | {name: factory() for name, factory in FACTORIES.items()}  # fmt: skip

# One object for each name, however its parameters were spelled.
_MADE = {rule.name: rule for rule in RULES.values()}


class _Rules(Grammar):
  def make(self, written: Any) -> Rule:
    rule, call = super().make(written), self._call(written)
    if ":" in call.name:  # others have the names of ours, perhaps
      return dataclasses.replace(
        rule, name=written if isinstance(written, str) else str(call)
      )
    return _MADE.setdefault(rule.name, rule)


GRAMMAR = _Rules(kind="rule", entries=RULES | FACTORIES, custom=Rule)


def get(name: str) -> Rule:
  """The rule of that name.

  Args:
    name: one of `RULES`; for those of `FACTORIES` parameters may follow, as in
      `"typical(epsilon=0.1)"`. A rule's own `name` gives that rule. One's own
      is `"package.module:RULE"`.

  Raises:
    ValueError: if there is no such rule, listing those there are; if it has no
      such parameters, or they are out of range; if a module is not there or
      holds no such rule.
  """
  return GRAMMAR.make(name)
