"""Losslessness, proved by enumeration through the shipped rules.

Context-dependent models (a random table indexed by a hash of the whole
context), every rule, draft law, tree and warp: the joint law of the next G + 1
tokens must be the warped target's, to float64 rounding. What must fail is in
mutants/.
"""

import contextlib

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import exact, rules
from specjax import siblings as siblings_lib
from specjax import tree as tree_lib
from specjax.tree import Tree
from specjax.types import Draft

LOSSLESS = {n: r for n, r in rules.RULES.items() if r.lossless}
WARPS = {
  "plain": {},
  "cold": dict(temperature=0.6),
  "top_p": dict(temperature=1.3, top_p=0.7),
  "top_k": dict(top_k=2),
  "greedy": dict(temperature=0.0),
}
TREES = {
  "root": tree_lib.chain(0),
  "chain1": tree_lib.chain(1),
  "chain3": tree_lib.chain(3),
  "paths2x2": tree_lib.paths(2, 2),
  "paths1x3": tree_lib.paths(1, 3),
  "uneven": Tree((-1, 0, 0, 1, 1)),
  # Equal siblings of which only the second goes on.
  "late": Tree((-1, 0, 0, 2)),
  "binary": tree_lib.k_ary(2, 2),
  # Equal siblings that go on differently.
  "one and two": Tree((-1, 0, 0, 1, 2, 2)),
  "two and deeper": Tree((-1, 0, 0, 1, 1, 4)),
}


def enumerable(rule, tree, siblings) -> bool:
  """Whether the rule is for this tree and these siblings."""
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
WALKERS = ("match", "batch", "traversal", "multipath_block")
FIRST_TREES = ("chain3", "paths2x2", "one and two")


def marks(name, tree_name, siblings):
  usual = siblings is siblings_lib.IID and name in WALKERS
  fast = usual or tree_name in FIRST_TREES or LOSSLESS[name].with_noise
  return () if fast else pytest.mark.heavy


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


@pytest.fixture(autouse=True)
def _x64(request):
  """Sums in float64 are of no compiler; those in float32 are as users get."""
  as_for_users = request.node.get_closest_marker("gpu")
  quick = contextlib.nullcontext() if as_for_users else compiling.quickly()
  with jax.enable_x64(True), quick:
    yield


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


@pytest.mark.parametrize(("rule", "tree", "siblings"), CASES)
def test_output_law_is_the_warped_targets(rule, tree, siblings):
  for settings in WARPS.values():
    found = distance(
      rule, tree, siblings=siblings, seed=0, warp_settings=settings
    )
    assert found < 1e-10, settings
  # Tokens of probability zero, in draft or target.
  found = distance(
    rule, tree, siblings=siblings, seed=5, warp_settings={}, zeros=True
  )
  assert found < 1e-10


def each_rule_once():
  """Other siblings of the same rule are heavy."""
  seen = set()
  for case in ONE_TREE:
    name = case.values[0].name
    again = pytest.mark.heavy if name in seen else ()
    seen.add(name)
    yield pytest.param(*case.values, id=case.id, marks=again)


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "tree", "siblings"), each_rule_once())
def test_output_law_holds_in_float32(rule, tree, siblings):
  with jax.enable_x64(False):
    found = distance(
      rule, tree, siblings=siblings, seed=5, warp_settings={}, zeros=True,
      dtype=jnp.float32,
    )  # fmt: skip
  assert found < 1e-5


@pytest.mark.parametrize(
  ("name", "siblings"),
  [("hub", siblings_lib.HUB), ("greedy_draft", siblings_lib.GREEDY)],
)
def test_ties_of_float32_are_drawn_as_they_are_verified(name, siblings):
  """Two tokens are equally probable to the rule, and in float64 are not."""
  p, q = np.array([0.35, 0.35 + 1e-9, 0.3 - 1e-9]), np.array([0.2, 0.7, 0.1])
  law = exact.block_law(
    rules.get(name), tree_lib.k_ary(2), lambda c: p, lambda c: q,
    siblings=siblings, dtype=jnp.float32,
  )  # fmt: skip
  np.testing.assert_allclose(law.output.sum(axis=1), q, atol=1e-6)


@pytest.mark.parametrize(("rule", "tree", "siblings"), ONE_TREE)
def test_equal_laws_are_verified_exactly_and_a_path_always_accepted(
  rule, tree, siblings
):
  vocab = 4 if tree.num_drafted <= 3 else 3
  _, target = toys.context_laws(vocab, seed=4, warp_settings={})
  law = exact.block_law(rule, tree, target, target, siblings=siblings)
  expected = exact.target_block_law(target, length=tree.max_depth + 1)
  assert np.abs(law.output - expected).max() < 1e-10
  # The path that is selected first has another law than the draft.
  selects = rule.name == "multipath_block" and not tree.is_chain
  if rule.name != "match" and not siblings.deterministic and not selects:
    assert law.expected_accepted == pytest.approx(tree.max_depth, abs=1e-9)


