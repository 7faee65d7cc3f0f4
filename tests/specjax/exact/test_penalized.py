"""Losslessness of rounds whose target's law reads its own path.

Every draft is run through the decoder's own round. What is expected are the
laws after each continuation as if all of it had been committed, so nothing of
how paths are counted is in them.
"""

import functools

import exact_cases
import forms
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from exact_cases import CHAIN, DRAFT, FAMILY, LIMIT, PATHS, TARGET, VOCAB

from specjax import drafters, penalties
from specjax.siblings import WITHOUT_REPLACEMENT
from specjax.tree import Form

pytestmark = pytest.mark.usefixtures("x64")

of_table = functools.partial(forms.table_drafter, VOCAB)

# The text has two: `min_tokens` ends among those that are drafted.
ALL = dict(
  presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.4,
  logit_bias={1: 0.8, 0: -0.5}, min_tokens=3, stop_token_ids=[2],
)  # fmt: skip


def error(drafter, rule, **more) -> float:
  """The largest error of the joint law of the next tokens of a round."""
  # Two of them are the completion's, and one token is in none of them.
  return exact_cases.round_error(
    drafter, rule, model=toys.table_model(VOCAB), target=TARGET, draft=DRAFT,
    text=(1, 0, 1, 0), completion=2, **more,
  )  # fmt: skip


CASES = {
  "chain, token": (of_table(CHAIN), "token"),
  "chain, block": (of_table(CHAIN), "block"),
  "a draft model's chain": (
    drafters.model(
      toys.table_model(VOCAB), tree=CHAIN, vocab_size=VOCAB
    ),
    "block",
  ),
  "paths, traversal": (of_table(PATHS), "traversal"),
  "paths, recursive": (of_table(PATHS), "recursive"),
  "a tree, kseq": (of_table(FAMILY), "kseq"),
  "a tree, match": (of_table(FAMILY), "match"),
  "nodes that are not there": (
    forms.masked(of_table(FAMILY), forms.varying_families), "traversal"),
  "parents are data": (
    forms.masked(
      of_table(FAMILY, WITHOUT_REPLACEMENT), forms.varying_families, Form.FREE
    ),
    "recursive"),
  "a certain tree": (
    forms.confidence_tree(VOCAB, nodes=4, depth=2), "match"),
  "certain and drawn siblings": (forms.mixed(VOCAB), "traversal"),
  "lanes": (forms.with_lanes(VOCAB), "token"),
  "plain": (drafters.plain(), "token"),
}  # fmt: skip


# A program each: those named here are compiled in every run.
ALWAYS = {
  "chain, block", "paths, traversal", "parents are data",
}  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow)
    for name in CASES
  ],
)
def test_penalized_round_matches_path_dependent_target(name):
  assert error(*CASES[name], **ALL) < LIMIT


def test_penalties_compose_with_warping_and_narrow_passes():
  case = CASES["nodes that are not there"]
  assert error(*case, widths=(1, 3), temperature=0.7, top_p=0.9, **ALL) < LIMIT


@pytest.mark.slow
def test_penalized_greedy_round_matches_path_dependent_target():
  assert error(*CASES["chain, token"], temperature=0.0, **ALL) < LIMIT


def committed_alone(draft, topology):
  """Laws of the draft's nodes are as if nothing had been drafted."""
  return jnp.full_like(_path_tokens(draft, topology), penalties.NONE)


def siblings_too(draft, topology):
  """Each node counts every node that is fed before it, as a chain would."""
  nodes = draft.tree.num_nodes
  before = np.tri(nodes, dtype=bool)[:, 1:]
  return jnp.where(before, draft.tokens[:, None, 1:nodes], penalties.NONE)


_path_tokens = penalties.path_tokens


@pytest.mark.parametrize("mutant", [committed_alone, siblings_too])
def test_wrong_penalty_token_counts_are_caught(monkeypatch, mutant):
  monkeypatch.setattr(penalties, "path_tokens", mutant)
  assert error(*CASES["paths, traversal"], **ALL) > 1e-4
