"""Stopping and the output law: every claim of docs/drafting.md, enumerated.

Rounds of the shipped loop under every policy, in states in which rows have
learned something; a depth that rows share; what is lossy, and its repair.
"""

import dataclasses
import functools

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from specjax import drafters, exact, rules
from specjax.adaptive import policies
from specjax.siblings import IID
from specjax.tree import Form, chain

pytestmark = pytest.mark.usefixtures("x64")

LIMIT = 1e-10
VOCAB, DEPTH = 3, 3
TARGET = toys.table(VOCAB, seed=0).astype(np.float64)
DRAFT = toys.near(TARGET, noise=1.0, seed=1).astype(np.float64)
MODEL = toys.table_model(VOCAB)

POLICIES = {
  "2": policies.get("2"),
  "confidence": policies.get("confidence(threshold=0.5)"),
  "survival": policies.get("survival(threshold=0.62)"),
  "optimal": policies.get("optimal(cost=0.4)"),
  "batch": policies.get("optimal(cost=0.4,rows=3)"),
  "exits": policies.get("exits(threshold=0.5, acceptance=0.6)"),
}
# Rounds after which what was learned ends some drafts and not others.
ROUNDS = {name: 5 if name == "survival" else 4 for name in POLICIES}
# All lossless rules of chains that may end early.
CHAIN_RULES = (
  "token", "block", "match", "recursive", "kseq", "transport", "traversal",
  "block_transport",
)  # fmt: skip
ALWAYS = [
  ("confidence", "token"), ("survival", "block"),
  ("exits", "token"), ("exits", "block"),
]  # fmt: skip
CASES = [
  *ALWAYS,
  *(
    pytest.param(policy, rule, marks=pytest.mark.slow)
    for policy in POLICIES
    for rule in CHAIN_RULES
    if (policy == "confidence" or rule in ("token", "block"))
    and (policy, rule) not in ALWAYS
  ),
]


def params():
  draft = jnp.asarray(DRAFT)
  return specjax.Params(target=jnp.asarray(TARGET), draft=draft)


def learned(decoder, rounds):
  """A state of one row after some rounds."""
  given = params()
  state = decoder.init(
    given, np.array([[1, 0]]), [2], jax.random.key(0), buffer_length=32,
    max_new_tokens=30,
  )  # fmt: skip
  return jax.jit(decoder.steps)(given, state, rounds)


def error(drafter, rule: str, rounds: int = 4) -> float:
  return exact_cases.round_error(
    drafter, rule, model=MODEL, target=TARGET, draft=params().draft,
    rounds=rounds,
  )  # fmt: skip


def under(policy, draft=drafters.model):
  return draft(MODEL, tree=chain(DEPTH), vocab_size=VOCAB, policy=policy)


@pytest.mark.parametrize(("policy", "rule"), CASES)
def test_a_round_under_a_policy_has_the_targets_law(policy, rule):
  assert error(under(POLICIES[policy]), rule, ROUNDS[policy]) < LIMIT


def test_no_lossless_rule_of_chains_that_may_end_is_left_out():
  tree, actual = under(POLICIES["2"]).tree, set()
  for name in rules.RULES:
    rule = rules.get(name)
    try:
      rule.check(tree, IID)
    except ValueError:
      continue
    if rule.lossless:
      actual.add(name)
  assert actual - {"gumbel_list"} == set(CHAIN_RULES)


@pytest.mark.parametrize("policy", ["confidence", "survival"])
def test_policies_end_some_of_the_drafts_that_are_enumerated(policy):
  decoder = specjax.make_decoder(MODEL, drafter=under(POLICIES[policy]))
  state = learned(decoder, ROUNDS[policy])
  every = exact.drafts(decoder, params(), state)
  depths = np.asarray(every.draft.topology().present.sum(axis=1)) - 1
  assert len(set(depths.tolist())) > 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["confidence", "survival"])
def test_a_target_that_drafts_for_itself_under_a_policy(policy):
  drafter = under(POLICIES[policy], drafters.layer_skip)
  for rule in ("token", "block"):
    assert error(drafter, rule, ROUNDS[policy]) < LIMIT


# -------------------------------------------------------------- what is lossy


HALF = ((0.5, 0.5), (0.5, 0.5), (True, False), (0.75, 0.25))
KEPT = ((0.6, 0.4), (0.3, 0.7), (True, False), (0.42, 0.58))


@pytest.mark.parametrize(("p", "q", "keep", "wrong"), [HALF, KEPT])
def test_by_hand_one_dropped_token_and_the_null_symbol(p, q, keep, wrong):
  """Two tokens, of which the second is dropped where it is drawn."""
  p, q, keep = np.array(p), np.array(q), np.array(keep)

  def propose(inner, params, state, cache, context):
    draft, state, cache = inner.propose(params, state, cache, context)
    present = jnp.asarray(keep)[draft.tokens].at[:, 0].set(True)
    parents = jnp.where(present, np.array([-1, 0]), -1)
    tree = dataclasses.replace(inner.tree, form=Form.MASKED)
    return (
      dataclasses.replace(draft, tree=tree, parents=parents), state, cache
    )  # fmt: skip

  inner = drafters.model(toys.table_model(2), tree=chain(1), vocab_size=2)
  drafter = dataclasses.replace(
    inner, tree=dataclasses.replace(inner.tree, form=Form.MASKED),
    propose=functools.partial(propose, inner),
  )  # fmt: skip
  decoder = specjax.make_decoder(toys.table_model(2), drafter=drafter)
  both = specjax.Params(
    target=jnp.log(jnp.asarray(q))[None], draft=jnp.log(jnp.asarray(p))[None]
  )
  state = decoder.init(
    both, np.array([[0]]), [1], jax.random.key(0), buffer_length=6,
    max_new_tokens=4,
  )  # fmt: skip
  law, _ = exact.round_law(decoder, both, state)
  np.testing.assert_allclose(law.output.sum(axis=1), wrong, atol=1e-9)
  # The repair: what is not kept is the symbol 2, which the target never says.
  with_null = lambda law, kept, rest: np.append(law * kept, rest)
  drawn = with_null(p, keep, p @ ~keep)
  asked = with_null(q, np.ones(2), 0)
  for rule in ("token", "block", "recursive"):
    repaired = exact.block_law(
      rules.get(rule), chain(1), lambda c: drawn, lambda c: asked
    )
    np.testing.assert_allclose(repaired.output[:2].sum(axis=1), q, atol=1e-12)


# -------------------------------------------------- a depth that rows share
