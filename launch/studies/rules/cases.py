"""Drafts and random models on which verification rules are compared.

A row of a report is named after its rule:

  NAME                            as in `specjax.rules.RULES`, or as asked for
                                  ("typical(epsilon=0.2)")
  recursive (without_replacement) the same rule, other siblings

What is enumerated is given small random models.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from absl import flags

from specjax import rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.drafters.shared.arguments import check_tree
from specjax.siblings import Siblings
from specjax.tree import Tree
from specjax.types import Rule

RULES = flags.DEFINE_list(
  "rules", [], "Which rules, or rows, to measure; none is all."
)
INSTANCES = flags.DEFINE_integer(
  "instances", 20, "Random instances of each size and kind.", lower_bound=2
)
# Rules of one path are given one; all others get all K.
SINGLE_PATH = ("token", "block", *rules.FACTORIES.keys() - {"block_transport"})

# The siblings a rule is compared on; one that is not listed gets i.i.d. ones.
SIBLINGS: dict[str, tuple[Siblings, ...]] = {
  "recursive": (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT),
  "traversal": (siblings_lib.IID, siblings_lib.WITHOUT_REPLACEMENT),
  "score_block": (siblings_lib.WITHOUT_REPLACEMENT,),
  "univer": (siblings_lib.IID, siblings_lib.GREEDY),
  "greedy_draft": (siblings_lib.GREEDY,),
  "hub": (siblings_lib.HUB,),
  "gumbel_list": (siblings_lib.SHARED_NOISE,),
}


def siblings_of(rule_name: str) -> tuple[Siblings, ...]:
  """Sibling laws of a rule when rules are compared."""
  return SIBLINGS.get(rule_name, (siblings_lib.IID,))


# By row: the rule's name and its siblings.
ROWS: dict[str, tuple[str, Siblings]] = {
  name if not number else f"{name} ({siblings.name})": (name, siblings)
  for name in rules.RULES
  for number, siblings in enumerate(siblings_of(name))
}
_MOST_NODES = 256  # trees are unrolled: larger ones take minutes to compile
_MAX_HUB_DEPTH = 5  # hub pairs at every node: 2 ** (G + 1) - 2 drafted tokens


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

  Args:
    asked: "all", the name of a row, or of a rule with parameters.
    num_drafts: K, at least 1.
    num_speculative_tokens: G, at least 1.
    vocab_size: V.

  Returns:
    The rows, and why rules that do not fit were left out, by row.

  Raises:
    ValueError: for numbers out of range, an unknown rule, or one rule asked for
      that does not fit.
  """
  for name, value in (
    ("num_drafts", num_drafts),
    ("num_speculative_tokens", num_speculative_tokens),
  ):
    if value < 1:
      raise ValueError(f"{name} must be >= 1 to compare rules, got {value}")
  if num_drafts * num_speculative_tokens > _MOST_NODES:
    raise ValueError(
      f"rules are compared on up to {_MOST_NODES} drafted tokens, got "
      f"{num_drafts} paths of {num_speculative_tokens}"
    )
  rows = ROWS
  if asked != "all":
    rows = {asked: ROWS.get(asked) or (asked, siblings_lib.IID)}
  fitting, left_out = [], {}
  for row, (rule_name, siblings) in rows.items():
    rule = rules.get(rule_name)
    try:
      tree = _tree(rule_name, num_drafts, num_speculative_tokens)
      rule.check(tree, siblings)
      check_tree(tree, siblings, vocab_size)
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
    if depth > _MAX_HUB_DEPTH:
      raise ValueError(
        "rule 'hub' needs pairs at every node, which is measured up to "
        f"num_speculative_tokens={_MAX_HUB_DEPTH} "
        f"({2 ** (_MAX_HUB_DEPTH + 1) - 2} drafted tokens), got {depth}"
      )
    return tree_lib.k_ary(*[2] * depth)
  return tree_lib.paths(depth, num_drafts)


# --------------------------------------------------------------- random models

LAWS = ("dirichlet_1", "dirichlet_0.3", "related")
"""Kinds of random laws at every context: draft and target independent, flat or
sharp; or the draft Dirichlet(1) and the target `q ~ p exp(0.7 noise)`."""


def random_models(laws: str, vocab_size: int, length: int, seed: int):
  """Small random draft and target, whose laws depend on the whole context.

  Args:
    laws: one of `LAWS`.
    vocab_size: V.
    length: G; there are laws after up to G tokens.
    seed: of the model; the same whatever it is drafted for.

  Returns:
    Two functions of a context, `f64[V]`.
  """
  rng = np.random.default_rng([LAWS.index(laws), vocab_size, length, seed])
  tables: tuple[dict, dict] = ({}, {})
  flat = 0.3 if laws == "dirichlet_0.3" else 1.0
  for depth in range(length + 1):
    for context in itertools.product(range(vocab_size), repeat=depth):
      p = rng.dirichlet(np.full(vocab_size, flat))
      q = rng.dirichlet(np.full(vocab_size, flat))
      if laws == "related":
        q = p * np.exp(0.7 * rng.normal(size=vocab_size))
        q /= q.sum()
      tables[0][context], tables[1][context] = p, q
  # Contexts start with the root's token.
  return tuple(lambda context, t=table: t[context[1:]] for table in tables)


def mean_and_minimum(shares: Sequence[float]) -> dict[str, float]:
  """Of several models' shares."""
  return {"mean": float(np.mean(shares)), "minimum": float(min(shares))}
