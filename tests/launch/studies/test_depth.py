"""`launch.studies.depth`: a replay is the loop, and rates are by hand."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import specjax
from configs import embedded
from launch import cli as command_line
from launch.evaluation import costs as timings
from launch.studies.depth import __main__ as study
from launch.studies.depth import plots, replay
from launch.studies.depth.traces import Traces
from specjax import drafters, laws
from specjax.adaptive import estimates, policies
from specjax.theory import stopping
from specjax.theory.stopping import Costs

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def traces_of(accept, top=None):
  accept = np.asarray(accept, np.float32)
  top = np.full_like(accept, 0.5) if top is None else np.asarray(top)
  return Traces(
    accept=accept, top=top.astype(np.float32),
    confidence=top.astype(np.float32), present=np.ones(accept.shape[:2], bool),
    hidden=np.zeros((*accept.shape, 0), np.float32), temperature=1.0,
  )  # fmt: skip


def replayed(traces, policy, **more):
  return replay.depths(traces, lambda _: policy, np.zeros(1), **more)[0]


@pytest.mark.parametrize(
  "policy", ["survival(threshold=0.45)", "optimal(cost=0.3)"]
)
def test_a_replay_of_its_own_rounds_is_what_the_loop_did(policy):
  vocab, levels, rounds = 11, 4, 25
  target = toys.table(vocab, seed=0)
  model = toys.table_model(vocab)
  decoder = specjax.make_decoder(
    model,
    drafter=drafters.model(
      model, tree=specjax.tree.chain(levels), vocab_size=vocab,
      policy=policies.get(policy),
    ),
  )  # fmt: skip
  params = specjax.Params(
    target=jnp.asarray(target),
    draft=jnp.asarray(toys.near(target, noise=0.8, seed=1)),
  )
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    params, np.array([[1, 2], [3, 4]]), np.array([2, 1]), jax.random.key(0),
    buffer_length=202, max_new_tokens=np.int32(200),
  )  # fmt: skip

  @jax.jit
  def step(params, state):
    after, info = decoder.step(params, state)
    now = after.drafter_state.drawn
    log_q = laws.token_log_prob(
      info.target_log_probs[:, :levels], info.draft.tokens[:, 1:]
    )
    accept = laws.acceptance(log_q, now.log_p)
    return after, (accept, now.top, now.confidence, now.drafted)

  seen = []
  for _ in range(rounds):
    state, actual = step(params, state)
    seen.append(actual)
  accept, top, confidence, drafted = (
    np.stack(column, axis=1) for column in zip(*seen, strict=True)
  )
  recorded = Traces(
    accept=accept, top=top, confidence=confidence,
    present=np.ones((2, rounds), bool),
    hidden=np.zeros((*accept.shape, 0), np.float32), temperature=1.0,
  )  # fmt: skip
  assert len(np.unique(drafted)) > 1
  actual = replayed(recorded, policies.get(policy))
  np.testing.assert_array_equal(actual, drafted)
  if policy.startswith("survival"):
    both = replay.depths(
      recorded, replay.priced(policies.survival()), np.array([0.9, 0.45])
    )
    np.testing.assert_array_equal(both[1], drafted)


def test_a_rate_is_tokens_over_the_levels_that_any_row_wants():
  traces = traces_of([[[0.5, 0.5], [1.0, 0.0]]])
  costs = Costs(draft=0.1, verify=lambda fed: 1 + 0.01 * fed)
  actual = replay.rate(traces, np.array([[1, 2]]), costs, rows=1, width=2)
  tokens = (1.5 + 2.0) / 2
  assert actual["tokens"] == pytest.approx(tokens)
  assert actual["levels"] == actual["drafted"] == 1.5
  assert actual["tokens_per_second"] == pytest.approx(tokens / (0.15 + 1.03))
  pair = replay.rate(traces, np.array([[1, 2]]), costs, rows=2, width=2)
  assert pair["levels"] == pytest.approx(1.75)  # of two rows, 3 in 4 want two
  narrow = replay.rate(traces, np.array([[1, 2]]), costs, rows=1, width=1)
  assert narrow["drafted"] == 1
  assert narrow["tokens_per_second"] == pytest.approx(1.75 / (0.1 + 1.02))


def test_costs_are_lines_through_two_batch_sizes():
  def result(rows, scale):
    return timings.Costs(
      batch_size=rows, depth=2, step=3.5 * scale, plain_step=1.5 * scale,
      drafting=0.4 * scale, target={1: 1.0 * scale, 3: 2.0 * scale}, nodes=3,
      prefill=1.0, plain_prefill=1.0,
    )  # fmt: skip

  two_sizes = replay.machine_of([result(1, 1.0), result(3, 2.0)])
  one, two = two_sizes.costs(1), two_sizes.costs(2)
  assert one.draft == pytest.approx(0.2 + (3.5 - 2.4 - 0.5) / 2)
  assert one.verify(1) == pytest.approx(1.5)
  assert one.verify(2) == pytest.approx(2.0)
  assert one.verify(5) == pytest.approx(3.5)  # beyond what was timed
  assert two.draft == pytest.approx(1.5 * one.draft)
  with pytest.raises(ValueError, match="different batch sizes"):
    replay.machine_of([result(1, 1.0), result(1, 2.0)])
  assert two_sizes.batch_size is None


def test_one_timing_tells_of_its_own_batch_size_alone():
  timed = timings.Costs(
    batch_size=6, depth=2, step=3.5, plain_step=1.5, drafting=0.4,
    target={1: 1.0, 3: 2.0}, nodes=3, prefill=1.0, plain_prefill=1.0,
  )  # fmt: skip
  traces = traces_of(np.full((2, 30, 3), 0.9))
  actual = study.compare(traces, replay.machine_of([timed]))
  assert [one["batch_size"] for one in actual["batches"]] == [6]


def test_of_timings_that_disagree_nothing_is_predicted(tmp_path):
  record = json.loads(pathlib.Path(COSTS[0]).read_text())
  record["costs"][0]["doubts"] = ["laws took -1.00 ms of a round"]
  path = tmp_path / "e.json"
  path.write_text(json.dumps(record))
  with pytest.raises(command_line.UserError, match="disagree, measure it agai"):
    study.read_costs([str(path)], embedded.get_config())


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    ({"target": "models/pretrained/draft"}, r"another target \('models/pre"),
    ({"weights": "int8"}, r"another weights \(''\)"),
    ({"cache": "int8"}, r"another cache \(''\)"),
    ({"drafter": "ngram"}, r"another drafter \('model"),
    ({"drafter": 'model("elsewhere")'}, r"another drafter \('model"),
  ],
)
def test_costs_of_another_pair_are_refused(changes, words):
  config = embedded.get_config()
  config.update(changes)
  assert study.read_costs(COSTS, embedded.get_config())
  with pytest.raises(command_line.UserError, match=words):
    study.read_costs(COSTS, config)


def test_the_process_is_that_of_the_traces_and_its_rule_the_optimum():
  """Two kinds of tokens, told apart by the draft's confidence."""
  rng = np.random.default_rng(0)
  sure = rng.random((4, 400, 6)) < 0.5
  traces = traces_of(np.where(sure, 1.0, 0.6), np.where(sure, 0.99, 0.5))
  actual = replay.process_of(traces)
  low, high = (int(estimates.bin_of(jnp.float32(x))) for x in (0.5, 0.99))
  np.testing.assert_allclose(
    actual.acceptance[[low, high]], [0.6, 1.0], atol=1e-6
  )
  assert actual.first[low] == pytest.approx(0.5, abs=0.05)
  assert actual.following[low, high] == pytest.approx(0.5, abs=0.05)
  costs = Costs(draft=0.1, verify=1.0)
  limits, predicted = replay.optimum(actual, costs, 6)
  exact = stopping.optimum(actual, costs, 6)
  assert predicted == pytest.approx(exact.rate, rel=1e-3)
  drafted = replayed(traces, policies.table(limits))
  actual = replay.rate(traces, drafted, costs, rows=1, width=6)
  assert actual["tokens_per_second"] == pytest.approx(predicted, rel=0.03)


