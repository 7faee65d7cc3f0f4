"""Two i.i.d. drafts in canonical form (Khisti et al., ICLR 2025).

Their theorem: the best verification of two drafts selects one of them by a
weight `w(x_1 | x_1, x_2)`, and verifies it as a single draft with the law of
the selected token. They find the weights by a linear programme, truncated where
the vocabulary is large. `transport` knows them in closed form for any number of
drafts; with two, the candidate of the higher q / p has weight 1 - T / 2, where
T is the lowest level between the two tokens. This rule is `transport` for the
two drafts of their theorem, at every node with at most two surviving paths, and
accepts `min_S {q(S) + 1 - p(S)^2}`, their optimum.
"""

from specjax.rules import checks, transport
from specjax.rules.nodewise import verify_nodes
from specjax.tree import Tree
from specjax.types import Rule


def check(tree: Tree, siblings) -> None:
  """Raises ValueError unless the tree is one or two independent paths."""
  checks.equal_paths("canonical", tree)
  checks.independent("canonical", tree, siblings)
  if tree.max_children > 2:
    raise ValueError(
      "rule 'canonical' verifies at most 2 paths (num_drafts <= 2), got "
      f"{tree.max_children}; rule 'transport' takes any number"
    )


RULE = Rule(
  name="canonical",
  verify=verify_nodes(transport.decide),
  lossless=True,
  check=check,
)
