"""Lossy rules: their distance is what they report, and theory's."""

import dataclasses
import itertools

import instances
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from instances import P, Q

from specjax import exact, rules, siblings, tree
from specjax.rules import by_rank
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("x64")
LOSSY = [name for name in rules.RULES if not rules.get(name).lossless]


def one_token(name, p, q):
  return exact.block_law(
    rules.get(name), tree.chain(1), lambda c: p, lambda c: q
  )


def distance(p, q):
  return np.abs(p - q).sum() / 2


@pytest.mark.parametrize("name", LOSSY)
def test_reported_distance_matches_enumerated_distribution(name):
  for p, q in zip(*instances.random_laws(10, 4, seed=0), strict=True):
    law = one_token(name, p, q)
    actual = law.output.sum(1)  # the first token's law
    assert law.total_variation == pytest.approx(distance(actual, q), abs=1e-12)
    assert law.reported_total_variation == pytest.approx(
      law.total_variation, abs=1e-12
    )


def test_lossy_rules_are_lossy():
  for name in LOSSY:
    assert one_token(name, P, Q).total_variation > 0.01, name


def test_typical_takes_the_longest_acceptable_path():
  """By a plain search over a tree with random tokens."""
  rng = np.random.default_rng(0)
  shape = tree.Tree((-1, 0, 0, 1, 1, 2, 3))
  rule = rules.get("typical(epsilon=0.2, delta=0.7)")
  vocab, seen = 5, set()
  for _ in range(50):
    q = rng.dirichlet(np.full(vocab, 0.7), shape.num_nodes)
    tokens = np.array([0, 0, 1, 2, 3, 4, 0])
    entropy = -(q * np.log(q)).sum(1)
    enough = np.minimum(0.2, 0.7 * np.exp(-entropy))
    best, score = 0, (0, 0.0)
    for node in range(1, shape.num_nodes):
      path = [n for n in shape.paths[node] if n]
      path = list(dict.fromkeys(path))
      probs = [q[shape.parents[n], tokens[n]] for n in path]
      ok = all(
        a > enough[shape.parents[n]] for a, n in zip(probs, path, strict=True)
      )
      this = (len(path), np.log(probs).sum())
      if ok and (
        len(path) > score[0] or (len(path) == score[0] and this > score)
      ):
        best, score = node, this
    draft = Draft(
      tree=shape, siblings=siblings.TOP_K,
      tokens=jnp.asarray(tokens[None], jnp.int32), log_probs=None,
    )  # fmt: skip
    actual = rule.verify(draft, draft.topology(), jnp.asarray(np.log(q))[None])
    assert int(np.argmax(actual.node_probs[0])) == best
    seen.add(best)
  assert len(seen) > 4


def test_synthetic_accepts_first_children_at_given_rates():
  shape = tree.Tree((-1, 0, 0, 1, 1, 3))
  draft = Draft(
    tree=shape, siblings=siblings.IID, tokens=jnp.array([[0, 1, 1, 2, 0, 1]]),
    log_probs=jnp.log(jnp.broadcast_to(P, (1, 6, len(P)))),
  )  # fmt: skip
  rule = rules.get("synthetic(0.9, 0.5)")
  target = jnp.log(jnp.broadcast_to(Q, (1, 6, len(Q))))
  actual = rule.verify(draft, draft.topology(), target)
  np.testing.assert_allclose(
    actual.node_probs[0], [0.1, 0.45, 0, 0.225, 0, 0.225], atol=1e-12
  )


def test_top_beta_with_beta_one_or_tau_zero_is_greedy():
  draft, target = toys.context_laws(4, seed=2, warp_settings={})
  for name in ("top_beta(beta=1)", "top_beta(tau=0)"):
    law = exact.block_law(rules.get(name), tree.chain(2), draft, target)
    greedy = (0,)
    for _ in range(3):
      greedy += (int(np.argmax(target(greedy))),)
    # What a round emits, one token to three, the bonus too.
    for count, emitted in enumerate(law.emitted, start=1):
      mass = emitted[greedy[1 : count + 1]]
      assert mass == pytest.approx(emitted.sum(), abs=1e-12)


