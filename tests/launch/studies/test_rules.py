"""`launch.studies.rules`: hand-computed values, honest nulls, clear errors."""

import contextlib
import dataclasses
import io
import json
import types

import heads_on_disk
import numpy as np
import pytest
from absl.testing import flagsaver

from launch import cli
from launch.evaluation import questions
from launch.studies.rules import __main__ as rules
from launch.studies.rules import cases, on_pair, on_vectors
from models import tokenizers

pytestmark = pytest.mark.usefixtures("quick_to_compile")
TARGET, DRAFT = "--target=0.2,0.3,0.5", "--draft=0.5,0.3,0.2"
Q = [0.2, 0.3, 0.5]


def execute(*flags):
  """Runs the command on laws, without a config."""
  with flagsaver.flagsaver():
    return cli.execute(rules.run, ["test", *flags])


def compare(path, *flags):
  """The JSON report of a run."""
  assert execute(*flags, f"--output={path}") == 0
  return json.loads(path.read_text())


# ---------------------------------------------------------------- on two laws


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
  """The report on all rules with two drafts, and what was printed."""
  path = tmp_path_factory.mktemp("rules") / "r.json"
  with contextlib.redirect_stdout(io.StringIO()) as out:
    result = compare(path, TARGET, DRAFT, "--num_drafts=2")
  return result, out.getvalue()


def test_acceptance_is_what_a_hand_computes(everything):
  result, _ = everything
  assert result["optimum"] == pytest.approx(0.86)
  expected = {
    "token": 0.7, "block": 0.7, "match": 0.483, "batch": 0.76,
    "recursive": 0.76, "kseq": 0.791355, "transport": 0.86,
    "greedy_draft": 0.9, "hub": 0.9,
    "recursive (without_replacement)": 0.82, "lenient": 0.9,
    "decoding_opt": 0.8, "decoding_uno": 0.8, "typical": 1.0,
    "ensemble": 0.73, "fuzzy": 1.0, "cascade_opt": 1.0, "cascade_token": 0.6,
  }  # fmt: skip
  for name, value in expected.items():
    entry = result["rules"][name]
    assert entry["acceptance"] == pytest.approx(value, abs=1e-6), name
    assert entry["share_of_optimum"] == pytest.approx(value / 0.86, abs=1e-6)
    assert entry["method"] == "exact"
    assert entry["standard_error"] is None


def test_lossless_rules_have_the_targets_law_and_lossy_ones_a_distance(
  everything,
):
  result, _ = everything
  sharper = np.array(Q) * (np.array(Q) / [0.5, 0.3, 0.2]) ** 0.5
  distances = {
    "decoding_opt": 0.1, "decoding_uno": 0.2, "lenient": 0.2, "typical": 0.3,
    "top_beta": 0.3, "blockwise": 0.15, "ensemble": 0.03, "fuzzy": 0.3,
    "cascade_chow": 0.3, "cascade_diff": 0.3, "cascade_opt": 0.3,
    "cascade_token": 0.15, "cactus": 0.032**0.5,
    "contrastive": sharper[2] / sharper.sum() - 0.5,
  }  # fmt: skip
  for name, entry in result["rules"].items():
    assert entry["lossless"] == (name not in distances)
    if name == "gumbel_list":
      continue
    distance = distances.get(name, 0)
    assert entry["total_variation"] == pytest.approx(distance, abs=1e-9), name
    if entry["lossless"]:
      np.testing.assert_allclose(entry["output_law"], Q, atol=1e-9)


@pytest.mark.parametrize("rule", ["gumbel_list", "recursive"])
def test_laws_without_a_token_in_common_are_compared(rule, tmp_path, capsys):
  """Nothing is accepted, and no share of an optimum of nothing is shown."""
  result = compare(
    tmp_path / "r.json", "--target=0,0,.5,.5", "--draft=.5,.5,0,0",
    "--num_drafts=2", f"--rule={rule}",
  )  # fmt: skip
  entry = result["rules"][rule]
  assert result["optimum"] == entry["acceptance"] == 0
  assert entry["share_of_optimum"] is None
  assert entry["share_standard_error"] is None
  np.testing.assert_allclose(entry["output_law"], [0, 0, 0.5, 0.5], atol=0.03)
  assert rule in capsys.readouterr().out


