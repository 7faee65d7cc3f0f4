"""Makes a plan: memory, collectives, and the speed-up to expect."""

import dataclasses
import importlib.metadata

import numpy as np
import rich.box
import rich.console
import rich.table
from scipy import optimize

from launch.hardware import GIB, Chip, Topology, devices
from launch.planning import heads, memory, mixtures, program, roofline
from launch.planning.program import Compiled, DoesNotFitError, Question
from launch.planning.roofline import Pass
from models.networks.transformer import SkippedLayers
from specjax import tree_search
from specjax.theory import throughput
from specjax.tree import Form, Tree, chain

_ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_BEST_AT = tuple(n / 20 for n in range(10, 20))  # where the best N is said
# Acceptances for which the largest batch is said at which drafting pays.
_PAYS_AT = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99)
_TYPICAL = 0.8  # acceptance, where one number must be chosen
_MOST = 32  # tokens of the widest verify pass
_NOT_SETTINGS = (
  "target", "draft", "head", "skipped", "tree", "layout", "distinct",
)  # fmt: skip
_OF_A_PROGRAM = (
  "collectives", "cache_copies", "cache_moves", "donation_honoured", "weights",
  "compile_seconds", "compile_cpu_seconds",
)  # fmt: skip


def plan(topology: Topology, question: Question) -> dict:
  """Compiles a question's programs for a slice, and makes the plan's JSON.

  Raises:
    ValueError: for what cannot be cut or decoded.
  """
  question.check()
  chip = topology.chip
  try:
    compiled = program.compile_for(question, devices(topology))
    needed = compiled.peak
  except DoesNotFitError as error:
    compiled, needed = None, error.needed
  fits = compiled is not None and needed <= chip.hbm_bytes
  temporaries = max(needed - memory.held(question), 0)
  largest = memory.largest(question, temporaries, chip.hbm_bytes)
  if fits:  # which is known, whatever the estimate says
    largest["batch_size"] = max(largest["batch_size"], question.batch_size)
    largest["max_length"] = max(largest["max_length"], question.max_length)
  answer = {
    "topology": topology.name,
    "accelerator_type": topology.accelerator_type,
    "settings": _settings(question),
    "libtpu": importlib.metadata.version("libtpu"),
    "fits": fits,
    "per_chip_bytes": {
      "arguments": compiled.arguments if compiled else memory.held(question),
      "temporaries": compiled.temporaries if compiled else temporaries,
      "peak": needed,
      "hbm": chip.hbm_bytes,
    },
    "largest": largest,
  }
  return answer | {
    **_compiled(question, compiled),
    "roofline": _roofline(topology, question),
    **of_mixture(topology, question),
  }


def of_mixture(topology: Topology, question: Question) -> dict:
  """`mixture`, see `mixtures.answer`, if there is one, and drafts."""
  if not question.tree.num_drafted or question.lookahead is not None:
    return {}

  def costs(batch_size):
    q = dataclasses.replace(
      question, batch_size=batch_size, siblings="iid",
      tree=chain(question.tree.max_depth),
    )  # fmt: skip
    passes, verify = _costs(topology, q)
    counts = np.arange(len(verify))
    if q.head is not None and q.head.num_depths is not None:
      return sum(passes) * (counts[: q.head.num_depths + 1] > 0), verify
    return _mean(passes) * counts, verify

  answer = mixtures.answer(question, costs)
  return {"mixture": answer} if answer else {}


def _settings(q: Question) -> dict:
  fields = {
    f.name: getattr(q, f.name)
    for f in dataclasses.fields(q)
    if f.name not in _NOT_SETTINGS
  }
  for name in ("weights", "draft_weights", "own_weights"):
    fields[name] = fields[name] and dataclasses.asdict(fields[name])
  return fields | {
    "drafter": q.drafter,
    "skipped": q.skipped and dataclasses.asdict(q.skipped),
    "mesh": dataclasses.asdict(q.layout),
    "target_parameters": program.num_params(q.target),
    "draft_parameters": program.num_draft_params(q),
    "parents": list(q.tree.parents),
    "num_speculative_tokens": q.tree.max_depth,
    "num_drafts": q.tree.max_children if q.tree.num_drafted else 0,
    "grown": q.tree.form is Form.FREE,  # parents are data, these one example
  }


