r"""The static tree that pays most, from acceptance by rank as it is measured.

  python -m launch.tools.best_tree --config=configs/embedded.py \
    --config.drafter='eagle3(siblings=without_replacement)' \
    --config.temperature=1 --config.rule=recursive --prompts=IN.jsonl \
    [--timings=E.json] --output=T.json

The prompts are decoded with a tree in which every node above the last level has
--children of them, by the rule and with the siblings that the config says (at
temperature 0 `--config.rule=match` and `siblings=top_k`), and it is counted
how often the walk went on to the child of each rank. The best trees of 1 to
--max_nodes drafted nodes follow, and their tokens a round (Sequoia, Chen et
al., NeurIPS 2024), which supposes that a rank is as good at every place: of a
draft whose later tokens are accepted less often deep trees are thought too
good.

--timings is what `launch.evaluate --timing=passes` wrote of the same pair and
batch size: seconds of a target pass over 1 to 16 tokens, and of a level of the
draft (a wide level is taken to cost what those do that were measured there).
Then the depth of each tree is the one with the least time for a token, and
speed-ups over plain decoding are predicted. The last line on stdout is the
argument of a drafter that drafts the best of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags

from launch import cli, prompts, provenance, results
from launch.assembly import pair, registry
from launch.assembly.drafting import Drafting
from launch.evaluation import costs as timings
from launch.prompts import Prompt
from specjax import tree as tree_lib
from specjax import tree_search
from specjax.runtime.requests import make_batches
from specjax.state import Counters
from specjax.tree import Tree

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.TIMINGS)
_CHILDREN = flags.DEFINE_integer(
  "children", 4, "Children of a node that are tried.", lower_bound=1
)
_LEVELS = flags.DEFINE_integer(
  "levels", 2, "Levels of the tree that they are tried in.", lower_bound=1
)
_MAX_NODES = flags.DEFINE_integer(
  "max_nodes", 15, "Drafted nodes of a tree at most.", lower_bound=1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeCosts:
  """Seconds of a round by its tree.

  Attributes:
    plain: of a round that drafts nothing.
    level: of one level of the draft, with what a round does for it beside
      passes.
    fed: of a round without levels, by the number of tokens that the target is
      fed.
  """

  plain: float
  level: float
  fed: dict[int, float]

  def of(self, tree: Tree) -> float:
    """Seconds of a round with a tree."""
    widths = sorted(self.fed)
    rest = np.interp(tree.num_fed, widths, [self.fed[w] for w in widths])
    return tree.max_depth * self.level + float(rest)


def read_costs(
  paths: Sequence[str], asked: ml_collections.ConfigDict
) -> TreeCosts:
  """TreeCosts that `launch.evaluate` measured of the config's drafter.

  Args:
    paths: of the files.
    asked: the config of the pair that the costs are to be of.

  Raises:
    UserError: if a file has no costs of a draft, or they are of another pair,
      batch size or mesh.
  """
  timed = [
    one for path in paths for _, one in timings.read(path, "--timings", asked)
  ]
  fitting = [one for one in timed if one.batch_size == asked.batch_size]
  if not fitting:
    other = {"batch_size": timed[-1].batch_size}
    raise timings.no_costs("--timings", ", ".join(paths), other)
  # Passes of many widths are timed with one system of a run.
  one = max(fitting, key=lambda one: len(one.target))
  return TreeCosts(
    plain=one.plain_step,
    level=one.level,
    fed={n: seconds + one.rest for n, seconds in one.target.items()},
  )


def wide(drafting: Drafting, *, children: int, levels: int) -> Drafting:
  """The same with the tree in which ranks are counted."""
  tree = tree_lib.k_ary(*[children] * levels)
  ended = {"policy": None} if drafting.takes_policy else {}
  return drafting.of_form(tree=tree, **ended)


def counted(
  config: ml_collections.ConfigDict, built: pair.Pair, items: list[Prompt]
) -> Counters:
  """Counters of the prompts' rows by rank: `rank_offered` and so on."""
  decoding = pair.engine_of(config, built)
  room = built.room(config.max_new_tokens)
  ended = []
  for batch in make_batches(
    items, batch_size=config.batch_size, max_width=room
  ):
    decoding.compile(batch)
    state = decoding.generate(batch, decoding.prefill(batch))
    ended.append(jax.device_get(state.counters))
  return jax.tree.map(lambda *rows: np.concatenate(rows), *ended)


