"""Stopping and the output law, enumerated.

Rounds of the shipped loop under every policy, in states in which rows have
learned something.
"""

import exact_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from exact_cases import DRAFT, LIMIT, TARGET, VOCAB

import specjax
from specjax import drafters, exact
from specjax.adaptive import policies
from specjax.tree import chain

pytestmark = pytest.mark.usefixtures("x64")

DEPTH = 3
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
def test_round_with_policy_matches_target_distribution(policy, rule):
  assert error(under(POLICIES[policy]), rule, ROUNDS[policy]) < LIMIT


@pytest.mark.parametrize("policy", ["confidence", "survival"])
def test_policies_stop_enumerated_drafts_at_different_depths(policy):
  decoder = specjax.make_decoder(MODEL, drafter=under(POLICIES[policy]))
  state = learned(decoder, ROUNDS[policy])
  every = exact.drafts(decoder, params(), state)
  depths = np.asarray(every.draft.topology().present.sum(axis=1)) - 1
  assert len(set(depths.tolist())) > 1
