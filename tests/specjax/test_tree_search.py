"""Tree search against exhaustive search, and from measured acceptance."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import siblings, tree_search
from specjax.tree import Tree, chain, k_ary
from specjax.types import Params
from specjax.warp import make_sampling


@functools.cache
def all_trees(num_nodes):
  """Every tree of exactly that many drafted nodes, level by level."""
  found = set()
  for above in itertools.product(*(range(n + 1) for n in range(num_nodes))):
    try:
      found.add(Tree((-1, *above)))
    except ValueError:
      continue
  return found


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_up_to_six_nodes_is_better(seed):
  acceptance = np.random.default_rng(seed).dirichlet(np.ones(5))[:4]
  for num_nodes in range(1, 7):
    best = tree_search.best_tree(acceptance, num_nodes=num_nodes)
    value = tree_search.expected_accepted(best, acceptance)
    assert best.num_drafted <= num_nodes
    most = max(
      tree_search.expected_accepted(tree, acceptance)
      for size in range(1, num_nodes + 1)
      for tree in all_trees(size)
    )
    assert value == pytest.approx(most, abs=1e-12)
    for depth in (1, 2):
      shallow = tree_search.best_tree(
        acceptance, num_nodes=num_nodes, max_depth=depth
      )
      assert shallow.max_depth <= depth
      most = max(
        tree_search.expected_accepted(tree, acceptance)
        for size in range(1, num_nodes + 1)
        for tree in all_trees(size)
        if tree.max_depth <= depth
      )
      assert tree_search.expected_accepted(
        shallow, acceptance
      ) == pytest.approx(most, abs=1e-12)


def test_one_rank_alone_makes_a_chain():
  assert tree_search.best_tree([0.8], num_nodes=5) == chain(5)
  assert tree_search.best_tree([0.8, 0.0], num_nodes=5) == chain(5)
  assert tree_search.expected_accepted(chain(3), [0.5]) == 0.875


def test_the_least_time_a_token_is_found():
  acceptance = [0.55, 0.2, 0.1]
  curve = {1: 1.0, 4: 1.05, 8: 1.4}
  verify = lambda fed: float(np.interp(fed, [1, 4, 8], [1.0, 1.05, 1.4]))
  for draft_seconds in (0.01, 0.1, 0.5):
    found = tree_search.best_tree_for_latency(
      acceptance,
      draft_seconds=draft_seconds,
      verify_seconds=curve,
      max_nodes=6,
    )
    seconds = lambda tree: (
      (
        tree.max_depth * draft_seconds + verify(tree.num_nodes)  # noqa: B023
      )
      / (1 + tree_search.expected_accepted(tree, acceptance))
    )
    least = min(
      seconds(tree) for size in range(1, 7) for tree in all_trees(size)
    )
    assert seconds(found) == pytest.approx(least, rel=1e-9)


def test_large_trees_are_found_quickly():
  start = time.process_time()
  acceptance = 0.6 * 0.45 ** np.arange(16)
  tree = tree_search.best_tree(acceptance, num_nodes=128, max_depth=16)
  assert tree.num_drafted == 128
  assert time.process_time() - start < 20
  wide = k_ary(2, 2, 2, 2, 2, 2)  # 126 nodes
  assert tree_search.expected_accepted(
    tree, acceptance
  ) > tree_search.expected_accepted(wide, acceptance)


@pytest.mark.parametrize(
  ("acceptance", "message"),
  [
    ([0.7, 0.4], "exclusive events"),
    ([-0.1, 0.4], "exclusive events"),
    ([0.0, 0.4], "never accepted"),
    ([], "vector"),
  ],
)
def test_what_is_no_acceptance_is_refused(acceptance, message):
  with pytest.raises(ValueError, match=message):
    tree_search.best_tree(acceptance, num_nodes=3)


def test_sizes_and_times_out_of_range_are_refused():
  with pytest.raises(ValueError, match="num_nodes >= 1"):
    tree_search.best_tree([0.5], num_nodes=0)
  with pytest.raises(ValueError, match="times must be positive"):
    tree_search.best_tree_for_latency(
      [0.5], draft_seconds=0.0, verify_seconds={1: 1.0}, max_nodes=2
    )


def test_a_tree_built_from_counters_accepts_what_it_predicts():
  vocab, rows = 11, 64
  table = toys.table(vocab, seed=0)
  model = toys.table_model(vocab)
  params = Params(
    target=jnp.asarray(table),
    draft=jnp.asarray(toys.near(table, noise=0.8, seed=1)),
  )

  def run(tree):
    drafter = specjax.drafters.model.drafter(
      model,
      tree=tree,
      siblings=siblings.WITHOUT_REPLACEMENT,
      vocab_size=vocab,
    )
    decoder = specjax.make_decoder(model, drafter=drafter, rule="recursive")
    prompts = np.random.default_rng(0).integers(0, vocab, (rows, 3))
    state = decoder.init(
      params, jnp.asarray(prompts), np.full(rows, 3), jax.random.key(0),
      buffer_length=3 + 60, max_new_tokens=60,
      sampling=make_sampling(rows, temperature=1.0),
    )  # fmt: skip
    # Fewer steps than could reach the budget: nothing is cut.
    steps = jax.jit(
      lambda p, s: decoder.steps(p, s, 60 // (tree.max_depth + 1))
    )
    return steps(params, state).counters

  counters = run(k_ary(3, 3))
  assert float(counters.rank_accepted.sum()) == pytest.approx(
    float(counters.expected_accepted.sum()), rel=1e-4
  )
  acceptance = tree_search.acceptance_by_rank(counters)
  assert (acceptance > 0).all()
  best = tree_search.best_tree(acceptance, num_nodes=8)
  found = run(best)
  per_step = float(found.expected_accepted.sum() / found.num_target_calls.sum())
  # Its assumption, acceptance independent of the place, holds here.
  assert per_step == pytest.approx(
    tree_search.expected_accepted(best, acceptance), rel=0.1
  )
