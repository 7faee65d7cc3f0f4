"""The decoding loop for a slice: built from shapes, compiled ahead of time.

Nothing is loaded and nothing runs: parameters are shapes with shardings. The
programs are those that `launch.decode` runs (`specjax.runtime.compilation`).
"""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.planning import borrowing, heads, hlo, networks
from launch.planning.networks import Config
from models import sharding as sharding_lib
from models.head_shapes import HeadShape
from models.meshes import Layout
from models.networks import lowbits
from models.networks.lowbits import Format
from models.networks.transformer import SkippedLayers
from models.sharding import Sharding
from specjax import decode, drafters, random, rules
from specjax import siblings as siblings_lib
from specjax.cache import Cache
from specjax.runtime import compilation
from specjax.runtime.mesh import MeshDecoder
from specjax.tree import Tree
from specjax.types import Drafter, Inputs, Params

_DTYPE = networks.DTYPE
num_params = networks.num_params
# Scopes of `Decoder.step` by what a reader asks for.
PHASES = {
  "draft_step": ("draft",),
  "verify": ("score", "verify"),
  "commit": ("commit",),
}


class DoesNotFitError(Exception):
  """The compiler ran out of memory.

  Attributes:
    needed, available: bytes of a device's memory.
  """

  def __init__(self, needed: int, available: int):
    super().__init__(f"{needed} bytes needed, {available} available")
    self.needed, self.available = needed, available


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """Settings of a plan.

  Attributes:
    target: the large model.
    draft: the small one, if there is one.
    head: what drafts from the target's features, if a head does.
    skipped: sub-layers that the target, or its copy, leaves out to draft for
      itself, if it does. With neither, n-grams are drafted.
    lookahead: the window's columns, where the target drafts by looking ahead;
      then the tree is the guesses, as many paths.
    tree: what a round drafts.
    siblings: how children are drawn, a name in `specjax.siblings`.
    rule: a name in `specjax.rules`.
    batch_size: rows, over all devices.
    max_length: tokens of a prompt with its completion.
    prompt_length: tokens that prefill takes at once.
    layout: the mesh.
    input_length: tokens of what an encoder reads; 0 without one.
    text_length: those of the longest row when a pass is timed; None for
      `max_length`.
    distinct: experts of a layer that a pass of the target touches, as measured;
      None for uniform routing.
    weights, draft_weights: how the target's and the draft's are stored; None
      for bfloat16.
    cache, draft_cache: what their keys and values are stored as; likewise.
    own_weights: how the copy is stored that drafts, if the target's own in few
      bits do (`quantised_self`); in fewer than `weights`.
  """

  target: Config
  draft: Config | None
  head: HeadShape | None = None
  skipped: SkippedLayers | None = None
  lookahead: int | None = None
  tree: Tree
  siblings: str
  rule: str
  batch_size: int
  max_length: int
  prompt_length: int
  layout: Layout
  input_length: int = 0
  text_length: int | None = None
  distinct: networks.Distinct | None = None
  weights: Format | None = None
  draft_weights: Format | None = None
  cache: str | None = None
  draft_cache: str | None = None
  own_weights: Format | None = None

  def check(self) -> None:
    """Raises ValueError for what cannot be cut or decoded."""
    low = (
      self.weights, self.draft_weights, self.own_weights, self.cache,
      self.draft_cache,
    )  # fmt: skip
    networks.check_kinds(
      self.target, self.draft, self.skipped, self.input_length, any(low)
    )
    networks.check_low(
      self.target, self.weights or self.own_weights, self.cache
    )
    networks.check_low(self.draft, self.draft_weights, self.draft_cache)
    self.cut_target(), self.cut_draft()
    rule, siblings = rules.get(self.rule), siblings_lib.get(self.siblings)
    if self.drafter == "ngram":
      if not self.tree.is_chain:
        raise ValueError(
          "the ngram drafter proposes one path (num_drafts=1), got "
          f"{self.tree.max_children}"
        )
      siblings = siblings_lib.IID
    tree = self.tree
    if self.lookahead is not None:
      siblings, tree = siblings_lib.GIVEN, make_drafter(self).tree
    if self.tree.num_drafted:
      rule.check(tree, siblings)
    if self.weights and self.own_weights:
      lowbits.below(self.own_weights, self.weights)
    if self.head is not None:
      even = self.head.even_sizes()
      if any(n % self.layout.draft for n in even):
        raise ValueError(
          f"a head with sizes {sorted({*even})} cannot be cut over "
          f"{self.layout.draft} devices"
        )
      make_drafter(self)  # which says whether it can draft such a tree
    if self.skipped is not None:
      self.skipped.check(self.target.num_layers)
    if self.batch_size % self.layout.data:
      raise ValueError(
        f"batch_size ({self.batch_size}) must be a multiple of the mesh's "
        f"'data' axis ({self.layout.data})"
      )
    if not 0 < self.prompt_length < self.max_length:
      raise ValueError(
        f"prompt_length ({self.prompt_length}) must be in 1.."
        f"{self.max_length - 1}"
      )
    if not 0 < (self.text_length or 1) <= self.max_length:
      raise ValueError(
        f"text_length ({self.text_length}) must be in 1..{self.max_length}"
      )
    if self.max_length > (longest := self.longest):
      raise ValueError(
        f"max_length ({self.max_length}) exceeds the models' {longest} "
        "positions"
      )

  @property
  def longest(self) -> int:
    """Positions that all models know."""
    models = (self.target, self.draft, self.head)
    known = [c.max_positions for c in models if c]
    return min((n for n in known if n is not None), default=2**20)

  @property
  def drafter(self) -> str:
    """The name of what proposes, as `launch.assembly.registry` has it.

    Of a head its kind (`models.head_shapes.KINDS`).
    """
    if not self.tree.num_drafted:
      return "plain"
    if self.head is not None:
      return self.head.kind
    if self.lookahead is not None:
      return "lookahead"
    if self.own_weights is not None:
      return "quantised_self"
    if self.draft is not None:
      return "model"
    return "ngram" if self.skipped is None else "layer_skip"

  @property
  def vocab_size(self) -> int:
    """V, the tokens that both models know."""
    return min(c.vocab_size for c in (self.target, self.draft) if c)

  @property
  def slots(self) -> int:
    """Cache slots of a row."""
    return self.max_length + self.fed

  @property
  def fed(self) -> int:
    """Tokens of a row that the target is fed in a round: nodes and lanes."""
    nodes = self.tree.num_nodes
    if self.lookahead is None:
      return nodes
    return nodes + self.lookahead * self.tree.max_depth - 1

  @property
  def rows(self) -> int:
    """Rows on each group of devices."""
    return self.batch_size // self.layout.data

  def shardings(self) -> tuple[Sharding, Sharding]:
    """The target's and the draft's rules."""
    target, draft = self.layout.shardings()
    return (
      sharding_lib.for_experts(self.target, target, self.layout.model),
      sharding_lib.for_experts(self.draft, draft, self.layout.draft),
    )

  def cut_target(self) -> Config:
    """The target with as many key/value heads as its devices need."""
    return networks.cut(self.target, self.layout.model)

  def cut_draft(self) -> Config | None:
    """The draft, likewise."""
    return self.draft and networks.cut(self.draft, self.layout.draft)

  def tables(self) -> heads.Tables:
    """The target's embedding and output projection, as they are stored."""
    return heads.Tables(config=self.cut_target(), weights=self.weights)

  def own_shapes(self):
    """Shapes of the copy in few bits that drafts."""
    return networks.shapes(self.cut_target(), self.own_weights)

  def cut_head(self) -> tuple[HeadShape, Sharding]:
    """The head as its devices hold it, and its rules on them."""
    assert self.head is not None
    return self.head.cut(self.shardings()[1], self.layout.draft)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The compiler's figures of both programs, per device.

  Attributes:
    arguments: bytes of parameters, caches and the rest of the state.
    temporaries: bytes on top, the larger of prefill's and the loop's.
    peak: the larger of both programs' totals.
    collectives: see `hlo.collectives`, of one round.
    cache_copies: copies of a whole cache in a round.
    cache_moves: how often a round moves a whole cache onto the chip, or back.
    weights: of a plain round whose weights are in few bits, their "bytes" on a
      device, how many of them it "reads", and how many of arrays of their form
      it "writes"; else None.
    donation_honoured: whether the loop writes every cache into the one that it
      is given.
    seconds: what compiling both took, by the clock.
    cpu_seconds: likewise, of all threads.
  """

  arguments: int
  temporaries: int
  peak: int
  collectives: dict
  cache_copies: int
  cache_moves: int
  weights: dict[str, int] | None
  donation_honoured: bool
  seconds: float
  cpu_seconds: float


def make_drafter(question: Question) -> Drafter:
  """The drafter that would run."""
  q = question
  of_target, of_draft = q.shardings()
  static = dict(
    tree=q.tree, siblings=siblings_lib.get(q.siblings), vocab_size=q.vocab_size
  )
  if not q.tree.num_drafted:
    return drafters.plain()
  if q.head is not None:
    head, of_draft = q.cut_head()
    return heads.make_drafter(
      head, **static, dtype=_DTYPE, sharding=of_draft, tables=q.tables()
    )
  if q.draft is not None:
    draft = networks.functions(
      q.cut_draft(), of_draft, weights=q.draft_weights, cache=q.draft_cache
    )
    return drafters.model(draft, **static)
  if q.own_weights is not None:
    draft = networks.functions(
      q.cut_target(), of_target, q.skipped, weights=q.own_weights, cache=q.cache
    )
    return borrowing.reading(
      drafters.quantised_self(draft, **static),
      borrowing.with_shared(q.own_shapes()),
    )
  if q.skipped is not None:
    draft = networks.functions(
      q.cut_target(), of_target, q.skipped, weights=q.weights, cache=q.cache
    )
    return drafters.layer_skip(draft, **static)
  if q.lookahead is not None:
    return drafters.lookahead(
      window=q.lookahead,
      tokens=q.tree.max_depth,
      num_guesses=q.tree.max_children,
      vocab_size=q.vocab_size,
    )
  return drafters.ngram(tokens=q.tree.max_depth)


def make_decoder(question: Question, mesh: Mesh) -> MeshDecoder:
  """The decoder that would run."""
  q = question
  features = q.head.features if q.head else ()
  target = networks.functions(
    q.cut_target(),
    q.shardings()[0],
    features=features,
    weights=q.weights,
    cache=q.cache,
  )
  decoder = decode.make_decoder(
    target,
    drafter=make_drafter(q),
    rule=rules.get(q.rule),
    vocab_size=q.vocab_size,
  )
  return MeshDecoder(decoder=decoder, mesh=mesh)


def num_draft_params(question: Question) -> int:
  """Parameters of what drafts that are not the target's."""
  q = question
  if q.head is not None:
    return heads.num_params(q.head, _DTYPE)
  if q.own_weights is not None:
    return num_params(q.target)
  return num_params(q.draft) if q.draft else 0


