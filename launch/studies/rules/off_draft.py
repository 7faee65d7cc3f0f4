r"""Share of the joint optimum for rules that see the laws on their draft only.

  python -m launch.studies.rules.off_draft \
    --output=docs/measurements/rules/off_draft.json

Of i.i.d. paths, by `specjax.theory.off_tree`. Every context but the root has m
equally likely pairs of laws, of `launch.studies.rules.cases`, each
mixed with 0.03 of the uniform law: the solver fails where masses are tiny.
"""

import jax
import numpy as np
from absl import flags

from launch import cli, provenance, results
from launch.studies.rules import cases
from specjax import tree as tree_lib
from specjax.theory import off_tree

cli.reads(cli.OUTPUT)
_PRIORS = flags.DEFINE_integer(
  "priors", 4, "Random priors of each size and kind.", lower_bound=2
)

# V, G, K, m.
_SIZES = ((2, 2, 2, 4), (2, 2, 3, 3), (3, 2, 2, 3), (2, 3, 2, 2))
_UNIFORM = 0.03


def share(laws: str, size: tuple[int, int, int, int], seed: int) -> float:
  """The share of the optimum with all laws known, for one prior.

  Args:
    laws: one of `launch.studies.rules.cases.LAWS`.
    size: V, G, K and m.
    seed: of the prior.
  """
  vocab, length, count, pairs = size
  models = [
    cases.random_models(laws, vocab, length, seed * pairs + i)
    for i in range(pairs)
  ]

  def prior(context):
    some = models if len(context) > 1 else models[:1]
    laws = np.array([[law(context) for law in model] for model in some])
    return (1 - _UNIFORM) * laws + _UNIFORM / vocab

  off = off_tree.optimum(tree_lib.paths(length, count), prior)
  return off.on_draft / off.everywhere


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  jax.config.update("jax_disable_most_optimizations", True)
  rows = []
  for size in _SIZES:
    for laws in cases.LAWS:
      shares = [share(laws, size, seed) for seed in range(_PRIORS.value)]
      vocab, length, count, pairs = size
      rows.append(
        {
          "vocab_size": vocab,
          "num_speculative_tokens": length,
          "num_drafts": count,
          "pairs": pairs,
          "laws": laws,
          "share_of_optimum": cases.mean_and_minimum(shares),
        }
      )
  result = {"priors": _PRIORS.value, "rows": rows, **provenance.record()}
  results.show_json(cli.OUTPUT.value, result)
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
