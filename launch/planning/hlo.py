"""Collectives, copies and weights read in an optimised XLA program, by phase.

Reads the text of a compiled module (`compiled.as_text()`). What is inside a
loop counts as often as the loop runs; a loop whose number of rounds is not
known (the decoding loop) counts once, so figures are of one round. Of the
branches of a conditional, collectives are those of the branch that sends most.
"""

import collections
import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np

COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute",
)  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$"
)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
# Of an array, with the memory that it is in: 1 is the chip's own.
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
  "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
  "s4": 0.5, "f8e4m3fn": 1, "f4e2m1fn": 0.5,
}  # fmt: skip

Shape = tuple[str, tuple[int, ...]]  # dtype and dimensions


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a computation.

  Attributes:
    name: without the percent sign.
    shapes: of its result or its results, as `(dtype, dimensions)`.
    opcode: as in "all-reduce-start".
    called: computations it calls, each `trips` times. Not that of a fusion:
      what is between its operations never reaches memory.
    fused: the computation of a fusion.
    trips: rounds of a while loop if they are known, else 1.
    moves: whether it is a copy between a device's memory and the chip's own,
      small and fast one.
    on_chip: whether its first result is there.
    scopes: parts of the name that jax gave the operation.
  """

  name: str
  shapes: tuple[Shape, ...]
  opcode: str
  called: tuple[str, ...]
  fused: str | None
  trips: int
  moves: bool
  on_chip: bool
  scopes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Bytes of all results; of the largest if a start repeats its inputs."""
    sizes = [nbytes(*shape) for shape in self.shapes]
    repeats = self.opcode.endswith("-start") and (
      self.opcode != "all-reduce-start"
    )
    return max(sizes, default=0) if repeats else sum(sizes)


def type_of(dtype) -> str:
  """XLA's name of a dtype, as in "bf16"."""
  return _TYPES[jnp.dtype(dtype).name]


_TYPES = {
  "int4": "s4", "int8": "s8", "float8_e4m3fn": "f8e4m3fn",
  "float4_e2m1fn": "f4e2m1fn",
  "bfloat16": "bf16", "float32": "f32",
}  # fmt: skip


def nbytes(dtype: str, dimensions: tuple[int, ...]) -> int:
  """Bytes of an array, padding left out; 0 for tokens and the like."""
  count = int(np.prod(dimensions, dtype=np.int64))
  return math.ceil(_BYTES.get(dtype, 0) * count)


@dataclasses.dataclass(frozen=True)
class Module:
  """A parsed program.

  Attributes:
    entry: name of the computation that runs.
    computations: instructions by computation.
  """

  entry: str
  computations: dict[str, tuple[Instruction, ...]]


def parse(text: str) -> Module:
  """Reads the text of a compiled module.

  Raises:
    ValueError: if there is no entry computation in it.
  """
  lines: dict[str, list[str]] = {}
  entry = current = None
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = lines.setdefault(match[2], [])
      entry = match[2] if match[1] else entry
    elif current is not None:
      current.append(line)
  if entry is None:
    raise ValueError("this is not the text of a compiled XLA module")
  rounds = {name: _rounds(body) for name, body in lines.items()}
  return Module(
    entry,
    {
      name: tuple(
        _instruction(*match.groups(), rounds=rounds)
        for match in map(_INSTRUCTION.match, body)
        if match
      )
      for name, body in lines.items()
    },
  )


def _rounds(condition: list[str]) -> int | None:
  """N, where a loop's condition is `i < N` and nothing else."""
  limits = [m[1] for m in map(_LIMIT.search, condition) if m]
  root = next((line for line in condition if "ROOT" in line), "")
  if len(limits) == 1 and "compare(" in root and "direction=LT" in root:
    return int(limits[0])
  return None


def _instruction(name, shape, opcode, rest, *, rounds) -> Instruction:
  called = []
  for one, several in _CALLED.findall(rest):
    called += [one] if one else re.findall(r"[\w.\-]+", several)
  trips = 1
  if opcode == "while":
    known = _TRIPS.search(rest)
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    trips = int(known[1]) if known else rounds.get(condition[1]) or 1
  label, spaces = _NAME.search(rest), _SPACE.findall(shape)
  return Instruction(
    name=name,
    shapes=tuple(
      (dtype, tuple(int(d) for d in dims.split(",") if d))
      for dtype, dims in _SHAPE.findall(shape)
    ),
    opcode=opcode,
    called=() if opcode == "fusion" else tuple(called),
    fused=called[0] if opcode == "fusion" and called else None,
    trips=trips,
    moves=opcode == "copy-start" and len(set(spaces)) == 2,
    on_chip=spaces[:1] == ["S(1)"],
    scopes=tuple(label[1].split("/")) if label else (),
  )


