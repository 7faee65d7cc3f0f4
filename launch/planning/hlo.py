"""Collectives and copies in a compiled TPU program, by phase.

XLA's `cost_analysis` counts the body of a loop once and omits collectives, so
this parses the text of the compiled module (`compiled.as_text()`). The body of
a loop counts as many times as it runs, except that of the decoding loop, which
counts once, so figures are per round. All branches of a conditional count.
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
# The memory space of an array: S(1) is on the chip.
_SPACE = re.compile(r"[a-z]\w*\[[\d,]+\]\{[^}]*?(S\(\d+\))?\}")
_CALLED = re.compile(
  r"(?:body|condition|calls|to_apply|true_computation|false_computation)="
  r"%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
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
  """The shape of an array in XLA's terms, such as `("bf16", (4, 8))`."""
  return _TYPES[jnp.dtype(dtype).name], dimensions


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a computation, with the shapes of its results.

  `called` are the computations that it runs, each `trips` times; `inside` are
  the opcodes of a fusion, whose intermediate results stay on the chip. `moves`
  marks copies between HBM and on-chip memory; `scopes` are parts of its name in
  jax.
  """

  shapes: tuple[Shape, ...]
  opcode: str
  called: tuple[str, ...]
  inside: frozenset[str]
  trips: int
  moves: bool
  scopes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Bytes of all results; of the largest, if a start repeats its inputs."""
    sizes = [_BYTES.get(t, 0) * math.prod(dims) for t, dims in self.shapes]
    repeats = self.opcode.endswith("-start") and (
      self.opcode != "all-reduce-start"
    )
    return max(sizes, default=0) if repeats else sum(sizes)


# An instruction, its number of runs, its scopes, and whether it is in a fusion.
Run = tuple[Instruction, int, tuple[str, ...], bool]


def parse(text: str) -> list[Run]:
  """Parses the text of a compiled module into its instructions, in order.

  An instruction that the compiler added has the scopes of its caller.
  """
  lines: dict[str, list[str]] = {}
  entry, current = "", []
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = lines.setdefault(match[2], [])
      entry = match[2] if match[1] else entry
    else:
      current.append(line)
  matches = {
    name: [match for match in map(_INSTRUCTION.match, body) if match]
    for name, body in lines.items()
  }

  def instruction(shape: str, opcode: str, rest: str) -> Instruction:
    called = []
    for one, several in _CALLED.findall(rest):
      called += [one] if one else re.findall(r"[\w.\-]+", several)
    loops, fuses = opcode == "while", opcode == "fusion"
    label = _NAME.search(rest)
    return Instruction(
      shapes=tuple(
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(shape)
      ),
      opcode=opcode,
      called=tuple(called),
      inside=frozenset(m[2] for x in called for m in matches[x] if fuses),
      trips=max(_rounds(lines[x]) for x in called) if loops else 1,
      moves=opcode == "copy-start" and len({*_SPACE.findall(shape)}) == 2,
      scopes=tuple(label[1].split("/")) if label else (),
    )

  computations = {
    name: [instruction(*match.groups()) for match in body]
    for name, body in matches.items()
  }

  def walk(name: str, count: int, scopes: tuple[str, ...], fused: bool):
    for one in computations[name]:
      here = one.scopes or scopes
      yield one, count, here, fused
      for called in one.called:
        within = fused or one.opcode == "fusion"
        yield from walk(called, count * one.trips, here, within)

  return list(walk(entry, 1, (), False))


def _rounds(condition: list[str]) -> int:
  """N if a loop's condition is just `i < N`, else 1."""
  limits = [m[1] for m in map(_LIMIT.search, condition) if m]
  root = next((line for line in condition if "ROOT" in line), "")
  is_bound = "compare(" in root and "direction=LT" in root
  return int(limits[0]) if len(limits) == 1 and is_bound else 1


def collectives(
  module: list[Run], phases: dict[str, tuple[str, ...]]
) -> dict[str, dict[str, dict[str, int]]]:
  """Counts collectives and their bytes.

  Args:
    module: the program.
    phases: maps names of phases to their `jax.named_scope`s.

  Returns:
    For every phase, and for "other", `{"count", "bytes"}` by kind; bytes are
    those of the results on one device.
  """
  phase_of = {scope: name for name, parts in phases.items() for scope in parts}
  counted: dict = {
    name: collections.defaultdict(lambda: {"count": 0, "bytes": 0})
    for name in (*phases, "other")
  }
  for one, count, scopes, _ in module:
    kind = one.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
      known = (phase_of[s] for s in scopes if s in phase_of)
      entry = counted[next(known, "other")][kind]
      entry["count"] += count
      entry["bytes"] += count * one.num_bytes
  return {phase: dict(kinds) for phase, kinds in counted.items()}


def copies(module: list[Run], shapes: set[Shape]) -> int:
  """Counts copies of arrays of these shapes in a round.

  A copy may permute dimensions, and may be a fusion. Updates of a slice, which
  write only that, and moves to and from on-chip memory do not count.
  """
  wanted = {(dtype, tuple(sorted(dims))) for dtype, dims in shapes}

  def makes_one(one: Instruction) -> bool:
    fusion = one.opcode == "fusion"  # may have several results
    results = one.shapes if fusion else one.shapes[:1]
    if not any((t, tuple(sorted(d))) in wanted for t, d in results):
      return False
    if fusion:
      return not one.inside & {"dynamic-update-slice", "scatter"}
    return one.opcode in ("copy", "copy-start", "transpose") and not one.moves

  return sum(n for one, n, _, fused in module if not fused and makes_one(one))
