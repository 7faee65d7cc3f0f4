"""A head of several layers reads the right states beside the right tokens.

Each layer of the toy has the law that EAGLE's toy has, if the state, the token
and the slots that it sees are all right: then both decode alike, round by
round.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from decoding import LENGTHS, PROMPTS, TARGET, VOCAB, rows_of

import specjax
from specjax import drafters
from specjax.adaptive import policies
from specjax.tree import Form, Tree, bound, chain

PARAMS = toys.pair(TARGET, noise=0.8, seed=1)
LAYERS = 3
TOY = toys.table_model(VOCAB, layers=LAYERS)
ONE = toys.feature_model(VOCAB, num_features=LAYERS)
# The accepted path is 0, 1, 3, 5: not the first nodes.
TREE = Tree((-1, 0, 0, 1, 2, 3))
ROWS = [2, 4]  # prompts that are longer than a head has layers
FORMS = {
  "chain": dict(tree=chain(5)),
  "tree": dict(tree=TREE),
  "dynamic": dict(tree=bound(9, 4, 3)),
  "policy": dict(tree=chain(4), policy=policies.survival(threshold=0.3)),
}


def of(num_depths, form):
  head = toys.layered_head(VOCAB, num_features=LAYERS, num_depths=num_depths)
  return drafters.mtp(head, vocab_size=VOCAB, **FORMS[form])


def outcome(drafter, *, longer=False):
  """Texts, and tokens accepted by depth; `longer` if one goes on."""
  certain = drafter.tree.form is Form.FREE
  decoder = specjax.make_decoder(
    TOY, drafter=drafter, rule="match" if certain else "recursive"
  )
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    PARAMS, PROMPTS[ROWS], LENGTHS[ROWS], jax.random.key(0), buffer_length=48,
    max_new_tokens=np.array([12, 30]),
  )  # fmt: skip
  steps = jax.jit(decoder.steps)
  state = steps(PARAMS, state, 3 if longer else 100)
  if longer:
    state = jax.jit(decoder.extend)(
      PARAMS, state, 0, jnp.array([4, 1, 7]), 2, max_new_tokens=14
    )
    state = steps(PARAMS, state, 100)
  return rows_of(state), state.counters.accept_counts.tolist()


@pytest.fixture(scope="module")
def expected():
  results = {}

  def of_one(form, **more):
    key = form, *more
    if key not in results:
      drafter = drafters.eagle(ONE, vocab_size=VOCAB, **FORMS[form])
      results[key] = outcome(drafter, **more)
    return results[key]

  return of_one


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("num_depths", "form"),
  [
    (2, "chain"), (3, "dynamic"), slow(2, "tree"), slow(3, "policy"),
  ],
)  # fmt: skip
def test_multilayer_head_decodes_like_a_single_layer_one(
  expected, num_depths, form
):
  """Also of drafts longer than there are layers."""
  assert outcome(of(num_depths, form)) == expected(form)


def test_multilayer_head_matches_single_layer_after_extend(expected):
  assert outcome(of(3, "tree"), longer=True) == expected("tree", longer=True)
