"""launch.plan: its mistakes, its predictions, and one plan from end to end."""

import functools
import json

import commands
import numpy as np
import pytest

from configs import shapes
from launch import plan
from launch.hardware import CHIPS
from launch.planning import answer, networks, program
from models.formats.huggingface import translate
from models.meshes import Layout
from specjax import tree as tree_lib
from specjax.theory import throughput

CHIP = CHIPS["v5e"]
SLICE = ("--topology=v5e:2x2", "--max_length=512")
PAIR = ("--target=pythia-2.8b", "--drafter=model('pythia-70m')")
EAGLE = ("--target=llama-3.1-8b", "--drafter=eagle3('eagle3-llama-3.1-8b')")
PYTHIA = (*SLICE, "--target=pythia-2.8b")
execute = functools.partial(commands.execute, plan.run)


def test_plan_is_printed_and_written(tmp_path, capsys):
  """Compiled for one chip of a v5e; what is printed has names and units."""
  pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64 only")
  out = tmp_path / "plan.json"
  arguments = (
    "--topology=v5e:1x1", "--target=models/pretrained/target", "--batch_size=2",
    '--drafter=model("models/pretrained/draft", tokens=2)', "--max_length=256",
    f"--output={out}",
  )  # fmt: skip
  assert execute(*arguments) == 0
  written = json.loads(out.read_text())
  assert written["fits"]
  assert written["buffers_reused"]
  assert written["cache_copies"] == 0
  size, line = written["per_device_bytes"], written["roofline"]
  assert size["arguments"] < size["peak"] < size["hbm"]
  text = " ".join(capsys.readouterr().out.split())
  for said in (
    f"fits: {size['peak'] / 2**30:.2f} GiB of 15.75 GiB on each device",
    "drafter model, 2 tokens a round, verified by token",
    "cache buffers reused",
    "copies of a whole cache 0 a round",
    f"cost of a draft pass (c) {line['cost_ratio']:.3f} target passes",
    f"break-even acceptance {line['break_even_acceptance']:.2f}",
    "memory MB memory ms GFLOP compute ms sent MB send ms total ms",
    f"{line['by_acceptance'][-1]['its speed-up']:.2f}",
  ):
    assert said in text
  assert execute(*arguments, "--max_length=300") == 2  # it is there already


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (("--topology=v9:2x2", *PAIR), "unknown topology 'v9:2x2'; known are v4:"),
    ((*PYTHIA, "--drafter=model('pythia-70m', cache=int8)"),
     "only model(...) can have quantized weights"),
    ((*SLICE, *EAGLE, "--max_length=4096"), "at most the models' 2048"),
    (("--topology=v5e:8x8", *PAIR), "num_heads (32) cannot be cut over 64"),
  ],
)  # fmt: skip
def test_user_errors_print_one_line_and_exit_with_2(
  arguments, expected, capsys
):
  assert execute(*arguments) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")
  assert expected in line


def test_model_shapes_match_published_parameter_counts():
  for name, expected in {
    "pythia-70m": 70_426_624,
    "llama-3.1-70b": 70_553_706_496,
    "gemma-3-12b": 11_766_034_176,  # of the text model
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v3": 671_026_419_200,
    "qwen3.5-27b": 26_895_998_464,
    "t5-1.1-small": 76_961_152,  # whose file does not tie its tables
  }.items():
    assert networks.count(networks.shapes(plan.shape(name))) == expected, name


def question(**changes):
  fields = dict(
    target=translate(shapes.SHAPES["pythia-2.8b"]),
    draft=translate(shapes.SHAPES["pythia-70m"]), tree=tree_lib.chain(4),
    siblings="iid", rule="token", batch_size=8, max_length=1024,
    prompt_length=128, layout=Layout(data=1, model=4, draft=4),
  )  # fmt: skip
  return program.Question(**fields | changes)


def test_predicted_speedups_match_theory_at_the_planned_costs():
  line = answer.predict(CHIP, question())
  plain, *_, verify = line["verify_seconds"][:5]
  draft = line["draft_pass_seconds"]
  assert line["cost_ratio"] == draft / plain
  assert line["plain_tokens_per_second"] == 8 / plain
  assert line["break_even_acceptance"] == pytest.approx(
    throughput.break_even(4, draft, verify, plain)
  )
  for row in line["by_acceptance"]:
    at = lambda n, seconds, p=row["acceptance"]: float(
      throughput.throughput(n, p, draft, seconds) * plain
    )
    assert row["speed-up"] == pytest.approx(at(4, verify))
    assert (row["speed-up"] > 1) == (
      row["acceptance"] > line["break_even_acceptance"]
    )
    every = [at(n, s) for n, s in enumerate(line["verify_seconds"])]
    assert row["best draft length"] == np.argmax(every)
    assert row["its speed-up"] == pytest.approx(max(every))
