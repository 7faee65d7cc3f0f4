"""The decoding loop: `init`, `step`, and `step` under `lax.while_loop`.

One round is draft, score, verify, draw, commit:

  propose a token tree -> one target pass over its nodes under the ancestor mask
  -> the rule's law of the deepest accepted node -> draw it, then the next token
  -> write the accepted path and the token, cut at stop tokens and budgets
  -> keep that path in the caches.

Plain autoregressive decoding is the same loop with the empty tree. Nothing here
is jitted; shapes are fixed, so `jax.jit(decoder.generate, donate_argnums=1)` is
one program for every prompt, length, temperature and budget of the same sizes.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import arguments, drafters, laws, rules
from specjax import cache as cache_lib
from specjax import emission as emission_lib
from specjax import sampling as sampling_lib
from specjax import warp as warp_lib
from specjax.types import (
  Commit,
  Context,
  Counters,
  DecodeState,
  Draft,
  Drafter,
  LanguageModel,
  Params,
  Rule,
  Sampling,
  StepInfo,
  StopReason,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A target, a way to draft, and a rule: everything static about decoding.

  Attributes:
    target: the model whose law is sampled.
    drafter: what proposes.
    rule: what verifies.
    vocab_size: V, the number of real tokens (ids at or beyond it get no mass).
    with_log_probs: whether to record the target's log-probabilities.

  Raises:
    ValueError: if the rule does not fit the drafter's tree, or the target knows
      fewer than V tokens.
  """

  target: LanguageModel
  drafter: Drafter
  rule: Rule
  vocab_size: int
  with_log_probs: bool = False

  def __post_init__(self):
    if not isinstance(self.rule, Rule):
      raise TypeError(
        "rule must be a specjax.Rule, or in make_decoder its name, got "
        f"{self.rule!r}"
      )
    self.rule.check(self.drafter.tree, self.drafter.siblings)
    if self.drafter.siblings.with_noise and not self.rule.with_noise:
      raise ValueError(
        f"rule {self.rule.name!r} does not verify drafts with noise "
        f"(siblings {self.drafter.siblings.name!r}); rule 'gumbel_list' does"
      )
    drafters.model.check_model("target", self.target, self.vocab_size)

  def init(
    self,
    params: Params,
    prompts: Array,
    lengths: Array,
    rng_key: Array,
    *,
    buffer_length: int,
    max_new_tokens: Array | int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] | Array = (),
  ) -> DecodeState:
    """Runs the prompts through the models (prefill).

    Args:
      params: parameters of both models.
      prompts: `i32[B, P]`, each row right-padded with anything.
      lengths: `i32[B]` in 1..P.
      rng_key: a typed key; row b gets the stream `fold_in(rng_key, b)`. Or
        `key[B]`, one per row, for seeds that follow a prompt wherever it is
        batched (`specjax.sampling.row_keys`).
      buffer_length: static; prompt and completion of a row must fit into it.
      max_new_tokens: tokens to emit at most, for all rows or `i32[B]`.
      sampling: the warp; by default temperature 1 and no truncation.
      stop_tokens: ids that end a row once emitted.

    Returns:
      The state before the first step.

    Raises:
      ValueError: for sizes that do not fit; lengths and budgets are checked
        when they are concrete (under `jit`, rows end at the buffer's end).
    """
    prompts = jnp.asarray(prompts)
    lengths = jnp.asarray(lengths, jnp.int32)
    max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
    self.check(
      params, prompts, lengths, rng_key, buffer_length=buffer_length,
      max_new_tokens=max_new_tokens, sampling=sampling,
    )  # fmt: skip
    batch, width = prompts.shape
    tree = self.drafter.tree
    sampling = sampling or warp_lib.make_sampling(batch)
    if rng_key.ndim == 0:
      rng_key = sampling_lib.row_keys(rng_key, jnp.arange(batch))
    max_length = jnp.minimum(lengths + max_new_tokens, buffer_length)
    # Every row may write a whole tree beyond its last committed token.
    slots = buffer_length + tree.num_nodes
    columns = buffer_length + tree.max_depth + 1
    # Whatever the caller padded with is replaced: models may not know it.
    prompts = jnp.where(
      jnp.arange(width) < lengths[:, None], prompts, prompts[:, :1]
    ).astype(jnp.int32)
    # Copies: the state is made to be donated, the arguments are the caller's.
    own = lambda arrays: jax.tree.map(jnp.copy, arrays)
    _, target_cache = self.target.apply(
      params.target,
      prompts,
      self.target.init_cache(batch, slots),
      logits_at=jnp.zeros((batch, 0), jnp.int32),
    )
    drafter_state = self.drafter.prefill(
      params, self.drafter.init(params, batch, slots), prompts, own(lengths)
    )
    zeros = lambda: jnp.zeros((batch,), jnp.int32)
    return DecodeState(
      tokens=jnp.pad(prompts, ((0, 0), (0, columns - width))),
      origins=jnp.zeros((batch, columns), jnp.int8),
      log_probs=jnp.zeros((batch, columns)) if self.with_log_probs else None,
      prompt_length=own(lengths),
      length=own(lengths),
      max_length=max_length,
      stop_reason=jnp.where(
        max_length > lengths, StopReason.RUNNING, StopReason.LENGTH
      ).astype(jnp.int32),
      stop_tokens=own(jnp.asarray(stop_tokens, jnp.int32).reshape(-1)),
      keys=own(rng_key),
      sampling=own(sampling),
      target_cache=target_cache.replace(length=lengths - 1),
      drafter_state=drafter_state,
      counters=Counters(
        num_target_calls=zeros(),
        num_drafted=zeros(),
        num_accepted=zeros(),
        expected_accepted=jnp.zeros((batch,)),
        accept_counts=jnp.zeros((batch, tree.max_depth + 1), jnp.int32),
        total_variation=jnp.zeros((batch,)),
        rank_offered=jnp.zeros((batch, tree.max_children)),
        rank_accepted=jnp.zeros((batch, tree.max_children)),
      ),
      num_steps=jnp.zeros((), jnp.int32),
    )

  def check(
    self,
    params: Params,
    prompts: Array,
    lengths: Array,
    rng_key: Array,
    *,
    buffer_length: int,
    max_new_tokens: Array,
    sampling: Sampling | None,
  ) -> None:
    """Raises ValueError for arguments of `init` that cannot work.

    Lengths, budgets and tokens are looked at when they are concrete.
    """
    arguments.check_params(params)
    arguments.check_rows(prompts, lengths, rng_key, max_new_tokens, sampling)
    arguments.check_sizes(
      prompts,
      lengths,
      max_new_tokens,
      buffer_length=buffer_length,
      vocab_size=self.vocab_size,
      max_positions={
        "target": self.target.max_positions,
        "draft": self.drafter.max_positions,
      },
    )

  def step(
    self, params: Params, state: DecodeState
  ) -> tuple[DecodeState, StepInfo]:
    """One round for every row; rows that are done stay as they are.

    Args:
      params: parameters of both models.
      state: from `init` or an earlier step.

    Returns:
      The next state, and what happened.
    """
    arguments.check_params(params)
    tree = self.drafter.tree
    keys = sampling_lib.step_keys(state.keys, state.length)
    context = Context(
      tokens=state.tokens,
      length=state.length,
      sampling=state.sampling,
      keys=keys,
      row_keys=state.keys,
    )
    root_slot = state.length - 1
    with jax.named_scope("draft"):
      draft, drafter_state, cache = self.drafter.propose(
        params, state.drafter_state, state.target_cache, context
      )
      self._check_draft(draft, batch=state.length.shape[0])
    with jax.named_scope("score"):
      output, cache = self.target.apply(
        params.target,
        draft.tokens,
        cache.replace(length=root_slot),
        positions=root_slot[:, None] + tree.depth,
        mask=None if tree.is_chain else tree.ancestors,
      )
      self._check_logits(output.logits, draft.tokens.shape)
      logits = output.logits[..., : self.vocab_size]
      logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
      target_log_probs = warp_lib.warp(logits, state.sampling)
      draft, target_log_probs, broken = _heal(draft, target_log_probs)
    with jax.named_scope("verify"):
      verification = self.rule.verify(
        tree, self.drafter.siblings, draft, target_log_probs
      )
      numbers = sampling_lib.numbers(
        sampling_lib.verification_keys(keys), target_log_probs.dtype
      )  # [B, 2, 2]
      node = sampling_lib.pick_node(numbers[:, 0, 0], verification.node_probs)
      next_token = sampling_lib.pick(
        numbers[:, 1], verification.next_log_probs(node)
      )
    with jax.named_scope("commit"):
      emission = emission_lib.emit(tree, state, draft, node, next_token, broken)
      state = self._record(state, draft, verification, emission)
      if self.with_log_probs:
        state = dataclasses.replace(
          state,
          log_probs=_write(
            state.log_probs,
            emission_lib.log_probs(logits, emission),
            root_slot + 1,
          ),
        )
      if tree.is_chain:
        cache = cache.replace(length=state.length - 1)
      else:
        cache = cache_lib.keep_path(
          cache,
          root_slot,
          emission.path,
          state.length - 1,
          nodes=tree.num_nodes,
        )
      drafter_state = self.drafter.commit(
        params,
        drafter_state,
        Commit(
          start=root_slot,
          path=emission.path,
          num_accepted=emission.depth,
          length=state.length,
          target_output=output,
        ),
      )
    state = dataclasses.replace(
      state, target_cache=cache, drafter_state=drafter_state
    )
    info = StepInfo(
      draft=draft,
      target_log_probs=target_log_probs,
      node_probs=verification.node_probs,
      node=node,
      tokens=emission.tokens,
      num_emitted=emission.count,
      total_variation=_total_variation(verification),
    )
    return state, info

  def _check_draft(self, draft: Draft, *, batch: int) -> None:
    nodes = self.drafter.tree.num_nodes
    for name, got, expected in (
      ("tokens", draft.tokens.shape, (batch, nodes)),
      ("log_probs", draft.log_probs.shape, (batch, nodes, self.vocab_size)),
    ):
      if got != expected:
        raise ValueError(
          f"drafter {self.drafter.name!r} must return {name} of shape "
          f"{expected} (it may be built for another vocab_size), got {got}"
        )

  def _check_logits(self, logits: Array, fed: tuple[int, ...]) -> None:
    expected = (*fed, self.target.vocab_size)
    if logits.shape != expected:
      raise ValueError(
        f"the target must return logits of shape {expected}, got {logits.shape}"
      )

  def _record(self, state, draft, verification, emission):
    """The state with the emitted tokens written and everything counted."""
    tree = self.drafter.tree
    length = state.length + emission.count
    active = ~state.done & emission.healthy
    stopped = jnp.where(
      emission.hit_stop,
      StopReason.STOP_TOKEN,
      jnp.where(
        length >= state.max_length, StopReason.LENGTH, StopReason.RUNNING
      ),
    )
    stopped = jnp.where(emission.healthy, stopped, StopReason.NAN_LOGITS)
    kept = jnp.minimum(emission.depth, emission.count)
    expected = jnp.sum(
      verification.node_probs * emission_lib.kept_depth(tree, state, draft),
      axis=1,
    )
    old, one = state.counters, active.astype(jnp.int32)
    kept_one_hot = kept[:, None] == jnp.arange(tree.max_depth + 1)
    # Emitted token i followed node i of the path.
    distance = jnp.take_along_axis(
      _total_variation(verification), emission.path, axis=1
    )
    distance = jnp.where(
      jnp.arange(tree.max_depth + 1) < emission.count[:, None], distance, 0
    ).sum(1)
    offered, went_on = emission_lib.by_rank(tree, verification.node_probs)
    add = lambda total, new: (
      total
      + jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, 0).astype(
        total.dtype
      )
    )
    return dataclasses.replace(
      state,
      tokens=_write(state.tokens, emission.tokens, state.length),
      origins=_write(state.origins, emission.origins, state.length),
      length=length,
      stop_reason=jnp.where(state.done, state.stop_reason, stopped),
      counters=Counters(
        num_target_calls=old.num_target_calls + one,
        num_drafted=old.num_drafted + one * tree.num_drafted,
        num_accepted=old.num_accepted + one * kept,
        expected_accepted=add(old.expected_accepted, expected),
        accept_counts=old.accept_counts + one[:, None] * kept_one_hot,
        total_variation=add(old.total_variation, distance),
        rank_offered=add(old.rank_offered, offered),
        rank_accepted=add(old.rank_accepted, went_on),
      ),
      num_steps=state.num_steps + 1,
    )

  def steps(
    self, params: Params, state: DecodeState, num_steps: Array | int
  ) -> DecodeState:
    """At most `num_steps` rounds (traced), fewer if all rows are done.

    Between calls the caller may read `state.tokens` up to `state.length`: this
    is how to stream.
    """
    arguments.check_params(params)
    last = state.num_steps + num_steps
    return lax.while_loop(
      lambda s: ~jnp.all(s.done) & (s.num_steps < last),
      lambda s: self.step(params, s)[0],
      state,
    )

  def generate(self, params: Params, state: DecodeState) -> DecodeState:
    """Rounds until every row is done: one `lax.while_loop`."""
    arguments.check_params(params)
    return lax.while_loop(
      lambda s: ~jnp.all(s.done),
      lambda s: self.step(params, s)[0],
      state,
    )


