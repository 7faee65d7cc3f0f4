"""The exact law of a whole round, through the shipped drafting code too.

`block_law` sums over drafts of one static tree, for laws given as functions.
Here a decoder's own round runs on every draft that its drafter may draw: draws
are replaced by a table, and the law of each is recorded where it is made. So
the sum does not rely on the laws, the shape or the lanes that the drafter
returns, and is right even if these are wrong.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import penalties, rows, warp
from specjax.decode import Decoder
from specjax.exact.enumeration import BlockLaw, block_law_of
from specjax.state import DecodeState
from specjax.types import Draft, DrawFn, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
  """Every draft that a drafter may make in a round; R of them.

  Attributes:
    draft: the drafts, R rows.
    table: `i32[R, N + 1]`, the outcome of each draw, made or not.
    drawn: by drawn node, the number of the call that drew it, and the law it
      was drawn from, `f64[R, V]`, normalized.
    probs: `f64[R]`, the probability of each; they sum to 1.
    outputs: the second output of `propose`.
  """

  draft: Draft
  table: np.ndarray
  drawn: dict[int, tuple[int, np.ndarray]]
  probs: np.ndarray
  outputs: Any


def drafts(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  propose: Callable[[Params, DecodeState, DrawFn], tuple[Draft, Any]]
  | None = None,
) -> Drafts:
  """Every draft that may be drawn in a round.

  Args:
    decoder: with a small vocabulary: V ** N drafts must be affordable.
    params: parameters of both models.
    state: of one row.
    propose: `(params, rows, draws) -> (Draft, outputs)`, for R equal rows of
      the state; arrays have rows first. By default it only drafts.

  Returns:
    The `Drafts`.

  Raises:
    ValueError: if the state has several rows, or the drafter draws a node
      twice.
  """
  if len(state.length) != 1:
    raise ValueError(f"the state must have one row, got {len(state.length)}")
  propose = propose or (lambda *args: (decoder.propose(*args)[0], None))
  nodes, vocab = decoder.drafter.tree.num_nodes, decoder.vocab_size
  drawn_nodes = enumerable_nodes(decoder, params, state)
  table = np.zeros((vocab ** len(drawn_nodes), nodes), np.int32)
  table[:, drawn_nodes] = list(
    itertools.product(range(vocab), repeat=len(drawn_nodes))
  )
  # With several widths a pass is as wide as the widest draft of its rows, so
  # each draft gets a round of its own.
  chunk = 1 if decoder.widths else len(table)
  axes = decoder.row_axes(state)

  @jax.jit
  def run(params, state, table):
    calls = []

    def draws(numbers, here, log_probs):
      calls.append((tuple(map(int, here)), log_probs))
      return table[:, np.asarray(here, np.int32)]

    repeated = rows.pick(axes, state, np.zeros(len(table), int))
    draft, outputs = propose(params, repeated, draws)
    given = {
      node: (number, log_probs[:, place])
      for number, (here, log_probs) in enumerate(calls)
      for place, node in enumerate(here)
    }
    if len(given) != sum(len(here) for here, _ in calls):
      raise ValueError("the drafter draws a node twice")
    return draft, given, outputs

  parts = [
    run(params, state, table[i : i + chunk])
    for i in range(0, len(table), chunk)
  ]
  join = lambda *xs: np.concatenate(xs) if np.ndim(xs[0]) else xs[0]
  draft, given, outputs = jax.tree.map(join, *parts)
  probs = np.ones(len(table))
  drawn = {}
  for node, (number, log_probs) in given.items():
    law = np.exp(np.asarray(log_probs, np.float64))
    law /= law.sum(axis=-1, keepdims=True)  # as a draw does
    probs *= law[np.arange(len(table)), table[:, node]]
    drawn[node] = (int(number), law)
  return Drafts(
    draft=draft, table=table, drawn=drawn, probs=probs, outputs=outputs
  )


def enumerable_nodes(
  decoder: Decoder, params: Params, state: DecodeState
) -> list[int]:
  """The nodes that a drafter draws by `Context.draw`, in order.

  Empty if it draws many siblings in a loop: those cannot be enumerated.
  """
  nodes: set[int] = set()
  in_loop = []

  def draws(numbers, here, log_probs):
    if isinstance(here, jax.core.Tracer):
      in_loop.append(here)
    else:
      nodes.update(map(int, here))
    return jnp.zeros(log_probs.shape[:2], jnp.int32)

  jax.eval_shape(lambda p, s: decoder.propose(p, s, draws), params, state)
  return [] if in_loop else sorted(nodes)


def round_law(
  decoder: Decoder, params: Params, state: DecodeState
) -> tuple[BlockLaw, np.ndarray]:
  """The exact outcome of a round, and the law it should have.

  Args:
    decoder, params, state: see `drafts`; float64 where the models are and
      `jax.enable_x64` is set.

  Returns:
    The `BlockLaw`, and the warped target's joint law of the next G + 1 tokens,
    `f64[V, .., V]`.
  """

  def propose(params, state, draws):
    round_, result = decoder.draft_and_verify(params, state, draws=draws)
    count = len(state.length)
    after = jax.lax.map(
      lambda node: jnp.exp(result.next_log_probs(jnp.full((count,), node))),
      jnp.arange(decoder.drafter.tree.num_nodes),
    )
    after = jnp.swapaxes(after, 0, 1)  # rows first
    return round_.draft, (result.node_probs, after, result.total_variation)

  every = drafts(decoder, params, state, propose)
  node_probs, next_laws, distance = jax.tree.map(
    lambda x: np.asarray(x, np.float64), every.outputs
  )
  target = target_laws(decoder, params, state)
  law = block_law_of(
    probs=every.probs,
    draft=every.draft,
    node_probs=node_probs,
    next_laws=np.swapaxes(next_laws, 0, 1),
    distance=distance,
    target=target,
  )
  expected = np.ones(())
  for law_here in target:
    expected = expected[..., None] * law_here
  return law, expected


def target_laws(
  decoder: Decoder, params: Params, state: DecodeState
) -> Sequence[np.ndarray]:
  """The warped target's law after each continuation of 0..G tokens.

  Args:
    decoder, params, state: see `drafts`.

  Returns:
    G + 1 arrays; entry g is `f64[V, .., V]` with g + 1 axes.
  """
  depth, vocab = decoder.drafter.tree.max_depth, decoder.vocab_size
  texts = np.array(
    list(itertools.product(range(vocab), repeat=depth)), np.int32
  ).reshape(vocab**depth, depth)
  axes = decoder.row_axes(state)

  @jax.jit
  def laws(params, state, texts) -> Array:
    state = rows.pick(axes, state, np.zeros(len(texts), int))
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    output, _ = decoder.target.apply(
      params.target,
      jnp.concatenate([root, texts], axis=1),
      state.target_cache.replace(length=state.length - 1),
    )
    logits = output.logits[..., :vocab]
    if state.sampling.penalties is not None:
      logits = jnp.concatenate(
        [_committed(logits, state, texts, g) for g in range(depth + 1)], axis=1
      )
    return jnp.exp(warp.warp(logits, state.sampling))

  laws_of_texts = np.asarray(laws(params, state, texts), np.float64)
  shaped = laws_of_texts.reshape(*(vocab,) * depth, depth + 1, vocab)
  return [
    shaped[(slice(None),) * g + (0,) * (depth - g) + (g,)]
    for g in range(depth + 1)
  ]


def _committed(logits: Array, state: DecodeState, texts: Array, count: int):
  """Penalized logits `f[R, 1, V]` after `count` tokens of R texts `i32[R, G]`.

  From logits `f[R, G + 1, V]`, as if the tokens had been committed.
  """
  at = jnp.arange(len(texts))[:, None], state.length[:, None] + np.arange(count)
  after = dataclasses.replace(
    state,
    tokens=state.tokens.at[at].set(texts[:, :count]),
    length=state.length + count,
  )
  nothing = jnp.zeros((len(texts), 1, 0), jnp.int32)
  return penalties.penalized(logits[:, count : count + 1], after, nothing)
