r"""Finds the static tree with the most tokens per round by measured acceptance.

  python -m launch.tools.best_tree --config=configs/embedded.py \
    --config.drafter='eagle3(tree=k_ary(4, 4), siblings=without_replacement)' \
    --config.temperature=1 --config.rule=recursive --prompts=IN.jsonl \
    --output=T.json

It decodes the prompts with the drafter's tree, where all nodes above the last
level have the same number of children, under the config's rule and siblings (at
temperature 0 `--config.rule=match` and `siblings=top_k`), and counts how often
the walk continues to the child of each rank. It then prints the best trees of 1
to --max_nodes drafted nodes with their tokens per round (Sequoia, Chen et al.,
NeurIPS 2024). This assumes that acceptance by rank does not depend on depth, so
deep trees look too good for drafts whose later tokens are accepted less often.
`launch.evaluate` measures which size is fastest on a device. The last line on
stdout is the `tree` argument of the largest tree.
"""

import jax
import ml_collections
import numpy as np
from absl import flags

from launch import cli, prompts, provenance, results
from launch.assembly import pair, registry
from launch.prompts import Prompt
from specjax import tree_search
from specjax.runtime.requests import make_batches
from specjax.state import Counters
from specjax.tree import Form

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_MAX_NODES = flags.DEFINE_integer(
  "max_nodes", 15, "Maximum drafted nodes of a tree.", lower_bound=1
)


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


def trees(acceptance: np.ndarray, *, max_nodes: int) -> list[dict]:
  """The best tree of each size up to `max_nodes`, as far as accepted ranks go.

  `acceptance` is `f64[C]`, by rank; `block_efficiency` is tokens per round.
  """
  rows = []
  for size in range(1, max_nodes + 1):
    tree = tree_search.best_tree(acceptance, num_nodes=size, max_depth=size)
    if tree.num_drafted < size:
      break
    tokens = 1 + tree_search.expected_accepted(tree, acceptance)
    rows.append(
      {
        "num_nodes": size,
        "max_depth": tree.max_depth,
        "parents": list(tree.parents),
        "block_efficiency": tokens,
      }
    )
  return rows


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  config = cli.CONFIG.value
  drafting = registry.of(config)
  if drafting.lengths or drafting.learning:
    raise cli.UserError("give the draft alone, without ladder or online")
  tree, counts = drafting.tree, {*map(len, drafting.tree.children)} - {0}
  if tree.form is not Form.FIXED or len(counts) != 1 or counts == {1}:
    raise cli.UserError(
      "every inner node needs the same number of children, two or more, as in "
      f"tree=k_ary(4, 4), got {config.drafter!r}"
    )
  built = pair.assemble(config, pair.load(config, inputs=True))
  items = prompts.all_of(
    cli.PROMPTS.value,
    built.tokenizer,
    max_tokens=built.room(config.max_new_tokens),
    encoder=built.encoder,
  )
  counts = counted(config, built, items)
  acceptance = tree_search.acceptance_by_rank(counts)
  rows = trees(acceptance, max_nodes=_MAX_NODES.value)
  results.write_json(
    cli.OUTPUT.value,
    {
      "acceptance_by_rank": acceptance.tolist(),
      "offered": counts.rank_offered.sum(axis=0).tolist(),
      "trees": rows,
      **provenance.record(config),
    },
  )
  if cli.OUTPUT.value != results.STDOUT:
    shown = ", ".join(f"{a:.3f}" for a in acceptance)
    print(f"accepted by rank, at depths 1 to {tree.max_depth}: {shown}")
    for row in rows:
      print(f"{row['num_nodes']} nodes: {row['block_efficiency']:.2f} tokens")
    best = rows[-1]["parents"] if rows else []
    print(f"tree=({', '.join(map(str, best))})" if best else "plain")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
