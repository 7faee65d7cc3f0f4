"""Models in plans: sharded shapes, functions, and a roofline of their passes.

The roofline is a model, not a measurement:

  time = max(bytes read and written / memory bandwidth,
             operations / peak) + bytes sent / interconnect bandwidth

per device. Bytes are the weights and the used blocks of the cache, once each,
and the activations; attention scores are assumed to stay on the chip. Tables
in which a pass looks up rows are ignored, and a model's replicated arrays count
as if sharded: routers, down-projections of latents, and Gemma E4B's per-layer
embeddings. Collectives are rings that use all links of a device at once, as if
every slice were a torus and every group of devices a ring in it.

Latencies, kernel launches and overlap are ignored (so small models on many
chips look better than they are), as are copies of dequantized expert groups.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from launch.hardware import Chip
from models import sharding as sharding_lib
from models.networks import (
  attention,
  mixture,
  quantized_tensor,
  stacked,
  t5,
)
from models.networks.description import TransformerConfig, mlp_width
from models.networks.layers import active_weights
from models.networks.mixture import Mixture
from models.networks.quantized import Quantization
from models.networks.t5_config import T5Config
from models.networks.transformer import (
  Features,
  SkippedLayers,
  delta_memory,
  mixtures_of,
)
from models.sharding import Sharding
from specjax.theory import experts
from specjax.types import LanguageModel

Config = TransformerConfig | T5Config

DTYPE = jnp.bfloat16
_NOTHING = SkippedLayers()


def functions(
  config: Config,
  sharding: Sharding,
  skipped: SkippedLayers | None = None,
  features: Features = (),
  weights: Quantization | None = None,
  cache: str | None = None,
) -> LanguageModel:
  """The model as pure functions."""
  if isinstance(config, T5Config):
    module = t5.abstract(config, dtype=DTYPE)
    return t5.as_language_model(module, sharding=sharding)[0]
  return stacked.as_language_model(
    config, dtype=DTYPE, sharding=sharding, skipped=skipped, features=features,
    weights=weights, stored=cache,
  )  # fmt: skip


@functools.cache
def shapes(config: Config, weights: Quantization | None = None):
  """Shapes of a model's parameters."""
  if isinstance(config, T5Config):
    return nnx.state(t5.abstract(config, dtype=DTYPE))
  return stacked.abstract_params(config, dtype=DTYPE, weights=weights)


def place(shapes, sharding: Sharding, mesh: Mesh):
  """Shapes of parameters with their shardings on a mesh."""
  at = lambda x, spec: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
  )
  return jax.tree.map(at, shapes, sharding_lib.param_specs(shapes, sharding))


def count(params) -> int:
  """Number of elements in parameters, or in their shapes."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def num_bytes(params) -> int:
  """Bytes that parameters take."""
  return sum(map(quantized_tensor.num_bytes, jax.tree.leaves(params)))


@functools.cache
def _read(
  config: TransformerConfig, weights: Quantization | None
) -> tuple[int, int]:
  """Number and bytes of the parameters a pass reads, but for lookup tables."""
  params = shapes(config, weights)
  tables = ["embed"] * (not config.tied_embeddings)
  tables += ["per_layer_embed"] * (config.per_layer_dim > 0)
  apart = [params["frame"][name] for name in tables]
  return count(params) - count(apart), num_bytes(params) - num_bytes(apart)


def _slot_bytes(of, cache: str | None = None) -> int:
  """Bytes of a slot in one layer's cache: keys and values of all heads."""
  channels = of.head_dim + of.value_dim
  # In eight bits, keys and values each have a scale of four bytes.
  each = DTYPE.dtype.itemsize * channels if cache is None else channels + 2 * 4
  return of.num_kv_heads * each


def touched(block: Mixture, tokens: float, size: int = 1) -> float:
  """Expected experts of a layer that a pass over `tokens` reads.

  Assumes uniform routing. If split by expert over `size` devices, each counts
  as the one that reads the most.
  """
  sizes = block.num_experts, block.num_chosen
  distinct = experts.expected_distinct(tokens, *sizes)
  if size > 1 and mixture.cut_by(block, size) == "expert":
    distinct = size * experts.busiest(distinct, block.num_experts, size)
  return float(distinct)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """The memory traffic and arithmetic of a model's passes, on all devices.

  Attributes:
    blocks: attention and feed-forward blocks.
    embed_dim: channels between them.
    vocab_size: V, the logits of a token.
    summed: values per token that are summed over devices: outputs of blocks,
      and lookups in tables, which are split too.
    weights: parameters that are read and multiplied, including all experts.
    weight_bytes: their bytes.
    mixtures: each kind, with the number of layers that have it.
    inside: values per token inside the blocks: two per channel of a head, and
      per hidden channel.
    cache_bytes: bytes of a row's cache that attention reads.
    products: channels of queries times slots that they attend to.
    state_bytes: bytes of a row's recurrent states.
    pending_bytes: bytes that a token adds to them until it is committed.
  """

  blocks: int
  embed_dim: int
  vocab_size: int
  summed: int
  weights: int
  weight_bytes: float
  mixtures: tuple[tuple[Mixture, int], ...] = ()
  inside: int
  cache_bytes: float
  products: int
  state_bytes: int = 0
  pending_bytes: int = 0