def _compiled(q: Question, compiled: Compiled | None) -> dict:
  """The compiled program's part of a plan; all None without a program."""
  if compiled is None:
    return dict.fromkeys(_OF_A_PROGRAM)
  phases = dict(compiled.collectives)
  if q.tree.num_drafted:
    passes = max(len(program.make_drafter(q).passes), 1)
    phases["draft_step"] = {
      kind: {name: value / passes for name, value in entry.items()}
      for kind, entry in phases["draft_step"].items()
    }
  return {
    "collectives": phases,
    "cache_copies": compiled.cache_copies,
    "cache_moves": compiled.cache_moves,
    "donation_honoured": compiled.donation_honoured,
    "weights": compiled.weights,
    "compile_seconds": compiled.seconds,
    "compile_cpu_seconds": compiled.cpu_seconds,
  }


# ---------------------------------------------------------------------- time


def _place(q: Question, config, size: int, **more) -> roofline.Placement:
  return roofline.Placement(
    config=config,
    num_params=program.num_params(config),
    size=size,
    rows=q.rows,
    slots=q.slots,
    text=q.text_length,
    input_length=q.input_length,
    **more,
  )


def _target(q: Question, **more) -> roofline.Placement:
  options = dict(distinct=q.distinct, weights=q.weights, cache=q.cache) | more
  return _place(q, q.cut_target(), q.layout.model, **options)


def _passes(q: Question) -> tuple[list[Pass], list[Pass]]:
  """A round's draft passes, and those that verify 1..32 tokens or so."""
  target = _target(q)
  verify = [
    roofline.forward(target, n) for n in range(1, max(_MOST, q.fed) + 1)
  ]
  drafter = program.make_drafter(q)
  if q.head is not None:
    drafting = heads.passes(
      q.head, drafter, size=q.layout.draft, rows=q.rows, slots=q.slots,
      text=q.text_length, saved=heads.saved_bytes(q.head, q.tables()),
    )  # fmt: skip
    return drafting, verify
  if q.draft is not None:
    draft = _place(
      q, q.cut_draft(), q.layout.draft, weights=q.draft_weights,
      cache=q.draft_cache,
    )  # fmt: skip
  else:
    draft = _target(
      q,
      weights=q.own_weights or q.weights,
      skipped=q.skipped or SkippedLayers(),
    )
  text = q.max_length + q.tree.max_depth + 1
  each = [roofline.forward(draft, n) for n in drafter.tokens_of_passes(text)]
  return each, verify


def _costs(topology: Topology, q: Question) -> tuple[list[float], np.ndarray]:
  """Seconds of these passes."""
  passes, verify = _passes(q)
  chip = topology.chip
  return (
    [one.seconds(chip) for one in passes],
    np.array([one.seconds(chip) for one in verify]),
  )


def _causes(chip: Chip, one: Pass) -> dict[str, str | float]:
  """Bytes, operations and seconds of a pass by cause, and the longest cause.

  Memory and arithmetic are taken to go on at the same time, collectives after
  them.
  """
  alone = one.causes(chip)
  return {
    "bound_by": one.bound(chip),
    "memory_bytes": one.hbm_bytes,
    "memory_seconds": alone["memory"],
    "operations": one.flops,
    "arithmetic_seconds": alone["arithmetic"],
    "collective_bytes": one.ici_bytes,
    "collective_seconds": alone["collectives"],
    "seconds": one.seconds(chip),
  }


