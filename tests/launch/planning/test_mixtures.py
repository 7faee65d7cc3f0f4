"""Plans of mixtures: batch sizes at which drafting pays, by hand."""

import dataclasses

import numpy as np
import pytest
from absl.testing import flagsaver

from configs import shapes
from launch import cli, hardware, plan
from launch.planning import answer, mixtures, program, roofline
from models.formats.huggingface_config import config_from_json
from models.meshes import Layout
from specjax import tree
from specjax.theory import experts
from specjax.theory.experts import expected_distinct

QWEN = config_from_json(shapes.SHAPES["qwen3-30b-a3b"])
V5E = hardware.topology("v5e-8")


def question(devices=8, **changes):
  fields = dict(
    target=QWEN, draft=None, tree=tree.chain(4), siblings="iid", rule="token",
    batch_size=1, max_length=256, prompt_length=32,
    layout=Layout(data=1, model=devices, draft=1),
  )  # fmt: skip
  return program.Question(**fields | changes)


def test_lengths_that_pay_by_hand():
  """One more token costs half a pass for the first, and nothing after it."""
  verify = np.array([1.0, 1.5, 1.5, 1.5])
  actual = mixtures._of_batch(np.zeros(4), verify)
  # All three are accepted: 4 tokens for 1.5; at P = 0.34 1.494 of them.
  assert (actual["pays_from"], actual["pays_with"]) == (0.35, 3)
  at = {one["acceptance"]: one for one in actual["at"]}
  assert at[0.6]["best"] == 3
  assert at[0.6]["speedup"] == pytest.approx((1 + 0.6 + 0.36 + 0.216) / 1.5)
  assert at[0.6]["lengths"] == [[1, 3]]
  dear = mixtures._of_batch(np.arange(4.0), verify)
  assert (dear["pays_from"], dear["pays_with"]) == (None, None)
  assert dear["at"][0] == {
    "acceptance": 0.6, "best": 0, "speedup": 1.0, "lengths": [],
  }  # fmt: skip
  assert mixtures.cells(dear | {
    "batch_size": 2, "experts": 3.0, "experts_busiest": 1.0,
  })[3:5] == ["never", "none"]  # fmt: skip
  assert mixtures.ranges([1, 2, 5, 7, 8]) == [[1, 2], [5, 5], [7, 8]]


def test_the_device_with_most_experts_is_waited_for():
  """Eight devices hold sixteen experts each; four have a share of all."""
  place = roofline.Placement(
    config=QWEN, num_params=program.num_params(QWEN), size=8, rows=2, slots=64
  )
  expert, layers = 3 * 2048 * 768, 48
  read = lambda p: roofline.forward(p, 3).hbm_bytes
  touched = expected_distinct(6, 128, 8)
  more = experts.busiest(touched, 128, 8) - touched / 8
  whole = dataclasses.replace(place, distinct=lambda t: 128.0)  # on each 16
  gap = 2 * layers * expert * (16 - touched / 8 - more)
  assert read(whole) - read(place) == pytest.approx(gap)
  even = dataclasses.replace(place, size=2)  # by width
  gap = 2 * layers * expert * (128 - touched) / 2
  assert read(dataclasses.replace(even, distinct=whole.distinct)) - read(
    even
  ) == pytest.approx(gap)


def test_a_plan_says_where_drafting_pays():
  actual = answer.of_mixture(V5E, question())["mixture"]
  sizes = ("num_experts", "num_chosen", "layers", "cut_by", "routing")
  assert [actual[name] for name in sizes] == [128, 8, 48, "expert", "uniform"]
  rows = {row["batch_size"]: row for row in actual["by_batch_size"]}
  assert list(rows) == [2**i for i in range(9)]
  assert rows[1]["experts"] == 8
  assert rows[1]["pays_from"] > rows[8]["pays_from"] > rows[32]["pays_from"]
  alike = question(distinct=lambda tokens: 8.0)
  alike = answer.of_mixture(V5E, alike)["mixture"]
  assert alike["routing"] == "measured"
  assert alike["by_batch_size"][0]["pays_from"] < 0.05  # as a dense model's
  assert answer.of_mixture(V5E, question(tree=tree.chain(0))) == {}
  dense = config_from_json(shapes.SHAPES["qwen3-8b"])
  assert answer.of_mixture(V5E, question(target=dense)) == {}


def evaluation(**changes):
  row = {"level": "all", "pass_tokens": 1.0, "experts_by_layer": [8, 8]}
  more = [
    row | {"pass_tokens": 5.0, "experts_by_layer": [20, 22]},
    row | {"pass_tokens": 5.04, "experts_by_layer": [21, 25]},
    row | {"pass_tokens": 6.0, "experts_by_layer": [20, 20]},
    row | {"level": "category", "pass_tokens": 7.0},
    row | {"pass_tokens": 9.0, "experts_by_layer": None},
  ]
  facts = {"num_experts": [128, 128], "num_chosen": [8, 8]}
  return {"runs": [row, *more], "experts": facts | changes}


def test_a_curve_is_read_of_an_evaluation():
  curve = mixtures.measured(evaluation(), QWEN)
  assert (curve.tokens, curve.distinct) == ((1.0, 5.0, 6.0), (8.0, 22.0, 22.0))
  with pytest.raises(ValueError, match=r"\[\(64, 8\), \(128, 8\)\], and"):
    mixtures.measured(evaluation(num_experts=[128, 64]), QWEN)
  with pytest.raises(ValueError, match="no experts were counted"):
    mixtures.measured({"runs": []}, QWEN)


def test_a_plan_refuses_an_evaluation_that_counted_nothing(tmp_path, capsys):
  path = tmp_path / "E.json"
  asked = ("--topology=v5e-8", "--target=qwen3-30b-a3b", "--drafter=ngram")
  for text, message in (
    (None, "no such file"), ('{"runs": []}', "no experts were counted"),
    ("[1]", "--experts="),
  ):  # fmt: skip
    if text:
      path.write_text(text)
    with flagsaver.flagsaver():
      code = cli.execute(plan.run, ["plan", *asked, f"--experts={path}"])
    assert code == 2
    assert message in capsys.readouterr().err