@pytest.mark.parametrize(("rule", "tree", "siblings"), ONE_TREE)
def test_disjoint_supports_are_verified_exactly(rule, tree, siblings):
  p, q = np.array([1.0, 0, 0, 0]), np.array([0, 0.4, 0.5, 0.1])
  if tree.num_drafted > 3:
    p, q = p[:3], np.array([0, 0.4, 0.6])
  law = exact.block_law(rule, tree, lambda c: p, lambda c: q, siblings=siblings)
  expected = exact.target_block_law(lambda c: q, length=tree.max_depth + 1)
  assert np.abs(law.output - expected).max() < 1e-12
  if siblings.independent:
    assert law.expected_accepted == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSLESS))
def test_point_mass_drafts_are_verified_exactly(name):
  # N-gram drafts: the law of every node is one-hot, all paths are equal.
  for tree, vocab in ((tree_lib.chain(3), 4), (tree_lib.paths(2, 2), 3)):
    if not enumerable(LOSSLESS[name], tree, siblings_lib.IID):
      continue
    _, target = toys.context_laws(vocab, seed=2, warp_settings={})
    point = lambda context, vocab=vocab: np.eye(vocab)[sum(context) % vocab]
    law = exact.block_law(LOSSLESS[name], tree, point, target)
    expected = exact.target_block_law(target, length=tree.max_depth + 1)
    assert np.abs(law.output - expected).max() < 1e-10


def test_more_children_than_the_draft_has_tokens_for():
  """Siblings without replacement from a law of one or two tokens."""
  p, q = np.array([0.7, 0.3, 0, 0]), np.array([0.1, 0.2, 0.3, 0.4])
  tree = tree_lib.k_ary(3)
  for siblings in (siblings_lib.WITHOUT_REPLACEMENT, siblings_lib.GREEDY):
    for name in ("recursive", "traversal", "match"):
      law = exact.block_law(
        LOSSLESS[name], tree, lambda c: p, lambda c: q, siblings=siblings
      )
      np.testing.assert_allclose(law.output.sum(1), q, atol=1e-12)


def test_expected_rejections_of_one_round_are_those_not_accepted():
  draft, target = toys.context_laws(4, seed=3, warp_settings={})
  law = exact.block_law(LOSSLESS["token"], tree_lib.chain(2), draft, target)
  assert law.expected_rejections == pytest.approx(
    1 - law.accepted_at_least[2], abs=1e-12
  )
  assert sum(e.sum() for e in law.emitted) == pytest.approx(1, abs=1e-12)


def test_float64_without_x64_is_refused():
  with jax.enable_x64(False), pytest.raises(ValueError, match="enable_x64"):
    exact.block_law(
      rules.get("token"),
      tree_lib.chain(1),
      lambda c: np.ones(2) / 2,
      lambda c: np.ones(2) / 2,
    )


def test_noise_is_not_enumerable():
  with pytest.raises(ValueError, match="not enumerable"):
    exact.block_law(
      rules.get("gumbel_list"),
      tree_lib.chain(1),
      lambda c: np.ones(2) / 2,
      lambda c: np.ones(2) / 2,
      siblings=siblings_lib.SHARED_NOISE,
    )


def test_siblings_that_cannot_be_drawn_are_refused():
  p, q = np.array([0.5, 0.5]), np.array([0.3, 0.7])
  for siblings in (siblings_lib.WITHOUT_REPLACEMENT, siblings_lib.TOP_K):
    with pytest.raises(ValueError, match="at most 2 a node for 2 tokens"):
      exact.block_law(
        rules.get("recursive"), tree_lib.k_ary(3), lambda c: p, lambda c: q,
        siblings=siblings,
      )  # fmt: skip


@pytest.mark.parametrize(
  "p, words",
  [([0.5, 0.3, 0.3], "sum to 1; one is off by 0.1"),
   ([0.5, 0.5], "over 3 tokens"), ([1.5, -0.5, 0], "probabilities")],
)  # fmt: skip
def test_laws_that_are_none_are_refused(p, words):
  p, q = np.array(p), np.array([0.2, 0.3, 0.5])
  with pytest.raises(ValueError, match=words):
    exact.block_law(
      rules.get("token"), tree_lib.chain(2), lambda c: p, lambda c: q
    )
  with pytest.raises(TypeError, match=r"must be a specjax\.Rule"):
    exact.block_law("token", tree_lib.chain(2), lambda c: q, lambda c: q)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_rules_keep_the_laws_dtype(dtype):
  """Laws of a float32 model stay float32 where x64 is enabled."""
  with jax.enable_x64(True):
    for case in ONE_TREE:
      rule, tree, siblings = case.values
      shape = (2, tree.num_nodes)
      draft = Draft(
        tree=tree,
        siblings=siblings,
        tokens=jax.ShapeDtypeStruct(shape, jnp.int32),
        log_probs=jax.ShapeDtypeStruct((*shape, 5), dtype),
      )

      def ask(draft, target, rule=rule):
        found = rule.verify(draft, target)
        node = jnp.zeros(2, jnp.int32)
        return found.node_probs, found.next_log_probs(node)

      found = jax.eval_shape(ask, draft, draft.log_probs)
      assert [x.dtype for x in found] == [dtype] * 2, case.id
