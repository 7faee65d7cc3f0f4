"""`launch.studies.drafts`: equal compute, one line a draft, resumable."""

import dataclasses
import functools
import json
import pathlib

import files
import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from flax import nnx

from configs import draft_study as study_config
from configs import embedded, train_head
from launch import cli, provenance
from launch.studies.drafts import __main__ as draft_study
from launch.studies.drafts import plots
from launch.training import flops, head, step
from launch.training.run import Run
from models import checkpoints
from models.formats import huggingface
from models.networks.layers import TransformerConfig
from specjax.runtime.engine import Completion
from specjax.state import Origin

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.mark.parametrize("arg", ["shapes", "objectives"])
def test_every_draft_is_paid_for_with_the_same_operations(arg):
  config = study_config.get_config(arg)
  teacher = huggingface.load(config.train.teacher).config
  assert len(config.drafts) >= 4
  sizes = []
  for name, changes in config.drafts.items():
    if name == "before":
      continue
    one = draft_study.training_config(config, changes.to_dict())
    model = TransformerConfig(**one.model)
    spent = one.num_steps * flops.step_flops(one, teacher)
    assert spent == pytest.approx(config.flops, rel=0.02)
    width = model.embed_dim
    heads = model.num_heads * model.head_dim
    assert heads == width
    layer = 4 * width * heads + 3 * width * model.mlp_dim
    sizes.append(2 * width * model.vocab_size + model.num_layers * layer)
  assert max(sizes) < 1.15 * min(sizes)


def test_heads_are_paid_for_with_what_the_draft_model_is():
  """The target's pass is counted for all of them; so is all of their own."""
  config = study_config.get_config("heads")
  results = {}
  for name, changes in config.drafts.items():
    one = draft_study.training_config(config, changes.to_dict())
    if "head" in one:
      per_step, shared = head.step_flops(one), one.target
      assert one.learning_rate == train_head.get_config().learning_rate
    else:
      teacher = huggingface.load(one.teacher).config
      per_step, shared = flops.step_flops(one, teacher), one.teacher
    assert shared == embedded.get_config().target
    results[name] = one.num_steps * per_step, one.batch_size, one.data_seed
  assert {*results} == {"draft model", "Medusa", "EAGLE-1", "EAGLE-3"}
  for spent, *same in results.values():
    assert spent == pytest.approx(config.flops, rel=0.02)
    assert same == [4, 0]


def test_the_study_of_objectives_begins_with_the_embedded_draft():
  config = study_config.get_config("objectives")
  assert config.train.init_from == embedded.get_config().checkpoints.draft
  loaded = huggingface.load(config.train.init_from).config
  for changes in config.drafts.values():
    one = draft_study.training_config(config, changes.to_dict())
    assert TransformerConfig(**one.model) == loaded
  before = config.drafts["before"].to_dict()
  assert draft_study.training_config(config, before).num_steps == 0


def test_a_draft_that_is_not_trained_is_what_it_begins_with(texts, tmp_path):
  config = study_config.get_config("tiny")
  config.train.dataset = str(texts)
  config.train.init_from = embedded.get_config().checkpoints.draft
  model = study_config.get_config("objectives").train.model
  one = draft_study.training_config(
    config, {"num_steps": 0, "model": model.to_dict()}
  )
  actual, finished = draft_study.train_draft(one, tmp_path)
  assert finished
  assert (
    actual["num_steps"] == actual["tokens"] == actual["training_seconds"] == 0
  )
  assert 0 < actual["validation_acceptance"] < 1
  jax.tree.map(
    np.testing.assert_array_equal,
    nnx.state(huggingface.load(str(tmp_path / "model"))),
    nnx.state(huggingface.load(config.train.init_from)),
  )


