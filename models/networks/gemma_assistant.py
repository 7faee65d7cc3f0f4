"""Gemma 4's assistants, drafts whose layers attend to their target's cache.

These drafts are published with Gemma 4. A token's embedding, from the target's
table, and a hidden state are concatenated in this order, projected to the
assistant's width, and go through a few layers of Gemma 4's kind. These have
only queries: full layers read the KV cache of the target's last full layer that
has one, sliding layers that of its last such sliding layer. The output is
normed, gives the logits, and is projected to the target's width as the next
hidden state.

Sliding layers see the W + 1 newest cached tokens, all before the query's token,
as in transformers. transformers differs from this file in two ways: after a
rejection its assistant also sees keys of rejected tokens, one in full layers,
and all in sliding layers once a text is longer than W; and its ordered
embeddings have one floor for all rows and tokens of a call.

Letters in shapes: B rows, T tokens, D width of the assistant, F of the target,
V vocabulary, n clusters, k of them chosen.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from models.networks.description import TransformerConfig
from models.networks.heads import HeadConfig, embedding, first_ids
from models.networks.layers import Layer, Linear, make_norm
from models.networks.params import split
from specjax.cache import Cache, Visible
from specjax.types import CacheReader


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
  """Shapes and switches of an assistant.

  Attributes:
    layers: its layers: `embed_dim` is D and `vocab_size` V. Their `source` is
      an index among the target's cached layers.
    target_dim: F.
    embed_scale: factor of the target's embeddings, rounded to their dtype, or
      None.
    num_clusters: n, with ordered embeddings, of V / n tokens each; 0 without.
    num_chosen: k, number of clusters whose tokens have their own logits.
  """

  layers: TransformerConfig
  target_dim: int
  embed_scale: float | None = None
  num_clusters: int = 0
  num_chosen: int = 0

  kind = "assistant"
  shared = frozenset({"embed"})

  @property
  def num_features(self) -> int:
    """F."""
    return self.target_dim

  def even_sizes(self) -> tuple[int, ...]:
    """Sizes that must be multiples of the number of devices."""
    raise ValueError(
      "Gemma 4's assistant runs on one device, without config.mesh"
    )


class Assistant(nnx.Module):
  """The network; its logits are float32 at least."""

  def __init__(
    self, config: AssistantConfig, *, dtype=jnp.float32, rngs: nnx.Rngs
  ):
    c, features = config.layers, config.num_features
    self.config = config
    self.dtype = jnp.dtype(dtype)
    self.embed = embedding(c.vocab_size, features, dtype, rngs)
    self.enter = Linear(2 * features, c.embed_dim, False, dtype, rngs)
    self.layers = nnx.List(
      [Layer(c, dtype, index=i, rngs=rngs) for i in range(c.num_layers)]
    )
    self.final_norm = make_norm(c, c.embed_dim, dtype, rngs)
    self.leave = Linear(c.embed_dim, features, False, dtype, rngs)
    self.lm_head = Linear(c.embed_dim, c.vocab_size, False, dtype, rngs)
    if config.num_clusters:
      self.centroids = Linear(
        c.embed_dim, config.num_clusters, False, dtype, rngs
      )
      self.ordering = first_ids(c.vocab_size)  # tokens by cluster

  def __call__(
    self, tokens: Array, hidden: Array, cache: Cache, *, positions: Array
  ) -> tuple[Array, Array]:
    """One pass; see `specjax.types.CacheReader.apply`.

    Args:
      tokens: `i32[B, T]`.
      hidden: `f[B, T, F]`.
      cache: the target's, with an array for each layer.
      positions: `i32[B, T]`, only for rotating queries.

    Returns:
      `f32[B, T, V]` logits and `[B, T, F]` hidden states.

    Raises:
      ValueError: for a stacked target's cache.
    """
    if cache.keys[0].ndim == 5:
      raise ValueError("an assistant cannot read a stacked cache")
    c = self.config.layers
    x = self.embed(tokens)
    if self.config.embed_scale is not None:
      x = x * jnp.asarray(self.config.embed_scale, x.dtype)
    x = self.enter(jnp.concatenate([x, hidden.astype(self.dtype)], axis=-1))
    kinds = [*c.attentions.values()]
    of_window = {
      w: visible(cache, tokens, w) for w in {a.window for a in kinds}
    }
    tables = {a.rope: a.rope and a.rope.table(positions) for a in kinds}
    for layer, a in zip(self.layers, kinds, strict=True):
      assert a.source is not None
      kv = cache.keys[a.source], cache.values[a.source]
      x, _ = layer(x, tables[a.rope], of_window[a.window], kv, cache.length)
    read = self.final_norm(x)
    return self.logits(read), self.leave(read)

  def logits(self, x: Array) -> Array:
    """`[B, T, D] -> f32[B, T, V]`.

    With ordered embeddings, tokens of the k clusters with the largest centroid
    scores have their own logits; all others have the minimum of these minus
    one, taken per row so that rows stay independent.
    """
    wide = jnp.promote_types(self.dtype, jnp.float32)
    config = self.config
    if not config.num_clusters:
      return self.lm_head(x).astype(wide)
    _, chosen = lax.top_k(self.centroids(x), config.num_chosen)
    clusters = self.ordering[...].reshape(config.num_clusters, -1)
    ids = clusters[chosen].reshape(*x.shape[:2], -1)  # [B, T, k V / n]
    rows = self.lm_head.weight[...][ids]
    scores = jnp.einsum("btd,btmd->btm", x, rows, preferred_element_type=wide)
    floor = jnp.min(scores, axis=-1, keepdims=True) - 1
    every = jnp.broadcast_to(floor, (*x.shape[:2], config.layers.vocab_size))
    return jnp.put_along_axis(every, ids, scores, axis=-1, inplace=False)


def visible(cache: Cache, tokens: Array, window: int | None) -> Visible:
  """The slots of a text that tokens outside it see.

  Args:
    cache: its `length` is the text's; slots are in the text's order.
    tokens: `i32[B, T]`, for the shape.
    window: W of a sliding layer, of which the W + 1 newest slots are seen; None
      for all.
  """
  text = cache.length
  if cache.idle is not None:
    text = jnp.where(cache.idle, 0, text)
  first = jnp.zeros((), text.dtype)
  if window is not None:
    oldest = jnp.maximum(text - window - 1, 0)
    first = jnp.min(jnp.where(text > 0, oldest, cache.slots))
  return Visible(
    text=text,
    fed_mask=None,
    positions=jnp.broadcast_to(text[:, None], tokens.shape),
    own_positions=None,
    slots=None,
    # Less than this away from a query one position after the text.
    window=None if window is None else jnp.asarray(window + 2, text.dtype),
    first=first,
    stop=jnp.max(text),
    read_slots=cache.read_slots,
  )


def as_cache_reader(module: Assistant) -> tuple[CacheReader, nnx.State]:
  """Splits a module, or its shapes, into a pure function and its parameters."""
  merge, params = split(module)
  config = module.config
  model = CacheReader(
    vocab_size=config.layers.vocab_size,
    num_features=config.num_features,
    apply=lambda params, *given, positions: merge(params)(
      *given, positions=positions
    ),
    max_positions=config.layers.max_positions,
  )
  return model, params