def walk(module: Module, *, start: str | None = None, branches=tuple):
  """All instructions that run, with their counts and scopes.

  Args:
    module: the program.
    start: the computation to begin with; by default the one that runs.
    branches: which of a conditional's computations are walked, a function of
      all their names.

  Yields:
    `(instruction, count, scopes)`; scopes are the instruction's own, or those
    of what called it if the compiler made it up.
  """

  def visit(name, count, scopes):
    for one in module.computations.get(name, ()):
      here = one.scopes or scopes
      yield one, count, here
      called = one.called
      for name in branches(called) if one.opcode == "conditional" else called:
        yield from visit(name, count * one.trips, here)

  yield from visit(start or module.entry, 1, ())


def _collectives(module: Module, start: str | None = None):
  """As `walk`, but only collectives, each with its kind in front."""
  most = lambda names: [max(names, key=lambda name: sent(name))]
  sent = lambda name: sum(
    count * one.num_bytes for _, one, count, _ in _collectives(module, name)
  )
  for instruction, count, scopes in walk(module, start=start, branches=most):
    for one in (instruction, *module.computations.get(instruction.fused, ())):
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
  for kind, one, count, scopes in _collectives(module):
    phase = next((phase_of[s] for s in scopes if s in phase_of), "other")
    entry = counted[phase][kind]
    entry["count"] += count
    entry["bytes"] += count * one.num_bytes
  return {phase: dict(kinds) for phase, kinds in counted.items()}


def copies(module: Module, shapes: set[Shape]) -> int:
  """Number of copies of arrays of these `(dtype, dimensions)` in a round.

  A copy may have its dimensions in another order, and may be a fusion; one that
  updates a slice of such an array writes no more than that slice. One that
  moves an array onto the chip or back is none (`moves`).
  """
  return _count(module, shapes, lambda one: not one.moves)


def moves(module: Module, shapes: set[Shape]) -> int:
  """Number of moves of such an array onto the chip, or back, in a round."""
  return _count(module, shapes, lambda one: one.moves)


def _count(module: Module, shapes, which) -> int:
  wanted = {(dtype, tuple(sorted(dims))) for dtype, dims in shapes}

  def makes_one(one: Instruction) -> bool:
    fusion = one.opcode == "fusion"  # it may have several results
    results = one.shapes if fusion else one.shapes[:1]
    if not any((t, tuple(sorted(d))) in wanted for t, d in results):
      return False
    if not fusion:
      return one.opcode in ("copy", "copy-start", "transpose") and which(one)
    inside = {x.opcode for x in module.computations.get(one.fused, ())}
    whole = not inside & {"dynamic-update-slice", "scatter"}
    return whole and which(one)

  return sum(count for one, count, _ in walk(module) if makes_one(one))


def weights_read(module: Module, shapes: set[Shape]) -> int:
  """Bytes of weights that the operations of a round read.

  A fusion that takes one layer's slice of stacked weights reads that slice.
  Rows that are looked up in a table are not counted.

  Args:
    module: the program.
    shapes: `(dtype, dimensions)` of the weights as they lie on a device.
  """

  def read(shape, inside) -> int:
    dtype, dims = shape
    slices = {
      x.shapes[0] for x in inside if x.opcode in ("dynamic-slice", "slice")
    }
    one = (dtype, (1, *dims[1:]))
    if len(dims) == 2 and any(x.opcode == "gather" for x in inside):
      return 0
    return nbytes(*(one if one in slices else shape))

  total = 0
  for one, count, _ in walk(module):
    inside = list(_inside(module, one))
    for x in module.computations.get(one.fused, ()):
      if x.opcode == "parameter" and x.shapes[0] in shapes:
        total += count * read(x.shapes[0], inside)
  return total


def weights_written(
  module: Module, shapes: set[Shape], group: int | None = None
) -> int:
  """Bytes of arrays of a weight's form, or a layer's, that a round writes.

  Of any type: dequantised weights are such, and copies. What is moved onto the
  chip, or made there, is not written to memory.

  Args:
    module: the program.
    shapes: `(dtype, dimensions)` of the weights as they lie on a device.
    group: inputs of a group, which may be an axis of their own.
  """
  forms = {d for _, dims in shapes for d in (dims, dims[1:], (1, *dims[1:]))}
  if group is not None:  # inputs are the last axis, of experts the one before
    forms |= {
      (*d[:at], d[at] // group, group, *d[at + 1 :])
      for d in forms
      for at in range(max(len(d) - 2, 0), len(d))
    }
  wanted = {tuple(sorted(d)) for d in forms if math.prod(d) >= _LARGE}
  given = (
    "parameter", "get-tuple-element", "tuple", "while", "conditional",
    "bitcast", "copy-done", "call", "custom-call", "constant",
  )  # fmt: skip
  return sum(
    count * nbytes(*shape)
    for one, count, _ in walk(module)
    if one.opcode not in given and not one.moves and not one.on_chip
    for shape in one.shapes[:1]
    if tuple(sorted(shape[1])) in wanted
  )


_LARGE = 2**16  # numbers of what could be a weight


def _inside(module: Module, one: Instruction):
  """The instructions of a fusion, and of those within it."""
  for x in module.computations.get(one.fused, ()):
    yield x
    yield from _inside(module, x)