def test_top_beta_reports_bonus_distance_from_target():
  p, q = np.full(4, 0.25), np.array([0.4, 0.3, 0.2, 0.1])
  draft = Draft(
    tree=tree.chain(1), siblings=siblings.IID, tokens=jnp.array([[0, 1]]),
    log_probs=jnp.log(jnp.stack([p, p]))[None],
  )  # fmt: skip
  actual = rules.get("top_beta(beta=2, tau=9.0)").verify(
    draft, draft.topology(), jnp.log(jnp.stack([q, q]))[None]
  )
  # At the root (1/4 on each of the first two, all else on the first); at the
  # end the first is certain.
  np.testing.assert_allclose(actual.total_variation[0], [0.35, 0.6], atol=1e-6)
  for node in (0, 1):
    after = jnp.exp(actual.next_log_probs(jnp.array([node])))
    np.testing.assert_array_equal(after, [[1, 0, 0, 0]])


@pytest.mark.parametrize(
  "name",
  [
    "typical(epsilon=0)", "top_beta(tau=-1)", "decoding_uno(epsilon=-0.1)",
    "blockwise(top_k=0)", "synthetic(0.5, 1.5)", "ensemble(weight=1.1)",
    "ensemble(base='best')", "fuzzy(threshold=-1)", "cascade_token(version=4)",
  ],
)  # fmt: skip
def test_invalid_parameters_are_rejected(name):
  with pytest.raises(ValueError, match=name.partition("(")[0]):
    rules.get(name)


@pytest.mark.parametrize("top_k, first", [(2, 0), (2, 1), (1, 2)])
def test_blockwise_accepts_top_ranks_and_min_accepted(top_k, first):
  """A certain path, by hand: ranks of the target, and so many in any case."""
  q = np.random.default_rng(3).dirichlet(np.ones(5), 4)
  rule = rules.get(f"blockwise(top_k={top_k}, min_accepted={first})")
  for tokens in itertools.product(range(5), repeat=2):
    tokens = (0, *tokens, 1)
    draft = Draft(
      tree=tree.chain(3), siblings=siblings.IID,
      tokens=jnp.asarray([tokens], jnp.int32), log_probs=None,
    )  # fmt: skip
    actual = rule.verify(draft, draft.topology(), jnp.asarray(np.log(q))[None])
    passes = [
      n <= first or (q[n - 1] > q[n - 1, tokens[n]]).sum() < top_k
      for n in (1, 2, 3)
    ]
    deepest = ([*passes, False]).index(False)
    assert np.flatnonzero(actual.node_probs[0]).tolist() == [deepest]
    distances = [
      1 - q[n - 1, tokens[n]] if passes[n - 1] else 0 for n in (1, 2, 3)
    ]
    np.testing.assert_allclose(
      actual.total_variation[0, :3], distances, atol=1e-12
    )


@pytest.mark.parametrize(
  ("count", "expected"), [(1, [1]), (3, [0, 1, 3]), (9, [0, 1, 3, 4])]
)
def test_likeliest_breaks_ties_by_index_and_skips_zero_mass(count, expected):
  law = jnp.log(jnp.array([[0.2, 0.3, 0.0, 0.3, 0.2], [0, 0, 1.0, 0, 0]]))
  actual = by_rank.likeliest(law, count)
  assert np.flatnonzero(actual[0]).tolist() == expected
  assert np.flatnonzero(actual[1]).tolist() == [2]


@pytest.mark.parametrize(
  ("name", "after", "distances"),
  [
    ("top_beta(beta=2, tau=9.0)", [1.0, 0, 0], [0.7, 0.4, 0.4]),
    ("blockwise(top_k=2)", [0.6, 0.3, 0.1], [0.7, 0.0, 0.0]),
  ],
)
def test_truncated_path_ends_like_a_full_path(name, after, distances):
  """Of two drafted nodes the second is not there: no draft is refused there."""
  law = jnp.log(jnp.array([[[0.6, 0.3, 0.1]] * 3]))
  point = jnp.where(jnp.arange(3) == 1, 0.0, -jnp.inf)
  draft = Draft(
    tree=dataclasses.replace(tree.chain(2), form=tree.Form.MASKED),
    siblings=siblings.IID, tokens=jnp.array([[0, 1, 2]]),
    log_probs=jnp.stack([point, point, jnp.full(3, jnp.nan)])[None],
    parents=jnp.array([[-1, 0, -1]]),
  )  # fmt: skip
  actual = rules.get(name).verify(draft, draft.topology(), law)
  np.testing.assert_array_equal(actual.node_probs, [[0, 1, 0]])
  np.testing.assert_allclose(actual.total_variation[0], distances, atol=1e-6)
  np.testing.assert_allclose(
    jnp.exp(actual.next_log_probs(jnp.array([1]))), [after], atol=1e-6
  )
