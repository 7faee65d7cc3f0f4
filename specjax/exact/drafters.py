"""Checks that a drafter reports the laws it drew from and reads nothing stale.

A draft with a law other than the one it was drawn from makes every rule lossy,
which shows only in the text; a draft that reads a stale slot or another row
cannot be reproduced. Both are checked on the drafter itself, in a state made by
the loop.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, random, rows
from specjax.exact import rounds, samples
from specjax.exact.samples import Nodes
from specjax.state import DecodeState
from specjax.tree import Form
from specjax.types import Draft, Drafter, LanguageModel, Params
from specjax.warp import make_sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterCheck:
  """Result of the checks of a drafter that passed.

  Attributes:
    method: "exact": every possible draft was enumerated. "sampled": its tokens
      were drawn many times and tested against its laws; whether the tree's form
      depends on drawn tokens is not checked then. "deterministic": it draws
      nothing.
    num_drafts: drafts enumerated or drawn.
    error: the largest difference between a reported law and the one drawn from;
      0 if sampled.
    p_value: the sampled test's, the least over nodes; else None.
  """

  method: str
  num_drafts: int
  error: float
  p_value: float | None


def check_drafter(
  drafter: Drafter,
  params: Params,
  target: LanguageModel,
  *,
  vocab_size: int,
  prompts=None,
  temperature: float = 1.0,
  num_steps: int = 2,
  max_drafts: int = 20_000,
  num_samples: int = 4096,
  rng_key=None,
  inputs: Any = None,
) -> DrafterCheck:
  """Checks a drafter in a state after some rounds with a target.

  - Its laws sum to one, and are those that its tokens are drawn from: exactly,
    if it draws only by `Context.draw` and V ** N is affordable, else by a
    chi-squared test (level 1e-6) of every node.
  - If siblings are independent, nodes with equal paths have children of equal
    laws and masks, since rules merge them.
  - No random number is used twice: by the same tests, tokens follow their laws
    given the loop's random numbers for verification, the draws of earlier
    nodes, and what the round before emitted.
  - A node's mask and parent are decided before the first token of its family is
    drawn (deterministic drafts may decide them by anything).
  - A row's draft depends on that row alone, and on nothing stale: neither on
    tokens from `length` on nor on the target's slots from `length - 1` on.
  - Its state's row axes are those that it declares.

  Args:
    drafter: the drafter.
    params: parameters of target and draft.
    target: the target.
    vocab_size: V.
    prompts: `i32[B, P]`, at least two rows; by default three rows of ids that
      count up.
    temperature: of the warp.
    num_steps: rounds before the check.
    max_drafts: the most drafts to enumerate per row.
    num_samples: drafts to draw otherwise.
    rng_key: by default `jax.random.key(0)`.
    inputs: the encoders' inputs, with a row for each prompt.

  Returns:
    The `DrafterCheck`.

  Raises:
    ValueError: if the drafter fails a check, saying which.
  """
  if prompts is None:
    prompts = np.arange(12).reshape(3, 4) % vocab_size
  prompts = np.asarray(prompts, np.int32)
  key = jax.random.key(0) if rng_key is None else rng_key
  decoder = decode.make_decoder(
    target,
    drafter=drafter,
    # Not "match": its text does not depend on the draft.
    rule="gumbel_list" if drafter.siblings.with_noise else "recursive",
    vocab_size=vocab_size,
  )
  width = prompts.shape[1]
  budget = (num_steps + 2) * (drafter.tree.max_depth + 1)
  state = jax.jit(decoder.init, static_argnames="buffer_length")(
    params,
    prompts,
    np.maximum(width - np.arange(len(prompts)) % width, 1),
    key,
    buffer_length=width + budget,
    max_new_tokens=np.int32(budget),
    sampling=make_sampling(len(prompts), temperature=temperature),
    inputs=inputs,
  )
  _check_axes(decoder, state)
  axes = decoder.row_axes(state)
  state = jax.jit(decoder.steps)(params, state, num_steps)
  pick = jax.jit(lambda state, some: rows.pick(axes, state, some))
  draft_of = jax.jit(lambda p, s: decoder.propose(p, s)[0])
  draft = draft_of(params, state)
  scrambled = jax.jit(lambda state: _scrambled(decoder, state))(state)
  _check_same(
    draft,
    draft_of(params, scrambled),
    "stale data (tokens from length on, slots from length - 1 on)",
  )
  for row in range(len(prompts)):
    # Among copies of itself: a single row would be another program.
    here = np.full(len(prompts), row)
    _check_same(
      jax.tree.map(lambda x: np.asarray(x)[here], draft),  # noqa: B023
      draft_of(params, pick(state, here)),
      f"other rows (row {row} drafts differently among copies of itself)",
    )
  alone = pick(state, np.array([0]))
  if draft.log_probs is None:
    return DrafterCheck(
      method="deterministic", num_drafts=len(prompts), error=0.0, p_value=None
    )
  seen = Nodes.of(draft)
  _check_sums(seen)
  _check_families(drafter, seen)
  many = rows.pick(axes, alone, np.zeros(num_samples, int))
  many = dataclasses.replace(
    many, keys=random.row_keys(key, jnp.arange(num_samples))
  )
  sampled = Nodes.of(draft_of(params, many))

  nodes = rounds.enumerable_nodes(decoder, params, alone)
  enumerable = vocab_size ** len(nodes) <= max_drafts
  # Draws by other means show only in samples.
  others = seen.drawn & ~np.isin(np.arange(seen.drawn.shape[1]), nodes)
  enumerable &= bool((seen.token_probs()[others] == 1).all())
  if nodes and enumerable and not drafter.siblings.with_noise:
    every = rounds.drafts(decoder, params, alone)
    checked = DrafterCheck(
      method="exact",
      num_drafts=len(every.table),
      error=_check_laws(drafter, every),
      p_value=None,
    )
  else:
    _check_sums(sampled)
    _check_families(drafter, sampled)
    checked = DrafterCheck(
      method="sampled",
      num_drafts=num_samples,
      error=0.0,
      p_value=samples.check_nodes(sampled),
    )
    samples.check_pairs(sampled)
    after, info = jax.jit(decoder.step)(params, many)
    later = Nodes.of(draft_of(params, after))
    samples.check_rounds(np.asarray(info.tokens[:, 0]), later)
  samples.check_coins(many, sampled)
  return checked


def _check_axes(decoder: decode.Decoder, state: DecodeState) -> None:
  """Raises ValueError unless every row axis is as long as there are rows."""
  count, drafter = len(state.length), decoder.drafter
  leaves = jax.tree.leaves(state.drafter_state)
  kind: Any = jax.tree.structure(state.drafter_state)
  axes = kind.flatten_up_to(drafter.row_axes(state.drafter_state))
  for leaf, axis in zip(leaves, axes, strict=True):
    if axis is not None and (leaf.ndim <= axis or leaf.shape[axis] != count):
      raise ValueError(
        f"drafter {drafter.name!r} declares rows along axis {axis} of a state "
        f"of shape {leaf.shape}, but there are {count} rows"
      )


def _scrambled(decoder: decode.Decoder, state: DecodeState) -> DecodeState:
  """The state with everything stale replaced."""
  cache = state.target_cache
  stale = jnp.arange(state.tokens.shape[1]) >= state.length[:, None]
  other = (state.tokens + 1) % decoder.vocab_size

  def scramble(buffer):  # [..., B, K, S, C]
    slots = jnp.arange(buffer.shape[-2])
    gone = slots >= state.length[:, None, None] - 1  # [B, 1, S]
    return jnp.where(gone[..., None], buffer + 1, buffer)

  return dataclasses.replace(
    state,
    tokens=jnp.where(stale, other, state.tokens),
    target_cache=cache.replace(
      keys=jax.tree.map(scramble, cache.keys),
      values=jax.tree.map(scramble, cache.values),
    ),
  )


def _check_same(draft: Draft, other: Draft, what: str) -> None:
  """Raises ValueError unless two drafts are equal at unmasked nodes."""
  present = np.asarray(draft.topology().present)
  same = np.array_equal(present, other.topology().present)
  same &= bool((np.asarray(draft.tokens == other.tokens) | ~present).all())
  if draft.log_probs is not None:
    mine, theirs = Nodes.of(draft), Nodes.of(other)
    same &= _distance(mine.laws[mine.drawn], theirs.laws[mine.drawn]) < 1e-5
  if not same:
    raise ValueError(f"the draft depends on {what}")


def _distance(laws: np.ndarray, others: np.ndarray) -> float:
  """The largest difference of any two entries; 0 if there are none."""
  return float(np.abs(laws - others).max(initial=0))


def _check_sums(seen: Nodes) -> None:
  """Raises ValueError unless the draft's laws sum to 1."""
  mass = seen.laws.sum(axis=-1)[seen.drawn]
  if not (np.abs(mass - 1) < 1e-4).all():
    worst = mass[np.argmax(np.abs(mass - 1))]
    raise ValueError(
      f"a law of the draft sums to {worst:.3g}, not to 1: log_probs are "
      "normalized log-probabilities (jax.nn.log_softmax of logits)"
    )


