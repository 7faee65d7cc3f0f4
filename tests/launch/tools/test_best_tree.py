"""launch.tools.best_tree: the tree that pays most, as it is measured."""

import json

import files
import ml_collections
import numpy as np
import pytest
from absl.testing import flagsaver

from configs import embedded
from launch import cli
from launch.tools import best_tree
from specjax import tree_search
from specjax.tree import Tree

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ROUND = {
  "system": "model(tokens=3)", "batch_size": 4, "depth": 3, "doubts": [],
  "draft_cost": 0.6,
  "seconds": {
    "step": 2.1, "plain_step": 1.0, "nodes": 4, "prefill": 1.0,
    "plain_prefill": 1.0,
    "target": {"1": 0.9, "4": 1.3, "8": 1.6, "16": 2.4},
  },
}  # fmt: skip


def costs_of(*records):
  """A result with these costs."""
  config = {
    "target": "models/pretrained/target", "dtype": "float32", "batch_size": 1,
    "mesh": "", "checkpoints": embedded.get_config().checkpoints.to_dict(),
  }  # fmt: skip
  return {"config": config, "costs": list(records)}


FEW = ROUND["seconds"] | {"target": {"1": 0.9, "4": 1.3}}
COSTS = costs_of(ROUND | {"batch_size": 1}, ROUND | {"seconds": FEW}, ROUND)


def execute(*args, code=0):
  with flagsaver.flagsaver():
    arguments = [
      "test", "--config=configs/embedded.py", "--overwrite",
      "--config.max_new_tokens=12", "--config.batch_size=4", *args,
    ]  # fmt: skip
    assert cli.execute(best_tree.run, arguments) == code


def test_a_measured_pair_gets_its_best_tree_and_the_flag_for_it(
  tmp_path, capsys
):
  files.write_jsonl(
    tmp_path / "in.jsonl", [{"prompt": "import os\n"}, {"prompt": "def f("}]
  )
  costs, output = tmp_path / "costs.json", tmp_path / "tree.json"
  costs.write_text(json.dumps(COSTS))
  execute(
    f"--prompts={tmp_path / 'in.jsonl'}", f"--output={output}",
    "--children=3", "--max_nodes=6", f"--timings={costs}",
    "--config.temperature=1", "--config.rule=recursive",
    "--config.drafter=model(siblings=without_replacement)",
  )  # fmt: skip
  record = json.loads(output.read_text())
  acceptance = np.array(record["acceptance_by_rank"])
  assert acceptance.shape == (3,)
  assert 0.2 < acceptance[0] < 1
  assert acceptance.sum() <= 1
  # A second child is offered wherever a first one is.
  assert record["offered"][0] == pytest.approx(record["offered"][2])
  assert [row["num_nodes"] for row in record["trees"]] == list(range(7))
  assert record["trees"][0]["predicted_speedup"] == 1

  def rate(tree):
    fed = np.interp(tree.num_nodes, [1, 4, 8], [0.9, 1.3, 1.6])
    tokens = 1 + tree_search.expected_accepted(tree, acceptance)
    return tokens / (tree.max_depth * 0.7 / 3 + fed + 0.1)

  every = [
    tree_search.best_tree(acceptance, num_nodes=size, max_depth=depth)
    for size in range(1, 7)
    for depth in range(1, size + 1)
  ]
  fastest = max([Tree(), *every], key=rate)
  best = record["best"]
  assert best["parents"] == list(fastest.parents)
  assert best["block_efficiency"] == pytest.approx(
    1 + tree_search.expected_accepted(fastest, acceptance)
  )
  last = capsys.readouterr().out.splitlines()[-1]
  assert last == f"tree={fastest.parents}"


def test_without_costs_every_node_is_worth_having():
  rows = best_tree.trees(np.array([0.6, 0.2]), max_nodes=4, costs=None)
  assert [row["num_nodes"] for row in rows] == [0, 1, 2, 3, 4]
  tokens = [row["block_efficiency"] for row in rows]
  # 0.6, then 0.36 below it, then 0.216, then the root's second child, 0.2.
  np.testing.assert_allclose(np.diff(tokens), [0.6, 0.36, 0.216, 0.2])
  assert "predicted_speedup" not in rows[0]


def test_where_nothing_was_accepted_plain_decoding_is_all_there_is():
  rows = best_tree.trees(np.array([0.0, 0.0]), max_nodes=3, costs=None)
  assert [row["num_nodes"] for row in rows] == [0]


def test_a_tree_of_a_size_has_that_size_though_a_smaller_one_is_faster():
  """Two children are all that one level has: a third node is on another."""
  costs = best_tree.TreeCosts(plain=1.0, level=5.0, fed={1: 1.0, 4: 1.0})
  rows = best_tree.trees(np.array([0.6, 0.2]), max_nodes=3, costs=costs)
  assert [row["num_nodes"] for row in rows] == [0, 1, 2, 3]
  assert [row["max_depth"] for row in rows] == [0, 1, 1, 2]


def test_a_round_takes_its_levels_its_pass_and_what_plain_decoding_takes_too(
  tmp_path,
):
  (tmp_path / "costs.json").write_text(json.dumps(COSTS))
  asked = COSTS["config"] | {"batch_size": 4, "drafter": "model(tokens=2)"}
  costs = best_tree.read_costs(
    [str(tmp_path / "costs.json")], ml_collections.ConfigDict(asked)
  )
  assert costs.of(Tree((-1, 0, 1, 2))) == pytest.approx(2.1)
  # Two levels, and a pass over six tokens, halfway between four and eight. Of
  # the 0.2 beside passes plain decoding has 0.1, and three levels the rest.
  assert costs.of(Tree((-1, 0, 0, 0, 1, 1))) == pytest.approx(
    2 * (0.6 + 0.1) / 3 + 1.45 + 0.1
  )
  dear = best_tree.TreeCosts(plain=1.0, level=5.0, fed=costs.fed)
  rows = best_tree.trees(np.array([0.6, 0.2]), max_nodes=3, costs=dear)
  assert max(rows, key=lambda row: row["predicted_speedup"]) == rows[0]


@pytest.mark.parametrize(
  ("content", "args", "message"),
  [
    ("{}", [], "is not what launch.evaluate writes of a draft: KeyError"),
    ("[", [], "is not what launch.evaluate writes"),
    (json.dumps(COSTS), ["--max_nodes=16"], "asks for 17"),
    (
      json.dumps(costs_of(ROUND | {"draft_cost": None})),
      [],
      "is not what launch.evaluate writes of a draft: TypeError",
    ),
    (json.dumps(COSTS), ["--config.batch_size=2"], "another batch_size (4)"),
    (json.dumps(COSTS), ["--config.drafter=medusa"], "another drafter ('mod"),
    (
      json.dumps(costs_of(ROUND | {"doubts": ["laws took -1 ms"]})),
      [],
      "disagree, measure it again: laws took -1 ms",
    ),
  ],
)
def test_costs_that_cannot_be_used_are_one_line(
  content, args, message, tmp_path, capsys
):
  (tmp_path / "costs.json").write_text(content)
  execute(
    f"--timings={tmp_path / 'costs.json'}", f"--output={tmp_path / 'o.json'}",
    *args, code=2,
  )  # fmt: skip
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
