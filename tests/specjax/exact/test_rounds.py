"""Losslessness of whole rounds, through drafting code of every form.

Shapes that depend on data, certain and drawn siblings, lanes: every draft that
a drafter may draw is run through the decoder's own round, and the joint law of
the next tokens must be the warped target's. What breaks the shape law must
fail.
"""

import dataclasses
import functools

import exact_cases
import forms
import jax
import jax.numpy as jnp
import mutation
import pytest
import toys
from exact_cases import CHAIN, DRAFT, FAMILY, LIMIT, PATHS, TARGET, VOCAB

import specjax
from specjax import exact
from specjax import warp as warp_lib
from specjax.siblings import IID, WITHOUT_REPLACEMENT
from specjax.tree import Form, Tree

pytestmark = pytest.mark.usefixtures("x64")

of_table = functools.partial(forms.table_drafter, VOCAB)


def error(drafter, rule: str, widths=(), **sampling) -> float:
  """The largest error of the joint law of the next tokens of a round."""
  return exact_cases.round_error(
    drafter, rule, model=toys.table_model(VOCAB), target=TARGET, draft=DRAFT,
    widths=widths, **sampling,
  )  # fmt: skip


# Each form, and the rules of which it asks something.
SOUND = {
  "depth ended early, chain": (
    forms.masked(of_table(CHAIN), forms.ends_early), "token block"),
  "depth ended early, paths": (
    forms.masked(of_table(PATHS), forms.ends_early),
    "recursive kseq transport traversal"),
  "depth ended by a coin": (
    forms.masked(of_table(CHAIN), forms.random_stop), "block"),
  "families of varying size": (
    forms.masked(of_table(FAMILY), forms.varying_families),
    "match recursive kseq transport traversal"),
  "without replacement": (
    forms.masked(of_table(FAMILY, WITHOUT_REPLACEMENT), forms.varying_families),
    "recursive"),
  "parents are data": (
    forms.masked(
      of_table(FAMILY, WITHOUT_REPLACEMENT), forms.varying_families, Form.FREE
    ),
    "match recursive traversal"),
  "certain tree": (
    forms.confidence_tree(VOCAB, nodes=4, depth=2), "match traversal"),
  "certain and drawn siblings": (
    forms.mixed(VOCAB), "match recursive traversal"),
  "lanes": (forms.with_lanes(VOCAB), "token"),
}  # fmt: skip
# Of each form one rule in every run, and those that walk levels together.
CASES = [
  pytest.param(
    drafter, rule, id=f"{name}-{rule}",
    marks=() if not place or rule == "kseq" else pytest.mark.slow,
  )
  for name, (drafter, some) in SOUND.items()
  for place, rule in enumerate(some.split())
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "rule"), CASES)
def test_round_matches_target_distribution(drafter, rule):
  assert error(drafter, rule) < LIMIT


@pytest.mark.parametrize(
  ("form", "rule", "widths"),
  [
    ("depth ended early, chain", "block", (1, 2)),
    ("families of varying size", "recursive", (1, 3)),
    ("parents are data", "traversal", (2, 3, 4)),
  ],
)
def test_round_matches_target_distribution_at_any_pass_width(
  form, rule, widths
):
  assert error(SOUND[form][0], rule, widths) < LIMIT


BROKEN = {
  "a sibling decided after its elder, kseq": (
    forms.masked(of_table(FAMILY), forms.after_its_elder), "kseq"),
  "a sibling decided after its elder, transport": (
    forms.masked(of_table(FAMILY), forms.after_its_elder), "transport"),
  "a drawn token dropped for its value": (
    forms.masked(of_table(CHAIN), forms.dropped_for_its_value), "token"),
  "a drawn token dropped for its value, block": (
    forms.masked(of_table(CHAIN), forms.dropped_for_its_value), "block"),
  "a sampled tree reranked by its tokens": (
    forms.masked(of_table(FAMILY), forms.reranked_by_its_tokens), "recursive"),
  "a node without a law that has a token": (
    forms.not_there_but_named(of_table(CHAIN)), "token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_draft_shapes_are_caught(name):
  drafter, rule = BROKEN[name]
  assert error(drafter, rule) > 1e-3


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_sequential_rules_allow_shape_from_previous_siblings(rule):
  late = forms.masked(of_table(FAMILY), forms.after_its_elder)
  assert error(late, rule) < LIMIT


def test_match_allows_value_dependent_shapes():
  for present in (forms.dropped_for_its_value, forms.reranked_by_its_tokens):
    assert error(forms.masked(of_table(FAMILY), present), "match") < LIMIT


def test_verifying_a_lane_is_caught():
  """The lane is told to the rule as the drafted token's child."""
  sound = forms.with_lanes(VOCAB)
  tree = Tree((-1, 0, 1))

  def propose(params, state, cache, context):
    draft, state, cache = sound.propose(params, state, cache, context)
    laws = jnp.concatenate([draft.log_probs, draft.log_probs[:, 1:]], axis=1)
    told = specjax.Draft(
      tree=tree, siblings=IID, tokens=draft.tokens[:, :3], log_probs=laws
    )
    return told, state, cache

  broken = dataclasses.replace(
    sound, tree=tree, propose=propose, commit=specjax.types.keep
  )
  assert error(broken, "token") > 1e-3


def mask_before_temperature(logits, settings):
  """As tpu-inference verified: its ordinary sampler divides first."""
  one = jnp.ones_like(settings.temperature)
  kept = warp_lib.warp(logits, dataclasses.replace(settings, temperature=one))
  return warp_lib.warp(kept, dataclasses.replace(settings, top_p=one))


def without_temperature(logits, settings):
  """SGLang #39253: verification on ROCm ignored it."""
  one = jnp.ones_like(settings.temperature)
  return warp_lib.warp(logits, dataclasses.replace(settings, temperature=one))


@pytest.mark.parametrize("warp", [mask_before_temperature, without_temperature])
def test_verifier_with_different_warp_is_caught(warp):
  settings = dict(temperature=2.0, top_p=0.8)
  assert error(of_table(CHAIN), "token", **settings) < LIMIT
  with mutation.verifier_warps(warp):
    assert error(of_table(CHAIN), "token", **settings) > 1e-3


def test_multi_row_state_is_rejected():
  decoder = specjax.make_decoder(
    toys.table_model(VOCAB), drafter=of_table(CHAIN)
  )
  params = specjax.Params(target=jnp.asarray(TARGET), draft=jnp.asarray(DRAFT))
  state = jax.eval_shape(
    lambda: decoder.init(
      params, jnp.zeros((2, 2), jnp.int32), jnp.array([2, 2]),
      jax.random.key(0), buffer_length=8, max_new_tokens=2,
    )
  )  # fmt: skip
  with pytest.raises(ValueError, match="must have one row, got 2"):
    exact.drafts(decoder, params, state)