@functools.cache
def work(
  config: Config,
  *,
  slots: int,
  skipped: SkippedLayers = _NOTHING,
  input_length: int = 0,
  weights: Quantization | None = None,
  cache: str | None = None,
) -> Work:
  """The work of passes over full rows."""
  c = config
  if isinstance(c, T5Config):
    return _t5_work(c, slots, input_length)
  every = range(c.num_layers)
  layers, specs = c.layers, c.attentions
  attentions = [i for i in every if i not in skipped.attention]
  mlps = [i for i in every if i not in skipped.mlp]
  extra = [block for i in mlps if (block := layers[i].extra) is not None]
  sums = len(attentions) + len(mlps)
  if layers[0].parallel:  # both blocks of a layer are added before the sum
    sums = len({*attentions, *mlps})
  inside = sum(2 * mlp_width(layers[i]) for i in mlps)
  inside += sum(2 * block.expert_dim for block in extra)
  cache_bytes, products = 0.0, 0
  for i in attentions:
    of = specs.get(i, c.attention)  # recurrent ones: as others
    inside += 2 * of.num_heads * of.head_dim
    if i in specs:
      met = attention.slots_read(slots, slots, of.window)
      cache_bytes += met * _slot_bytes(of, cache)
      products += met * of.num_heads * of.head_dim
  numbers, _ = _read(c, None)
  per_number = _read(c, weights)[1] / numbers  # including scales
  embed = c.embed_dim
  # For a mixture these are a token's experts.
  numbers -= sum(active_weights(c, i)[0] for i in skipped.attention)
  numbers -= sum(active_weights(c, i)[1] for i in skipped.mlp)
  mixtures = collections.Counter(mixtures_of(c, skipped))
  for block, times in collections.Counter(mixtures_of(c)).items():
    idle = (block.num_experts - block.num_chosen) * block.num_expert_params
    numbers -= (times - mixtures[block]) * idle
  memory = lambda of: jax.eval_shape(lambda: delta_memory(of, 1, DTYPE))
  memories = list(map(memory, c.deltas.values()))
  return Work(
    blocks=len(attentions) + len(mlps) + len(extra),
    embed_dim=embed,
    vocab_size=c.vocab_size,
    summed=(sums + len(extra) + 1) * embed + c.num_layers * c.per_layer_dim,
    weights=numbers,
    weight_bytes=per_number * numbers,
    mixtures=tuple(mixtures.items()),
    inside=inside,
    cache_bytes=cache_bytes,
    products=products,
    state_bytes=sum(num_bytes((m.state, m.window)) for m in memories),
    pending_bytes=sum(num_bytes(m.pending) for m in memories),
  )


def _t5_work(c: T5Config, slots: int, input_length: int) -> Work:
  """The decoder's work; the encoder and its keys and values come before."""
  layers, width = c.num_layers, c.num_heads * c.head_dim
  mlp = (3 if c.gated_mlp else 2) * c.embed_dim * c.mlp_dim
  numbers = layers * (6 * c.embed_dim * width + mlp)
  numbers += c.vocab_size * c.embed_dim
  met = layers * (attention.slots_read(slots, slots) + input_length)
  return Work(
    blocks=3 * layers,
    embed_dim=c.embed_dim,
    vocab_size=c.vocab_size,
    summed=(3 * layers + 1) * c.embed_dim,
    weights=numbers,
    weight_bytes=DTYPE.dtype.itemsize * numbers,
    inside=2 * layers * (2 * width + c.mlp_dim),
    cache_bytes=met * _slot_bytes(c.layers[0].attention),
    products=met * width,
  )


@dataclasses.dataclass(frozen=True)
class Pass:
  """A forward pass on one device.

  Attributes:
    hbm_bytes: read from and written to memory.
    flops: bfloat16 operations.
    ici_bytes: sent to other devices.
  """

  hbm_bytes: float
  flops: float
  ici_bytes: float

  def causes(self, chip: Chip) -> dict[str, float]:
    """Seconds of memory traffic, arithmetic and collectives, each alone."""
    return {
      "memory": self.hbm_bytes / chip.hbm_bandwidth,
      "arithmetic": self.flops / chip.peak_flops,
      "collectives": self.ici_bytes / chip.ici_bandwidth,
    }

  def seconds(self, chip: Chip) -> float:
    """Seconds by the roofline."""
    alone = self.causes(chip)
    return max(alone["memory"], alone["arithmetic"]) + alone["collectives"]


def total(passes: Sequence[Pass]) -> Pass:
  """The sum of passes."""
  return Pass(*map(sum, zip(*map(dataclasses.astuple, passes), strict=True)))


def mean(passes: Sequence[Pass]) -> Pass:
  """The mean of at least one pass."""
  every = dataclasses.astuple(total(passes))
  return Pass(*(x / len(passes) for x in every))


def forward(work: Work, num_tokens: int, *, size: int, rows: int) -> Pass:
  """A pass over `num_tokens` tokens of every row."""
  tokens = rows * num_tokens

  def idle(tokens: int, size: int) -> float:
    """Weights of experts that no token of a pass uses."""
    return sum(
      layers
      * (block.num_experts - touched(block, tokens, size))
      * block.num_expert_params
      for block, layers in work.mixtures
    )

  # Written once and read once: inputs and outputs of blocks, replicated; values
  # inside them, sharded; and the logits.
  whole = 2 * tokens * work.blocks * 2 * work.embed_dim
  cut = DTYPE.dtype.itemsize * 2 * tokens * work.inside
  logits = 4 * tokens * work.vocab_size  # float32, replicated
  cut += work.weight_bytes * (1 - idle(tokens, size) / max(work.weights, 1))
  cut += rows * work.cache_bytes
  cut += 2 * rows * (work.state_bytes + num_tokens * work.pending_bytes)
  flops = 2 * tokens * (work.weights - idle(1, 1)) + 4 * tokens * work.products
  # Rings: (n - 1) / n of an array per trip, two trips for partial sums.
  sent = 2 * DTYPE.dtype.itemsize * tokens * work.summed + logits
  return Pass(
    hbm_bytes=cut / size + DTYPE.dtype.itemsize * whole + 2 * logits,
    flops=flops / size,
    ici_bytes=(size - 1) / size * sent,
  )
