"""Exact output laws, by enumeration through the shipped rules and drafters.

`block_law` sums a rule over every draft of a tree, for laws given as functions;
`round_law` sums a decoder's own round, drafting code included. `check_drafter`
checks that a drafter returns the laws it drew from, `check_rule` that a rule is
lossless or reports its distance.
"""

from specjax.exact.drafters import DrafterCheck, check_drafter
from specjax.exact.enumeration import (
  BlockLaw,
  ContextLaw,
  block_law,
  target_block_law,
)
from specjax.exact.rounds import Drafts, drafts, round_law
from specjax.exact.rules import RuleCheck, check_rule

__all__ = [
  "BlockLaw", "ContextLaw", "DrafterCheck", "Drafts", "RuleCheck", "block_law",
  "check_drafter", "check_rule", "drafts", "round_law",
  "target_block_law",
]  # fmt: skip
