"""`launch.studies.audit`: closed forms, exact nulls, a biased instrument."""

import collections
import json

import numpy as np
import pytest
from commands import execute

from launch.studies.audit import __main__ as audit
from launch.studies.audit import chains, shape
from specjax import rules
from specjax.tree import chain

BY_NAME = {method.name: method for method in audit.METHODS}
INSTANCES = {one.name: one for one in shape.INSTANCES}


def distance(name, instance, depth=None):
  return shape.outcome(BY_NAME[name], INSTANCES[instance], depth).distance


def of_laws(name, draft, target, depth=1):
  laws = shape.Instance(
    name="laws", draft=shape.constant(draft), target=shape.constant(target)
  )
  return shape.outcome(BY_NAME[name], laws, depth).distance


EXACT = {
  "HSD, text",
  "transformers, assistant model, T = 0.5",
  "transformers, prompt look-up",
  "transformers, DFlash and MTP, T = 0.5",
  "EAGLE-1, fixed, T = 1",
  "EAGLE-2, T = 1",
}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_exact_methods_are_exact_on_every_instance(name):
  for instance in INSTANCES:
    assert distance(name, instance) < 1e-12, instance
  if "transformers" not in name:
    assert shape.smallest(BY_NAME[name]) is None


@pytest.mark.parametrize(
  "name, instance, expected",
  [
    ("HSD, release", "A", 1 / 9),
    ("HSD, release", "C", 0.06),
    ("transformers, DFlash and MTP before PR 48007, T = 0.5", "A", 0.04),
    ("transformers, Gemma 4 assistant", "A", 1 / 6),
    ("transformers, Gemma 4 assistant", "B", 1 / 2),
    ("transformers, Gemma 4 assistant", "C", 0.36),
    ("Self-speculative sampling, defaults", "A", 1 / 6),
    ("EAGLE-1, before the fix, T = 1", "A", 1 / 9),
    ("EAGLE-1, fixed, T = 0.5", "A", 2 / 15),
    ("EAGLE-2, T = 0.5", "A", 2 / 15),
    ("Sampled tests on a top-k tree", "C", 0.3),
  ],
)
def test_distances_match_hand_computed_values(name, instance, expected):
  assert distance(name, instance) == pytest.approx(expected, abs=1e-12)


def test_one_token_distances_match_closed_forms():
  """P(x) written out for each, against what the methods' code sums."""
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
  away = lambda law: np.abs(law - q).sum() / 2
  accept = np.minimum(1, q / p)
  # OpenVINO: x stays if r <= p(x) / q(y), r in hundredths, else q's draw.
  coin = np.minimum(1, (np.floor(100 * p[:, None] / q + 1e-9) + 1) / 101)
  stays = p * (coin @ q)
  law = stays + (1 - stays.sum()) * q
  actual = of_laws("OpenVINO GenAI, draft model", p, q)
  assert actual == pytest.approx(away(law), abs=1e-12)
  # xLLM: only the rejected token's own mass is taken off.
  law = p * accept
  for x in range(3):
    left = np.maximum(q - p * np.eye(3)[x], 0)
    law = law + p[x] * (1 - accept[x]) * left / left.sum()
  actual = of_laws("xLLM before PR 2175", p, q)
  assert actual == pytest.approx(away(law), abs=1e-12)
  # Recurrent drafter: two beams, tokens 0 and 1, each with its own coin.
  left = np.maximum(q - p, 0)
  miss = (1 - accept[0]) * (1 - accept[1])
  law = np.array([accept[0], (1 - accept[0]) * accept[1], 0])
  law = law + miss * left / left.sum()
  actual = of_laws("Recurrent drafter", p, q)
  assert actual == pytest.approx(away(law), abs=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("instance", ["A", "B", "R"])
def test_hsd_as_published_equals_block_verification(depth, instance):
  laws = INSTANCES[instance]
  emitted = []
  for rounds in (
    BY_NAME["HSD, text"].rounds,
    shape.of_rule(rules.get("block"), chain),
  ):
    actual = collections.Counter()
    for mass, tokens, law in rounds(laws.draft, laws.target, depth):
      actual.update({(*tokens, x): mass * law[x] for x in range(len(law))})
    emitted.append(actual)
  text, shipped = emitted
  assert all(abs(text[k] - shipped[k]) < 1e-12 for k in text | shipped)
  assert len(shipped) > 2


@pytest.mark.parametrize("bias", [1e-6, 1e-9])
def test_audit_detects_a_small_bias_in_an_exact_method(bias):
  def rounds(draft, target, depth):
    for mass, tokens, law in chains.hsd(draft, target, depth, capped=True):
      move = bias * law.min() * (np.eye(len(law))[0] - np.eye(len(law))[1])
      yield mass, tokens, law + move * (law[1] > law.min() / 2)

  method = BY_NAME["HSD, text"]
  biased = shape.Method(
    name="biased", source="", claim="", finding="", depth=2, rounds=rounds
  )
  honest = shape.outcome(method, INSTANCES["R"]).distance
  actual = shape.outcome(biased, INSTANCES["R"]).distance
  assert honest < 1e-15 < bias * 1e-3 < actual < bias


def test_command_finds_smallest_counterexamples_of_lossy_methods(
  tmp_path, capsys
):
  assert execute(audit.run, f"--output={tmp_path / 'audit.json'}") == 0
  rows = capsys.readouterr().out.splitlines()[2:]
  assert len(rows) == len(audit.METHODS)
  methods = json.loads((tmp_path / "audit.json").read_text())["methods"]
  assert {x["name"] for x in methods if x["smallest"] is None} == EXACT
