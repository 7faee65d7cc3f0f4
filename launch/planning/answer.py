"""Makes a plan: memory, collectives and the expected speed-up."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Iterator

import numpy as np
import rich.box
import rich.console
import rich.table
from scipy import optimize

from launch.hardware import GIB, Chip, Topology, devices
from launch.planning import heads, networks, program
from launch.planning.networks import Pass
from launch.planning.program import Compiled, Question
from specjax import tree_search
from specjax.theory import throughput
from specjax.tree import Form, Tree, chain

_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_MOST = 32  # tokens of the widest target pass
_SETTINGS = (
  "drafter", "siblings", "rule", "batch_size", "max_length", "prompt_length",
  "input_length",
)  # fmt: skip


def plan(topology: Topology, question: Question) -> dict:
  """Compiles a question's programs for a slice; returns the plan's JSON."""
  chip, places = topology.chip, devices(topology)  # refuses without libtpu
  plan = {
    "topology": topology.name,
    "accelerator_type": topology.accelerator_type,
    "settings": {name: getattr(question, name) for name in _SETTINGS}
    | {
      "mesh": dataclasses.asdict(question.layout),
      "parents": list(question.tree.parents),
      "num_speculative_tokens": question.tree.max_depth,
    },
    "libtpu": importlib.metadata.version("libtpu"),
  }
  try:
    compiled = program.compile_for(question, places)
  except MemoryError as error:
    return plan | {"fits": False, "compiler": str(error)}
  return plan | {
    "fits": True,
    "per_device_bytes": {
      "arguments": compiled.arguments,
      "temporaries": compiled.temporaries,
      "peak": compiled.peak,
      "hbm": chip.hbm_bytes,
    },
    "collectives": _collectives(question, compiled),
    "cache_copies": compiled.cache_copies,
    "buffers_reused": compiled.buffers_reused,
    "roofline": predict(chip, question),
  }


def _collectives(q: Question, compiled: Compiled) -> list[dict]:
  """Collectives of a round by phase; for drafting, the mean over its passes."""
  passes = {"draft pass": max(len(program.make_drafter(q).passes), 1)}
  return [
    {
      "phase": phase, "kind": kind, "count": x["count"] / passes.get(phase, 1),
      "MB": x["bytes"] / 1e6 / passes.get(phase, 1),
    }
    for phase, kinds in compiled.collectives.items()
    for kind, x in kinds.items()
  ]  # fmt: skip


def passes(q: Question) -> tuple[list[Pass], list[Pass]]:
  """A round's draft passes, and target passes over 1 to at least 32 tokens."""
  drafter = program.make_drafter(q)
  work = functools.partial(
    networks.work, slots=q.slots, input_length=q.input_length
  )
  forward = functools.partial(networks.forward, rows=q.rows)
  stored = dict(weights=q.weights, cache=q.cache)
  draft = target = work(q.cut_target(), **stored)
  size = q.layout.model
  widths = range(1, max(_MOST, q.tree.num_nodes) + 1)
  verify = [forward(target, n, size=size) for n in widths]
  if q.head is not None:
    drafting = heads.passes(
      q.head, drafter, size=q.layout.draft, rows=q.rows, slots=q.slots
    )
    return drafting, verify
  if q.draft is not None:
    draft = work(q.cut_draft(), weights=q.draft_weights)
    size = q.layout.draft
  elif q.skipped:
    draft = work(q.cut_target(), skipped=q.skipped, **stored)
  text = q.max_length + q.tree.max_depth + 1
  each = drafter.tokens_of_passes(text)
  return [forward(draft, n, size=size) for n in each], verify


def _described(name: str, chip: Chip, one: Pass) -> dict[str, str | float]:
  """Bytes, operations and time of a pass."""
  alone = one.causes(chip)
  return {
    "pass": name,
    "bound by": max(alone, key=lambda cause: alone[cause]),
    "memory MB": one.hbm_bytes / 1e6,
    "memory ms": 1e3 * alone["memory"],
    "GFLOP": one.flops / 1e9,
    "compute ms": 1e3 * alone["arithmetic"],
    "sent MB": one.ici_bytes / 1e6,
    "send ms": 1e3 * alone["collectives"],
    "total ms": 1e3 * one.seconds(chip),
  }


def tokens_per_round(tree: Tree, acceptance: float) -> float:
  """Tokens of a round if every child tried has the same acceptance.

  A dynamic tree counts as the best static one of its size and depth.
  """
  if not tree.num_drafted:
    return 1.0
  by_rank = [
    acceptance * (1 - acceptance) ** r for r in range(tree.max_children)
  ]
  if tree.form is Form.FREE:
    tree = tree_search.best_tree(
      by_rank, num_nodes=tree.num_drafted, max_depth=tree.max_depth
    )
  return throughput.tree_tokens(tree, by_rank)


