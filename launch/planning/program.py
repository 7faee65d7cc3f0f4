"""The decoding loop for a slice: built from shapes, compiled ahead of time.

Nothing is loaded or run: parameters are shapes with shardings. The programs are
`launch.decode`'s (`specjax.runtime.compilation`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.planning import heads, hlo, networks
from launch.planning.networks import Config
from models import sharding as sharding_lib
from models.head_shapes import HeadShape
from models.meshes import Layout
from models.networks import quantized
from models.networks.quantized import Quantization
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

# Scopes of `Decoder.step` by phase of a plan.
PHASES = {
  "draft pass": ("draft",),
  "verify": ("score", "verify"),
  "commit": ("commit",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """Settings of a plan.

  Attributes:
    target, draft: the target, and the draft model or None.
    head: the draft head or None.
    skipped: sub-layers to skip if the target drafts for itself, or None.
      Without any of these, n-grams are drafted.
    tree: the tree of a round's drafts.
    siblings: how children are drawn, a name in `specjax.siblings`.
    rule: a name in `specjax.rules`.
    batch_size: rows, over all devices.
    max_length: maximum tokens of prompt and completion.
    prompt_length: tokens per prefill pass.
    layout: the mesh.
    input_length: tokens of the encoder's input; 0 without an encoder.
    weights, draft_weights: how the target's and the draft's weights are stored;
      None for bfloat16.
    cache: dtype of the target's KV cache; likewise.
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
  weights: Quantization | None = None
  draft_weights: Quantization | None = None
  cache: str | None = None

  def check(self) -> None:
    """Raises ValueError if it cannot be sharded or decoded."""
    head = self.head and self.head.config
    models = [c for c in (self.target, self.draft, head) if c]
    of_t5 = isinstance(self.target, T5Config)
    if self.draft and isinstance(self.draft, T5Config) != of_t5:
      raise ValueError("target and draft must both be T5s, or neither")
    low = self.weights or self.draft_weights or self.cache
    if of_t5 and (low or self.skipped):
      raise ValueError("plans of T5s support no skipped layers or quantization")
    if of_t5 != bool(self.input_length):
      raise ValueError("input_length is required for T5s, and only for these")
    if not of_t5:
      quantized.check_weights(self.target, self.weights, on_mesh=True)
      quantized.check_cache(self.target, self.cache)
    if self.draft and not of_t5:
      quantized.check_weights(self.draft, self.draft_weights, on_mesh=True)
    self.cut_target(), self.cut_draft()
    siblings = "iid" if self.drafter == "ngram" else self.siblings
    if self.tree.num_drafted:
      rules.get(self.rule).check(self.tree, siblings_lib.get(siblings))
    if self.head:
      if self.weights:
        raise ValueError("plans of heads need targets in bfloat16")
      make_drafter(self)  # raises if it cannot draft such a tree
    if self.skipped:
      self.skipped.check(self.target.num_layers)
    if self.batch_size % self.layout.data:
      raise ValueError("batch_size must be a multiple of the mesh's data axis")
    most = [c.max_positions for c in models if c.max_positions]
    most = min(most, default=self.max_length)
    if not self.prompt_length < self.max_length <= most:
      raise ValueError(
        f"max_length ({self.max_length}) must exceed prompt_length "
        f"({self.prompt_length}) and be at most the models' {most} positions"
      )

  @property
  def drafter(self) -> str:
    """The drafter's name in `launch.assembly.registry`."""
    if not self.tree.num_drafted:
      return "plain"
    if self.head is not None:
      return self.head.config.kind
    if self.draft is not None:
      return "model"
    return "ngram" if self.skipped is None else "layer_skip"

  @property
  def vocab_size(self) -> int:
    """V, the tokens that both models have."""
    return min(c.vocab_size for c in (self.target, self.draft) if c)

  @property
  def slots(self) -> int:
    """Cache slots of a row."""
    return self.max_length + self.tree.num_nodes

  @property
  def rows(self) -> int:
    """Rows of each group of devices."""
    return self.batch_size // self.layout.data

  def shardings(self) -> tuple[Sharding, Sharding]:
    """The target's and the draft's rules."""
    target, draft = self.layout.shardings()
    target = sharding_lib.for_experts(self.target, target, self.layout.model)
    if self.draft is not None:
      draft = sharding_lib.for_experts(self.draft, draft, self.layout.draft)
    return target, draft

  def cut_target(self) -> Config:
    """The target with key/value heads repeated for its devices."""
    return sharding_lib.kv_heads_for(self.target, self.layout.model)

  def cut_draft(self) -> Config | None:
    """The draft, likewise."""
    size = self.layout.draft
    return self.draft and sharding_lib.kv_heads_for(self.draft, size)

  def cut_head(self) -> tuple[HeadShape, Sharding]:
    """The head as split over its devices, and its sharding rules."""
    assert self.head is not None
    config, rules_of = self.head.config.cut(
      self.shardings()[1], self.layout.draft
    )
    return dataclasses.replace(self.head, config=config), rules_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The compiler's figures of both programs, per device.

  Attributes:
    arguments: bytes of parameters, caches and other state.
    temporaries: additional bytes, the larger of prefill's and the loop's.
    peak: the larger of both programs' totals.
    collectives: those of one round, from `hlo.collectives`.
    cache_copies: copies of a whole cache in a round.
    buffers_reused: whether the loop writes every cache in place.
  """

  arguments: int
  temporaries: int
  peak: int
  collectives: dict
  cache_copies: int
  buffers_reused: bool


def make_drafter(question: Question) -> Drafter:
  """The drafter that would run."""
  q = question
  of_target, of_draft = q.shardings()
  siblings = siblings_lib.get(q.siblings)
  static = dict(tree=q.tree, siblings=siblings, vocab_size=q.vocab_size)
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


def compile_for(question: Question, devices: list) -> Compiled:
  """Compiles prefill and loop for the devices."""
  question.check()
  q, mesh = question, question.layout.mesh(devices)
  of_target, of_draft = q.shardings()
  inner = decode.make_decoder(
    networks.functions(
      q.cut_target(), of_target, features=q.head.features if q.head else (),
      weights=q.weights, cache=q.cache,
    ),
    drafter=make_drafter(q), rule=rules.get(q.rule), vocab_size=q.vocab_size,
  )  # fmt: skip
  decoder = MeshDecoder.of(inner, mesh=mesh)
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
  lengths = row((q.batch_size,), jnp.int32)
  texts = lambda width: row((q.batch_size, width), jnp.int32)
  inputs = None
  if q.input_length:
    inputs = Inputs(tokens=texts(q.input_length), lengths=lengths)
  arguments = (
    params, texts(q.prompt_length), lengths, row(keys.shape, keys.dtype),
    lengths, inputs,
  )  # fmt: skip

  def init(params, prompts, lengths, keys, budgets, inputs):
    return decoder.init(
      params, prompts, lengths, keys, buffer_length=q.max_length,
      max_new_tokens=budgets, inputs=inputs,
    )  # fmt: skip

  with jax.set_mesh(mesh):
    programs = compilation.compile_both(
      decoder, init, arguments, compiled=_compile,
      cache_specs=q.layout.cache_specs(),
    )  # fmt: skip
  module = hlo.parse(programs.loop.as_text())
  before = programs.prefill.memory_analysis()
  during = programs.loop.memory_analysis()
  total = lambda m: (
    m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    + m.temp_size_in_bytes
  )  # fmt: skip
  is_cache = lambda x: isinstance(x, Cache)
  pieces = [
    (buffer.dtype, buffer.sharding.shard_shape(buffer.shape))
    for node in jax.tree.leaves(programs.state, is_leaf=is_cache)
    if is_cache(node)
    for buffer in jax.tree.leaves((node.keys, node.values))
  ]
  sizes = [dtype.itemsize * math.prod(piece) for dtype, piece in pieces]
  # Outputs of the loop that do not alias its inputs.
  fresh = during.output_size_in_bytes - during.alias_size_in_bytes
  return Compiled(
    arguments=during.argument_size_in_bytes,
    temporaries=max(before.temp_size_in_bytes, during.temp_size_in_bytes),
    peak=max(total(before), total(during)),
    collectives=hlo.collectives(module, PHASES),
    cache_copies=hlo.copies(module, {hlo.shape_of(*x) for x in pieces}),
    buffers_reused=fresh < min(sizes),
  )


def _compile(lowered):
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    said = str(error).partition("\n")[0]
    raise MemoryError(said.partition("RESOURCE_EXHAUSTED: ")[2]) from None
