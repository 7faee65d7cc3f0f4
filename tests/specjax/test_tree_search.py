"""Tree search against exhaustive search, and from measured acceptance."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, siblings, tree_search
from specjax.state import Counters
from specjax.tree import Tree, chain, k_ary


@functools.cache
def all_trees(num_nodes):
  """Every tree of exactly that many drafted nodes.

  Numbered level by level, parents do not decrease; their number is Catalan's.
  """
  above = itertools.product(*(range(n + 1) for n in range(num_nodes)))
  return [
    Tree((-1, *parents))
    for parents in above
    if list(parents) == sorted(parents)
  ]


def accepts(tree, acceptance):
  """`expected_accepted`, once more: node by node, path by path."""
  total = 0.0
  for node in range(1, tree.num_nodes):
    path = tree.paths[node][1 : tree.depth[node] + 1]
    ranks = [tree.rank[n] for n in path]
    total += np.prod([acceptance[r] for r in ranks])
  return total


@pytest.mark.parametrize(
  "acceptance",
  [
    *np.random.default_rng(0).dirichlet(np.ones(7), size=2)[:, :6],
    [0.7, 0.2, 0.05, 0.02, 0.01, 0.0],
    # Later ranks may be the better ones.
    [0.1, 0.6, 0.0, 0.2, 0.0, 0.0],
    [0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
  ],
)
def test_best_tree_matches_exhaustive_search_up_to_six_nodes(acceptance):
  values = {
    tree: accepts(tree, acceptance) for n in range(7) for tree in all_trees(n)
  }
  for tree, value in values.items():
    assert tree_search.expected_accepted(tree, acceptance) == pytest.approx(
      value, abs=1e-14
    )
  for num_nodes, max_depth in itertools.product(range(1, 7), (1, 2, 3, None)):
    allowed = {
      tree: value
      for tree, value in values.items()
      if tree.num_drafted <= num_nodes
      and tree.max_depth <= (max_depth or num_nodes)
    }
    best = tree_search.best_tree(
      acceptance, num_nodes=num_nodes, max_depth=max_depth
    )
    most = max(allowed.values())
    assert allowed[best] == pytest.approx(most, abs=1e-12)
    # None that is as good is smaller.
    assert best.num_drafted == min(
      tree.num_drafted for tree, v in allowed.items() if v > most - 1e-12
    )


@pytest.mark.parametrize(
  ("acceptance", "message"),
  [
    ([0.7, 0.4], "add up to at most 1"),
    ([-0.1, 0.4], r"in \[0, 1\]"),
    ([np.nan], r"in \[0, 1\]"),
    ([], "one probability per rank"),
  ],
)
def test_invalid_acceptance_is_rejected(acceptance, message):
  for function in (
    functools.partial(tree_search.best_tree, num_nodes=3),
    functools.partial(tree_search.expected_accepted, chain(3)),
  ):
    with pytest.raises(ValueError, match=message):
      function(acceptance)


# ------------------------------------------------- from what a decoder counts

VOCAB, ROWS, STEPS = 11, 64, 15
TABLE = toys.table(VOCAB, seed=0)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, 3))


def decode(tree):
  """The state after some rounds, all within their budget."""
  model = toys.table_model(VOCAB)
  drafter = drafters.model(
    model, tree=tree, siblings=siblings.WITHOUT_REPLACEMENT, vocab_size=VOCAB
  )
  decoder = specjax.make_decoder(model, drafter=drafter, rule="recursive")
  budget = STEPS * (tree.max_depth + 1)
  params = toys.pair(TABLE, noise=0.8, seed=1)

  @jax.jit
  def run(params):
    state = decoder.init(
      params, PROMPTS, np.full(ROWS, 3), jax.random.key(0),
      buffer_length=3 + budget, max_new_tokens=budget,
    )  # fmt: skip
    return decoder.steps(params, state, STEPS)

  return run(params)


def test_tree_built_from_counters_matches_predicted_acceptance():
  counters = decode(k_ary(3, 3)).counters
  # Nothing was cut: all that was accepted was emitted.
  np.testing.assert_allclose(
    counters.rank_accepted.sum(1), counters.expected_accepted, rtol=1e-4
  )
  acceptance = tree_search.acceptance_by_rank(counters)
  assert acceptance.shape == (3,)
  assert (acceptance > 0).all()
  assert acceptance.sum() < 1
  tree = tree_search.best_tree(acceptance, num_nodes=8)
  assert tree.num_drafted == 8
  state = decode(tree)
  per_step = float(
    state.counters.expected_accepted.sum()
    / state.counters.num_target_calls.sum()
  )
  # Its assumption, acceptance independent of the place, nearly holds here.
  assert per_step == pytest.approx(
    tree_search.expected_accepted(tree, acceptance), rel=0.1
  )


def test_acceptance_by_rank_is_ratio_of_totals_or_zero():
  zeros = jnp.zeros((3, 4))
  offered = zeros.at[0, :2].set(jnp.array([8.0, 2.0])).at[1, 0].set(2.0)
  accepted = zeros.at[0, :2].set(jnp.array([4.0, 0.5])).at[1, 0].set(2.0)
  fields = dict.fromkeys(field.name for field in dataclasses.fields(Counters))
  counters = Counters(
    **fields | dict(rank_offered=offered, rank_accepted=accepted)
  )
  np.testing.assert_array_equal(
    tree_search.acceptance_by_rank(counters), [0.6, 0.25, 0, 0]
  )
