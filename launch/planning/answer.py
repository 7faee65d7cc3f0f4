"""Makes a plan: memory, collectives, and the speed-up to expect."""

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
from launch.planning import heads, networks, program, roofline
from launch.planning.program import Compiled, DoesNotFitError, Question
from launch.planning.roofline import Pass
from specjax import tree_search
from specjax.theory import throughput
from specjax.tree import Form, Tree, chain

_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_MOST = 32  # tokens of the widest target pass
_SETTINGS = (
  "siblings", "rule", "batch_size", "max_length", "prompt_length",
  "input_length", "cache", "drafter",
)  # fmt: skip


def plan(topology: Topology, question: Question) -> dict:
  """Compiles a question's programs for a slice, and makes the plan's JSON.

  Raises:
    ValueError: for what cannot be cut or decoded.
  """
  chip = topology.chip
  plan = {
    "topology": topology.name,
    "accelerator_type": topology.accelerator_type,
    "settings": _settings(question),
    "libtpu": importlib.metadata.version("libtpu"),
  }
  try:
    compiled = program.compile_for(question, devices(topology))
  except DoesNotFitError as error:
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
    "compile_seconds": compiled.seconds,
    "roofline": predict(chip, question),
  }


def _settings(q: Question) -> dict:
  form = lambda weights: weights and dataclasses.asdict(weights)
  return {name: getattr(q, name) for name in _SETTINGS} | {
    "weights": form(q.weights),
    "draft_weights": form(q.draft_weights),
    "skipped": q.skipped and dataclasses.asdict(q.skipped),
    "mesh": dataclasses.asdict(q.layout),
    "target_parameters": networks.num_params(q.target),
    "draft_parameters": program.num_draft_params(q),
    "parents": list(q.tree.parents),
    "num_speculative_tokens": q.tree.max_depth,
    "dynamic": q.tree.form is Form.FREE,  # parents are one example
  }


def _collectives(q: Question, compiled: Compiled) -> list[dict]:
  """Those of a round by phase; of drafting those of its mean pass."""
  passes = {"draft pass": max(len(program.make_drafter(q).passes), 1)}
  return [
    {
      "phase": phase, "kind": kind, "count": x["count"] / passes.get(phase, 1),
      "MB": x["bytes"] / 1e6 / passes.get(phase, 1),
    }
    for phase, kinds in compiled.collectives.items()
    for kind, x in kinds.items()
  ]  # fmt: skip


# ---------------------------------------------------------------------- time


def passes(q: Question) -> tuple[list[Pass], list[Pass]]:
  """A round's draft passes, and those that verify 1 to 32 tokens or so."""
  place = lambda config, size, **how: roofline.Placement(
    config=config,
    work=networks.work(
      config, slots=q.slots, input_length=q.input_length, **how
    ),
    size=size,
    rows=q.rows,
  )
  stored = dict(weights=q.weights, cache=q.cache)
  target = functools.partial(place, q.cut_target(), q.layout.model, **stored)
  widths = range(1, max(_MOST, q.tree.num_nodes) + 1)
  verify = [roofline.forward(target(), n) for n in widths]
  drafter = program.make_drafter(q)
  if q.head is not None:
    drafting = heads.passes(
      q.head, drafter, size=q.layout.draft, rows=q.rows, slots=q.slots
    )
    return drafting, verify
  if q.draft is not None:
    draft = place(q.cut_draft(), q.layout.draft, weights=q.draft_weights)
  else:
    draft = target(**{"skipped": q.skipped} if q.skipped else {})
  text = q.max_length + q.tree.max_depth + 1
  each = [roofline.forward(draft, n) for n in drafter.tokens_of_passes(text)]
  return each, verify


def _described(name: str, chip: Chip, one: Pass) -> dict[str, str | float]:
  """What a pass reads and writes, computes and sends, and how long it takes."""
  alone = one.causes(chip)
  return {
    "pass": name,
    "bound by": one.bound(chip),
    "memory MB": one.hbm_bytes / 1e6,
    "memory ms": 1e3 * alone["memory"],
    "GFLOP": one.flops / 1e9,
    "compute ms": 1e3 * alone["arithmetic"],
    "sent MB": one.ici_bytes / 1e6,
    "send ms": 1e3 * alone["collectives"],
    "total ms": 1e3 * one.seconds(chip),
  }


