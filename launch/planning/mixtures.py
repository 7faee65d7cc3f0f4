"""Plans of mixtures: where drafting pays, by batch, length and acceptance.

A pass over more tokens reads more experts, so drafting may pay at one batch
size, not at the next, and again at a larger one. Chains alone are looked at.
"""

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import rich.box
import rich.table

from models.networks import mixture
from models.networks.description import TransformerConfig
from models.networks.transformer import mixtures_of
from specjax.theory import experts, throughput

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
_GRID = np.arange(101) / 100


def answer(q, costs: Callable[[int], tuple[np.ndarray, np.ndarray]]):
  """Batch sizes, acceptances and draft lengths at which drafting pays.

  Args:
    q: the `launch.planning.program.Question`.
    costs: `batch_size -> seconds f64[n] of drafting 0, 1, .. tokens, and of
      passes over 1, 2, .. tokens a row`.

  Returns:
    Sizes of the mixture, how it is cut, and for each batch size: experts a
    layer that a plain pass reads on all devices (`experts`) and on the busiest
    (`experts_busiest`); the least acceptance at which some length pays
    (`pays_from`, in hundredths) and that length (`pays_with`), None where none
    does; and for each acceptance the best length, its speed-up and the lengths
    that pay, as `[first, last]`. None for a model without experts.
  """
  if not isinstance(q.target, TransformerConfig):
    return None
  if not (blocks := mixtures_of(q.target)):
    return None
  block, size = blocks[0], q.layout.model
  cut = mixture.cut_by(block, size)
  sizes = block.num_experts, block.num_chosen
  rows = []
  for batch_size in (q.layout.data * 2**i for i in range(9)):
    tokens = batch_size // q.layout.data
    touched = (
      experts.expected_distinct(tokens, *sizes)
      if q.distinct is None
      else np.asarray(q.distinct(tokens))
    )
    most = (
      experts.busiest(touched, block.num_experts, size)
      if cut == "expert"
      else touched  # a share of each
    )
    rows.append(
      {
        "batch_size": batch_size,
        "experts": float(touched),
        "experts_busiest": float(most),
        **_of_batch(*costs(batch_size)),
      }
    )
  return {
    "num_experts": block.num_experts,
    "num_chosen": block.num_chosen,
    "layers": len(blocks),
    "cut_by": cut,
    "devices": size,
    "routing": "uniform" if q.distinct is None else "measured",
    "by_batch_size": rows,
  }


def _of_batch(drafting: np.ndarray, verify: np.ndarray) -> dict:
  """The lengths that pay at one batch size, from seconds as of `answer`."""
  counts = np.arange(min(len(drafting), len(verify)))
  seconds = drafting[counts] + verify[counts]
  gain = lambda p: (
    throughput.tokens_per_cycle(counts, p) * (verify[0] / seconds)
  )
  gains = np.array([gain(p) for p in _GRID])[:, 1:]  # [P, N - 1]
  pays = np.flatnonzero((gains > 1).any(axis=1))
  first = pays[0] if len(pays) else None
  return {
    "pays_from": None if first is None else float(_GRID[first]),
    "pays_with": None if first is None else int(gains[first].argmax()) + 1,
    "at": [
      {
        "acceptance": p,
        "best": int(np.argmax(gain(p))),
        "speedup": float(np.max(gain(p))),
        "lengths": ranges(counts[gain(p) > 1]),
      }
      for p in ACCEPTANCES
    ],
  }


def ranges(numbers: Sequence[int] | np.ndarray) -> list[list[int]]:
  """Rising integers as `[first, last]` of each run without a gap."""
  runs: list[list[int]] = []
  for n in map(int, numbers):
    if runs and runs[-1][1] == n - 1:
      runs[-1][1] = n
    else:
      runs.append([n, n])
  return runs


def measured(result: Mapping, target) -> experts.Measured:
  """The curve of an evaluation that counted experts, the mean over layers.

  Of numbers of tokens that are the same to a tenth the mean counts.

  Args:
    result: what `launch.evaluate --count_experts` wrote.
    target: the configuration of the model that is planned.

  Raises:
    ValueError: for a result without counts, or of another mixture.
  """
  counts = collections.defaultdict(list)
  for row in result.get("runs", ()):
    if row["level"] == "all" and row.get("experts_by_layer"):
      mean = float(np.mean(row["experts_by_layer"]))
      counts[round(row["pass_tokens"], 1)].append(mean)
  if not counts:
    raise ValueError(
      "no experts were counted: launch.evaluate counts with --count_experts"
    )
  blocks = mixtures_of(target) if isinstance(target, TransformerConfig) else ()
  mine = {(block.num_experts, block.num_chosen) for block in blocks}
  facts = result["experts"]
  theirs = {*zip(facts["num_experts"], facts["num_chosen"], strict=True)}
  if len(mine) != 1 or mine != theirs:
    raise ValueError(
      f"experts were counted of layers with (all, chosen) {sorted(theirs)}, "
      f"and the target's have {sorted(mine)}"
    )
  ((num_experts, num_chosen),) = mine
  tokens = sorted(counts)
  # More tokens touch no fewer: what falls is noise.
  rising = np.maximum.accumulate([np.mean(counts[t]) for t in tokens])
  return experts.Measured(
    tokens=tuple(tokens),
    distinct=tuple(rising.tolist()),
    num_experts=num_experts,
    num_chosen=num_chosen,
  )


HEAD = [
  "rows", "experts of a plain pass", "on the busiest device", "pays from P (N)",
  *(f"best N at P = {p:g}" for p in ACCEPTANCES),
]  # fmt: skip


def cells(row: dict) -> list[str]:
  """A batch size's line of the table, under `HEAD`."""
  start = row["pays_from"]
  return [
    f"{row['batch_size']}",
    f"{row['experts']:.1f}",
    f"{row['experts_busiest']:.1f}",
    "never" if start is None else f"{start:.2f} ({row['pays_with']})",
    *(
      f"{one['best']} ({one['speedup']:.2f}x)" if one["best"] else "none"
      for one in row["at"]
    ),
  ]


def table(answered: dict) -> rich.table.Table:
  """The table of `answer`, for a console."""
  shown = rich.table.Table(
    box=rich.box.SIMPLE,
    title=f"where drafting pays: {answered['num_chosen']} of "
    f"{answered['num_experts']} experts a token, cut by {answered['cut_by']}, "
    f"{answered['routing']} routing",
  )
  for name in HEAD:
    shown.add_column(name, justify="right")
  for row in answered["by_batch_size"]:
    shown.add_row(*cells(row))
  return shown
