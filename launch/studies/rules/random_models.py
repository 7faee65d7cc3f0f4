"""Small random pairs of models, whose laws depend on the whole context."""

import itertools

import numpy as np
from absl import flags

INSTANCES = flags.DEFINE_integer(
  "instances", 20, "Random instances of each size and kind.", lower_bound=2
)
LAWS = ("dirichlet_1", "dirichlet_0.3", "related")
"""How they are drawn at every context: draft and target independent, flat or
sharp; or the draft Dirichlet(1) and the target `q ~ p exp(0.7 noise)`."""


def draw(laws: str, vocab_size: int, length: int, seed: int):
  """Draft and target, laws of the tokens after the root.

  Args:
    laws: one of `LAWS`.
    vocab_size: V.
    length: G; there are laws after up to G tokens.
    seed: of the model; the same whatever it is drafted for.
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
