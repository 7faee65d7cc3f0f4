"""Checks of the decoder's parts, arguments and rounds.

Each error is one sentence: what was expected, and what was given. Values are
checked where they are concrete; shapes, also under `jit`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import distributions, random
from specjax.drafters.shared.arguments import check_model
from specjax.prefill import Prompts
from specjax.state import DecodeState
from specjax.tree import Form, Topology
from specjax.types import (
  Draft,
  Drafter,
  LanguageModel,
  Params,
  Rule,
  Sampling,
)
from specjax.warp import make_sampling

# ------------------------------------------------------------------- arguments


def params(given: Params) -> None:
  """Raises ValueError unless the first argument is a `Params`."""
  _expect(
    isinstance(given, Params),
    f"the first argument must be specjax.Params, got {type(given).__name__}",
  )


def prompts(
  tokens: Array,
  lengths: Array,
  rng_key: Array,
  *,
  buffer_length: int,
  vocab_size: int,
  max_positions: tuple[int | None, int | None],
  max_new_tokens: Array | int,
  sampling: Sampling | None,
  stop_tokens: Sequence[int] | Array,
  ignore_stop: Array | bool,
  inputs: Any,
) -> Prompts:
  """The arguments of `Decoder.init` as arrays; raises the same errors.

  `max_positions` are those of the target and the draft.
  """
  tokens = jnp.asarray(tokens)
  _expect(
    tokens.ndim == 2 and jnp.issubdtype(tokens.dtype, jnp.integer),
    "prompts must be token ids i32[B, P], a row for each prompt, got "
    f"{_show(tokens)}",
  )
  _expect(
    hasattr(rng_key, "dtype")
    and jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key),
    f"rng_key must be a typed key (jax.random.key), got {_show(rng_key)}",
  )
  lengths = jnp.asarray(lengths, jnp.int32)
  budgets = jnp.asarray(max_new_tokens, jnp.int32)
  count = len(tokens)
  sampling = sampling or make_sampling(count)
  for name, array, may_be_one in (
    ("lengths", lengths, False),
    ("max_new_tokens", budgets, True),
    ("rng_key", rng_key, True),
    ("sampling", sampling.temperature, False),
  ):
    one = "be a scalar or " if may_be_one else ""
    _expect(
      array.shape == (count,) or (may_be_one and array.shape == ()),
      f"{name} must {one}have an entry for each of {count} prompts, got "
      f"{_show(array)}",
    )
  _sizes(tokens, lengths, budgets, buffer_length, vocab_size)
  for name, limit in zip(("target", "draft"), max_positions, strict=True):
    _expect(
      limit is None or buffer_length <= limit,
      f"the {name} model has {limit} positions, too few for prompt and new "
      f"tokens (buffer_length {buffer_length})",
    )
  if rng_key.ndim == 0:
    rng_key = random.row_keys(rng_key, jnp.arange(count))
  return Prompts(
    tokens=tokens,
    lengths=lengths,
    keys=rng_key,
    max_new_tokens=jnp.broadcast_to(budgets, (count,)),
    sampling=sampling,
    ignores_stop=jnp.broadcast_to(jnp.asarray(ignore_stop, bool), (count,)),
    inputs=inputs,
    stop_tokens=jnp.asarray(stop_tokens, jnp.int32).reshape(-1),
  )


def row_index(state: DecodeState, row: Array | int, name: str = "row") -> Array:
  """The index of a row as an array; raises if it is concrete and wrong."""
  row, rows = jnp.asarray(row, jnp.int32), len(state.length)
  if _concrete(row):
    _expect(0 <= int(row) < rows, f"{name} must be in 0..{rows - 1}, got {row}")
  return row


def prefix(
  state: DecodeState, source: Array | int | None, keep: Array | int
) -> Array | None:
  """The row whose first `keep` tokens are reused; raises like `row_index`."""
  most: Array | int = 0
  if source is not None:
    source = row_index(state, source, "source")
    known = _concrete(source) and _concrete(state.length)
    most = state.length[source] if known else keep
  if _concrete(keep) and _concrete(most):
    _expect(
      0 <= int(keep) <= int(most), f"keep must be in 0..{most}, got {keep}"
    )
  return source


def extension(
  state: DecodeState,
  row: Array | int,
  tokens: Array,
  count: Array | int,
  max_new_tokens: Array | int,
  *,
  buffer_length: int,
  vocab_size: int,
) -> tuple[Array, Array, Array, Array]:
  """The arguments of `Decoder.extend` as arrays; raises the same errors."""
  tokens = jnp.asarray(tokens)
  row = row_index(state, row)
  count, budget = (jnp.asarray(x, jnp.int32) for x in (count, max_new_tokens))
  _expect(
    tokens.ndim == 1 and jnp.issubdtype(tokens.dtype, jnp.integer),
    f"tokens must be token ids i32[P], of one row, got {_show(tokens)}",
  )
  concrete = _concrete(row) and _concrete(state.length)
  text = state.length[row] if concrete else 0
  _sizes(tokens[None], count[None], budget, buffer_length, vocab_size, text)
  return row, tokens, count, budget


def _sizes(
  tokens: Array,
  lengths: Array,
  budgets: Array,
  buffer_length: int,
  vocab_size: int,
  text: Array | int = 0,
) -> None:
  """Raises for numbers that do not fit after `text` tokens."""
  if isinstance(buffer_length, jax.core.Tracer):
    raise TypeError(
      "buffer_length must be static, as it is the size of arrays: "
      "jax.jit(decoder.init, static_argnames='buffer_length')"
    )
  width = tokens.shape[1]
  _expect(
    width <= buffer_length,
    f"{width} tokens do not fit into a buffer of {buffer_length}: "
    "buffer_length must hold prompt and new tokens",
  )
  if not _concrete(lengths):
    return
  known = np.asarray(lengths)
  _expect(
    known.min(initial=1) >= 1 and known.max(initial=1) <= width,
    f"lengths must be in 1..{width}, got {known.tolist()}",
  )
  if _concrete(budgets, text):
    wanted = np.asarray(budgets, np.int64)
    need = (wanted + known + int(text)).max(initial=0)
    got = f"max_new_tokens {wanted.tolist()}"
    _expect(
      wanted.min(initial=0) >= 0, f"max_new_tokens must be 0 or more, got {got}"
    )
    _expect(
      need <= buffer_length,
      f"prompt and new tokens must fit into buffer_length ({buffer_length}), "
      f"so it must be at least {need}: got {got} after {text} tokens and "
      f"lengths {known.tolist()}",
    )
  if _concrete(tokens):
    ids = np.asarray(tokens)[np.arange(width) < known[:, None]]
    least, most = (ids.min(), ids.max()) if ids.size else (0, 0)
    _expect(
      least >= 0 and most < vocab_size,
      f"tokens must be in 0..{vocab_size - 1}, got {least}..{most}",
    )


def _expect(fits: bool, otherwise: str) -> None:
  if not fits:
    raise ValueError(otherwise)


def _concrete(*arrays: Array | int) -> bool:
  abstract = jax.core.Tracer | jax.ShapeDtypeStruct
  return not any(isinstance(x, abstract) for x in arrays)


def _show(x) -> str:
  """Dtype and shape, as in "float32[3, 4]", or the type of a non-array."""
  if not hasattr(x, "dtype"):
    return type(x).__name__
  return f"{x.dtype}{list(x.shape)}"


# ----------------------------------------------------------- parts and rounds


def parts(
  target: LanguageModel, drafter: Drafter, rule: Rule, vocab_size: int
) -> None:
  """Raises unless a target, a drafter and a rule fit together."""
  if not isinstance(drafter, Drafter):
    got = repr(drafter) if isinstance(drafter, str) else type(drafter).__name__
    raise TypeError(
      "drafter must be made by a function of specjax.drafters, as "
      f"specjax.drafters.model(draft, tokens=6), got {got}"
    )
  if not isinstance(rule, Rule):
    raise TypeError(
      f"rule must be a specjax.Rule, or in make_decoder its name, got {rule!r}"
    )
  rule.check(drafter.tree, drafter.siblings)
  _expect(
    rule.with_noise or not drafter.siblings.with_noise,
    f"rule {rule.name!r} does not verify drafts with noise (siblings "
    f"{drafter.siblings.name!r}); rule 'gumbel_list' does",
  )
  check_model("target", target, vocab_size)


def draft(drafter: Drafter, proposed: Draft, rows: int, *, vocab_size: int):
  """Raises ValueError unless a draft is what its drafter declares."""
  tree, who = drafter.tree, f"drafter {drafter.name!r}"
  _expect(
    proposed.tree == tree and proposed.siblings == drafter.siblings,
    f"{who} must propose the tree and siblings that it declares ({tree}, "
    f"{drafter.siblings.name!r}), got {proposed.tree} and "
    f"{proposed.siblings.name!r}",
  )
  _expect(
    (proposed.parents is None) == (tree.form is Form.FIXED),
    f"{who} must give parents exactly if its tree's form is not fixed",
  )
  _expect(
    proposed.log_probs is not None
    or not proposed.siblings.independent
    or tree.max_children <= 1,
    f"{who} proposes deterministic tokens, which are not independent draws "
    "from one distribution: its siblings must be 'given', got "
    f"{proposed.siblings.name!r}",
  )
  fed = (rows, tree.num_fed)
  for name, array, expected in (
    ("tokens", proposed.tokens, fed),
    ("parents", proposed.parents, fed),
    ("log_probs", proposed.log_probs, (rows, tree.num_nodes, vocab_size)),
  ):
    _expect(
      array is None or array.shape == expected,
      f"{who} must return {name} of shape {expected} (it may be built for "
      f"another vocab_size), got {_show(array)}",
    )


def sanitized(
  draft: Draft, *, vocab_size: int, max_depth: Array
) -> tuple[Draft, Topology]:
  """A draft that can be verified, and its topology.

  Ids out of range, such as copied ones, become token 0; nodes deeper than
  `max_depth: i32[B]` are masked.
  """
  is_token = (draft.tokens >= 0) & (draft.tokens < vocab_size)
  tokens = jnp.where(is_token, draft.tokens, 0)
  topology, parents = draft.topology(max_depth), draft.parents
  if parents is not None:
    parents = jnp.where(topology.present, parents, -1)
  return dataclasses.replace(draft, tokens=tokens, parents=parents), topology


def logits(model: LanguageModel, returned: Array, fed: tuple[int, ...]) -> None:
  """Raises ValueError unless the target returned logits for T fed tokens."""
  expected = (*fed, model.vocab_size)
  _expect(
    returned.shape == expected,
    f"the target must return logits of shape {expected}, got {returned.shape}",
  )


def replace_nans(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> tuple[Draft, Array, Array]:
  """Makes NaN distributions uniform, and marks the nodes that end a row.

  A row that reaches a node whose target distribution is NaN ends, and emits
  nothing of the round. So does a row whose draft has a NaN distribution, which
  cannot be verified.

  Returns:
    The draft, the target's distributions, and the marks `bool[B, N + 1]`.
  """
  broken = jnp.isnan(target_log_probs[..., 0])
  if draft.log_probs is not None:
    nodes = draft.tree.num_nodes
    unknown = jnp.isnan(draft.log_probs).any(axis=-1)
    unknown &= topology.present[:, :nodes] & (np.arange(nodes) > 0)
    broken |= unknown.any(axis=1, keepdims=True)
    draft = dataclasses.replace(
      draft, log_probs=distributions.replace_nans(draft.log_probs)
    )
  return draft, distributions.replace_nans(target_log_probs), broken
