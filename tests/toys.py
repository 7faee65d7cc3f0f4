"""Table-lookup language models: exact in float32, and easily upset.

The logits after a token depend on every visible token *and its position*, by an
integer hash that float32 computes exactly. A stale cache slot, a wrong mask, a
position off by one or a leaking neighbor changes the table row that is read,
so such bugs cannot hide, and equality of tokens can be asserted without
tolerance.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as cache_lib
from specjax.types import (
  BlockModel,
  CacheReader,
  FeatureModel,
  LanguageModel,
  MarkovModel,
  ModelOutput,
  Params,
)
from specjax.warp import make_sampling, warp

_PRIMES = np.array([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47])


def table(vocab_size: int, *, seed: int, contexts: int = 97, scale=1.5):
  """Random logits for every hashed context, `f32[contexts, V]`."""
  rng = np.random.default_rng(seed)
  return (scale * rng.standard_normal((contexts, vocab_size))).astype(
    np.float32
  )


def near(logits: np.ndarray, *, noise: float, seed: int) -> np.ndarray:
  """A table close to another: a draft for its target."""
  rng = np.random.default_rng(seed)
  return (logits + noise * rng.standard_normal(logits.shape)).astype(np.float32)


def pair(target, *, noise, seed):
  """Parameters of a target and of a draft `near` it."""
  draft = near(target, noise=noise, seed=seed)
  return Params(target=jnp.asarray(target), draft=jnp.asarray(draft))


def attention_mask(cache, positions, mask, *, window=None):
  """Slots of all that are allocated that T fed tokens see, `bool[B, T, S]`.

  The T tokens are in slots `cache.length ..`; the other arguments are as
  `specjax.cache.visible` has them. Of the text a program sees what it reads.
  """
  fed = positions.shape[1]
  if mask is None:
    mask = np.tril(np.ones((fed, fed), bool))
  trailing = mask.shape[-1]
  slot = jnp.arange(cache.slots)  # [S]
  first = cache.length[:, None] + (fed - trailing)  # [B, 1]
  read = cache.read_slots or cache.slots
  visible = (slot < jnp.minimum(first, read))[:, None, :]  # [B, 1, S]
  offset = slot - first  # [B, S]
  inside = (offset >= 0) & (offset < trailing)  # [B, S]
  if trailing == 1:
    visible = visible | inside[:, None, :]
  else:
    column = jnp.where(inside, offset, trailing)  # [B, S]
    if mask.ndim == 2:
      table = jnp.asarray(np.pad(mask, ((0, 0), (0, 1))))  # [T, M + 1]
      seen = jnp.moveaxis(table[:, column], 0, 1)
    else:
      table = jnp.pad(mask, ((0, 0), (0, 0), (0, 1)))
      seen = jax.vmap(lambda rows, at: rows[:, at])(table, column)
    visible = visible | seen  # [B, T, S]
  if window is not None:
    distance = positions[:, :, None] - cache.positions[:, None, :]
    visible = visible & (distance < window)
  return jnp.broadcast_to(visible, (positions.shape[0], fed, cache.slots))


SHIFT = 1000  # what each layer adds to the context that the one below has read


def table_model(
  vocab_size: int, *, max_positions=None, layers=0, with_inputs=False
) -> LanguageModel:
  """A `LanguageModel` whose parameters are a table from `table`.

  Args:
    vocab_size: V.
    max_positions: of the model.
    layers: of which it has features: that of layer j is the hash of all that a
      token sees, itself too, plus j times `SHIFT`, whatever the input.
    with_inputs: whether an `i32[B]` is read, and added to every hash.
  """

  def init_cache(batch, slots):
    return cache_lib.make_cache(
      batch=batch, slots=slots, num_layers=1, num_kv_heads=1, head_dim=1,
      with_positions=True,
    )  # fmt: skip

  def apply(
    params, tokens, cache, *, positions=None, mask=None, logits_at=None
  ):
    fed = tokens.shape[1]
    if positions is None:
      positions = cache.length[:, None] + jnp.arange(fed)
    cache = cache_lib.write_positions(cache, positions)
    visible = attention_mask(cache, positions, mask)  # [B, T, S]
    keys = cache_lib.write_rows(
      cache.keys[0], tokens[:, None, :, None], cache.length
    )
    weight = jnp.asarray(_PRIMES)[cache.positions % len(_PRIMES)]
    terms = (keys[:, 0, :, 0] + 1) * weight  # [B, S]
    terms = jnp.mod(terms, params.shape[0])  # small, so that the sum is exact
    context = jnp.sum(jnp.where(visible, terms[:, None, :], 0), axis=-1)
    if with_inputs:
      context += cache.context[:, None]
    context = jnp.mod(context, params.shape[0]).astype(jnp.int32)
    features = None
    if layers:
      features = context[..., None] + SHIFT * np.arange(layers)
    if logits_at is not None:
      context = jnp.take_along_axis(context, logits_at, axis=1)
    cache = cache.replace(keys=(keys,), length=cache.length + fed)
    return ModelOutput(logits=params[context], features=features), cache

  return LanguageModel(
    vocab_size=vocab_size,
    init_cache=init_cache,
    apply=apply,
    encode=(lambda params, inputs: inputs) if with_inputs else None,
    max_positions=max_positions,
  )


def counted(model, counts: list):
  """The model; lists how many tokens each pass that is really run is fed."""

  def apply(params, tokens, *arguments, **more):
    jax.debug.callback(
      lambda t: counts.append(t.shape[1]), tokens, ordered=False
    )
    return model.apply(params, tokens, *arguments, **more)

  return dataclasses.replace(model, apply=apply)


def feature_model(
  vocab_size: int, *, num_features: int, layer: int = 1, ahead: int = 1
):
  """A head for `table_model(.., layers=..)` that knows what it knows.

  Its hidden state at place i, `f[.., 1]`, is the context hashed up to token
  i + 1: the target's feature there, as if the target had read one token more.
  Its cache says the same, from the feature of slot 0 and all tokens in slots
  that are seen. Where the two differ, by a slot that is stale, missing, masked
  wrongly or in the wrong place, or by a hidden state that is not the parent's,
  another row of the table is read.

  Args:
    vocab_size: V.
    num_features: F, layers of the target.
    layer: whose feature is read.
    ahead: how many places after its state the token beside it stands, from 1.
  """

  def init_cache(batch, slots):
    return cache_lib.make_cache(
      batch=batch, slots=slots, num_layers=1, num_kv_heads=1, head_dim=2,
      with_positions=True,
    )  # fmt: skip

  def apply(
    params, tokens, hidden, cache, *, positions=None, mask=None, logits_at=None
  ):
    contexts, fed = params.shape[0], tokens.shape[1]
    if positions is None:
      positions = cache.length[:, None] + jnp.arange(fed)
    cache = cache_lib.write_positions(cache, positions)
    visible = attention_mask(cache, positions, mask)
    terms = (tokens + 1) * weight_at(positions + ahead)
    entry = jnp.stack([jnp.mod(terms, contexts), hidden[..., 0]], axis=-1)
    keys = cache_lib.write_rows(
      cache.keys[0], entry[:, None].astype(hidden.dtype), cache.length
    )
    read = jnp.where(visible, keys[:, 0, None, :, 0], 0).sum(-1)
    by_cache = jnp.mod(read + keys[:, 0, :1, 1], contexts)
    context = jnp.mod(hidden[..., 0] + terms, contexts)
    row = jnp.mod(2 * context - by_cache, contexts).astype(jnp.int32)
    cache = cache.replace(keys=(keys,), length=cache.length + fed)
    if logits_at is not None:
      row = jnp.take_along_axis(row, logits_at, axis=1)
    return params[row], context[..., None].astype(hidden.dtype), cache

  return FeatureModel(
    vocab_size=vocab_size,
    num_features=num_features,
    init_cache=init_cache,
    fuse=lambda params, x: x[..., layer : layer + 1] - layer * SHIFT,
    apply=apply,
  )


def layered_head(vocab_size: int, *, num_features: int, num_depths: int):
  """A head of a layer for each of so many tokens, all of `feature_model`."""
  layers = [
    feature_model(vocab_size, num_features=num_features, ahead=ahead)
    for ahead in range(1, num_depths + 1)
  ]
  return dataclasses.replace(layers[0], later=tuple(layers[1:]))


def block_model(vocab_size: int, *, num_features: int, num_depths: int):
  """A head for `table_model(.., layers=..)` that says all depths at once.

  Its logits depend on the features of all committed tokens, each times the
  weight of its position, and on the newest token: a slot that is stale, missing
  or in the wrong place is another row of the table.

  Args:
    vocab_size: V.
    num_features: F, layers of the target, of which it reads the last.
    num_depths: K; depth k reads `depth_row` of the row.
  """

  def init_cache(batch, slots):
    return cache_lib.make_cache(
      batch=batch, slots=slots, num_layers=1, num_kv_heads=1, head_dim=1
    )

  def write(cache, values):
    keys = cache_lib.write_rows(
      cache.keys[0], values[:, None, :, None], cache.length
    )
    return cache.replace(keys=(keys,))

  def read(params, features, cache):
    context = features[..., -1] - (num_features - 1) * SHIFT
    cache = write(cache, context)
    return cache.replace(length=cache.length + features.shape[1])

  def predict(params, newest, cache):
    contexts, slot = params.shape[0], np.arange(cache.slots)
    committed = slot < cache.length[:, None]
    each = jnp.mod(cache.keys[0][:, 0, :, 0] * weight_at(slot), contexts)
    total = (
      jnp.where(committed, each, 0).sum(-1).astype(jnp.int32) + newest[:, 0]
    )
    rows = depth_row(total[:, None], np.arange(num_depths), contexts)
    # What a block leaves behind must not be seen.
    noise = jnp.ones((len(newest), num_depths + 1), cache.keys[0].dtype)
    return params[rows], write(cache, noise)

  return BlockModel(
    vocab_size=vocab_size,
    num_features=num_features,
    num_depths=num_depths,
    init_cache=init_cache,
    read=read,
    predict=predict,
  )


def markov_block(
  vocab_size: int, *, num_features: int, num_depths: int, candidates=None
):
  """A `block_model` whose logits depend on the whole path, in order.

  Its confidence is 0.1 or 0.9, by the row of the table that is read. With
  `candidates` it drafts that many tokens of a place, the likeliest there
  whatever the path.
  """
  inner = block_model(
    vocab_size, num_features=num_features, num_depths=num_depths
  )

  def apply(params, row, tokens, state):
    path = 3 * state[..., 0] + tokens + 1
    index = jnp.mod(row + 7 * path.astype(jnp.int32), len(params))
    sure = jnp.where(index % 3 == 0, 0.1, 0.9)
    logits = params[index]
    if candidates is not None:
      least = jax.lax.top_k(params[row], candidates)[0][..., -1:]
      logits = jnp.where(params[row] < least, -jnp.inf, logits)
    return logits, path[..., None], sure

  return dataclasses.replace(
    inner,
    predict=lambda params, *rest: inner.predict(jnp.arange(len(params)), *rest),
    markov=MarkovModel(state_size=1, estimates=True, apply=apply),
  )


def cache_reader(vocab_size: int, *, num_features: int, num_own=None):
  """An assistant for `table_model(.., layers=..)` that knows what it knows.

  Its hidden state is the context hashed up to its token, beside that the number
  of its own steps, and the context that the target gave. The cache says the
  latter too. Where the two differ, or a position is not the newest token's, or
  a hidden state not the parent's, another row of the table is read.

  Args:
    vocab_size: V.
    num_features: F, layers of the target, at least three.
    num_own: tokens of the largest logits, which keep them; all others have the
      least of these, less one. None: all keep theirs.
  """

  def apply(params, tokens, hidden, cache, *, positions):
    contexts, slot = params.shape[0], np.arange(cache.slots)
    steps = hidden[..., 1] - hidden[..., 0] - SHIFT
    root = hidden[..., 2] - 2 * SHIFT
    place = (positions + steps).astype(jnp.int32)
    context = hidden[..., 0] + (tokens + 1) * weight_at(place)
    context = jnp.mod(context, contexts)
    each = (cache.keys[0][:, 0, :, 0] + 1) * weight_at(slot)
    seen = slot < cache.length[:, None]
    text = jnp.where(seen, jnp.mod(each, contexts), 0).sum(-1, keepdims=True)
    row = jnp.mod(context + root - jnp.mod(text, contexts), contexts)
    logits = params[row.astype(jnp.int32)]
    if num_own is not None:
      least = jax.lax.top_k(logits, num_own)[0][..., -1:]
      logits = jnp.where(logits < least, least - 1, logits)
    after = [context, context + SHIFT + steps + 1, root + 2 * SHIFT]
    after += [jnp.zeros_like(context)] * (num_features - 3)
    return logits, jnp.stack(after, axis=-1)

  return CacheReader(
    vocab_size=vocab_size, num_features=num_features, apply=apply
  )


def depth_row(row, depth, contexts: int):
  """The row of a table that is read for a depth, from 0."""
  return (row + 7 * depth) % contexts


def weight_at(position):
  """The factor of the token at a position in the hash."""
  return jnp.asarray(_PRIMES)[position % len(_PRIMES)]


def context_logits(params: np.ndarray, context, added=0) -> np.ndarray:
  """The same model in plain Python: logits after a whole context."""
  total = added + sum(
    (int(t) + 1) * int(_PRIMES[i % len(_PRIMES)]) for i, t in enumerate(context)
  )
  return np.asarray(params)[total % len(params)]


def context_law(params: np.ndarray, warp_row):
  """A `specjax.exact.ContextLaw`: warped probabilities after a context."""

  @functools.cache
  def law(context):
    return warp_row(context_logits(params, context))

  return law


_warp = jax.jit(warp)


def context_laws(vocab, *, seed, warp_settings, noise=1.0, zeros=False):
  """Draft and target laws of every context, warped by the shipped warp."""
  target = table(vocab, seed=seed)
  draft = near(target, noise=noise, seed=seed + 1)
  if zeros:
    rng = np.random.default_rng(seed + 2)
    for logits in (target, draft):
      rows = np.arange(len(logits))
      logits[rows, rng.integers(vocab, size=len(rows))] = -np.inf
  sampling = make_sampling(1, **warp_settings)

  def laws(params):  # the whole table at once
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    warped = _warp(jnp.asarray(params, dtype)[None], sampling)[0]
    rows = np.exp(np.asarray(warped, np.float64))
    return context_law(rows, lambda row: row)

  return laws(draft), laws(target)
