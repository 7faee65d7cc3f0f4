"""The README's code, run, and its claims."""

import pathlib
import re
import textwrap

import pytest
import references

from models.formats import huggingface, loading
from models.formats.families import FAMILIES


@pytest.fixture(autouse=True)
def families():
  """A family that a block adds is there no longer than its test."""
  yield
  FAMILIES.pop("smollm3", None)


def run_blocks(name, word=""):
  """Runs a document's Python blocks in which a word is, one after the other."""
  text = pathlib.Path(name).read_text("utf-8")
  names = {}
  for code in re.findall(r"^ *```python\n(.*?)```", text, re.S | re.M):
    if word in code:
      exec(compile(textwrap.dedent(code), name, "exec"), names)
  return names


def test_readme_example_completes_its_prompts(capsys):
  run_blocks("README.md")
  printed = capsys.readouterr().out
  assert printed.startswith(
    "self.data.keys())\n\n stop_token\n 0\n\n stop_token"
  )
  assert "\n1 RESIDUAL  0\n" in printed


@pytest.mark.slow
def test_decode_page_examples_run(capsys):
  names = run_blocks("docs/decode.md")
  assert names["bushy"].decoder.drafter.tree.num_drafted == 10
  assert len(names["completion"]) <= 20
  printed = capsys.readouterr().out
  for name in ("0 ACCEPTED", "2 RESIDUAL", "2 BONUS", "drafted ["):
    assert name in printed


def test_contributing_guide_rule_is_lossless(capsys):
  names = run_blocks("CONTRIBUTING.md")
  assert names["rule_check"].error < 1e-12
  assert "cases, error" in capsys.readouterr().out
  assert names["checked"].method == "exact"
  assert names["checked"].num_drafts == 9
  drafting = names["DOUBLED"]("DIR", tokens=3)
  assert drafting.reads == "model"
  assert drafting.tree.num_drafted == 6
  drafting = names["SUCCESSORS"]("table.npy", tokens=2)
  assert (drafting.checkpoint, drafting.tree.num_drafted) == ("table.npy", 2)


def test_contributing_guide_family_matches_transformers(tmp_path):
  family = run_blocks("CONTRIBUTING.md", "FAMILIES")["FAMILY"]
  settings = references.GATED | dict(num_hidden_layers=4, num_key_value_heads=2)
  model = references.make(family.name, settings | dict(pad_token_id=None))
  assert 0 in model.config.no_rope_layers
  model.save_pretrained(tmp_path)
  expected = references.logits(model, references.TOKENS)
  actual = references.module_logits(loading.load(huggingface.source(tmp_path)))
  assert references.relative_error(actual, expected) < 1e-5