def test_forward_operations_are_twice_the_weights_and_attention():
  config = TransformerConfig(
    vocab_size=10, embed_dim=4, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=2, mlp_dim=6, max_positions=8,
  )  # fmt: skip
  layer = 4 * (4 + 2 + 2 + 4) + 3 * 4 * 6
  weights = 2 * layer + 4 * 10
  assert flops.forward_flops(config, 8) == 2 * weights + 2 * 2 * 4 * 8
  one = flops.forward_flops(config, 8)
  assert flops.training_flops(config, None, 8) == 3 * one
  cost = functools.partial(flops.training_flops, config, config, 8)
  assert cost(objective="next_token") == 3 * one
  assert cost(objective="next_token", contexts="draft") == 4 * one
  assert cost(objective="forward_kl") == 4 * one
  assert cost(objective="forward_kl", contexts="target") == 5 * one


def test_a_study_writes_a_line_a_draft_and_resumes(tmp_path, monkeypatch, pair):
  texts = tmp_path / "texts"
  for split in ("train", "validation"):
    (texts / split).mkdir(parents=True)
    for i in range(20):
      (texts / split / f"{i}.txt").write_text(f"def f{i}():\n  pass\n" * 30)
  output = tmp_path / "o.jsonl"

  def study():
    with flagsaver.flagsaver():
      return cli.execute(
        draft_study.run,
        ["study", "--config=configs/draft_study.py:tiny",
         f"--config.train.dataset={texts}", f"--workdir={tmp_path}/w",
         f"--config.train.teacher={pair[0]}",
         f"--config.decode.target={pair[0]}", f"--output={output}"],
      )  # fmt: skip

  real = draft_study.decode_with

  def dies_at_the_second(config, draft):
    if "/b/" in draft:
      raise KeyboardInterrupt
    return real(config, draft)

  monkeypatch.setattr(draft_study, "decode_with", dies_at_the_second)
  with pytest.raises(KeyboardInterrupt):
    study()
  monkeypatch.setattr(provenance, "hash_checkpoint", lambda _: "another")
  assert study() == 2  # the target was trained again, at the same path
  monkeypatch.undo()
  assert not output.exists()
  before = pathlib.Path(f"{output}.journal").read_text().splitlines()
  assert len(before) == 2  # a header and the first draft
  assert study() == 0
  assert set(json.loads(output.read_text().splitlines()[0])["provenance"][
    "checkpoints"]) == {"target", "draft"}  # fmt: skip
  rows = files.read_jsonl(output)
  assert [row["name"] for row in rows] == ["a", "b"]
  first = json.loads(before[1])
  assert rows[0] == {k: v for k, v in first.items() if k != "batch"}
  for row in rows:
    assert row["flops"] == pytest.approx(4e9, rel=0.1)
    assert row["num_steps"] >= 1
    assert 0 < row["validation_acceptance"] < 1
    assert row["draft_pass_seconds"] > 0
    assert set(row["decoding"]) == {"0", "1"}
    assert row["decoding"]["0"]["block_efficiency"] >= 1
  printed = plots.table({"": rows})
  assert printed.count("\n") == 3
  assert "`b`" in printed


def test_a_study_of_heads_tells_what_is_accepted_and_times_nothing(
  tmp_path, texts, pair
):
  output = tmp_path / "o.jsonl"
  with flagsaver.flagsaver():
    assert 0 == cli.execute(
      draft_study.run,
      ["study", "--config=configs/draft_study.py:tiny_heads",
       f"--config.train.dataset={texts}", f"--workdir={tmp_path}/w",
       f"--config.train.teacher={pair[0]}",
       f"--config.decode.target={pair[0]}", f"--output={output}"],
    )  # fmt: skip
  rows = files.read_jsonl(output)
  (row,) = rows
  assert row["name"] == "Medusa"
  assert "draft_pass_seconds" not in row
  assert row["flops"] == pytest.approx(2e10, rel=0.1)
  for actual in row["decoding"].values():
    assert actual["tried"][0] > 0
    assert len(actual["accepted"]) == len(actual["accepted_ci"]) == 4
  printed = plots.table({"": rows})
  assert printed.count("\n") == 3
  panels = plots.by_position(rows).axes
  assert [len(panel.containers) for panel in panels] == [1, 1]
  # Questions in place of files; one of them is too long to be asked.
  asked = tmp_path / "questions.jsonl"
  files.write_jsonl(
    asked,
    [{"question_id": i, "category": "x", "turns": [text, "And then?"]}
     for i, text in enumerate(["def a(", "x = " * 99, "if b:"])],
  )  # fmt: skip
  config = study_config.get_config("tiny_heads")
  config.questions, config.num_prompts = str(asked), 5
  config.decode.target = pair[0]
  tokenizer = checkpoints.load_tokenizer(pair[0])
  asked = draft_study._asked(config, tokenizer)
  assert [one.turns for one in asked] == [("def a(",), ("if b:",)]
  head = f'medusa("{tmp_path / "w/Medusa/model"}")'
  answered = draft_study.accepted_with(config, head)
  tried = [x["tried"][0] for x in answered["decoding"].values()]
  assert 0 < min(tried)
  assert tried != [x["tried"][0] for x in row["decoding"].values()]