def test_a_head_is_replayed_with_the_hidden_states_it_reads():
  traces = dataclasses.replace(
    traces_of([[[1.0, 1.0], [1.0, 1.0]]]),
    hidden=np.array([[[[0.9], [0.9]], [[0.4], [0.9]]]], np.float32),
  )
  policy = policies.predicted(
    lambda params, token: params * token.hidden[..., 0], width=1,
    threshold=0.6,
  )  # fmt: skip
  # 1 - 0.5 x 0.9 = 0.55 is not above the threshold, and 1 - 0.5 x 0.4 is.
  assert replayed(traces, policy, params=0.5).tolist() == [[2, 1]]


def test_optimal_is_told_what_a_level_costs_a_round_of_its_width():
  """As many tokens are drafted as there is room for."""
  traces = traces_of(np.full((2, 30, 3), 0.9))
  costs = replay.Machine(
    level=(0.1, 0.0), verify={1: (1.0, 0.0), 4: (2.0, 0.0)}, rest=(0.0, 0.0)
  )
  actual = study.compare(traces, costs, batches=(1, 4))
  one, four = actual["batches"]
  assert one["draft_cost"] == pytest.approx(0.1)
  assert one["optimal"]["name"] == "optimal(cost=0.05)"
  assert four["optimal"]["name"] == "optimal(cost=0.05,rows=4)"
  assert one["optimal"]["width"] == one["optimal"]["levels"] == 3
  best = one["best_static"]["tokens_per_second"]
  assert one["optimal"]["tokens_per_second"] == pytest.approx(best)