def _mean(passes: list[float]) -> float:
  return float(np.mean(passes)) if passes else 0.0


def tokens_per_round(tree: Tree, acceptance: float) -> float:
  """Tokens of a round if every child is accepted with the same probability.

  A node's children are tried in turn; on a chain this is the i.i.d. formula
  (Leviathan et al., 2023, equation 1).

  Args:
    tree: what is drafted. One that is grown anew in every round is taken to be
      the best of its size and depth for that acceptance, which it would be if
      the draft knew no more than that.
    acceptance: P, of each child whose elders were rejected.
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


def _roofline(topology: Topology, q: Question) -> dict:
  chip, (of_draft, of_target) = topology.chip, _passes(q)
  passes, verify = _costs(topology, q)
  named = {"plain": of_target[0]}
  if of_draft:
    named["draft_step"] = roofline.mean(of_draft)
  if q.tree.num_drafted:
    named["verify"] = of_target[q.fed - 1]
  plain, draft = q.batch_size / verify[0], _mean(passes)
  nodes = q.tree.num_nodes
  seconds = sum(passes) + verify[q.fed - 1]
  speculative = lambda p: q.batch_size * tokens_per_round(q.tree, p) / seconds
  of_batches = [
    (one, _costs_of_chain(topology, one))
    for i in range(13 if nodes > 1 else 0)
    for one in (dataclasses.replace(q, batch_size=q.layout.data * 2**i),)
  ]
  by_batch = [_best(*batch, _TYPICAL) for batch in of_batches]

  def pays_up_to(acceptance: float) -> int:
    rows = (_best(*batch, acceptance) for batch in of_batches)
    pays = [row["batch_size"] for row in rows if row["speedup"] > 1]
    return max(pays, default=0)

  costs = _costs_of_chain(topology, q)
  return {
    "note": "a model, not a measurement; acceptance taken as i.i.d.",
    "peaks": {
      "bfloat16": chip.peak_flops,
      "int8": chip.peak_int8,
      "fp8": chip.peak_fp8,
    },
    "draft_step_seconds": draft,
    "verify_seconds": {str(n + 1): float(s) for n, s in enumerate(verify)},
    "passes": {name: _causes(chip, one) for name, one in named.items()},
    "bytes_over_minimum": of_target[0].hbm_bytes
    / roofline.least_bytes(_target(q)),
    "cost_ratio": draft / verify[0],
    "break_even_acceptance": (
      _break_even(lambda p: speculative(p) / plain) if nodes > 1 else None
    ),
    "best_num_speculative_tokens": (
      _best(q, costs, _TYPICAL)["num_speculative_tokens"] if nodes > 1 else 0
    ),
    "best_by_acceptance": [
      {"acceptance": p}
      | {k: best[k] for k in ("num_speculative_tokens", "speedup")}
      for p in (_BEST_AT if nodes > 1 else ())
      for best in (_best(q, costs, p),)
    ],
    "tokens_per_second": [
      [p, float(plain), float(speculative(p))] for p in _ACCEPTANCES
    ],
    "acceptance": _TYPICAL,
    "tokens_fed": q.fed,
    "by_batch_size": by_batch,
    "pays_up_to_batch_size": pays_up_to(_TYPICAL),
    "pays_by_acceptance": [
      {"acceptance": p, "batch_size": pays_up_to(p)}
      for p in (_PAYS_AT if nodes > 1 else ())
    ],
  }


def _costs_of_chain(
  topology: Topology, q: Question
) -> tuple[list[float], np.ndarray]:
  """As `_costs`, of one path; what is looked ahead for stays as it is."""
  if q.lookahead is None:
    q = dataclasses.replace(q, tree=chain(q.tree.max_depth), siblings="iid")
  return _costs(topology, q)


def _best(
  q: Question, costs: tuple[list[float], np.ndarray], acceptance: float
) -> dict:
  """The best chain of a batch size, over plain decoding.

  What is looked ahead for is no chain: it is what was asked for.

  Args:
    q: the question.
    costs: of its chain.
    acceptance: of every token.
  """
  passes, verify = costs
  if q.lookahead is not None:
    tokens = tokens_per_round(q.tree, acceptance)
    return {
      "batch_size": q.batch_size,
      "num_speculative_tokens": q.tree.max_depth,
      "speedup": float(tokens * verify[0] / verify[q.fed - 1]),
    }
  if q.head is not None and q.head.num_depths is not None:
    # One pass says them all: only verifying costs more with more of them.
    counts = np.arange(1, min(q.head.num_depths, _MOST - 1) + 1)
    tokens = throughput.tokens_per_cycle(counts, acceptance)
    rates = tokens / (sum(passes) + verify[counts])
    best = int(counts[np.argmax(rates)])
    rate = float(np.max(rates))
  else:
    draft = _mean(passes)
    best = throughput.best_num_tokens(
      acceptance, draft, lambda fed: verify[np.asarray(fed) - 1], most=_MOST - 1
    )
    rate = throughput.throughput(best, acceptance, draft, verify[best])
  return {
    "batch_size": q.batch_size,
    "num_speculative_tokens": best,
    "speedup": float(rate * verify[0]),
  }


def _break_even(speedup) -> float | None:
  """The least acceptance of a speed-up of 1; None if there is none."""
  if speedup(1.0) < 1:
    return None
  if speedup(0.0) >= 1:
    return 0.0
  return float(optimize.brentq(lambda p: speedup(p) - 1, 0.0, 1.0))


# ---------------------------------------------------------------------- show


def show(console: rich.console.Console, given: dict) -> None:
  """Prints a plan: one line that answers, then the tables."""
  size, line = given["per_chip_bytes"], given["roofline"]
  gib = lambda n: f"{n / GIB:.2f}"
  s = given["settings"]
  head = (
    f"{given['topology']} ({given['accelerator_type']}), "
    f"data:{s['mesh']['data']}, model:{s['mesh']['model']}, draft on "
    f"{s['mesh']['draft']}, batch {s['batch_size']}, "
    f"length {s['max_length']}, {len(s['parents']) - 1} drafted nodes"
  )
  verdict = "fits" if given["fits"] else "does not fit"
  largest = given["largest"]
  out = lambda text: console.print(
    text, highlight=False, markup=False, soft_wrap=True
  )
  out(
    f"{verdict}: {gib(size['peak'])} of {gib(size['hbm'])} GiB a device; "
    f"arguments {gib(size['arguments'])}, temporaries "
    f"{gib(size['temporaries'])}; largest batch at this length "
    f"{largest['batch_size']}, longest at this batch {largest['max_length']} "
    f"({head})"
  )
  if given["collectives"] is None:
    return
  moves = given.get("cache_moves")  # of a small one
  moved = f" (moved onto the chip or back: {moves})" if moves else ""
  out(
    f"copies of a whole cache in a round: {given['cache_copies']}{moved}; "
    "donation "
    f"{'honoured' if given['donation_honoured'] else 'NOT honoured'}; compiled "
    f"in {given['compile_seconds']:.0f} s ({given['compile_cpu_seconds']:.0f} "
    f"of a core) with libtpu {given['libtpu']}"
  )
  if weights := given.get("weights"):
    out(
      f"weights in few bits: {weights['bytes'] / 1e6:,.0f} MB on a device, of "
      f"which a round reads {weights['read'] / 1e6:,.0f}; "
      f"{weights['written'] / 1e6:,.0f} MB of such arrays are written"
    )
  table = rich.table.Table(
    box=rich.box.SIMPLE, title="collectives on one device"
  )
  for name in ("phase", "kind", "count", "bytes"):
    table.add_column(
      name, justify="left" if name in ("phase", "kind") else "right"
    )
  for phase, kinds in given["collectives"].items():
    for kind, entry in kinds.items():
      table.add_row(
        "draft step (mean)" if phase == "draft_step" else phase,
        kind, f"{entry['count']:g}", f"{entry['bytes']:,.0f}",
      )  # fmt: skip
  if table.rows:
    console.print(table)
  else:
    out("no collectives")
  even = line["break_even_acceptance"]
  best = line["best_num_speculative_tokens"]
  verify = line["verify_seconds"]
  out(
    "roofline (a model, not a measurement): draft step "
    f"{1e3 * line['draft_step_seconds']:.2f} ms, verifying 1, 8, 32 tokens "
    + ", ".join(f"{1e3 * verify[n]:.2f}" for n in ("1", "8", "32"))
    + f" ms; c = {line['cost_ratio']:.3f}; break-even acceptance "
    + ("none" if even is None else f"{even:.2f}")
    + f"; at acceptance {line['acceptance']} the best chain has N = {best}, "
    + ("see the last table" if "mixture" in given else _pays(line))
  )
  out(
    f"a plain pass over rows of {s['text_length'] or s['max_length']} tokens "
    f"moves {line['bytes_over_minimum']:.2f} times the weights and the text's "
    "cache"
  )
  console.print(_table_of_passes(line["passes"]))
  rates = rich.table.Table(box=rich.box.SIMPLE, title="tokens a second")
  for name in ("acceptance", "plain", "speculative", "ratio"):
    rates.add_column(name, justify="right")
  for acceptance, plain, speculative in line["tokens_per_second"]:
    rates.add_row(
      f"{acceptance:g}", f"{plain:,.0f}", f"{speculative:,.0f}",
      f"{speculative / plain:.2f}",
    )  # fmt: skip
  console.print(rates)
  if line["best_by_acceptance"]:
    console.print(_table_of_best(line["best_by_acceptance"]))
  if "mixture" in given:
    console.print(mixtures.table(given["mixture"]))


def _table_of_passes(passes: dict[str, dict]) -> rich.table.Table:
  """The table of passes, with bytes, operations and time by cause."""
  table = rich.table.Table(
    box=rich.box.SIMPLE, title="a pass on one device (roofline)"
  )
  for name in (
    "pass", "bound by", "memory MB", "ms", "arithmetic GFLOP", "ms",
    "collectives MB", "ms", "in all ms",
  ):  # fmt: skip
    left = name in ("pass", "bound by")
    table.add_column(name, justify="left" if left else "right")
  ms = lambda seconds: f"{1e3 * seconds:.2f}"
  for name, one in passes.items():
    table.add_row(
      "draft step (mean)" if name == "draft_step" else name, one["bound_by"],
      f"{one['memory_bytes'] / 1e6:,.1f}", ms(one["memory_seconds"]),
      f"{one['operations'] / 1e9:,.1f}", ms(one["arithmetic_seconds"]),
      f"{one['collective_bytes'] / 1e6:,.1f}", ms(one["collective_seconds"]),
      ms(one["seconds"]),
    )  # fmt: skip
  return table


def _table_of_best(best: list[dict]) -> rich.table.Table:
  """The best chain at each acceptance."""
  table = rich.table.Table(box=rich.box.SIMPLE, title="the best chain")
  for name in ("acceptance", "N", "ratio"):
    table.add_column(name, justify="right")
  for row in best:
    table.add_row(
      f"{row['acceptance']:g}", f"{row['num_speculative_tokens']}",
      f"{row['speedup']:.2f}",
    )  # fmt: skip
  return table


def _pays(line: dict) -> str:
  """Words on the batch sizes at which drafting pays."""
  last = line["pays_up_to_batch_size"]
  if not last:
    return "and no batch pays"
  tried = line["by_batch_size"][-1]["batch_size"]
  more = ", the largest tried" if last == tried else ""
  return f"and drafting pays up to batch {last}{more}"