def _check_families(
  drafter: Drafter, seen: Nodes, possible: np.ndarray | bool = True
) -> None:
  """Raises ValueError unless rules may merge nodes of equal paths.

  Below all nodes with equal paths, independent siblings must have one law, and
  be present or not alike; checked in the `possible` drafts, `bool[R]`.
  """
  tree = drafter.tree
  if not drafter.siblings.independent:
    return
  text = np.take_along_axis(seen.tokens[:, None], seen.paths, axis=-1)
  inside = np.arange(text.shape[-1]) <= seen.depth[..., None]
  text = np.where(inside, text, -1)  # [R, N + 1, G + 1]
  above = np.take_along_axis(text, seen.parents[..., None], axis=1)
  nodes = np.arange(tree.num_nodes)
  below = (seen.parents[:, None] == nodes[:, None]) & seen.drawn[:, None]
  some = below.any(axis=-1)
  for one, other in itertools.combinations(nodes, 2):
    equal = (text[:, one] == text[:, other]).all(axis=-1) & possible
    equal &= seen.present[:, one] & seen.present[:, other]
    # Skip nodes whose form leaves no room for children.
    room = tree.form is Form.FREE or (
      tree.children[one] and tree.children[other]
    )
    if room and (some[equal, one] != some[equal, other]).any():
      raise ValueError(
        f"only one of nodes {one} and {other}, with equal paths, has children: "
        "the mask of independent siblings must depend only on the path above"
      )
    family = (above[:, one] == above[:, other]).all(axis=-1) & possible
    family &= seen.drawn[:, one] & seen.drawn[:, other]
    gap = _distance(seen.laws[family, one], seen.laws[family, other])
    if gap > 1e-5:
      raise ValueError(
        f"nodes {one} and {other}, below equal paths, are drawn from laws that "
        f"differ by {gap:.3g}: they are 'given', not "
        f"{drafter.siblings.name!r}"
      )