def test_advice_names_the_policy_only_where_it_gains():
  option = lambda rate, name: {
    "tokens_per_second": rate, "name": name, "width": 4
  }  # fmt: skip
  actual = {
    "batch_size": 1, "plain": 1.0, "best_static": option(2.0, "3"),
    "confidence": option(1.9, "confidence"),
    "survival": option(2.2, "survival(threshold=0.2)"),
    "optimal": option(2.1, "optimal"), "optimum": option(2.3, "table"),
  }  # fmt: skip
  said = plots.advice({"batches": [actual]})
  assert "policy=survival(threshold=0.2)" in said
  assert "+10.0%" in said
  assert "+15.0%" in said
  none = (
    actual
    | {"survival": option(2.01, "survival(threshold=0.2)")}
    | {"optimal": option(1.0, "optimal")}
  )
  assert "draft a static 3" in plots.advice({"batches": [none]})
  assert "no depth pays" in plots.advice({"batches": [actual | {"plain": 9.0}]})


COSTS = [
  f"docs/measurements/embedded-greedy{more}.json" for more in ("", "-batch-6")
]


@pytest.fixture
def costs(pair, tmp_path):
  """The flag of these costs, as if they were of the tests' pair."""
  paths = []
  for number, path in enumerate(COSTS):
    record = json.loads(pathlib.Path(path).read_text())
    record["config"]["target"] = pair[0]
    record["config"]["checkpoints"] = {"draft": pair[1]}
    paths.append(tmp_path / f"{number}.json")
    paths[-1].write_text(json.dumps(record))
  return "--timings=" + ",".join(map(str, paths))


def test_the_command_writes_numbers_a_page_and_a_figure(cli, tmp_path, costs):
  prompts = tmp_path / "p.jsonl"
  prompts.write_text(
    '{"id": 0, "prompt": "import os"}\n{"id": 1, "prompt": "def f("}\n'
  )
  code = cli(
    study.run, "--config.max_new_tokens=16",
    "--config.batch_size=2", "--most_tokens=3", f"--prompts={prompts}",
    costs, f"--workdir={tmp_path / 'w'}",
  )  # fmt: skip
  assert code == 0
  record = json.loads((tmp_path / "w" / "depth.json").read_text())
  assert [one["batch_size"] for one in record["batches"]] == [1, 2, 4, 8, 16]
  for one in record["batches"]:
    assert set(one["static"]) == {"0", "1", "2", "3"}
    assert one["best_static"]["tokens_per_second"] == max(
      one["static"].values()
    )
  assert plots.page(record) == (tmp_path / "w" / "depth.md").read_text()
  assert "<svg" in (tmp_path / "w" / "depth.svg").read_text()


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ((), "--timings is required"),
    (
      ("--config.drafter=model(tree=paths(2))", "--config.rule=recursive"),
      "for chains",
    ),
    (("--timings=no.json",), "--timings: no.json is not"),
    (("--timings=pyproject.toml",), "--timings: pyproject.toml is not"),
    (("--timings=docs/plans/8b-v5e-8.json",), "what launch.evaluate writes"),
  ],
)
def test_what_cannot_be_studied_is_said_in_one_line(
  cli, capsys, tmp_path, costs, flags, message
):
  timed = (costs,) if flags and flags[0].startswith("--config") else ()
  assert cli(study.run, f"--workdir={tmp_path / 'w'}", *timed, *flags) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.count("\n") == 1
