"""Systems: how they are written, and what they share."""

import pytest

from configs import common
from launch.evaluation import systems


def config(**changes):
  actual = common.get_config()
  actual.target = "models/pretrained/target"
  actual.checkpoints.draft = "models/pretrained/draft"
  actual.update(changes)
  return actual


def test_plain_comes_first_and_names_are_canonical():
  actual = systems.parse(
    "ngram(), plain, ngram(tokens=8, max_ngram=2),model(policy=survival()),"
    "with_rule(model, typical(delta=0.2, epsilon=0.1)), hf",
    config(),
  )
  assert [s.name for s in actual] == [
    "plain", "ngram", "ngram(tokens=8, max_ngram=2)", "model(policy=survival)",
    "with_rule(model, typical(epsilon=0.1, delta=0.2))", "hf",
  ]  # fmt: skip
  assert [s.is_plain for s in actual] == [True] + 5 * [False]
  assert [s.drafts_here for s in actual] == [False, *4 * [True], False]


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("ngram, ngram()", "duplicate system"),
    ("model(tree=paths(2))", "system 'model.*verifies a single path"),
  ],
)
def test_invalid_systems_are_rejected(text, words):
  with pytest.raises(ValueError, match=words):
    systems.parse(text, config())


def test_transformers_drafting_systems_take_only_batch_size_1():
  actual = systems.parse("ngram, hf, hf_assisted, hf_prompt_lookup", config())
  assert [s.takes(8) for s in actual] == [True] * 3 + [False] * 2
  assert all(s.takes(1) for s in actual)
  assert actual[3].reference.draft == "models/pretrained/draft"


def test_pairs_share_target_weights_and_have_their_own_drafts(pair):
  target, draft = pair
  given = config(target=target, max_new_tokens=8)
  given.checkpoints.draft = draft
  other = f'model("{target}", tokens=2)'
  actual = systems.parse(f"ngram, model(tokens=2), {other}, hf", given)
  pairs = systems.assemble(actual)
  assert list(pairs) == ["plain", "ngram", "model(tokens=2)", other]
  assert len({id(p.params.target) for p in pairs.values()}) == 1
  assert pairs["ngram"].params.draft is None
  assert pairs["model(tokens=2)"].params.draft is not None
