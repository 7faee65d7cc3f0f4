"""launch.plan: what it is asked, its mistakes, and its sums."""

import dataclasses
import io
import json
import pathlib

import jax
import pytest
import rich.console
from absl.testing import flagsaver

from configs import shapes
from launch import cli, plan
from launch.hardware import topology
from launch.planning import answer, borrowing, memory, networks, program
from models.formats.huggingface_config import config_from_json
from models.meshes import Layout
from models.networks.lowbits import Format
from models.networks.transformer import SkippedLayers
from specjax import calls, rules
from specjax import tree as tree_lib
from specjax.theory import throughput
from specjax.types import Params

PAIR = ("--target=pythia-2.8b", "--drafter=model('pythia-70m')")
EAGLE = ("--target=llama-3.1-8b", "--drafter=eagle3('eagle3-llama-3.1-8b')")
SMALL = ("--topology=v5e-4", "--target=pythia-2.8b", "--max_length=512")


def test_shapes_have_the_published_numbers_of_parameters():
  actual = {
    name: program.num_params(config_from_json(settings))
    for name, settings in shapes.SHAPES.items()
  }
  assert actual == {
    "pythia-70m": 70_426_624,
    "pythia-2.8b": 2_775_208_960,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-12b": 11_766_034_176,  # of the text model
    "olmo-3-7b": 7_298_011_136,
    "olmo-2-7b": 7_298_617_344,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-4-e4b": 7_463_013_418,  # of the text model, embeddings by layer too
    "gemma-4-26b-a4b": 25_233_141_790,
    "gemma-4-31b": 30_697_345_340,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
    "glm-4.5-air": 106_852_251_264,
    "deepseek-v3": 671_026_419_200,
    "qwen3.5-9b": 8_953_803_264,  # by transformers' defaults
    "qwen3.5-27b": 26_895_998_464,
  }


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (("--topology=v9:2x2", *PAIR), "unknown topology 'v9:2x2'; known are v4:"),
    (PAIR, "--topology is required"),
    (("--topology=v5e-4",), "--drafter is required"),
    (("--topology=v5e-4", "--drafter=ngram"), "--target is required"),
    (("--topology=v5e-4", "--target=gpt-9", "--drafter=plain"),
     "unknown shape 'gpt-9': expected one of"),
    ((*SMALL, "--drafter=quantised_self", "--weights=int8"),
     "of weights that are int8 must have fewer, got int8"),
    ((*SMALL, "--drafter=model('pythia-70m', cache=int4)"),
     "a cache is stored as one of"),
    ((*SMALL, "--drafter=plain", "--weights=int9"), "unknown weights 'int9'"),
    (("--topology=v5e-4", "--target=qwen3.5-9b", "--drafter=plain",
      "--cache=int8"), "a cache with recurrent states is not in eight bits"),
    ((*SMALL, "--drafter=model"), "'model' needs a shape, as model("),
    ((*SMALL, "--drafter=eagle3"), "'eagle3' needs a shape, as eagle3("),
    ((*SMALL, "--drafter=mtp(weights=int8)"), "planned in bfloat16: leave out"),
    (("--topology=v5e-4", "--target=llama-3.1-8b",
      "--drafter=model('eagle3-llama-3.1-8b')"),
     "is a draft head: say of what kind"),
    (("--topology=v5e-4", "--target=llama-3.1-8b",
      "--drafter=medusa('eagle3-llama-3.1-8b')"),
     "the number of heads must be said"),
    (("--topology=v5e-4", "--target=llama-3.1-8b",
      "--drafter=eagle3('eagle4')"),
     "unknown shape 'eagle4': expected one of ['dflash-"),
    (("--topology=v5e-4", *PAIR, "--mesh=data:2,model:4"),
     "takes 8 devices, there are 4"),
    (("--topology=v5e-4", *PAIR, "--mesh=model:4"), "must be as in data:2"),
    (("--topology=v5e-4,v5e-8", *PAIR), "2 combinations of values need"),
    (("--topology=v5e-4", *PAIR, "--batch_size=0"), "positive integers"),
    (("--topology=v5e-4", *PAIR, "--max_length=4096"),
     "exceeds the models' 2048 positions"),
    (("--topology=v5e-4", *PAIR, "--max_length=512", "--rule=tokn"),
     "unknown rule 'tokn'"),
    ((*SMALL, "--drafter=model('pythia-70m', tree=dynamic(9))"),
     "a dynamic tree is of a head"),
    (("--topology=v5e-4", "--target=llama-3.1-8b", "--max_length=512",
      "--drafter=eagle3('eagle3-llama-3.1-8b', tree=dynamic(19))",
      "--rule=token"), "rule 'token'"),
    (("--topology=v5e-4", *EAGLE), "exceeds the models' 2048 positions"),
    ((*SMALL, "--drafter=ngram(tree=paths(2))"), "no parameter 'tree'"),
    ((*SMALL, "--drafter=ngram", "--draft_devices=2"),
     "--draft_devices: not read with --drafter=ngram"),
    ((*SMALL, "--drafter=model('pythia-70m', policy=survival)"),
     "without a policy"),
    ((*SMALL, "--drafter=suffix"), "drafter 'suffix' is not planned"),
    ((*SMALL, "--drafter=layer_skip('no.json')"), "no such file of layers"),
    ((*SMALL, "--drafter=quantised_self(skipped='no.json')"),
     "no such file of layers"),
    (("--sweep", "--topology=v5e-4", *PAIR, "--max_length=512",
      "--batch_size=4,3", "--mesh=data:2,model:2"), "must be a multiple"),
    (("--sweep", "--topology=v5e-4,v5e-64", *PAIR, "--max_length=512"),
     "num_heads (32) cannot be cut over 64 devices"),
    (("--sweep", "--topology=v5e-4", *PAIR, "--plot=sweep.gif"),
     "--plot must end in .svg or .png"),
  ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(arguments, expected, capsys):
  with flagsaver.flagsaver():
    assert cli.execute(plan.run, ["plan", *arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")
  assert expected in line


def test_a_pair_of_other_vocabularies_is_planned_with_a_warning(capsys):
  sizes = [
    config_from_json(shapes.SHAPES[n]) for n in ("qwen3-0.6b", "pythia-70m")
  ]
  plan.warn_of_vocabularies(*sizes)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("warning: the target has 151936 token ids and the ")
  plan.warn_of_vocabularies(sizes[0], sizes[0])
  plan.warn_of_vocabularies(sizes[0], None)
  assert capsys.readouterr().err == ""


def test_a_sweep_of_several_drafts_names_and_warns_of_each(
  tmp_path, capsys, monkeypatch
):
  out, drafts = tmp_path / "o.json", ("qwen3-0.6b", "pythia-70m")
  for name in drafts:
    (tmp_path / name).mkdir()
    text = json.dumps(shapes.SHAPES[name])
    (tmp_path / name / "config.json").write_text(text)
  paths = [str(tmp_path / name) for name in drafts]
  monkeypatch.setattr(
    plan.answer, "plan", lambda topology, asked: {"fits": True}
  )
  monkeypatch.setattr(plan.answer, "show", lambda *_: None)
  with flagsaver.flagsaver():
    arguments = [
      "plan", "--topology=v5e-1", "--sweep", "--target=qwen3-0.6b",
      "--batch_size=1", "--max_length=512", f"--output={out}",
      "--drafter=" + ", ".join(f"model('{path}')" for path in paths),
    ]  # fmt: skip
    assert cli.execute(plan.run, arguments) == 0
  assert "151936 token ids and the draft 50304" in capsys.readouterr().err


def test_a_model_may_be_a_file_or_its_folder(tmp_path):
  path = tmp_path / "config.json"
  path.write_text(json.dumps(shapes.SHAPES["qwen3-0.6b"]))
  expected = config_from_json(shapes.SHAPES["qwen3-0.6b"])
  assert plan.shape(str(path)) == plan.shape(str(tmp_path)) == expected


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("[1]", "must hold a JSON object, got [1]"),
    ("{", "Expecting property name"),
    ("[" * 99_999, "maximum recursion depth exceeded"),
    ('{"model_type": "mamba"}', "model_type must be one of"),
  ],
)
def test_a_file_that_is_no_model_is_one_line(tmp_path, capsys, text, expected):
  path = tmp_path / "config.json"
  path.write_text(text)
  arguments = ("--topology=v5e-4", f"--target={path}", "--drafter=plain")
  with flagsaver.flagsaver():
    assert cli.execute(plan.run, ["plan", *arguments]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert f"cannot use {path}: " in line
  assert expected in line


def question(**changes):
  config = config_from_json(shapes.SHAPES["pythia-2.8b"])
  fields = dict(
    target=config, draft=config_from_json(shapes.SHAPES["pythia-70m"]),
    tree=tree_lib.chain(4), siblings="iid", rule="token", batch_size=8,
    max_length=1024, prompt_length=128, layout=Layout(data=1, model=4, draft=4),
  )  # fmt: skip
  return program.Question(**fields | changes)


def test_tokens_of_a_chain_are_the_iid_formula():
  for acceptance in (0.0, 0.3, 0.9, 1.0):
    assert answer.tokens_per_round(
      tree_lib.chain(5), acceptance
    ) == pytest.approx(float(throughput.tokens_per_cycle(5, acceptance)))


def test_plain_decoding_is_planned_without_a_speed_up():
  line = answer._roofline(
    topology("v5e-4"), question(draft=None, tree=tree_lib.chain(0))
  )
  assert line["best_num_speculative_tokens"] == 0
  assert line["pays_up_to_batch_size"] == 0
  for _, plain_rate, speculative in line["tokens_per_second"]:
    assert speculative == plain_rate


def test_skipping_half_of_the_target_costs_half_a_pass():
  half = SkippedLayers(attention=tuple(range(16)), mlp=tuple(range(16)))
  ask = lambda skipped: answer._roofline(
    topology("v5e-4"), question(draft=None, skipped=skipped)
  )["cost_ratio"]
  # The output projection, 5% of the weights, is never skipped.
  assert ask(half) == pytest.approx(0.52, abs=0.02)
  assert ask(SkippedLayers()) == pytest.approx(1.0)


def test_eight_bits_are_half_of_the_bytes_of_a_pass():
  int8 = Format(kind="int8", embedding=True)
  ask = lambda **changes: answer._roofline(
    topology("v5e-4"), question(draft=None, **changes)
  )
  plain, rounded_self = ask(skipped=SkippedLayers()), ask(own_weights=int8)
  low = ask(weights=int8, cache="int8", skipped=SkippedLayers())
  read = lambda line, name="plain": line["passes"][name]["memory_bytes"]
  config = question().target
  count = networks.num_params(config)
  met = (count - networks.looked_up(config)) / 4  # on each of four devices
  peaks = {"bfloat16": 197e12, "int8": 393e12, "fp8": None}
  assert rounded_self["peaks"] == peaks
  saved = read(rounded_self) - read(rounded_self, "draft_step")
  assert saved == pytest.approx(met, rel=0.01)
  assert read(low) / read(plain) == pytest.approx(0.52, abs=0.03)
  assert read(rounded_self) == read(plain)
  assert networks.num_bytes(config, None) == 2 * count
  assert count < networks.num_bytes(config, int8) < 1.01 * count
  mixture = config_from_json(shapes.SHAPES["mixtral-8x7b"])
  count = networks.num_params(mixture)
  assert count < networks.num_bytes(mixture, int8) < 1.01 * count
  int4 = Format(kind="int4", group=32, embedding=True)
  assert networks.bytes_per_weight(config, int4) == pytest.approx(0.625, 0.01)


def test_a_copy_in_few_bits_shares_what_is_not():
  plain, rounded_self = (
    memory.held(question(draft=None, own_weights=weights))
    for weights in (None, Format(kind="int8"))
  )
  config = question().target
  rounded = networks.num_params(config) - networks.looked_up(config)
  assert rounded_self - plain == pytest.approx(rounded / 4, rel=0.01)
  low, fewer = (
    memory.held(
      question(draft=None, weights=Format(kind="int8"), own_weights=weights)
    )
    for weights in (None, Format(kind="int4", group=32))
  )
  assert fewer - low == pytest.approx(0.625 * rounded / 4, rel=0.01)


def test_a_draft_in_few_bits_has_a_smaller_cache():
  cache = lambda draft_cache: memory.held(question(draft_cache=draft_cache))
  # Six layers; channels of 64 take 128 lanes, and a scale has four bytes.
  slots = 8 * (1024 + 5) * 6 * 2 * 8
  assert cache(None) - cache("int8") == slots * (128 - 4) // 4


def test_a_copy_in_few_bits_is_given_what_is_not_the_targets():
  """Few arrays go in; with the target's others they are the whole copy."""
  int8, int4 = Format(kind="int8"), Format(kind="int4", group=32)
  q = question(draft=None, weights=int8, own_weights=int4)
  q.check()
  whole = networks.shapes(q.target, int4)
  rounded_self = borrowing.rounded(whole, networks.shapes(q.target))
  assert {x.dtype.name for x in rounded_self.values()} == {"int4", "float32"}
  target = networks.shapes(q.target, int8)
  actual = borrowing.with_shared(whole)(
    Params(target=target, draft=rounded_self)
  )
  assert jax.tree.structure(actual.draft) == jax.tree.structure(whole)
  assert jax.tree.leaves(actual.draft) == jax.tree.leaves(whole)
  norm = lambda params: params["frame"]["final_norm"]["scale"].get_value()
  assert norm(actual.draft) is norm(target)


def test_the_batch_up_to_which_drafting_pays_rises_with_acceptance():
  rounded_self = question(draft=None, own_weights=Format(kind="int8"))
  line = answer._roofline(topology("v5e-4"), rounded_self)
  largest = [row["batch_size"] for row in line["pays_by_acceptance"]]
  assert largest == sorted(largest)
  assert largest[0] < largest[-1]
  of = {
    row["acceptance"]: row["batch_size"] for row in line["pays_by_acceptance"]
  }
  assert of[0.8] == line["pays_up_to_batch_size"]


def test_the_window_of_lookahead_costs_verification():
  """4 columns, guesses of 3 tokens: 1 + 2 x 3 + 3 + 2 x 4 fed, 6 drafted."""
  ahead = question(
    draft=None, lookahead=4, tree=tree_lib.paths(3, 2), rule="match",
    batch_size=2048,
  )  # fmt: skip
  ahead.check()
  line = answer._roofline(topology("v5e-4"), ahead)
  assert line["tokens_fed"] == 18
  assert program.make_drafter(ahead).tree.num_fed == 18
  assert ahead.slots == ahead.max_length + 18
  seconds = line["verify_seconds"]
  tokens = answer.tokens_per_round(tree_lib.paths(3, 2), 0.8)
  rate = {p: fast for p, _, fast in line["tokens_per_second"]}[0.8]
  assert rate == pytest.approx(2048 * tokens / seconds["18"])
  assert seconds["18"] > 1.3 * seconds["7"]
  costs = answer._costs_of_chain(topology("v5e-4"), ahead)
  best = answer._best(ahead, costs, 0.8)
  assert best["speedup"] == pytest.approx(tokens * seconds["1"] / seconds["18"])
  with pytest.raises(ValueError, match="rule 'token' verifies a single path"):
    dataclasses.replace(ahead, rule="token").check()


@pytest.mark.parametrize(
  ("drafter", "expected"),
  [
    ("ngram", "token"),
    ("model('pythia-70m', tree=paths(3))", "block_transport"),
    ("model('pythia-70m', tree=k_ary(2, 2))", "block_transport"),
    ("model('pythia-70m', tree=(-1, 0, 0, 1))", "recursive"),
    (
      "model('pythia-70m', tree=paths(3), siblings=without_replacement)",
      "recursive",
    ),
    ("eagle3('eagle3-llama-3.1-8b', tree=dynamic(19))", "match"),
  ],
)
def test_a_plan_without_a_rule_has_one_that_fits(drafter, expected):
  (call,) = calls.parse_list(drafter)
  drafting = plan.drafting_of(call)
  assert plan.usual_rule(drafting) == expected
  rules.get(expected).check(drafting.tree, drafting.siblings)


def test_the_best_chain_does_not_depend_on_what_else_is_drafted():
  ask = lambda tree: answer._roofline(
    topology("v5e-4"), question(tree=tree, batch_size=64)
  )["best_num_speculative_tokens"]
  assert ask(tree_lib.paths(4, 16)) == ask(tree_lib.chain(4)) > 0


def test_two_paths_are_tried_in_turn():
  p = 0.6
  expected = 1 + (p + (1 - p) * p) * (1 + p)
  assert answer.tokens_per_round(tree_lib.paths(2, 2), p) == pytest.approx(
    expected
  )


def test_break_even_is_where_the_rates_meet():
  line = answer._roofline(topology("v5e-4"), question())
  even = line["break_even_acceptance"]
  seconds = 4 * line["draft_step_seconds"] + line["verify_seconds"]["5"]
  assert answer.tokens_per_round(tree_lib.chain(4), even) / seconds == (
    pytest.approx(1 / line["verify_seconds"]["1"])
  )
  for acceptance, plain, speculative in line["tokens_per_second"]:
    assert (speculative > plain) == (acceptance > even)


def test_each_pass_is_bound_by_what_takes_longest():
  """Few rows wait for weights, many compute, and slow links are waited for."""
  ask = lambda **changes: answer._roofline(
    topology("v5e-4"), question(**changes)
  )
  line = ask()
  assert {*line["passes"]} == {"plain", "draft_step", "verify"}
  for name, one in line["passes"].items():
    chip = topology("v5e-4").chip
    alone = {
      "memory": one["memory_bytes"] / chip.hbm_bandwidth,
      "arithmetic": one["operations"] / chip.peak_flops,
      "collectives": one["collective_bytes"] / chip.ici_bandwidth,
    }
    assert alone == pytest.approx(
      {
        "memory": one["memory_seconds"],
        "arithmetic": one["arithmetic_seconds"],
        "collectives": one["collective_seconds"],
      }
    )
    assert one["bound_by"] == max(alone, key=alone.get), name
    assert one["seconds"] == pytest.approx(
      max(alone["memory"], alone["arithmetic"]) + alone["collectives"]
    )
  passes = line["passes"]
  assert passes["plain"]["seconds"] == line["verify_seconds"]["1"]
  assert passes["verify"]["seconds"] == line["verify_seconds"]["5"]
  assert passes["draft_step"]["seconds"] == pytest.approx(
    line["draft_step_seconds"]
  )
  assert passes["plain"]["bound_by"] == "memory"
  short = dict(max_length=129, draft=None, tree=tree_lib.chain(31))
  many = ask(batch_size=1024, layout=Layout(data=4, model=1, draft=1), **short)
  assert many["passes"]["verify"]["bound_by"] == "arithmetic"
  small = config_from_json(shapes.SHAPES["pythia-70m"])
  cut = ask(batch_size=1024, target=small, **short)
  assert cut["passes"]["verify"]["bound_by"] == "collectives"
  alone = ask(draft=None, tree=tree_lib.chain(0))
  assert {*alone["passes"]} == {"plain"}


@pytest.mark.parametrize("batch_size", [8, 64])
def test_the_best_chain_is_said_for_each_acceptance(batch_size):
  line = answer._roofline(topology("v5e-4"), question(batch_size=batch_size))
  best = {
    row["acceptance"]: row["num_speculative_tokens"]
    for row in line["best_by_acceptance"]
  }
  assert [min(best), max(best), len(best)] == [0.5, 0.95, 10]
  assert [*best.values()] == sorted(best.values())
  assert best[0.5] < best[0.95]
  assert best[0.8] == line["best_num_speculative_tokens"]
  verify, draft = line["verify_seconds"], line["draft_step_seconds"]
  for row in line["best_by_acceptance"]:
    speedups = [
      float(throughput.tokens_per_cycle(n, row["acceptance"]))
      * verify["1"] / (n * draft + verify[str(n + 1)])
      for n in range(1, 32)
    ]  # fmt: skip
    assert max(speedups) == pytest.approx(row["speedup"])
    assert speedups[row["num_speculative_tokens"] - 1] == max(speedups)


def shown(actual):
  console = rich.console.Console(file=io.StringIO(), width=100)
  answer.show(console, actual)
  return console.file.getvalue()


def test_what_is_shown():
  record = json.loads(pathlib.Path("docs/plans/70b-v5e-16.json").read_text())
  text = shown(record)
  first, second, *_ = text.splitlines()
  assert first.startswith("fits: 10.69 of 15.75 GiB a device; arguments 10.16")
  assert "v5e:4x4 (v5litepod-16), data:1, model:16, draft on 8" in first
  assert second.startswith(
    "copies of a whole cache in a round: 0; donation hon"
  )
  words = " ".join(text.split())
  assert "draft step (mean) all-reduce 33 1,351,680" in words
  assert "verify all-reduce 161 105,512,960" in words
  assert "a model, not a measurement" in words
  assert "drafting pays up to batch 4096, the largest tried" in words
  verify = record["roofline"]["passes"]["verify"]
  assert verify["bound_by"] == "memory"
  assert (
    f"verify memory {verify['memory_bytes'] / 1e6:,.1f} "
    f"{1e3 * verify['memory_seconds']:.2f} "
  ) in words
  last = record["roofline"]["best_by_acceptance"][-1]
  n, ratio = last["num_speculative_tokens"], last["speedup"]
  assert f"0.95 {n} {ratio:.2f}" in words

  record["collectives"] = {"draft_step": {}, "verify": {}}
  record["roofline"] |= dict(
    pays_up_to_batch_size=0, break_even_acceptance=None
  )
  text = shown(record)
  assert "no collectives" in text
  assert "break-even acceptance none" in text
  assert "and no batch pays" in text


def test_what_does_not_fit_is_one_line():
  record = json.loads(pathlib.Path("docs/plans/70b-v5e-16.json").read_text())
  unfit = record | {"fits": False, "collectives": None}
  (line,) = shown(unfit).splitlines()
  assert line.startswith("does not fit: 10.69 of 15.75 GiB a device")


def test_the_largest_batch_and_length_are_where_memory_ends():
  q, temporaries, hbm = question(), 10**9, 15 * 2**30
  actual = memory.largest(q, temporaries, hbm)

  def needed(batch, length):
    other = question(batch_size=batch, max_length=length)
    # 80 channels take 128 lanes; two bytes each, and the heads on four devices.
    keys = 2 * 32 * 8 * 128 * batch * (length + 5)
    more = temporaries * batch / 8 * max(length / 1024, 1)
    return memory.held(other) + keys + more

  batch = actual["batch_size"]
  assert needed(batch, 1024) <= hbm < needed(batch + 1, 1024)
  length = actual["max_length"]
  assert needed(8, length) <= hbm
  assert length == 2048 or needed(8, length + 1) > hbm
