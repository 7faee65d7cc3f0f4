"""Drafters as they are written; a rule and a drafter of one's own."""

import json

import pytest
import toys

from configs import embedded
from launch import decode
from launch.assembly import registry
from launch.assembly.drafting import Drafting
from specjax import drafters, rules, shapes
from specjax.adaptive import policies
from specjax.siblings import GIVEN

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


def test_ones_own_rule_and_drafter_decode_what_plain_decoding_does(
  cli, mine, tmp_path
):
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"id": 0, "prompt": "x = 1"}\n')
  texts = {}
  for name, flags in {
    "own": (f"--config.rule={mine}.RULE", f"--config.drafter={mine}.again"),
    "plain": ("--config.drafter=plain",),
    "survival": (
      "--config.drafter=model(tokens=4, policy=survival(threshold=0.5))",
    ),
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
  assert len(texts) == 5
  assert set(texts.values()) == {texts["plain"]}
  record = json.loads((tmp_path / "own.json").read_text())
  assert record["rule"] == f"{mine}.RULE"
  assert record["lossless"]


@pytest.mark.parametrize(
  "flag, words",
  [
    (
      "--config.drafter=no_such_module.make",
      "no drafter 'no_such_module.make'",
    ),
    ("--config.drafter=of_a_user.nothing", "has no attribute 'nothing'"),
    ("--config.rule=of_a_user.NUMBER", "must be a Rule"),
    ("--config.drafter=modle", "did you mean 'model'?"),
  ],
)
def test_what_is_none_is_one_line(cli, mine, capsys, flag, words):
  assert cli(decode.run, flag) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1


def of(text: str) -> Drafting:
  return registry.of(embedded.get_config(), text)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("model(policy=survivl)", "did you mean 'survival'"),
    ("ngram(policy=survival)", "no parameter 'policy'"),
    ("ladder(model, lengths=(0, 2, 1))", "rising, got .0, 2, 1."),
    ("ladder(dflash, lengths=(0, 2))", "same for all lengths, got 'dflash'"),
    ("ladder(model(policy=3))", "drafted whole: without tree"),
    ("repeats(model)", "state is made of what was committed"),
    ("repeats(eagle3(tree=paths(2)))", "is around a chain"),
    ("repeats(online(eagle3))", "not around online and ladder"),
    ("online(medusa)", "drafts with parameters of their own"),
    ("online(model, rate=2)", "rate in .0, 1."),
    ("rest", "missing a required argument: 'corpus'"),
    ("with_widths(suffix)", "widths must be >= 1"),
  ],
)
def test_what_cannot_be_drafted_is_refused_in_words(text, words):
  with pytest.raises(ValueError, match=words):
    of(text)


def test_a_rule_of_ones_own_keeps_its_module(tmp_path, monkeypatch):
  (tmp_path / "rule_of_mine.py").write_text(
    "import dataclasses\n"
    "from specjax import rules\n"
    "RULE = dataclasses.replace(rules.get('block'), name='token')\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  drafting = of("with_rule(model, rule_of_mine.RULE)")
  assert drafting.rule == "rule_of_mine.RULE"
  assert rules.get(drafting.rule).verify is rules.get("block").verify


def test_names_are_those_of_the_library_and_what_decoders_are_told():
  assert {*registry.DRAFTERS.entries} - {*drafters.__all__} == {
    "ladder", "with_widths", "with_rule",
  }  # fmt: skip
  assert {*drafters.__all__} <= {*registry.DRAFTERS.entries}


@pytest.mark.parametrize(
  ("text", "made"),
  [
    ("eagle3", drafters.eagle3(HEAD)),
    ("eagle(tokens=7)", drafters.eagle(HEAD, tokens=7)),
    ("mtp(tree=dynamic(20, top_k=4))",
     drafters.mtp(HEAD, tree=shapes.dynamic(20, top_k=4))),
    ("eagle3(policy=2)", drafters.eagle3(HEAD, policy=policies.fixed(2))),
    ("repeats(eagle3(tokens=1), tokens=7)",
     drafters.repeats(
       drafters.eagle3(HEAD, tokens=1, policy=policies.fixed(1)), tokens=7
     )),
    ("ngram", drafters.ngram()),
    ("suffix(tokens=3)", drafters.suffix(tokens=3)),
    ("rest(F)", drafters.rest()),
    ("lookahead(tokens=2)", drafters.lookahead(tokens=2)),
  ],
)  # fmt: skip
def test_a_call_of_a_config_drafts_as_the_same_call_in_python(text, made):
  actual = of(text).make(HEAD, HEAD.vocab_size)
  assert (actual.name, actual.tree, actual.siblings) == (
    made.name, made.tree, made.siblings
  )  # fmt: skip
  assert (actual.passes, actual.num_refed) == (made.passes, made.num_refed)


def test_trees_have_the_form_that_is_said():
  assert of("model(tree=paths(3), tokens=2)").tree.num_drafted == 6
  assert of("model(tree=k_ary(2, 2))").tree.num_drafted == 6
  assert of("medusa(tree=mc_sim_7b_63)").tree.num_drafted == 63
  actual = of("eagle3(tree=dynamic(20, top_k=4), tokens=6)")
  assert (actual.tree.num_drafted, actual.tree.max_depth) == (20, 6)
  assert actual.siblings is GIVEN
  ahead = of("lookahead(window=3, num_guesses=4)").tree
  assert (ahead.num_drafted, len(ahead.lanes)) == (4 * 5, 2 + 4 * 3)
  default = of("suffix").tree
  assert default.max_depth == 5 < default.max_children
  rasd = of("rasd(nodes=9, tree=(-1, 0, 0), siblings=top_k)")
  assert (rasd.tree.num_drafted, rasd.tree.max_depth) == (9, 5)


def test_what_repeats_is_longer_than_what_is_drafted_elsewhere():
  actual = of("repeats(eagle3(tokens=1), tokens=7)")
  assert (actual.tree.max_depth, actual.policy.name) == (7, "1")
  assert actual.widths == (2,)
  tree = of("repeats(eagle3(tokens=3, tree=dynamic(5, top_k=2)), tokens=6)")
  assert (tree.tree.num_drafted, tree.tree.max_depth) == (7, 6)
  assert tree.widths == (6,)
  same = of("repeats(eagle3(tokens=3))")
  assert (same.tree.max_depth, same.policy, same.widths) == (3, None, ())


def test_help_names_all_drafters_and_their_defaults(capsys):
  table = dict(registry.help_table())
  assert "ngram(tokens=5, max_ngram=3)" in table
  assert "int4(group=32, output=True, embedding=False, dense=True)" in table
  names = {written.partition("(")[0] for written in table}
  assert names >= {*registry.DRAFTERS.entries, *shapes.GRAMMAR.entries}
  assert all(table.values())