def trees(
  acceptance: np.ndarray, *, max_nodes: int, costs: TreeCosts | None
) -> list[dict[str, Any]]:
  """The best tree of each size.

  Args:
    acceptance: `f64[C]`, by rank.
    max_nodes: drafted nodes at most.
    costs: of a round, or None.

  Returns:
    For each size that there is, from plain decoding on, `num_nodes`,
    `max_depth`, `parents`, `block_efficiency` and, with costs,
    `predicted_speedup`: then the tree is the fastest of its size, of any depth.
  """
  rows = [_row(Tree(), acceptance, costs)]
  for size in range(1, max_nodes + 1):
    made = [
      tree_search.best_tree(acceptance, num_nodes=size, max_depth=depth)
      for depth in (range(1, size + 1) if costs else [size])
    ]
    # Few levels have no room for many nodes, and ranks that were never
    # accepted have no place in any tree.
    whole = [t for t in made if t.num_drafted == size]
    if not whole:
      break
    rows.append(max((_row(t, acceptance, costs) for t in whole), key=_gain))
  return rows


def _gain(row: dict[str, Any]) -> float:
  """The quantity that the best tree maximises."""
  return row.get("predicted_speedup", row["block_efficiency"])


def _row(tree: Tree, acceptance: np.ndarray, costs: TreeCosts | None) -> dict:
  """A tree's row of the table."""
  tokens = 1 + tree_search.expected_accepted(tree, acceptance)
  row = {
    "num_nodes": tree.num_drafted,
    "max_depth": tree.max_depth,
    "parents": list(tree.parents),
    "block_efficiency": tokens,
  }
  if costs:
    plain = not tree.num_drafted
    seconds = costs.plain if plain else costs.of(tree)
    row["predicted_speedup"] = tokens * costs.plain / seconds
  return row


def run(_) -> int:
  """The command."""
  paths = cli.TIMINGS.value or []
  results.check(
    {"--output": cli.OUTPUT.value},
    stdout=True,
    inputs={f"--timings {i}": path for i, path in enumerate(paths)},
  )
  config = cli.CONFIG.value
  drafting = wide(
    registry.of(config), children=_CHILDREN.value, levels=_LEVELS.value
  )
  costs = read_costs(paths, config) if paths else None
  if costs and _MAX_NODES.value + 1 > max(costs.fed):
    raise cli.UserError(
      f"--timings has passes over {max(costs.fed)} tokens at most, and "
      f"--max_nodes={_MAX_NODES.value} asks for {_MAX_NODES.value + 1}"
    )
  models = pair.load(config, drafting=drafting, inputs=True)
  built = pair.assemble(config, models, drafting=drafting)
  items = prompts.all_of(
    cli.PROMPTS.value,
    built.tokenizer,
    max_tokens=built.room(config.max_new_tokens),
    encoder=built.encoder,
  )
  counts = counted(config, built, items)
  acceptance = tree_search.acceptance_by_rank(counts)
  rows = trees(acceptance, max_nodes=_MAX_NODES.value, costs=costs)
  best = max(rows, key=_gain)
  results.write_json(
    cli.OUTPUT.value,
    {
      "acceptance_by_rank": acceptance.tolist(),
      "offered": counts.rank_offered.sum(axis=0).tolist(),
      "trees": rows,
      "best": best,
      "costs": costs and dataclasses.asdict(costs),
      **provenance.of_config(config, texts=[item.text for item in items]),
    },
  )
  if cli.OUTPUT.value != results.STDOUT:
    print(_said(acceptance, rows, best))
  return 0


def _said(acceptance: np.ndarray, rows: list[dict], best: dict) -> str:
  """The answer in words, the flag in the last line."""
  lines = [
    "accepted by rank: " + ", ".join(f"{a:.3f}" for a in acceptance),
    "nodes  depth  tokens a round"
    + "  speed-up" * ("predicted_speedup" in best),
  ]
  for row in rows:
    line = (
      f"{row['num_nodes']:5d}  {row['max_depth']:5d}  "
      f"{row['block_efficiency']:14.2f}"
    )
    if "predicted_speedup" in row:
      line += f"  {row['predicted_speedup']:8.2f}"
    lines.append(line)
  if not best["num_nodes"]:
    return "\n".join([*lines, "plain"])
  return "\n".join([*lines, f"tree=({', '.join(map(str, best['parents']))})"])


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