def test_noise_is_sampled_and_says_so(everything):
  entry = everything[0]["rules"]["gumbel_list"]
  assert entry["method"] == "sampled"
  assert entry["total_variation"] is None  # 0 was not computed
  # At least sum_j K / sum_i (max(q_i / q_j, p_i / p_j) + (K - 1) q_i / q_j).
  assert entry["acceptance"] > 0.716
  assert 0 < entry["standard_error"] < 0.01
  np.testing.assert_allclose(entry["output_law"], Q, atol=0.03)


def test_every_rule_is_shown_with_what_it_was_given(everything):
  result, shown = everything
  assert set(result["rules"]) == set(cases.ROWS)
  assert not result["left_out"]
  drafted = {n: (e["siblings"], e["num_drafted"])
             for n, e in result["rules"].items()}  # fmt: skip
  assert drafted["token"] == ("iid", 1)
  assert drafted["recursive"] == ("iid", 2)
  assert drafted["hub"] == ("hub", 2)
  assert drafted["greedy_draft"] == ("greedy", 2)
  assert drafted["gumbel_list"] == ("shared_noise", 2)
  for text in ("multipath_block", "0.860000", "not computed", "above 1"):
    assert text in shown


def test_several_tokens_and_a_rule_with_parameters(tmp_path):
  result = compare(
    tmp_path / "r.json", TARGET, DRAFT, "--rule=lenient(lenience=1.0)",
    "--num_drafts=1", "--num_speculative_tokens=2",
  )  # fmt: skip
  (name, entry), = result["rules"].items()  # fmt: skip
  assert name == "lenient(lenience=1.0)"
  assert entry["acceptance"] == pytest.approx(0.7 + 0.49)
  assert result["optimum"] == pytest.approx(0.7 + 0.49)
  assert "transport" in result["optimum_is"]
  np.testing.assert_allclose(entry["output_law"], Q, atol=1e-9)


@pytest.mark.parametrize(
  "rule, acceptance, distance",
  [("recursive", 0.76, None), ("decoding_opt", 0.8, 0.1)],
)
def test_sampled_drafts_agree_with_enumeration(
  tmp_path, monkeypatch, rule, acceptance, distance
):
  monkeypatch.setattr(on_vectors, "_MAX_ENUMERATED", 0)
  result = compare(tmp_path / "r.json", TARGET, DRAFT, f"--rule={rule}")
  entry = result["rules"][rule]
  assert entry["method"] == "sampled"
  error = entry["standard_error"]
  assert 0 < error < 0.01
  assert abs(entry["acceptance"] - acceptance) < 4 * error
  assert entry["total_variation"] == (distance and pytest.approx(distance))
  law = Q if distance is None else [0.3, 0.3, 0.4]
  np.testing.assert_allclose(entry["output_law"], law, atol=0.03)


def test_laws_of_a_file_too_long_to_enumerate(tmp_path):
  rng = np.random.default_rng(0)
  laws = rng.dirichlet(np.ones(2000), 2).astype(np.float32)
  path = tmp_path / "laws.npz"
  np.savez(path, target=laws[0], draft=laws[1])
  result = compare(tmp_path / "r.json", f"--laws={path}", "--rule=token")
  entry = result["rules"]["token"]
  assert entry["method"] == "sampled"
  assert entry["output_law"] is None
  expected = np.minimum(*laws).sum()
  assert abs(entry["acceptance"] - expected) < 4 * entry["standard_error"]


def test_disjoint_laws_have_no_share(tmp_path):
  result = compare(
    tmp_path / "r.json", "--target=0,1", "--draft=1,0", "--rule=token"
  )
  entry = result["rules"]["token"]
  assert (entry["acceptance"], result["optimum"]) == (0, 0)
  assert entry["share_of_optimum"] is None