def predict(chip: Chip, q: Question) -> dict:
  """Predicts the times of passes from the roofline, and speed-ups.

  "verify_seconds" is for passes over 1, 2, .. tokens per row; "cost_ratio" is a
  draft pass in target passes; drafting pays above "break_even_acceptance"
  (None: never).
  """
  of_draft, of_target = passes(q)
  verify = [one.seconds(chip) for one in of_target]
  seconds = [one.seconds(chip) for one in of_draft] or [0.0]
  whole, drafts = q.tree.num_nodes - 1, q.tree.num_drafted > 0
  named = {"plain": of_target[0]}
  if of_draft:
    named["draft pass"] = networks.mean(of_draft)
  if drafts:
    named["verify"] = of_target[whole]
  cost = (sum(seconds) + verify[whole]) / verify[0]  # of a round
  speedup = lambda p: float(tokens_per_round(q.tree, p) / cost)
  plain, even = q.batch_size / verify[0], None
  if drafts and speedup(1.0) >= 1:  # at acceptance 0 drafting never pays
    even = float(optimize.brentq(lambda p: speedup(p) - 1, 0.0, 1.0))
  mean = float(np.mean(seconds))
  widths = {"plain": 1, "verify": q.tree.num_nodes}
  return {
    "passes": [_described(name, chip, one) for name, one in named.items()],
    "draft_pass_seconds": mean,
    "verify_seconds": verify,
    "experts": [  # that passes read in a layer of each kind of mixture
      {"experts": block.num_experts, "chosen": block.num_chosen}
      | {k: networks.touched(block, q.rows * n) for k, n in widths.items()}
      for block, _ in networks.work(q.cut_target(), slots=q.slots).mixtures
    ],
    "cost_ratio": mean / verify[0],
    "break_even_acceptance": even,
    "plain_tokens_per_second": plain,
    "by_acceptance": [
      {"acceptance": p, "tokens/s": plain * speedup(p), "speed-up": speedup(p)}
      | best
      for p, best in (_best_chains(chip, q) if drafts else ())
    ],
  }


def _best_chains(chip: Chip, q: Question) -> Iterator[tuple[float, dict]]:
  """The best draft length, 0 if none pays, for several acceptances."""
  of_draft, of_target = passes(
    dataclasses.replace(q, tree=chain(q.tree.max_depth), siblings="iid")
  )
  verify = np.array([one.seconds(chip) for one in of_target])
  drafting = [one.seconds(chip) for one in of_draft] or [0.0]
  counts = np.arange(_MOST)
  costs = np.mean(drafting) * counts
  head = q.head and q.head.config
  if head and (head.num_predicted or head.kind == "p_eagle"):
    # One pass drafts all tokens: only verification costs more for more tokens.
    counts = counts[: (head.num_predicted or _MOST) + 1]
    costs = sum(drafting) * (counts > 0)
  for p in _ACCEPTANCES:
    tokens = throughput.tokens_per_cycle(counts, p)
    speedups = tokens * verify[0] / (costs + verify[counts])
    best = int(np.argmax(speedups))
    yield p, {"best draft length": best, "its speed-up": float(speedups[best])}


def show(console: rich.console.Console, plan: dict) -> None:
  """Prints a plan: whether it fits, and tables of its figures."""
  if not plan["fits"]:
    line = f"does not fit {plan['topology']}: {plan['compiler']}"
    console.print(line, soft_wrap=True)
    return
  size, s, line = plan["per_device_bytes"], plan["settings"], plan["roofline"]
  gib = lambda name: f"{size[name] / GIB:.2f} GiB"
  even = line["break_even_acceptance"]
  rows = {
    "slice": f"{plan['topology']} ({plan['accelerator_type']})",
    "mesh": ", ".join(f"{axis} {n}" for axis, n in s["mesh"].items()),
    "drafter": f"{s['drafter']}, {len(s['parents']) - 1} tokens a round, "
    f"verified by {s['rule']}",
    "weights, caches, state": gib("arguments"),
    "temporaries": gib("temporaries"),
    "cache buffers": "reused" if plan["buffers_reused"] else "NOT reused",
    "copies of a whole cache": f"{plan['cache_copies']} a round",
    "predicted plain decoding": f"{line['plain_tokens_per_second']:,.0f} "
    "tokens/s",
  }
  if line["by_acceptance"]:
    cost, never = line["cost_ratio"], "none: drafting never pays"
    rows |= {
      "predicted cost of a draft pass (c)": f"{cost:.3f} target passes",
      "predicted break-even acceptance": never
      if even is None
      else f"{even:.2f}: drafting pays above it",
    }
  console.print(f"fits: {gib('peak')} of {gib('hbm')} on each device")
  summary = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
  for row in rows.items():
    summary.add_row(*row)
  console.print(summary)
  of_round = "on one device (for draft passes, the mean)"
  for title, lines in (
    (f"collectives of a round {of_round}", plan["collectives"]),
    ("experts of a layer that passes touch (uniform routing)", line["experts"]),
    (f"passes {of_round}, predicted by a roofline", line["passes"]),
    ("predicted speed-up by the acceptance of a drafted token",
     line["by_acceptance"]),
  ):  # fmt: skip
    if lines:
      console.print(_table(title, lines))


def _table(title: str, rows: list[dict]) -> rich.table.Table:
  table = rich.table.Table(
    box=rich.box.SIMPLE, title=title, collapse_padding=True
  )
  for name, value in rows[0].items():
    words = isinstance(value, str)
    table.add_column(name, justify="left" if words else "right", no_wrap=True)
  whole = lambda x: x >= 100 or x == int(x)
  number = lambda x: f"{x:,.0f}" if whole(x) else f"{x:#.3g}"
  for row in rows:
    table.add_row(
      *(number(x) if isinstance(x, float) else str(x) for x in row.values())
    )
  return table
