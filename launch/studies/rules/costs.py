"""Costs of verification rules, against one pass over the laws they read.

  python -m launch.studies.rules.costs --output=costs.json

A rule is timed on random laws: it verifies a batch and says the next token's
law at one node a row. Right beside it, in turn with it, one pass over both laws
is timed (`sum max(q, p)`), which no rule that looks at them can undercut; the
ratio of the two is what is reported. Milliseconds are of this machine today.

Every rule is measured at its centre, the cell closest to V = 131,072, K = 4,
G = 4, B = 1 that it can verify, and along each axis from there. `--full_grid`
measures every cell. A stopped run goes on where it was.
"""

import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from absl import flags
from jax import Array

import specjax
from launch import cli, provenance, results
from launch.results import Journal
from launch.studies.rules import cases
from specjax import random, rules
from specjax.runtime import timing
from specjax.siblings import Siblings, laws_of_tokens
from specjax.tree import Tree, paths
from specjax.types import Draft

cli.reads(cli.OUTPUT, cases.RULES, cli.TURNS)
_VOCAB_SIZES = flags.DEFINE_list(
  "vocab_sizes", ["32768", "131072", "262144"], "Each V."
)
_NUM_DRAFTS = flags.DEFINE_list(
  "rule_num_drafts", ["1", "2", "4", "8"], "Each K, paths drafted."
)
_LENGTHS = flags.DEFINE_list(
  "rule_num_speculative_tokens", ["1", "4", "8"], "Each G."
)
_BATCH_SIZES = flags.DEFINE_list("rule_batch_sizes", ["1", "8"], "Each B.")
_FULL_GRID = flags.DEFINE_bool(
  "full_grid", False, "Every cell, not only along the axes."
)
_MAX_GIB = flags.DEFINE_float(
  "max_gib", 2.0, "Cells with more input than this are skipped."
)

# Short calls take more turns: others on the machine disturb whole runs of them.
_SECONDS, _MOST_TURNS = 0.3, 500


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Cell:
  """Sizes of a verification: B rows of K paths of G tokens among V."""

  vocab_size: int
  num_drafts: int
  num_speculative_tokens: int
  batch_size: int

  @property
  def tree(self) -> Tree:
    """K chains of G tokens under the root."""
    return paths(self.num_speculative_tokens, self.num_drafts)

  @property
  def pass_bytes(self) -> int:
    """Of both laws at every node."""
    return 8 * self.batch_size * self.tree.num_nodes * self.vocab_size

  def input_bytes(self, drawn: Siblings) -> int:
    """Of all that a rule is given."""
    noise = self.num_drafts * (self.num_speculative_tokens + 1)
    noise *= 4 * self.batch_size * self.vocab_size
    return self.pass_bytes + (noise if drawn.with_noise else 0)

  def distance(self, other: "Cell") -> float:
    """Distance in octaves along all axes."""
    return sum(
      abs(math.log2(a / b))
      for a, b in zip(
        dataclasses.astuple(self), dataclasses.astuple(other), strict=True
      )
    )


CENTRE = Cell(
  vocab_size=1 << 17, num_drafts=4, num_speculative_tokens=4, batch_size=1
)