def test_rules_that_do_not_fit_are_left_out_with_the_reason():
  rows, left_out = cases.cases(
    "all", num_drafts=3, num_speculative_tokens=2, vocab_size=3
  )
  assert set(left_out) == {"hub", "score_block"}
  assert "num_drafts=2" in left_out["hub"]
  assert {r.name for r in rows} | set(left_out) == set(cases.ROWS)
  _, left_out = cases.cases(  # more distinct siblings than tokens
    "all", num_drafts=4, num_speculative_tokens=1, vocab_size=3
  )
  assert "recursive (without_replacement)" in left_out
  rows, _ = cases.cases(
    "hub", num_drafts=2, num_speculative_tokens=2, vocab_size=3
  )
  assert rows[0].tree.parents == (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
  "flags, words",
  [
    (("--target=0.5,0.6", DRAFT), "same length"),
    (("--target=0.2,0.3,0.6", DRAFT), "sum to 1, got 1.1"),
    (("--target=0.2,-0.3,1.1", DRAFT), "negative"),
    (("--target=a,b,c", DRAFT), "numbers"),
    (("--target=0.5,0.5,", DRAFT), "numbers"),
    (("--target=nan,0.5,0.5", DRAFT), "finite"),
    (("--target=", "--draft="), "empty"),
    ((TARGET,), "--draft missing"),
    ((), "nothing to compare on"),
    ((TARGET, DRAFT, "--num_drafts=0"), "num_drafts"),
    ((TARGET, DRAFT, "--num_speculative_tokens=0"), "num_speculative_tokens"),
    ((TARGET, DRAFT, "--rule=magic"), "unknown rule 'magic'"),
    ((TARGET, DRAFT, "--rule=typical(epsilon=-1)"), "positive"),
    ((TARGET, DRAFT, "--rule=hub", "--num_drafts=3"), "num_drafts=2"),
    ((TARGET, DRAFT, "--laws=x.npz"), "either --laws or"),
    ((TARGET, DRAFT, "--prompts=x.jsonl"), "--config"),
    ((TARGET, DRAFT, "--output=no/such/folder/r.json"), "no such folder"),
    (("--laws=no-such-file.npz",), "no such file"),
    (("--config=configs/embedded.py", "--num_drafts=2"), "--num_drafts"),
    (("--config=configs/embedded.py", TARGET, DRAFT), "--target"),
    (("--config=configs/embedded.py", "--config.drafter=ngram"), "ngram"),
    (
      (
        "--config=configs/embedded.py",
        "--config.drafter=model(siblings=top_k)",
      ),
      "a tree and siblings of its",
    ),
    (
      ("--config=configs/embedded.py", "--config.drafter=medusa"),
      "launch.evaluate --compare E.json --over='with_rule(medusa, token)'",
    ),
  ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, flags, words):
  assert execute(*flags) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1


@pytest.mark.parametrize(
  "arrays, words",
  [
    (None, "not an .npz file"),
    (
      {"target": np.ones(1)},
      "arrays target, draft: draft missing, got ['target']",
    ),
    ({"target": np.ones((1, 1)), "draft": np.ones(1)}, "one row"),
    ({"target": np.array(["a"]), "draft": np.ones(1)}, "must be numbers"),
    ({"target": np.ones(0), "draft": np.ones(0)}, "empty"),
  ],
)
def test_broken_files_of_laws(tmp_path, capsys, arrays, words):
  path = tmp_path / "laws.npz"
  if arrays is None:
    path.write_text("0.5, 0.5")
  else:
    np.savez(path, **arrays)
  assert execute(f"--laws={path}") == 2
  assert words in capsys.readouterr().err


# -------------------------------------------------------- along real contexts

SMALL = ("--config.drafter=model(tokens=2)", "--config.max_new_tokens=6",
         "--max_contexts=2", "--config.batch_size=4")  # fmt: skip
TWO = "--config.drafter=model(tokens=2, tree=paths(2))"


def test_a_pair_of_equal_models_accepts_every_token(cli, tmp_path, pair):
  path = tmp_path / "r.json"
  code = cli(
    rules.run, *SMALL, "--config.temperature=1.0", "--rule=token",
    f"--output={path}",
    config=f"configs/huggingface.py:target={pair[0]},draft={pair[0]}",
  )  # fmt: skip
  assert code == 0
  entry = json.loads(path.read_text())["rules"]["token"]
  assert entry["expected_accepted"] == pytest.approx(2, abs=1e-4)
  assert entry["block_efficiency"] == pytest.approx(3, abs=1e-4)
  assert entry["total_variation"] is None


def test_rows_of_one_prompt_are_one_unit(cli, tmp_path, monkeypatch):
  """Six lines of three prompts: too few for an interval."""
  monkeypatch.setattr(cases, "ROWS", {n: cases.ROWS[n] for n in ("token",)})
  source, path = tmp_path / "p.jsonl", tmp_path / "r.json"
  source.write_text(
    "".join(
      json.dumps({"prompt": text}) + "\n"
      for text in ("a = 1", "b = 2", "c = 3") * 2
    )
  )
  code = cli(
    rules.run, *SMALL, "--config.temperature=0.7", TWO,
    f"--prompts={source}", f"--output={path}",
  )  # fmt: skip
  assert code == 0
  record = json.loads(path.read_text())
  assert record["num_prompts"] == 3
  assert record["rules"]["token"]["num_contexts"] >= 6  # of all lines
  assert record["rules"]["token"]["block_efficiency_ci"] is None


def test_a_thinned_target_drafts_for_every_tree(cli, tmp_path):
  path, skipped = tmp_path / "r.json", tmp_path / "skip.json"
  skipped.write_text('{"skip_attention": [], "skip_mlp": [1]}')
  code = cli(
    rules.run, *SMALL, "--rule=hub", f"--output={path}",
    f"--config.drafter=layer_skip('{skipped}', tokens=2, tree=paths(2))",
  )  # fmt: skip
  assert code == 0
  entry = json.loads(path.read_text())["rules"]["hub"]
  assert (entry["num_drafted"], entry["siblings"]) == (6, "hub")
  assert 0 <= entry["expected_accepted"] <= 2


def test_a_head_drafts_for_every_tree(cli, tmp_path):
  folder, path = tmp_path / "heads", tmp_path / "r.json"
  folder.mkdir()
  heads_on_disk.write_all(folder)
  head = f"eagle3('{folder / 'eagle3'}', tokens=2, tree=paths(2))"
  code = cli(
    rules.run, *SMALL, "--config.temperature=1", "--rule=block_transport",
    f"--config.drafter={head}", f"--output={path}",
    config=f"configs/huggingface.py:target={folder / 'target'}",
  )  # fmt: skip
  assert code == 0
  entry = json.loads(path.read_text())["rules"]["block_transport"]
  assert entry["num_drafted"] == 4
  assert 0 < entry["expected_accepted"] < 2


def test_a_target_that_chats_answers_short_questions(pair, monkeypatch):
  monkeypatch.setattr(on_pair, "NUM_PROMPTS", types.SimpleNamespace(value=5))
  template = "{% for m in messages %}{{ m.content }}{% endfor %}"
  models = types.SimpleNamespace(
    tokenizer=dataclasses.replace(
      tokenizers.load(pair[0]), chat_template=template
    )
  )
  texts, (batch,) = on_pair.held_out(models)
  asked = {one.turns[0] for one in questions.read(questions.OWN)}
  assert len(texts) == 5
  assert set(texts) < asked
  assert {models.tokenizer.decode(p.token_ids) for p in batch.prompts} == {
    *texts
  }
  assert max(len(p.token_ids) for p in batch.prompts) <= batch.width <= 96


@pytest.mark.parametrize(
  "names",
  [
    ("token", "lenient", "transport"),
    pytest.param(tuple(cases.ROWS), marks=pytest.mark.heavy, id="all"),
  ],
)
def test_rules_along_real_contexts(cli, tmp_path, capsys, monkeypatch, names):
  rows = {name: cases.ROWS[name] for name in names}
  monkeypatch.setattr(cases, "ROWS", rows)
  path = tmp_path / "r.json"
  code = cli(
    rules.run, *SMALL, "--config.temperature=0.7", TWO,
    f"--output={path}",
  )  # fmt: skip
  assert code == 0
  result = json.loads(path.read_text())
  actual = result["rules"]
  assert set(actual) == set(names)
  assert result["machine"]["jax"]
  assert result["num_drafts"] == 2
  shown = capsys.readouterr().out
  for name, entry in actual.items():
    assert name.split()[0] in shown
    value = entry["expected_accepted"]
    assert 0 <= value <= 2
    assert entry["block_efficiency"] == 1 + value
    low, high = entry["block_efficiency_ci"]
    assert low <= 1 + value <= high
    if name != names[0]:
      low, high = entry["block_efficiency_ratio_ci"]
      assert low <= entry["block_efficiency_ratio"] <= high
      assert f"{entry['block_efficiency_ratio']:.3f} (" in shown
    # Six built-in prompts; the rows that fill the last batch do not count.
    assert 6 <= entry["num_contexts"] <= 12
    assert (entry["total_variation"] is None) == entry["lossless"]
  # On the same contexts and drafts, so without any noise between them:
  value = lambda name: actual[name]["expected_accepted"]
  assert value("lenient") >= value("token") - 1e-5
  assert 0 < actual["lenient"]["total_variation"] < 1
  assert actual["lenient"]["block_efficiency_ratio"] == pytest.approx(
    actual["lenient"]["block_efficiency"] / actual["token"]["block_efficiency"]
  )
  if "hub" in actual:
    assert actual["hub"]["num_drafted"] == 6
    assert value("decoding_opt") == pytest.approx(value("decoding_uno"))
