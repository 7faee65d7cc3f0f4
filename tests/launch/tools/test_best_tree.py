"""launch.tools.best_tree: static trees by measured acceptance."""

import json

import files
import numpy as np
import pytest
from commands import execute

from launch.tools import best_tree
from specjax import tree_search


def test_best_trees_of_a_measured_pair_are_written_and_printed(
  tmp_path, capsys
):
  files.write_jsonl(
    tmp_path / "in.jsonl", [{"prompt": "import os\n"}, {"prompt": "def f("}]
  )
  output = tmp_path / "tree.json"
  assert execute(
    best_tree.run, "--config=configs/embedded.py",
    "--config.max_new_tokens=12", "--config.batch_size=4",
    f"--prompts={tmp_path / 'in.jsonl'}", f"--output={output}",
    "--max_nodes=6",
    "--config.temperature=1", "--config.rule=recursive",
    "--config.drafter=model(tree=k_ary(3, 3), siblings=without_replacement)",
  ) == 0  # fmt: skip
  record = json.loads(output.read_text())
  acceptance = np.array(record["acceptance_by_rank"])
  assert acceptance.shape == (3,)
  assert 0.2 < acceptance[0] < 1
  assert acceptance.sum() <= 1
  # A second child is offered wherever a first one is.
  assert record["offered"][0] == pytest.approx(record["offered"][2])
  best = tree_search.best_tree(acceptance, num_nodes=6, max_depth=6)
  assert record["trees"][-1]["parents"] == list(best.parents)
  last = capsys.readouterr().out.splitlines()[-1]
  assert last == f"tree={best.parents}"


def test_block_efficiency_grows_by_the_best_remaining_node():
  rows = best_tree.trees(np.array([0.6, 0.2]), max_nodes=4)
  assert [row["num_nodes"] for row in rows] == [1, 2, 3, 4]
  tokens = [1, *(row["block_efficiency"] for row in rows)]
  # 0.6, then 0.36 below it, then 0.216, then the root's second child, 0.2.
  np.testing.assert_allclose(np.diff(tokens), [0.6, 0.36, 0.216, 0.2])