def compile_for(question: Question, devices: list) -> Compiled:
  """Compiles prefill and loop for the devices.

  Raises:
    DoesNotFitError: if either does not fit into a device's memory.
    ValueError: as `Question.check`.
  """
  question.check()
  q, mesh = question, question.layout.mesh(devices)
  decoder = make_decoder(q, mesh)
  of_target, of_draft = q.shardings()
  target = networks.shapes(q.cut_target(), q.weights)
  draft = q.draft and networks.shapes(q.cut_draft(), q.draft_weights)
  if q.head is not None:
    head, of_draft = q.cut_head()
    draft = heads.own_params(head, _DTYPE)
  if q.own_weights is not None:
    draft, of_draft = q.own_shapes(), of_target
  draft = draft and networks.place(draft, of_draft, mesh)
  if q.own_weights is not None:
    draft = borrowing.rounded(draft, networks.shapes(q.cut_target()))
  params = Params(target=networks.place(target, of_target, mesh), draft=draft)
  keys = jax.eval_shape(
    lambda: random.row_keys(jax.random.key(0), jnp.arange(q.batch_size))
  )
  rows = NamedSharding(mesh, P("data"))
  row = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
  inputs = None
  if q.input_length:
    inputs = Inputs(
      tokens=row((q.batch_size, q.input_length), jnp.int32),
      lengths=row((q.batch_size,), jnp.int32),
    )
  arguments = (
    params,
    row((q.batch_size, q.prompt_length), jnp.int32),
    row((q.batch_size,), jnp.int32),
    row(keys.shape, keys.dtype),
    row((q.batch_size,), jnp.int32),
    inputs,
  )

  def init(params, prompts, lengths, keys, budgets, inputs):
    return decoder.init(
      params, prompts, lengths, keys, buffer_length=q.max_length,
      max_new_tokens=budgets, inputs=inputs,
    )  # fmt: skip

  start, cpu_start = time.perf_counter(), time.process_time()
  with jax.set_mesh(mesh):
    programs = compilation.compile_both(
      decoder,
      init,
      arguments,
      compiled=_compile,
      cache_specs=q.layout.cache_specs(),
    )
  seconds = time.perf_counter() - start
  cpu_seconds = time.process_time() - cpu_start
  module = hlo.parse(programs.loop.as_text())
  before = programs.prefill.memory_analysis()
  during = programs.loop.memory_analysis()
  total = lambda m: (
    m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    + m.temp_size_in_bytes
  )  # fmt: skip
  pieces = [
    (buffer.dtype, buffer.sharding.shard_shape(buffer.shape))
    for node in jax.tree.leaves(
      programs.state, is_leaf=lambda x: isinstance(x, Cache)
    )
    if isinstance(node, Cache)
    for buffer in jax.tree.leaves((node.keys, node.values))
  ]
  whole = {(hlo.type_of(dtype), piece) for dtype, piece in pieces}
  cache_bytes = [hlo.nbytes(hlo.type_of(dtype), p) for dtype, p in pieces]
  # What the loop returns in memory that it was not given.
  fresh = during.output_size_in_bytes - during.alias_size_in_bytes
  return Compiled(
    arguments=during.argument_size_in_bytes,
    temporaries=max(before.temp_size_in_bytes, during.temp_size_in_bytes),
    peak=max(total(before), total(during)),
    collectives=hlo.collectives(module, PHASES),
    cache_copies=hlo.copies(module, whole),
    cache_moves=hlo.moves(module, whole),
    weights=_weights(module, q, params.target),
    donation_honoured=fresh < min(cache_bytes),
    seconds=seconds,
    cpu_seconds=cpu_seconds,
  )