def _check_laws(drafter: Drafter, every: rounds.Drafts) -> float:
  """The largest error of a law.

  Raises ValueError unless laws are those drawn from, and forms decided in time.
  """
  seen, tree = Nodes.of(every.draft), drafter.tree
  possible = every.probs > 0
  _check_sums(seen)
  _check_families(drafter, seen, possible)
  sure = seen.token_probs() == 1
  worst = 0.0

  def known(first, here):  # the outcomes of earlier draws
    before = [n for n, (call, _) in every.drawn.items() if call < first]
    return every.table[here][:, before]

  for node in range(1, tree.num_nodes):
    here = seen.present[:, node] & possible
    tokens, laws = seen.tokens[:, node], seen.laws[:, node]
    if node not in every.drawn:
      if not sure[here, node].all():
        raise ValueError(
          f"node {node} was not drawn, and its law is no point mass"
        )
      continue
    call, drawn_from = every.drawn[node]
    # A drawn token was replaced by a deterministic one.
    replaced = here & sure[:, node]
    replaced &= np.abs(laws - drawn_from).max(axis=-1) >= 1e-5
    given = np.where(replaced, tokens, -1)[here, None]
    if replaced.any() and not _follows(given, known(call, here)):
      raise ValueError(
        f"node {node} was drawn, but its reported law is that of a "
        "deterministic token"
      )
    here = here & ~replaced
    if (tokens[here] != every.table[here, node]).any():
      raise ValueError(f"node {node} is not the token that was drawn for it")
    error = _distance(laws[here], drawn_from[here])
    worst = max(worst, error)
    if not error < 1e-5:
      raise ValueError(
        f"node {node} was drawn from another law than the draft reports: they "
        f"differ by {error:.3g}"
      )
    if tree.form is Form.FIXED or not here.any():
      continue
    family = tree.children[tree.parents[node]]
    if tree.form is Form.FREE:
      family = (node,)
    first = min(every.drawn[n][0] for n in family if n in every.drawn)
    form = np.stack([seen.present[:, node], seen.parents[:, node]], axis=1)
    if not _follows(form[possible], known(first, possible)):
      raise ValueError(
        f"the mask or parent of node {node} depends on tokens drawn with it or "
        "after it"
      )
  return worst


def _follows(rows: np.ndarray, known: np.ndarray) -> bool:
  """True if rows of integers are a function of other rows of integers."""
  both = np.concatenate([known, rows], axis=1)
  return len(np.unique(both, axis=0)) == len(np.unique(known, axis=0))
