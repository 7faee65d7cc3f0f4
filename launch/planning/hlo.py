"""Collectives and copies in a compiled XLA program, by phase.

XLA's `cost_analysis` takes the body of a loop once and knows no collectives, so
the text of the compiled module is read (`compiled.as_text()`). What is inside a
loop counts as often as the loop runs; a loop whose number of rounds is not
known (the decoding loop) counts once, so figures are of one round. Of the
branches of a conditional, collectives are those of the branch that sends most.
"""

import collections
import dataclasses
import math
import re

import jax.numpy as jnp

COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute",
)  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
# Of an array, the memory that it is in: S(1) is the chip's own.
_SPACE = re.compile(r"[a-z]\w*\[[\d,]+\]\{[^}]*?(S\(\d+\))?\}")
_CALLED = re.compile(
  r"(?:body|condition|calls|to_apply|true_computation|false_computation)="
  r"%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"?known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)"?\}')
_LIMIT = re.compile(r"constant\((\d+)\)")
_NAME = re.compile(r'op_name="([^"]*)"')
_BYTES = {
  "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
  "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1,
}  # fmt: skip
_TYPES = {
  "int8": "s8", "float8_e4m3fn": "f8e4m3fn", "bfloat16": "bf16",
  "float32": "f32",
}  # fmt: skip

Shape = tuple[str, tuple[int, ...]]  # XLA's name of a dtype, and dimensions


def shape_of(dtype, dimensions: tuple[int, ...]) -> Shape:
  """The shape of an array as XLA names it, as in `("bf16", (4, 8))`."""
  return _TYPES[jnp.dtype(dtype).name], dimensions


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a computation, with the shapes of its results.

  `called` are the computations that it runs, each `trips` times. That of a
  fusion is apart (`fused`): what is between its operations never reaches
  memory. `moves` says that it copies between a device's memory and the chip's
  own, small and fast one; `scopes` are parts of the name that jax gave it.
  """

  shapes: tuple[Shape, ...]
  opcode: str
  called: tuple[str, ...]
  fused: str | None
  trips: int
  moves: bool
  scopes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Bytes of all results; of the largest if a start repeats its inputs."""
    sizes = [_BYTES.get(t, 0) * math.prod(dims) for t, dims in self.shapes]
    repeats = self.opcode.endswith("-start") and (
      self.opcode != "all-reduce-start"
    )
    return max(sizes, default=0) if repeats else sum(sizes)


@dataclasses.dataclass(frozen=True)
class Module:
  """A parsed program: its instructions by computation, and which one runs."""

  entry: str
  computations: dict[str, tuple[Instruction, ...]]

  def fused(self, one: Instruction) -> tuple[Instruction, ...]:
    """The instructions of a fusion; none of another one."""
    return self.computations.get(one.fused or "", ())


def parse(text: str) -> Module:
  """Reads the text of a compiled module.

  Raises:
    ValueError: if there is no entry computation in it.
  """
  lines: dict[str, list[str]] = {}
  entry, current = "", []
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = lines.setdefault(match[2], [])
      entry = match[2] if match[1] else entry
    else:
      current.append(line)
  if not entry:
    raise ValueError("this is not the text of a compiled XLA module")
  rounds = {name: _rounds(body) for name, body in lines.items()}
  computations = {
    name: tuple(
      _instruction(*match.groups(), rounds)
      for match in map(_INSTRUCTION.match, body)
      if match
    )
    for name, body in lines.items()
  }
  return Module(entry, computations)


def _rounds(condition: list[str]) -> int | None:
  """N, where a loop's condition is `i < N` and nothing else."""
  limits = [m[1] for m in map(_LIMIT.search, condition) if m]
  root = next((line for line in condition if "ROOT" in line), "")
  if len(limits) == 1 and "compare(" in root and "direction=LT" in root:
    return int(limits[0])
  return None


def _instruction(shape: str, opcode: str, rest: str, rounds) -> Instruction:
  called = []
  for one, several in _CALLED.findall(rest):
    called += [one] if one else re.findall(r"[\w.\-]+", several)
  trips = 1
  if opcode == "while":
    known = _TRIPS.search(rest)
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    trips = int(known[1]) if known else rounds.get(condition[1]) or 1
  label = _NAME.search(rest)
  fusion = opcode == "fusion"
  return Instruction(
    shapes=tuple(
      (dtype, tuple(int(d) for d in dims.split(",") if d))
      for dtype, dims in _SHAPE.findall(shape)
    ),
    opcode=opcode,
    called=() if fusion else tuple(called),
    fused=called[0] if fusion and called else None,
    trips=trips,
    moves=opcode == "copy-start" and len({*_SPACE.findall(shape)}) == 2,
    scopes=tuple(label[1].split("/")) if label else (),
  )


def _walk(module: Module, start: str, scopes=(), branches=tuple):
  """All instructions that run, with their counts and scopes.

  Scopes are the instruction's own, or those of what called it if the compiler
  made it up. `branches` says which computations of a conditional are walked.
  """
  for one in module.computations.get(start, ()):
    here = one.scopes or scopes
    yield one, 1, here
    conditional = one.opcode == "conditional"
    for called in branches(one.called) if conditional else one.called:
      for inner, count, its_own in _walk(module, called, here, branches):
        yield inner, count * one.trips, its_own


def _collectives(module: Module, start: str):
  """As `_walk`, but only collectives, each with its kind in front."""
  sent = lambda name: sum(
    count * one.num_bytes for _, one, count, _ in _collectives(module, name)
  )
  most = lambda names: [max(names, key=sent)]
  for instruction, count, scopes in _walk(module, start, branches=most):
    for one in (instruction, *module.fused(instruction)):
      kind = one.opcode.removesuffix("-start")
      if kind in COLLECTIVES:
        yield kind, one, count, one.scopes or scopes


def collectives(
  module: Module, phases: dict[str, tuple[str, ...]]
) -> dict[str, dict[str, dict[str, int]]]:
  """Counts collectives and their bytes.

  Args:
    module: the program.
    phases: names to the `jax.named_scope`s that they are made of.

  Returns:
    For every phase, and for "other", kinds to `{"count", "bytes"}`; bytes are
    those of the results on one device.
  """
  phase_of = {scope: name for name, parts in phases.items() for scope in parts}
  counted: dict = {
    name: collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    for name in (*phases, "other")
  }
  for kind, one, count, scopes in _collectives(module, module.entry):
    phase = next((phase_of[s] for s in scopes if s in phase_of), "other")
    entry = counted[phase][kind]
    entry["count"] += count
    entry["bytes"] += count * one.num_bytes
  return {phase: dict(kinds) for phase, kinds in counted.items()}


def copies(module: Module, shapes: set[Shape]) -> int:
  """Number of copies of arrays of these shapes in a round.

  A copy may have its dimensions in another order, and may be a fusion; one that
  updates a slice of such an array writes no more than that slice. One that
  moves an array onto the chip or back is none.
  """
  wanted = {(dtype, tuple(sorted(dims))) for dtype, dims in shapes}

  def makes_one(one: Instruction) -> bool:
    fusion = one.opcode == "fusion"  # it may have several results
    results = one.shapes if fusion else one.shapes[:1]
    if not any((t, tuple(sorted(d))) in wanted for t, d in results):
      return False
    if not fusion:
      return one.opcode in ("copy", "copy-start", "transpose") and not one.moves
    inside = {x.opcode for x in module.fused(one)}
    return not inside & {"dynamic-update-slice", "scatter"}

  return sum(
    count for one, count, _ in _walk(module, module.entry) if makes_one(one)
  )