def tokens_per_round(tree: Tree, acceptance: float) -> float:
  """Tokens of a round if every child is accepted with the same probability.

  A node's children are tried in turn; on a chain this is the i.i.d. formula
  (Leviathan et al., 2023, equation 1).

  Args:
    tree: what is drafted. A dynamic one is taken to be the best of its size and
      depth for that acceptance, which it would be if the draft knew no more
      than that.
    acceptance: P, of each child whose previous siblings were rejected.
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
  """Times of passes by the roofline, and the speed-ups that follow.

  Returns:
    "passes", of a draft pass the mean; "verify_seconds" of passes over 1, 2, ..
    tokens a row; "cost_ratio", a draft pass in target passes; the acceptance
    from which the draft pays (None: never); "experts" that passes touch of each
    kind of mixture; and "by_acceptance" the speed-up over plain decoding, and
    that of the best length of a chain.
  """
  of_draft, of_target = passes(q)
  verify = [one.seconds(chip) for one in of_target]
  seconds = [one.seconds(chip) for one in of_draft]
  nodes, drafts = q.tree.num_nodes, q.tree.num_drafted > 0
  named = {"plain": of_target[0]}
  if of_draft:
    named["draft pass"] = roofline.mean(of_draft)
  if drafts:
    named["verify"] = of_target[nodes - 1]
  cost = (sum(seconds) + verify[nodes - 1]) / verify[0]  # of a round
  speedup = lambda p: float(tokens_per_round(q.tree, p) / cost)
  plain = q.batch_size / verify[0]
  return {
    "passes": [_described(name, chip, one) for name, one in named.items()],
    "draft_pass_seconds": float(np.mean(seconds or [0.0])),
    "verify_seconds": verify,
    "experts": _experts(q),
    "cost_ratio": float(np.mean(seconds or [0.0])) / verify[0],
    "break_even_acceptance": _break_even(speedup) if drafts else None,
    "plain_tokens_per_second": plain,
    "by_acceptance": [
      {"acceptance": p, "tokens/s": plain * speedup(p), "speed-up": speedup(p)}
      | best
      for p, best in (_best_chains(chip, q) if drafts else ())
    ],
  }


def _experts(q: Question) -> list[dict]:
  """For each kind of mixture, experts of a layer that passes touch."""
  mixtures = networks.work(q.cut_target(), slots=q.slots).mixtures
  widths = {"plain": 1, "verify": q.tree.num_nodes}
  return [
    {"experts": block.num_experts, "chosen": block.num_chosen}
    | {k: networks.touched(block, q.rows * n) for k, n in widths.items()}
    for block, _ in mixtures
  ]


def _best_chains(chip: Chip, q: Question) -> Iterator[tuple[float, dict]]:
  """The best length of a chain, 0 if none pays, for some acceptances."""
  of_draft, of_target = passes(
    dataclasses.replace(q, tree=chain(q.tree.max_depth), siblings="iid")
  )
  verify = np.array([one.seconds(chip) for one in of_target])
  drafting = [one.seconds(chip) for one in of_draft] or [0.0]
  counts = np.arange(_MOST)
  if q.head is not None and q.head.num_depths is not None:
    # One pass drafts them all: only verifying costs more with more of them.
    counts = counts[: q.head.num_depths + 1]
    costs = sum(drafting) * (counts > 0)
  else:
    costs = np.mean(drafting) * counts
  for p in _ACCEPTANCES:
    tokens = throughput.tokens_per_cycle(counts, p)
    speedups = tokens * verify[0] / (costs + verify[counts])
    best = int(np.argmax(speedups))
    yield p, {"best draft length": best, "its speed-up": float(speedups[best])}


def _break_even(speedup) -> float | None:
  """The least acceptance of a speed-up of 1; None if there is none."""
  if speedup(1.0) < 1:
    return None
  if speedup(0.0) >= 1:
    return 0.0
  return float(optimize.brentq(lambda p: speedup(p) - 1, 0.0, 1.0))


# ---------------------------------------------------------------------- show


def show(console: rich.console.Console, plan: dict) -> None:
  """Prints a plan: whether it fits, and tables of what was compiled."""
  if not plan["fits"]:
    line = f"does not fit {plan['topology']}: {plan['compiler']}"
    console.print(line, soft_wrap=True)
    return
  size, s, line = plan["per_device_bytes"], plan["settings"], plan["roofline"]
  gib = lambda name: f"{size[name] / GIB:.2f} GiB"
  mesh = s["mesh"]
  rows = {
    "slice": f"{plan['topology']} ({plan['accelerator_type']})",
    "mesh": f"data {mesh['data']}, model {mesh['model']}, draft cut over "
    f"{mesh['draft']}",
    "batch": f"{s['batch_size']} rows of up to {s['max_length']} tokens",
    "drafter": f"{s['drafter']}, {len(s['parents']) - 1} tokens a round, "
    f"verified by {s['rule']}",
    "weights, caches, state": f"{gib('arguments')} on each device",
    "temporaries": f"{gib('temporaries')} on each device",
    "cache buffers": "reused" if plan["buffers_reused"] else "NOT reused",
    "copies of a whole cache": f"{plan['cache_copies']} a round",
    "compiled": f"in {plan['compile_seconds']:.0f} s with libtpu "
    f"{plan['libtpu']}",
  }
  for one in line["experts"]:
    rows["experts of a layer"] = (
      f"{one['plain']:.1f} of {one['experts']} read by a plain pass, "
      f"{one['verify']:.1f} to verify (routing taken to be uniform)"
    )
  rows["predicted plain decoding"] = (
    f"{line['plain_tokens_per_second']:,.0f} tokens/s"
  )
  if line["by_acceptance"]:
    even = line["break_even_acceptance"]
    rows["predicted cost of a draft pass (c)"] = (
      f"{line['cost_ratio']:.3f} target passes"
    )
    rows["predicted break-even acceptance"] = (
      "none: drafting never pays"
      if even is None
      else f"{even:.2f}: drafting pays above it"
    )
  console.print(f"fits: {gib('peak')} of {gib('hbm')} on each device")
  summary = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
  for row in rows.items():
    summary.add_row(*row)
  console.print(summary)
  _table(
    console,
    "collectives of a round on one device (of draft passes the mean)",
    plan["collectives"],
  )
  _table(
    console,
    "passes on one device (of draft passes the mean), predicted by a roofline",
    line["passes"],
  )
  _table(
    console,
    "predicted speed-up by the acceptance of a drafted token",
    line["by_acceptance"],
  )


def _table(console, title: str, rows: list[dict]) -> None:
  """Prints rows under their names, unless there are none."""
  table = rich.table.Table(
    box=rich.box.SIMPLE, title=title, collapse_padding=True
  )
  for name, value in rows[0].items() if rows else ():
    words = isinstance(value, str)
    table.add_column(name, justify="left" if words else "right", no_wrap=True)
  whole = lambda x: x >= 100 or x == int(x)
  number = lambda x: f"{x:,.0f}" if whole(x) else f"{x:#.3g}"
  for row in rows:
    table.add_row(
      *(number(x) if isinstance(x, float) else str(x) for x in row.values())
    )
  if rows:
    console.print(table)