def make_decoder(
  target: LanguageModel,
  *,
  drafter: Drafter | None = None,
  rule: str | Rule = "token",
  vocab_size: int | None = None,
  with_log_probs: bool = False,
) -> Decoder:
  """A `Decoder`; without a drafter, plain autoregressive decoding.

  Args:
    target: the model whose law is sampled.
    drafter: see `specjax.drafters`; build it with the same `vocab_size`.
    rule: a `Rule`, or its name in `specjax.rules`.
    vocab_size: number of real tokens; by default the target's.
    with_log_probs: record the target's log-probabilities of emitted tokens.

  Returns:
    The decoder.

  Raises:
    ValueError: for an unknown rule, or parts that do not fit each other.
  """
  vocab_size = target.vocab_size if vocab_size is None else vocab_size
  return Decoder(
    target=target,
    drafter=drafter or drafters.plain.drafter(vocab_size=vocab_size),
    rule=rules.get(rule) if isinstance(rule, str) else rule,
    vocab_size=vocab_size,
    with_log_probs=with_log_probs,
  )


def _heal(draft: Draft, target_log_probs: Array):
  """Replaces laws that are NaN by uniform ones, and says which nodes end a row.

  Rules then never see a NaN. The target's law at a node that is not reached
  costs its row nothing: to the rule, the target is uniform there, and a row
  that comes there ends before a token is drawn. Drafted tokens that were drawn
  from a law that nobody knows cannot be verified, wherever they are, so that a
  draft with such a law ends its row before any of it is emitted; the library's
  drafters heal their laws before they draw, and return none.

  Returns:
    The draft, the target's laws, and `bool[B, N + 1]`.
  """
  unknown = jnp.isnan(draft.log_probs[..., 0]).any(axis=1, keepdims=True)
  broken = jnp.isnan(target_log_probs[..., 0]) | unknown
  draft = dataclasses.replace(draft, log_probs=laws.heal(draft.log_probs))
  return draft, laws.heal(target_log_probs), broken


def _total_variation(verification) -> Array:
  """`f32[B, N + 1]`, zeros for a lossless rule."""
  if verification.total_variation is None:
    return jnp.zeros_like(verification.node_probs)
  return verification.total_variation


def _write(buffer: Array, rows: Array, start: Array) -> Array:
  """Writes `[B, T]` rows into `[B, L]` at each row's start."""
  return jax.vmap(lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
    buffer, rows.astype(buffer.dtype), start, 0
  )
