"""The drafts on which verification rules are compared.

A row of a report is named after its rule:

  NAME                            as in `specjax.rules.RULES`, or as asked for
                                  ("typical(epsilon=0.2)")
  recursive (without_replacement) the same rule, other siblings
"""

import dataclasses

from specjax import rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.drafters.shared.arguments import drawing
from specjax.siblings import Siblings
from specjax.tree import Tree
from specjax.types import Rule

# Rules of one path are given one; all others get all K.
SINGLE_PATH = {"token", "block"} | {
  name for name in rules.RULES if not rules.get(name).lossless
}

# The siblings a rule is compared on; one that is not listed gets i.i.d. ones.
SIBLINGS: dict[str, tuple[Siblings, ...]] = {
  "recursive": (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT),
  "traversal": (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT),
  "score_block": (siblings_lib.WITHOUT_REPLACEMENT,),
  "greedy_draft": (siblings_lib.GREEDY,),
  "hub": (siblings_lib.HUB,),
  "gumbel_list": (siblings_lib.SHARED_NOISE,),
}


# By row: the rule's name and its siblings.
ROWS: dict[str, tuple[str, Siblings]] = {
  name if not number else f"{name} ({siblings.name})": (name, siblings)
  for name in rules.RULES
  for number, siblings in enumerate(SIBLINGS.get(name, (siblings_lib.IID,)))
}
_MOST_NODES = 256  # trees are unrolled: larger ones take minutes to compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row of a report: a rule and what it is given.

  Attributes:
    name: the row's name.
    rule: the rule.
    tree: what is drafted.
    siblings: how the children of a node are drawn.
  """

  name: str
  rule: Rule
  tree: Tree
  siblings: Siblings

  def describe(self) -> dict:
    """The row itself, in a JSON report."""
    return {
      "rule": self.rule.name,
      "lossless": self.rule.lossless,
      "siblings": self.siblings.name,
      "parents": list(self.tree.parents),
      "num_drafted": self.tree.num_drafted,
    }


def cases(
  asked: str, *, num_drafts: int, num_speculative_tokens: int, vocab_size: int
) -> tuple[list[Case], dict[str, str]]:
  """The rows of a report.

  Separate paths, so that all multi-draft rules have the same budget of K G
  tokens; `hub` alone is given a binary tree, because it needs two children at
  every node, and rules of a single path are given one path of G tokens.
  """
  rows = ROWS
  if asked != "all":
    rows = {asked: ROWS.get(asked) or (asked, siblings_lib.IID)}
  fitting, left_out = [], {}
  for row, (rule_name, siblings) in rows.items():
    rule = rules.get(rule_name)
    try:
      tree = _tree(rule_name, num_drafts, num_speculative_tokens)
      if tree.num_drafted > _MOST_NODES:
        raise ValueError(
          f"compared on up to {_MOST_NODES} drafted tokens, got "
          f"{tree.num_drafted}"
        )
      rule.check(tree, siblings)
      drawing(None, tree, siblings, vocab_size)
    except ValueError as error:
      if asked != "all":
        raise
      left_out[row] = str(error)
      continue
    fitting.append(Case(name=row, rule=rule, tree=tree, siblings=siblings))
  return fitting, left_out


def _tree(rule_name: str, num_drafts: int, depth: int) -> Tree:
  """The tree that a rule is given."""
  if rule_name.partition("(")[0] in SINGLE_PATH:
    return tree_lib.chain(depth)
  if rule_name == "hub":
    if num_drafts != 2:
      raise ValueError(
        f"rule 'hub' verifies pairs (num_drafts=2), got {num_drafts}"
      )
    return tree_lib.k_ary(*[2] * min(depth, 8))  # 8 are too many nodes
  return tree_lib.paths(depth, num_drafts)
