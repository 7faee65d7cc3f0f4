"""Every rule, draft law and tree whose block law can be enumerated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from scipy import stats

import specjax
from specjax import exact, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.tree import Tree
from specjax.warp import make_sampling

LOSSLESS = {
  name: rules.get(name) for name in rules.RULES if rules.get(name).lossless
}
WARPS = {
  "plain": {},
  "cold": dict(temperature=0.6),
  "top_p": dict(temperature=1.3, top_p=0.7),
  "top_k": dict(top_k=2),
  "greedy": dict(temperature=0.0),
}
# Of whole rounds.
LIMIT, VOCAB = 1e-10, 3
TARGET = toys.table(VOCAB, seed=0).astype(np.float64)
DRAFT = toys.near(TARGET, noise=1.0, seed=1).astype(np.float64)
CHAIN, PATHS = tree_lib.chain(2), tree_lib.paths(2, 2)
FAMILY = Tree((-1, 0, 0, 1, 1))
TREES = {
  "root": tree_lib.chain(0),
  "chain1": tree_lib.chain(1),
  "chain3": tree_lib.chain(3),
  "paths2x2": PATHS,
  "paths1x3": tree_lib.paths(1, 3),
  "uneven": FAMILY,
  # Equal siblings of which only the second goes on.
  "late": Tree((-1, 0, 0, 2)),
  # Children in another order than their parents.
  "crossed": Tree((-1, 0, 0, 2, 1)),
  "crossed families": Tree((-1, 0, 0, 2, 1, 2)),
  "narrow": tree_lib.k_ary(1, 2),
  "binary": tree_lib.k_ary(2, 2),
  # Equal siblings that go on differently.
  "one and two": Tree((-1, 0, 0, 1, 2, 2)),
  "two and deeper": Tree((-1, 0, 0, 1, 1, 4)),
}


def enumerable(rule, tree, siblings) -> bool:
  """True if the rule takes this tree and these siblings."""
  most = siblings.max_children or tree.max_children
  if siblings.with_noise or tree.max_children > most:
    return False
  try:
    rule.check(tree, siblings)
  except ValueError:
    return False
  return True


# These go through all trees in every run, one rule for each way to walk one;
# the others through the first few.
WALKERS = (
  "match", "batch", "traversal", "multipath_block", "block_transport",
)  # fmt: skip
FIRST_TREES = ("chain3", "paths2x2", "one and two")


# Of "two and deeper", "crossed families" and "binary".
PARTS = ("uneven", "crossed", "narrow")


def marks(name, tree_name, siblings):
  usual = siblings is siblings_lib.IID and name in WALKERS
  usual &= tree_name not in PARTS
  fast = usual or tree_name in FIRST_TREES or LOSSLESS[name].with_noise
  return () if fast or name == "score_block" else pytest.mark.slow


CASES = [
  pytest.param(
    rule, tree, siblings, id=f"{name}-{tree_name}-{siblings.name}",
    marks=marks(name, tree_name, siblings),
  )
  for name, rule in LOSSLESS.items()
  for tree_name, tree in TREES.items()
  for siblings in siblings_lib.SIBLINGS.values()
  if siblings is siblings_lib.IID
  or tree_name in ("uneven", "binary", "one and two")
  or (name == "score_block" and tree_name in ("paths2x2", "narrow"))
  if enumerable(rule, tree, siblings)
]  # fmt: skip
# One tree a rule, all leaves equally deep, for the checks that need no more.
ONE_TREE = {
  (case.values[0].name, case.values[2].name): case
  for case in CASES
  if case.values[1].num_drafted >= 3
  if all(
    children or depth == case.values[1].max_depth
    for children, depth in zip(
      case.values[1].children, case.values[1].depth, strict=True
    )
  )
}.values()
ONE_TREE = [pytest.param(*case.values, id=case.id) for case in ONE_TREE]


def distance(
  rule, tree, *, siblings=siblings_lib.IID, dtype=jnp.float64, **options
):
  """Largest error of the joint law of the next tokens."""
  vocab = 4 if tree.num_drafted <= 3 else 3
  draft, target = toys.context_laws(vocab, **options)
  law = exact.block_law(
    rule, tree, draft, target, siblings=siblings, prefix=(1, 0), dtype=dtype
  )
  assert np.isfinite(law.output).all()
  assert law.accepted_at_least[0] == pytest.approx(1, abs=1e-5)
  expected = exact.target_block_law(
    target, length=tree.max_depth + 1, prefix=(1, 0)
  )
  return np.abs(law.output - expected).max()


def round_error(
  drafter, rule, *, model, target, draft, text=(1, 0), completion=0, rounds=0,
  widths=(), **sampling,
) -> float:  # fmt: skip
  """The largest error of the joint law of the next tokens of a whole round.

  Args:
    drafter, rule, model: of the decoder; of a small vocabulary.
    target: its table.
    draft: the draft's parameters.
    text: the prompt.
    completion: its last tokens that count as emitted ones.
    rounds: made before, by chance.
    widths: of the decoder.
    **sampling: of the warp.
  """
  decoder = specjax.make_decoder(
    model, drafter=drafter, rule=rule, widths=widths
  )
  params = specjax.Params(
    target=jnp.asarray(target), draft=jax.tree.map(jnp.asarray, draft)
  )
  state = decoder.init(
    params, np.array([text]), [len(text)], jax.random.key(0), buffer_length=32,
    max_new_tokens=24, sampling=make_sampling(1, **sampling),
  )  # fmt: skip
  start = state.length - completion
  state = dataclasses.replace(state, prompt_length=start)
  for _ in range(rounds):
    state, _ = jax.jit(decoder.step)(params, state)
  assert not state.done.any()
  law, expected = exact.round_law(decoder, params, state)
  rounding = 1e-9 if jax.config.jax_enable_x64 else 1e-5
  assert law.output.sum() == pytest.approx(1, abs=rounding)
  return float(np.abs(law.output - expected).max())


def p_value(counts, expected, *, shift, alpha=1e-6) -> float:
  """Of Pearson's chi-squared test; its power against a shift is asserted.

  Args:
    counts: `i64[C]`, of samples.
    expected: `f64[C]`, as many in all.
    shift: total variation of a shift, the same in every cell, that the test at
      level `alpha` must see with probability 0.99.
    alpha: the level.
  """
  samples, cells = expected.sum(), len(expected)
  limit = stats.chi2.isf(alpha, cells - 1)
  noncentrality = (2 * shift * samples / cells) ** 2 * (1 / expected).sum()
  assert stats.ncx2.sf(limit, cells - 1, noncentrality) > 0.99
  return stats.chisquare(counts, expected).pvalue
