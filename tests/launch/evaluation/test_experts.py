"""Counted experts, from the passes of a run to its page."""

import json

import evaluations
import files
import pytest
import references

from launch import evaluate
from launch.evaluation import experts, summary
from models import tokenizers
from specjax.theory.experts import expected_distinct

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def counted_example():
  """The usual records with four experts of two layers counted in each call."""
  records = evaluations.example()
  for record in records:
    for turn in record["turns"]:
      for actual in turn["systems"].values():
        calls = sum(actual["calls"])
        actual["num_experts"] = [2 * calls, 3 * calls]
  return records


FACTS = {"num_experts": [4, 8], "num_chosen": [1, 2], "groups": 1}


def test_counts_are_of_a_call_and_stand_beside_the_uniform_estimate():
  rows = summary.rows_of(counted_example(), [], FACTS)
  (actual,) = [
    r for r in rows if (r["system"], r["category"]) == ("ngram", "all")
  ]
  assert actual["pass_tokens"] == 2 * 3  # rows, tokens of each
  assert actual["experts_by_layer"] == [2, 3]
  assert actual["experts_uniform"] == pytest.approx(
    [float(expected_distinct(6, 4, 1)), float(expected_distinct(6, 8, 2))]
  )
  halved = summary.rows_of(counted_example(), [], FACTS | {"groups": 2})
  assert {r["pass_tokens"] for r in halved} == {3}
  for rows in (
    summary.rows_of(counted_example(), []),
    summary.rows_of(evaluations.example(), [], FACTS),
  ):
    assert {r["experts_by_layer"] for r in rows} == {None}
    assert experts.section({"runs": rows}) == []


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
  """A checkpoint of two layers of five experts, of which two are chosen."""
  path = str(tmp_path_factory.mktemp("mixture"))
  family, settings, _ = references.MODELS["mixtral"]
  settings = settings | dict(
    vocab_size=4096, sliding_window=None, max_position_embeddings=128,
    eos_token_id=4095, bos_token_id=4095, pad_token_id=None,
  )  # fmt: skip
  references.make(family, settings).save_pretrained(path)
  tokenizers.save(tokenizers.load(files.EMBEDDED), path)
  return path


def test_a_run_that_is_asked_counts_and_its_page_says_so(
  cli, mixture, tmp_path
):
  asked = files.write_jsonl(
    tmp_path / "q.jsonl",
    [{"question_id": i, "category": "a", "turns": ["a b a b"]} for i in (1, 2)],
  )
  output = tmp_path / "E.json"
  code = cli(
    evaluate.run, "--config.max_new_tokens=6", "--config.max_length=48",
    "--config.drafter=ngram(tokens=2)", "--count_experts",
    f"--questions={asked}", f"--output={output}",
    config=f"configs/huggingface.py:target={mixture}",
  )  # fmt: skip
  assert code == 0
  result = json.loads(output.read_text())
  layers = len(result["experts"]["num_experts"])
  rows = {r["system"]: r for r in result["runs"] if r["level"] == "all"}
  assert rows["plain"]["experts_by_layer"] == [2] * layers  # one token's
  assert rows["plain"]["experts_uniform"] == pytest.approx([2] * layers)
  actual = rows["ngram(tokens=2)"]
  assert actual["pass_tokens"] == 3
  assert all(2 < count <= 5 for count in actual["experts_by_layer"])
  page = output.with_suffix(".md").read_text()
  assert "## Experts a pass touched" in page
  assert "`ngram(tokens=2)` | 3.0 |" in page


def test_a_dense_target_has_none_to_count(cli, tmp_path, capsys):
  code = cli(
    evaluate.run, "--config.drafter=ngram", "--count_experts",
    f"--output={tmp_path / 'E.json'}",
  )  # fmt: skip
  assert code == 2
  assert "has no experts that could be counted" in capsys.readouterr().err