def _weights(module: hlo.Module, q: Question, params) -> dict | None:
  """Reads and writes of the target's low-bit weights in a plain round."""
  if q.weights is None or q.tree.num_drafted:
    return None
  pieces = [
    x.sharding.shard_shape(x.shape)
    for x in jax.tree.leaves(params)
    if x.dtype == q.weights.dtype
  ]
  stored = hlo.type_of(q.weights.dtype)
  shapes = {(stored, piece) for piece in pieces}
  return {
    "bytes": sum(hlo.nbytes(stored, piece) for piece in pieces),
    "read": hlo.weights_read(module, shapes),
    "written": hlo.weights_written(module, shapes, q.weights.group),
  }


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OUT_OF_MEMORY = re.compile(
  r"([\d.]+)([KMGT]?)i?B? ?(?:\)|of) ?(?:exceeds available HBM \(|)"
  r"([\d.]+)([KMGT]?)"
)


def _compile(lowered):
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise _does_not_fit(str(error)) from None


def _does_not_fit(message: str) -> Exception:
  match = _OUT_OF_MEMORY.search(message)
  if not match:
    return RuntimeError(message)
  size = lambda number, unit: int(float(number) * _UNITS[unit])
  return DoesNotFitError(size(*match.group(1, 2)), size(*match.group(3, 4)))
