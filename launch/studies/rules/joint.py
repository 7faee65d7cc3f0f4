r"""Share of the joint optimum of whole drafts that each lossless rule reaches.

  python -m launch.studies.rules.joint \
    --output=docs/measurements/rules/joint.json

On small random models whose laws depend on the whole context. A rule is summed
over all its drafts, in float64, and divided by what the best lossless rule
accepts of such drafts (`specjax.theory.joint`), so nothing is sampled but the
laws. Rules are those of `specjax.rules` that fit; all paths of a draft are
drawn from one law, "siblings" says how those that start at a node are.
"laws" are of `launch.studies.rules.cases`.
"""

import dataclasses

import jax
import numpy as np

from launch import cli, provenance, results
from launch.studies.rules import cases
from specjax import exact, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.exact import ContextLaw
from specjax.siblings import Siblings
from specjax.theory import joint
from specjax.tree import Tree
from specjax.types import Rule

cli.reads(cli.OUTPUT, cases.INSTANCES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Drafts of K paths of G tokens, V in the vocabulary.

  Attributes:
    vocab_size: V.
    length: G.
    count: K.
    siblings: how the children of a node are drawn.
  """

  vocab_size: int
  length: int
  count: int
  siblings: Siblings = siblings_lib.IID

  @property
  def tree(self) -> Tree:
    """Separate paths; of hub pairs, which all nodes need, a binary tree."""
    if self.siblings is siblings_lib.HUB:
      return tree_lib.k_ary(*[self.count] * self.length)
    return tree_lib.paths(self.length, self.count)

  def rules(self) -> dict[str, Rule]:
    """The lossless rules for such drafts, by name."""
    fitting = {}
    for name, rule in rules.RULES.items():
      try:
        rule.check(self.tree, self.siblings)
      except ValueError:
        continue
      if rule.lossless:
        fitting[name] = rule
    return fitting

  def optimum(self, draft: ContextLaw, target: ContextLaw) -> float:
    """Tokens that the best lossless rule accepts of such drafts."""
    if self.siblings is siblings_lib.IID:
      best = joint.iid_paths(
        draft, target, length=self.length, count=self.count
      )
    else:
      best = joint.any_tree(self.tree, draft, target, siblings=self.siblings)
    return best.expected_accepted


# V, G, K.
_IID = (
  (2, 2, 2), (3, 2, 2), (4, 2, 2), (2, 3, 2), (3, 3, 2), (4, 3, 2),
  (2, 2, 3), (3, 2, 3), (2, 3, 3),
)  # fmt: skip
_OTHERS = {
  siblings_lib.WITHOUT_REPLACEMENT: (
    (3, 2, 2), (4, 2, 2), (3, 3, 2), (4, 2, 3),
  ),
  siblings_lib.GREEDY: ((3, 2, 2), (4, 2, 2), (3, 3, 2), (4, 2, 3)),
  siblings_lib.HUB: ((3, 2, 2), (4, 2, 2)),
  siblings_lib.TOP_K: ((3, 2, 2), (4, 2, 2), (3, 3, 2), (4, 2, 3)),
}  # fmt: skip
SHAPES = tuple(
  Shape(vocab_size=v, length=g, count=k, siblings=siblings)
  for siblings, sizes in {siblings_lib.IID: _IID, **_OTHERS}.items()
  for v, g, k in sizes
)


def shares(shape: Shape, laws: str, instances: int) -> dict:
  """Shares of the joint optimum that the rules reach on some models.

  Args:
    shape: of the drafts.
    laws: one of `cases.LAWS`.
    instances: number of models.

  Returns:
    Mean and least share by rule, the mean optimum, the largest error of the
    output's law over rules and models, and how many models the solver of the
    optimum failed on: they are left out.
  """
  fitting = shape.rules()
  reached: dict[str, list[float]] = {name: [] for name in fitting}
  optima, error = [], 0.0
  for seed in range(instances):
    draft, target = cases.random_models(
      laws, shape.vocab_size, shape.length, seed
    )
    try:
      best = shape.optimum(draft, target)
    except ArithmeticError:
      continue
    optima.append(best)
    wanted = exact.target_block_law(target, length=shape.length + 1)
    for name, rule in fitting.items():
      law = exact.block_law(
        rule, shape.tree, draft, target, siblings=shape.siblings
      )
      reached[name].append(law.expected_accepted / best)
      error = max(error, float(np.abs(law.output - wanted).max()))
  return {
    "vocab_size": shape.vocab_size,
    "num_speculative_tokens": shape.length,
    "num_drafts": shape.count,
    "siblings": shape.siblings.name,
    "laws": laws,
    "optimum": float(np.mean(optima)),
    "num_unsolved": instances - len(optima),
    "error_of_output_law": error,
    "share_of_optimum": {
      name: cases.mean_and_minimum(some) for name, some in reached.items()
    },
  }


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  # Programs are many and run for milliseconds: compiling is what it spends.
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.enable_x64(True):
    rows = [
      shares(shape, laws, cases.INSTANCES.value)
      for shape in SHAPES
      for laws in cases.LAWS
    ]
  result = {
    "instances": cases.INSTANCES.value,
    "rows": rows,
    **provenance.record(),
  }
  results.show_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
