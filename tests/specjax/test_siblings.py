"""Laws of siblings: what the drafter draws is what the law says."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import exact, random, rules
from specjax import siblings as siblings_lib
from specjax.drafters.shared import levels
from specjax.siblings import GREEDY, HUB, SIBLINGS, TOP_K, WITHOUT_REPLACEMENT
from specjax.tree import Tree, k_ary
from specjax.types import Context, Params, pick_nodes
from specjax.warp import make_sampling

P = np.array([0.1, 0.4, 0.2, 0.3])


def sequence_law(siblings, p, count):
  """The law of `count` siblings together, `f64[V, .., V]`."""
  law = np.zeros((len(p),) * count)
  with np.errstate(divide="ignore"):
    log_p = jnp.asarray(np.log(p), jnp.float32)
  for tokens in itertools.product(range(len(p)), repeat=count):
    prob = 1.0
    for i, token in enumerate(tokens):
      previous = jnp.asarray(tokens[:i], jnp.int32)
      child = np.exp(np.asarray(siblings.child(log_p, previous, count)))
      assert child.sum() == pytest.approx(1, abs=1e-6)
      prob *= child[token]
    law[tokens] = prob
  return law


def test_without_replacement_matches_gumbel_top_k():
  law = sequence_law(WITHOUT_REPLACEMENT, P, 2)
  for a, b in itertools.permutations(range(4), 2):
    assert law[a, b] == pytest.approx(P[a] * P[b] / (1 - P[a]), abs=1e-6)
  noise = jax.random.gumbel(jax.random.key(0), (200_000, 4))
  _, drawn = jax.lax.top_k(jnp.log(P) + noise, 2)
  actual = np.zeros((4, 4))
  np.add.at(actual, tuple(np.asarray(drawn).T), 1 / len(drawn))
  assert np.abs(actual - law).max() < 0.005


def test_top_k_siblings_are_ordered_by_probability():
  assert sequence_law(TOP_K, P, 3)[1, 3, 2] == 1


def test_greedy_siblings_sample_only_the_last_one():
  law = sequence_law(GREEDY, P, 3)
  assert law[1, 3, 0] == pytest.approx(1 / 3, abs=1e-6)
  assert law[1, 3, 2] == pytest.approx(2 / 3, abs=1e-6)
  np.testing.assert_allclose(sequence_law(GREEDY, P, 1), P, atol=1e-6)


def test_hub_pairs_contain_the_most_probable_token():
  law = sequence_law(HUB, P, 2)
  hub = 1
  np.testing.assert_allclose(law.sum(1), P, atol=1e-6)
  for x in (0, 2, 3):
    assert law[x, hub] == pytest.approx(P[x], abs=1e-6)
    assert law[hub, x] == pytest.approx(P[hub] * P[x] / (1 - P[hub]), abs=1e-6)
    # All pairs with x: p(x) / (1 - p(a)).
    assert law[x].sum() + law[:, x].sum() == pytest.approx(
      P[x] / (1 - P[hub]), abs=1e-6
    )


def test_exhausted_support_falls_back_to_uniform_untried_tokens():
  p = np.array([0, 1.0, 0, 0])
  for siblings in (WITHOUT_REPLACEMENT, HUB):
    law = sequence_law(siblings, p, 2)
    np.testing.assert_allclose(law[1], [1 / 3, 0, 1 / 3, 1 / 3], atol=1e-6)


def test_exhausted_support_falls_back_to_highest_unused_logits():
  warped = jnp.log(jnp.array([0, 1.0, 0, 0]))
  logits = jnp.array([-jnp.inf, 3.0, -1.0, 0.5])
  for siblings in (WITHOUT_REPLACEMENT, GREEDY, HUB):
    previous, count = [1], 2 if siblings is HUB else 4
    for expected in (3, 2, 0)[: count - 1]:
      law = siblings.child(warped, jnp.array(previous), count, logits)
      assert np.flatnonzero(np.asarray(law) == 0).tolist() == [expected]
      previous.append(expected)


def test_zero_temperature_trees_hold_draft_top_k_tokens():
  """And not whatever is left of a law that is one token."""
  model, table = toys.table_model(6), jnp.asarray(toys.table(6, seed=0))

  @functools.cache
  def drafted(name, tree):
    drafter = specjax.drafters.model(
      model, tree=tree, siblings=name, vocab_size=6
    )
    rule = "match" if name == "top_k" else "recursive"
    decoder = specjax.make_decoder(model, drafter=drafter, rule=rule)

    @jax.jit
    def run(params):
      state = decoder.init(
        params, jnp.zeros((1, 2), jnp.int32), np.array([2]), jax.random.key(0),
        buffer_length=12, max_new_tokens=9,
        sampling=make_sampling(1, temperature=0.0),
      )  # fmt: skip
      return decoder.propose(params, state)[0].tokens

    return run(Params(target=table, draft=table))

  for name, tree in (
    ("without_replacement", k_ary(3, 2)),
    ("greedy", k_ary(3, 2)),
    ("hub", k_ary(2, 2)),
  ):
    np.testing.assert_array_equal(drafted(name, tree), drafted("top_k", tree))
  best = np.argsort(-toys.context_logits(np.asarray(table), (0, 0)))
  assert drafted("top_k", k_ary(3, 2))[0, 1:4].tolist() == best[:3].tolist()


def test_zero_mass_parent_gives_zero_mass_children():
  empty = jnp.full(4, -jnp.inf)
  for siblings in SIBLINGS.values():
    for previous in ([], [2]):
      law = siblings.child(empty, jnp.asarray(previous, jnp.int32), 2)
      assert (np.asarray(law) == -np.inf).all()


# ------------------------------------------------------- many: a loop over them


def looped(monkeypatch):
  monkeypatch.setattr(siblings_lib, "_MOST_UNROLLED", 0)


@pytest.mark.parametrize("name", ["without_replacement", "top_k", "greedy"])
def test_looped_sibling_draws_match_unrolled_draws(name, monkeypatch):
  tree = Tree((-1, 0, 0, 0, 1, 1, 1, 3, 3))  # families of three and of two
  laws = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(6), (40, 3)))
  keys = random.row_keys(jax.random.key(0), jnp.arange(40))
  context = types.SimpleNamespace(
    numbers=random.drafted_numbers(keys, tree.num_drafted), draws=pick_nodes
  )
  context.draw = functools.partial(Context.draw, context)
  drawing = types.SimpleNamespace(tree=tree, siblings=siblings_lib.get(name))

  def drawn():
    return jax.jit(
      lambda laws: levels._draw_level(
        drawing, 2, *2 * (jnp.log(laws),), context
      )
    )(laws)

  tokens, drawn_from = drawn()
  looped(monkeypatch)
  again = drawn()
  np.testing.assert_array_equal(again[0], tokens)
  np.testing.assert_allclose(again[1], drawn_from, rtol=1e-6)


@pytest.mark.parametrize(
  ("rule", "how"),
  [("recursive", "iid"), ("recursive", "greedy"),
   ("traversal", "without_replacement")],
)  # fmt: skip
def test_looped_sibling_verification_is_lossless(rule, how, monkeypatch):
  looped(monkeypatch)
  rule = dataclasses.replace(rules.get(rule), name="traced anew")
  rng = np.random.default_rng(0)
  p, q = rng.dirichlet(np.ones(4), 2)
  with jax.enable_x64(True):
    law = exact.block_law(
      rule, k_ary(3), lambda c: p, lambda c: q, siblings=siblings_lib.get(how)
    )
  np.testing.assert_allclose(law.output.sum(axis=1), q, atol=1e-12)
  assert law.expected_accepted > 0.5


def test_program_size_is_independent_of_sibling_count():
  def operations(jaxpr):
    inner = jax.extend.core.jaxprs_in_params
    return len(jaxpr.eqns) + sum(
      operations(x) for e in jaxpr.eqns for x in inner(e.params)
    )

  def size(count, rule):
    model = toys.table_model(300)
    drafter = specjax.drafters.model(
      model, tree=k_ary(count), siblings=WITHOUT_REPLACEMENT, vocab_size=300
    )
    decoder = specjax.make_decoder(model, drafter=drafter, rule=rule)
    table = jax.ShapeDtypeStruct((7, 300), jnp.float32)
    params = Params(target=table, draft=table)
    state = jax.eval_shape(
      lambda params: decoder.init(
        params, jnp.ones((1, 2), int), np.array([2]), jax.random.key(0),
        buffer_length=8, max_new_tokens=4,
      ),
      params,
    )  # fmt: skip
    return operations(jax.make_jaxpr(decoder.step)(params, state).jaxpr)

  for rule in ("recursive", "traversal"):
    assert size(16, rule) == size(256, rule)
