"""The decoding loop for a slice: built from shapes, compiled ahead of time.

Nothing is loaded and nothing runs: parameters are shapes with shardings. The
programs are those that `launch.decode` runs (`specjax.runtime.compilation`).
"""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.planning import heads, hlo, networks
from launch.planning.networks import Config
from models import sharding as sharding_lib
from models.head_shapes import HeadShape
from models.meshes import Layout
from models.networks import lowbits
from models.networks.description import TransformerConfig
from models.networks.lowbits import Format
from models.networks.t5_config import T5Config
from models.networks.transformer import SkippedLayers
from models.sharding import Sharding
from specjax import decode, drafters, random, rules
from specjax import siblings as siblings_lib
from specjax.cache import Cache
from specjax.runtime import compilation
from specjax.runtime.mesh import MeshDecoder
from specjax.tree import Tree
from specjax.types import Drafter, Inputs, Params

# Scopes of `Decoder.step` by what a reader asks for.
PHASES = {
  "draft pass": ("draft",),
  "verify": ("score", "verify"),
  "commit": ("commit",),
}


class DoesNotFitError(Exception):
  """The compiler ran out of memory: what it said of the bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """Settings of a plan.

  Attributes:
    target: the large model.
    draft: the small one, if there is one.
    head: what drafts from the target's features, if a head does.
    skipped: sub-layers that the target leaves out to draft for itself, if it
      does. With none of these, n-grams are drafted.
    tree: what a round drafts.
    siblings: how children are drawn, a name in `specjax.siblings`.
    rule: a name in `specjax.rules`.
    batch_size: rows, over all devices.
    max_length: tokens of a prompt with its completion.
    prompt_length: tokens that prefill takes at once.
    layout: the mesh.
    input_length: tokens of what an encoder reads; 0 without one.
    weights, draft_weights: how the target's and the draft's are stored; None
      for bfloat16.
    cache: what the target's keys and values are stored as; likewise.
  """

  target: Config
  draft: Config | None
  head: HeadShape | None = None
  skipped: SkippedLayers | None = None
  tree: Tree
  siblings: str
  rule: str
  batch_size: int
  max_length: int
  prompt_length: int
  layout: Layout
  input_length: int = 0
  weights: Format | None = None
  draft_weights: Format | None = None
  cache: str | None = None

  def check(self) -> None:
    """Raises ValueError for what cannot be cut or decoded."""
    self._check_kinds()
    self.cut_target(), self.cut_draft()
    rule, siblings = rules.get(self.rule), siblings_lib.get(self.siblings)
    if self.tree.num_drafted:
      rule.check(
        self.tree, siblings_lib.IID if self.drafter == "ngram" else siblings
      )
    if self.head is not None:
      if self.weights is not None:
        raise ValueError("heads are planned for targets in bfloat16")
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
    models = (self.target, self.draft, self.head)
    known = [c.max_positions for c in models if c and c.max_positions]
    if self.max_length > min(known, default=self.max_length):
      raise ValueError(
        f"max_length ({self.max_length}) exceeds the models' {min(known)} "
        "positions"
      )

  def _check_kinds(self) -> None:
    reads = isinstance(self.target, T5Config)
    if self.draft is not None and isinstance(self.draft, T5Config) != reads:
      raise ValueError(
        "target and draft must both be encoder-decoders, or none"
      )
    if reads and (self.weights or self.draft_weights or self.cache):
      raise ValueError(
        "quantized weights and caches are of decoder-only models"
      )
    if reads and self.skipped is not None:
      raise ValueError("an encoder-decoder drafts with no layers left out")
    if reads != bool(self.input_length):
      raise ValueError(
        "an encoder-decoder needs input_length, the tokens that it reads"
        if reads
        else "input_length is what an encoder reads, and the models have none"
      )
    for config, weights, cache in (
      (self.target, self.weights, self.cache),
      (self.draft, self.draft_weights, None),
    ):
      if isinstance(config, TransformerConfig):
        lowbits.check_weights(config, weights, on_mesh=True)
        lowbits.check_cache(config, cache)

  @property
  def drafter(self) -> str:
    """The name of what proposes, as `launch.assembly.registry` has it."""
    if not self.tree.num_drafted:
      return "plain"
    if self.head is not None:
      return self.head.kind
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
    return self.max_length + self.tree.num_nodes

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
    buffers_reused: whether the loop writes every cache into the one that it is
      given.
    seconds: what compiling both took, by the clock.
  """

  arguments: int
  temporaries: int
  peak: int
  collectives: dict
  cache_copies: int
  buffers_reused: bool
  seconds: float


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
    return heads.make_drafter(head, **static, sharding=of_draft)
  if q.draft is not None:
    draft = networks.functions(q.cut_draft(), of_draft, weights=q.draft_weights)
    return drafters.model(draft, **static)
  if q.skipped is not None:
    draft = networks.functions(
      q.cut_target(), of_target, q.skipped, weights=q.weights, cache=q.cache
    )
    return drafters.layer_skip(draft, **static)
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
    return networks.count(heads.own_params(q.head))
  return networks.num_params(q.draft) if q.draft else 0


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
    draft = heads.own_params(head)
  draft = draft and networks.place(draft, of_draft, mesh)
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

  start = time.perf_counter()
  with jax.set_mesh(mesh):
    programs = compilation.compile_both(
      decoder,
      init,
      arguments,
      compiled=_compile,
      cache_specs=q.layout.cache_specs(),
    )
  seconds = time.perf_counter() - start
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
  sizes = [dtype.itemsize * math.prod(piece) for dtype, piece in pieces]
  # What the loop returns in memory that it was not given.
  fresh = during.output_size_in_bytes - during.alias_size_in_bytes
  return Compiled(
    arguments=during.argument_size_in_bytes,
    temporaries=max(before.temp_size_in_bytes, during.temp_size_in_bytes),
    peak=max(total(before), total(during)),
    collectives=hlo.collectives(module, PHASES),
    cache_copies=hlo.copies(module, {hlo.shape_of(*x) for x in pieces}),
    buffers_reused=fresh < min(sizes),
    seconds=seconds,
  )


def _compile(lowered):
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    said = str(error).partition("\n")[0]
    raise DoesNotFitError(said.partition("RESOURCE_EXHAUSTED: ")[2]) from None
