"""`launch.build.drafters`: families by name, a rule and a drafter of one's own."""

import json

import pytest

from configs import embedded
from launch import benchmark, decode
from launch.build import drafters, pair

pytestmark = pytest.mark.usefixtures("quick_to_compile")

# A file of a user: a rule under another name, and a drafter of certain tokens.
MINE = '''
import dataclasses
import jax.numpy as jnp
import specjax

RULE = dataclasses.replace(specjax.rules.get("token"), name="mine")
NUMBER = 3


def make(config, draft, *, tree, siblings, vocab_size):
  """Supposes that the last token goes on."""

  def propose(params, state, target_cache, context):
    tokens = jnp.tile(context.root, (1, tree.num_nodes))
    found = specjax.Draft(
      tree=tree, siblings=siblings, tokens=tokens, log_probs=None
    )
    return found, state, target_cache

  return specjax.Drafter(
    name="again", tree=tree, siblings=siblings, propose=propose
  )
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
    "own": (f"--config.rule={mine}:RULE", f"--config.drafter={mine}:make"),
    "plain": ("--config.num_speculative_tokens=0",),
    "survival": (
      "--config.depth=survival(threshold=0.5)",
      "--config.num_speculative_tokens=4",
    ),
    "ladder": ("--config.ladder=0,1,3",),
    "looked up": ("--config.ladder=0,2", "--config.drafter=ngram"),
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
  found = json.loads((tmp_path / "own.json").read_text())
  assert found["rule"] == f"{mine}:RULE"
  assert found["lossless"]


def test_a_drafter_without_a_cache_is_measured(
  cli, mine, tmp_path, monkeypatch
):
  """A draft model is read for it, whose passes nobody can time apart."""
  monkeypatch.setattr(benchmark, "_WIDTHS", (1,))
  out = tmp_path / "b.json"
  code = cli(
    benchmark.run, "--rounds=1", "--noreference", "--config.max_new_tokens=8",
    "--config.num_speculative_tokens=2", f"--config.drafter={mine}:make",
    f"--output={out}",
  )  # fmt: skip
  assert code == 0
  found = json.loads(out.read_text())
  assert found["draft_forwards_seconds"] == 0
  # The target's alone; less where timings differ by a little (`StepCosts`).
  assert 0 < found["round_seconds"]["passes"] <= found["verify_seconds"]


@pytest.mark.parametrize(
  "flag, words",
  [
    (
      "--config.drafter=no_such_module:make",
      "no drafter 'no_such_module:make'",
    ),
    ("--config.drafter=of_a_user:nothing", "has no attribute 'nothing'"),
    ("--config.rule=of_a_user:NUMBER", "must be a specjax.Rule, is int"),
    ("--config.rule=of_a_user:", "must be a specjax.Rule, is module"),
    ("--config.rule=of_a_user:nothing", "no rule 'of_a_user:nothing'"),
    ("--config.drafter=of_a_user:NUMBER", "makes a drafter, is int"),
    ("--config.drafter=of_a_user:", "makes a drafter, is module"),
    ("--config.drafter=modle", "did you mean 'model'?"),
  ],
)
def test_what_is_none_is_one_line(cli, mine, capsys, flag, words):
  assert cli(decode.run, flag) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1


@pytest.mark.parametrize(
  "changes, read",
  [
    ({}, True),
    ({"drafter": "ngram"}, False),
    ({"drafter": "layer_skip"}, False),
    ({"num_speculative_tokens": 0}, False),
    ({"draft": ""}, False),
    ({"drafter": "launch.build.drafters:make_tree"}, True),
  ],
)
def test_the_draft_checkpoint_is_read_where_a_family_asks_for_it(changes, read):
  config = embedded.get_config()
  config.update(changes)
  assert drafters.reads_draft(config) == read


def test_every_family_says_what_it_needs():
  config = embedded.get_config()
  config.update(draft="", drafter="model")
  with pytest.raises(ValueError, match="drafter 'model' needs a draft"):
    pair.check_config(config)