def cells_of(name: str, drawn: Siblings, grid: list[Cell], *, full: bool):
  """The cells of a grid that a rule is measured in.

  Args:
    name: of the rule.
    drawn: how siblings are drawn.
    grid: all cells.
    full: whether every cell it can verify counts, or only the star around the
      one that is closest to `CENTRE`.

  Returns:
    A list of `Cell`, empty if the rule can verify none.
  """

  def fits(cell):
    try:
      rules.get(name).check(cell.tree, drawn)
    except ValueError:
      return False
    return True

  fit = [cell for cell in grid if fits(cell)]
  if full or not fit:
    return fit
  centre = dataclasses.astuple(min(fit, key=CENTRE.distance))
  off_axes = lambda cell: sum(
    a != b for a, b in zip(dataclasses.astuple(cell), centre, strict=True)
  )
  return [cell for cell in fit if off_axes(cell) <= 1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_inputs(cell: Cell, drawn: Siblings) -> tuple[Draft, Array]:
  """A draft from noisy Zipf laws, and the target's laws near them.

  Laws depend on a node's depth alone, so that paths with equal tokens have
  equal laws, as they must.

  Args:
    cell: the sizes (static).
    drawn: how siblings are drawn (static).

  Returns:
    The `Draft` and `f32[B, N + 1, V]`, the target's log-probabilities.
  """
  tree, batch, vocab = cell.tree, cell.batch_size, cell.vocab_size
  depths, num_paths = tree.max_depth, cell.num_drafts
  keys = jax.random.split(jax.random.key(0), 4)
  shape = (batch, depths + 1, vocab)
  zipf = -1.1 * jnp.log(1 + jnp.arange(vocab, dtype=jnp.float32))
  logits = zipf + 0.5 * jax.random.normal(keys[0], shape)
  law = jax.nn.log_softmax(logits)
  target = jax.nn.log_softmax(logits + 0.7 * jax.random.normal(keys[1], shape))
  noise = None
  if drawn.with_noise:
    shape = (batch, num_paths, depths + 1, vocab)
    noise = jax.random.gumbel(keys[2], shape)
  tokens = [jnp.zeros((batch,), jnp.int32)]
  for node in range(1, tree.num_nodes):
    parent, rank = law[:, tree.depth[node] - 1], tree.rank[node]
    siblings_before = tree.children[tree.parents[node]][:rank]
    elders = jnp.stack([tokens[n] for n in siblings_before], 1) if rank else (
      jnp.zeros((batch, 0), jnp.int32)
    )  # fmt: skip
    if drawn.with_noise:
      path = (node - 1) % num_paths
      tokens.append(random.race(noise[:, path, tree.depth[node] - 1], parent))
      continue
    count = len(tree.children[tree.parents[node]])
    tokens.append(
      random.categorical(
        jax.random.split(jax.random.fold_in(keys[3], node), batch),
        drawn.child(parent, elders, jnp.full((batch,), count)),
      )
    )
  tokens = jnp.stack(tokens, axis=1)
  draft = Draft(
    tree=tree,
    siblings=drawn,
    tokens=tokens,
    log_probs=laws_of_tokens(tree, drawn, tokens, law[:, tree.depth]),
    noise=noise,
  )
  return draft, target[:, tree.depth]


def verification(name: str, tree: Tree, drawn: Siblings):
  """A jitted verification: `(draft, target_log_probs) -> what is used of it`.

  The node is the most probable one; of the next token's law the largest entry
  is taken, which needs all of it and costs little.
  """
  rule = rules.get(name)

  @jax.jit
  def run(draft, target_log_probs):
    verified = rule.verify(draft, target_log_probs)
    node = random.argmax(verified.node_probs)
    largest = jnp.max(verified.next_log_probs(node), axis=-1)
    return verified.node_probs, node, largest, verified.total_variation

  return run


_PASS = jax.jit(lambda draft, q: jnp.sum(jnp.maximum(draft.log_probs, q), -1))
"""Reads both laws once, `f32[B, N + 1]`."""


def time_rule(
  name: str, tree: Tree, drawn: Siblings, inputs, *, rounds: int
) -> tuple[float, float]:
  """Median milliseconds of a verification and of a pass over its inputs."""
  functions = {"rule": verification(name, tree, drawn), "pass": _PASS}
  parts = {
    part: lambda f=function: jax.block_until_ready(f(*inputs))
    for part, function in functions.items()
  }
  for part in parts.values():
    part()  # compiles
  once = sum(timing.alternate(parts, rounds=1).values())
  turns = math.ceil(_SECONDS / once)
  seconds = timing.alternate(parts, rounds=max(rounds, min(turns, _MOST_TURNS)))
  return 1e3 * seconds["rule"], 1e3 * seconds["pass"]


def run(_) -> int:
  """The command."""
  rounds = cli.TURNS.value or 5
  names = cases.RULES.value or list(rules.RULES)
  for name in names:
    rules.get(name)
  axes = (_VOCAB_SIZES, _NUM_DRAFTS, _LENGTHS, _BATCH_SIZES)
  sizes = [sorted({*cli.integers(flag, default=())}) for flag in axes]
  fields = [field.name for field in dataclasses.fields(Cell)]
  grid = [
    Cell(**dict(zip(fields, size, strict=True)))
    for size in itertools.product(*sizes)
  ]
  plan, skipped = [], []
  for name in names:
    for drawn in cases.siblings_of(name):
      for cell in cells_of(name, drawn, grid, full=_FULL_GRID.value):
        gib = cell.input_bytes(drawn) / 2**30
        if gib <= _MAX_GIB.value:
          plan.append((cell, drawn, name))
        else:
          skipped.append(_entry(cell, drawn, name) | {"gib": gib})
  # Rules of one cell are neighbours, and share its inputs.
  plan.sort(key=lambda item: (item[0], item[1].name))
  made_by = provenance.record(
    models=provenance.hashes(provenance.modules("rules", ",".join(names)))
  )
  settings = {
    "rules": names,
    "checkpoints": made_by["provenance"]["checkpoints"],
    "sizes": dict(zip(fields, sizes, strict=True)),
    "full_grid": _FULL_GRID.value,
    "max_gib": _MAX_GIB.value,
    "rounds": rounds,
    "specjax": specjax.__version__,
    "machine": made_by["machine"],
  }
  path = cli.OUTPUT.value
  results.check({"--output": path}, resumes=True)
  with Journal(path, settings) as journal:
    for name, entry in _measure(plan, journal.batches, rounds=rounds):
      journal.add({"batch": name, **entry})
    cells = [
      {key: value for key, value in entry.items() if key != "batch"}
      for entry in journal.batches.values()
    ]
    results.write_json(
      path, {"cells": cells, "skipped": skipped, "rounds": rounds, **made_by}
    )
    journal.finish()
  return 0


def _measure(
  plan: list, done: Mapping, *, rounds: int
) -> Iterator[tuple[str, dict]]:
  """Entries of a plan that are not done yet, with their names."""
  made, inputs = None, None
  for number, (cell, drawn, rule) in enumerate(plan, start=1):
    entry = _entry(cell, drawn, rule)
    name = json.dumps(list(entry.values()))
    if name in done:
      continue
    if made != (cell, drawn):
      inputs = None  # the memory of the cell before
      made, inputs = (cell, drawn), make_inputs(cell, drawn)
    spent, one_pass = time_rule(rule, cell.tree, drawn, inputs, rounds=rounds)
    entry |= {
      "milliseconds": spent,
      "pass_milliseconds": one_pass,
      "ratio": spent / one_pass,
      "bytes": cell.pass_bytes,
    }
    print(
      f"[{number}/{len(plan)}] V={cell.vocab_size} K={cell.num_drafts} "
      f"G={cell.num_speculative_tokens} B={cell.batch_size} {rule} "
      f"({drawn.name}): {spent:.2f} ms, {spent / one_pass:.2f} passes",
      file=sys.stderr,
      flush=True,
    )
    yield name, entry


def _entry(cell: Cell, drawn: Siblings, name: str) -> dict:
  return {**dataclasses.asdict(cell), "rule": name, "siblings": drawn.name}


if __name__ == "__main__":
  cli.run(run, required=("output",))
