"""Drafters as they are written; a rule and a drafter of one's own."""

import inspect
import json

import pytest
import toys

from configs import embedded
from launch import decode
from launch.assembly import registry
from launch.assembly.drafting import Drafting
from specjax import drafters, shapes
from specjax import tree as tree_lib
from specjax.adaptive import policies

HEAD = toys.feature_model(11, num_features=1)
# A file of a user: a rule under another name, and a drafter of certain tokens.
MINE = '''
import dataclasses
import jax.numpy as jnp
import specjax
from launch.assembly.drafting import entry

RULE = dataclasses.replace(specjax.rules.get("token"), name="mine")
NUMBER = 3


def once_more(*, tokens: int = 2) -> specjax.Drafter:
  """Supposes that the last token goes on."""
  tree, siblings = specjax.tree.chain(tokens), specjax.siblings.IID

  def propose(params, state, target_cache, context):
    tokens = jnp.tile(context.root, (1, tree.num_nodes))
    found = specjax.Draft(
      tree=tree, siblings=siblings, tokens=tokens, log_probs=None
    )
    return found, state, target_cache

  return specjax.Drafter(
    name="again", tree=tree, siblings=siblings, propose=propose
  )


again = entry(once_more)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
  (tmp_path / "of_a_user.py").write_text(MINE)
  monkeypatch.syspath_prepend(tmp_path)
  return "of_a_user"


def test_custom_rules_and_drafters_match_plain_decoding(cli, mine, tmp_path):
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"id": 0, "prompt": "x = 1"}\n')
  texts = {}
  for name, flags in {
    "own": (f"--config.rule={mine}.RULE", f"--config.drafter={mine}.again"),
    "plain": ("--config.drafter=plain",),
    "ladder": ("--config.drafter=ladder(model, lengths=(0, 1, 3))",),
    "looked up": ("--config.drafter=ladder(ngram, lengths=(0, 2))",),
  }.items():
    out, summary = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.json"
    code = cli(
      decode.run, "--config.max_new_tokens=12", "--nobaseline", *flags,
      f"--prompts={prompts}", f"--output={out}", f"--summary={summary}",
    )  # fmt: skip
    assert code == 0
    texts[name] = json.loads(out.read_text())["completion"]
  assert set(texts.values()) == {texts["plain"]}
  record = json.loads((tmp_path / "own.json").read_text())
  assert record["rule"] == f"{mine}.RULE"
  assert record["lossless"]


def of(text: str) -> Drafting:
  return registry.of(embedded.get_config(), text)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("ngram(policy=survival)", "no parameter 'policy'"),
    ("ladder(model, lengths=(0, 2, 1))", "increasing lengths, got .0, 2, 1."),
    ("ladder(dflash, lengths=(0, 2))", "the draft length, got 'dflash'"),
    ("repeats(model)", "state depends on committed tokens alone"),
    ("repeats(online(eagle3))", "repeats cannot wrap online"),
    ("online(medusa)", "own, unquantized parameters"),
    ("with_widths(suffix)", "widths must be >= 1"),
  ],
)
def test_invalid_drafters_are_rejected(text, words):
  with pytest.raises(ValueError, match=words):
    of(text)


def test_registry_names_match_the_library_plus_wrappers():
  assert {*registry.DRAFTERS.entries} - {*drafters.__all__} == {
    "ladder", "with_widths", "with_rule",
  }  # fmt: skip
  assert {*drafters.__all__} <= {*registry.DRAFTERS.entries}


@pytest.mark.parametrize(
  ("text", "made"),
  [
    ("eagle3", drafters.eagle3(HEAD)),
    ("mtp(tree=dynamic(20, top_k=4))",
     drafters.mtp(HEAD, tree=shapes.dynamic(20, top_k=4))),
    ("eagle3(policy=2)", drafters.eagle3(HEAD, policy=policies.fixed(2))),
    ("repeats(eagle3(tokens=1), tokens=7)",
     drafters.repeats(
       drafters.eagle3(HEAD, tokens=1, policy=policies.fixed(1)), tokens=7
     )),
    ("ngram", drafters.ngram()),
    ("rest(F)", drafters.rest()),
    ("lookahead(tokens=2)", drafters.lookahead(tokens=2)),
  ],
)  # fmt: skip
def test_config_calls_build_the_same_drafter_as_python_calls(text, made):
  actual = of(text).make(HEAD, HEAD.vocab_size)
  assert (actual.name, actual.tree, actual.siblings) == (
    made.name, made.tree, made.siblings
  )  # fmt: skip
  assert (actual.passes, actual.num_refed) == (made.passes, made.num_refed)


TREES = sorted(
  name
  for name, call in registry.DRAFTERS.entries.items()
  if "tree" in inspect.signature(call).parameters and name != "rasd"
)  # whose tree has retrieved nodes besides


@pytest.mark.parametrize("name", TREES)
def test_every_tree_drafter_supports_delayed_paths(name):
  made = registry.DRAFTERS.make(
    f"{name}(tree=delayed(chain=1, paths=3, tokens=2))"
  )
  assert made.tree == tree_lib.delayed(1, 3, 2)