def test_every_bound_changes_one_thing_of_the_first():
  config = study_config.get_config("bounds")
  ones = {
    name: draft_study.training_config(config, changes.to_dict())
    for name, changes in config.drafts.items()
  }
  first = ones.pop("as it is")
  assert (first.target, first.num_steps) == (config.train.teacher, 200)
  assert (first.head.depth, first.head.draft_vocab_size) == (1, 8192)
  # Validation is at the end of each, whenever that is.
  flat = lambda one: {
    **{k: v for k, v in one.items() if k not in ("head", "validate_every")},
    **{f"head.{k}": v for k, v in one.head.items()},
  }
  usual = flat(first)
  for name, one in ones.items():
    changed = [k for k, v in flat(one).items() if v != usual[k]]
    assert len(changed) == 1, name
  assert len(ones) > 5
  text = study_config.get_config("text")
  assert [*text.drafts] == ["as it is"]


def test_positions_count_what_was_judged_and_intervals_are_over_prompts():
  a, r, b = Origin.ACCEPTED, Origin.RESIDUAL, Origin.BONUS

  def completion(*origins, calls):
    blank = dict.fromkeys(f.name for f in dataclasses.fields(Completion))
    return Completion(
      **blank
      | dict(
        token_ids=list(origins), origins=list(origins), num_target_calls=calls
      )
    )

  actual = draft_study.summary(
    [
      completion(a, a, b, a, r, r, calls=3),  # ends after a whole round
      completion(r, r, r, a, calls=4),  # and here inside of one
    ]
    * 3,
    2,
  )
  assert actual["tried"] == [21, 6]
  assert actual["accepted"] == pytest.approx([3 / 7, 1 / 2])
  assert actual["block_efficiency"] == pytest.approx(10 / 7)
  low, high = actual["accepted_ci"][0]
  assert 0 <= low < 3 / 7 < high <= 1
  assert actual["accepted_ci"][1] is None  # accepted in three prompts alone


def test_a_study_is_charged_for_the_passes_that_a_step_runs(texts, tmp_path):
  """XLA counts the teacher's pass where we do, and only there."""
  config = study_config.get_config("tiny").train
  config.dataset = str(texts)

  def counted(objective):
    config.objective = objective
    run = Run(config, str(tmp_path / objective))
    state = run.steps.init(jax.random.key(0))
    batch = step.place_batch(next(run.iterator), run.mesh)
    cost = jax.jit(run.steps.train).lower(state, batch).cost_analysis()
    return cost["flops"], run.task.step_flops

  (plain, plain_ours), (taught, taught_ours) = map(
    counted, ("next_token", "forward_kl")
  )
  # The softmax over the vocabulary is not counted by us.
  assert taught - plain == pytest.approx(taught_ours - plain_ours, rel=0.1)
  assert taught_ours > 4 * plain_ours


@pytest.mark.parametrize(
  "path",
  sorted(pathlib.Path("docs/measurements/drafts").glob("*.jsonl")),
  ids=lambda path: path.stem,
)
def test_drafts_of_a_study_had_equal_compute(path):
  rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
  assert len(rows) >= 4
  spent = [row["flops"] for row in rows if row["num_steps"]]
  assert spent == pytest.approx([max(spent)] * len(spent), rel=0.02)
  assert len({row["name"] for row in rows}) == len(rows)
