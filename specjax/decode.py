"""The decoding loop: `Decoder`, with `init`, `step` and `generate`.

One round drafts, scores, verifies, draws and commits:

  propose a token tree -> one target pass over its nodes under the ancestor mask
  -> the rule's distribution of the deepest accepted node -> draw it, then the
  next token -> write the accepted path and the token, cut at stop tokens and
  budgets -> keep that path in the caches.

Plain autoregressive decoding is the same loop with an empty tree. Nothing here
is jitted; shapes are static, so `jax.jit(decoder.generate, donate_argnums=1)`
is one program for all prompts, lengths, temperatures and budgets of the same
shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import cache as cache_lib
from specjax import checks, drafters, penalties, prefill, random, rows, rules
from specjax import emission as emission_lib
from specjax import warp as warp_lib
from specjax.adaptive import widths as widths_lib
from specjax.cache import Cache
from specjax.drafters.shared.arguments import check_functions
from specjax.prefill import Prompts
from specjax.state import DecodeState, Round, StepInfo
from specjax.tree import Topology, take_node
from specjax.types import (
  Commit,
  Context,
  Draft,
  Drafter,
  DrawFn,
  LanguageModel,
  Params,
  Rule,
  Sampling,
  Verification,
  pick_nodes,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """The decoding loop of a target, a drafter and a rule; all of it is static.

  Attributes:
    target: the model whose distribution is sampled.
    drafter: proposes a token tree each round.
    rule: verifies it.
    vocab_size: V, the number of real tokens (ids at or beyond it get no mass).
    with_log_probs: whether to record the target's log-probabilities.
    num_likeliest: K, how many of the likeliest tokens to record at each emitted
      one (`specjax.state.Likeliest`); 0 for none.
    widths: increasing numbers of fed tokens, below F, each with a target pass
      of its own: a round takes the narrowest that fits
      (`specjax.adaptive.widths`).

  Raises:
    ValueError: if the rule does not support the drafter's tree, `widths` do not
      suit it, K is more than V, or the target has fewer than V tokens.
    TypeError: if target, drafter or rule has the wrong type.
  """

  target: LanguageModel
  drafter: Drafter
  rule: Rule
  vocab_size: int
  with_log_probs: bool = False
  num_likeliest: int = 0
  widths: tuple[int, ...] = ()

  def __post_init__(self):
    checks.parts(self.target, self.drafter, self.rule, self.vocab_size)
    widths_lib.check(self.widths, self.drafter.tree)
    if not 0 <= self.num_likeliest <= self.vocab_size:
      raise ValueError(
        f"num_likeliest must be in 0..{self.vocab_size}, got "
        f"{self.num_likeliest}"
      )

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
    ignore_stop: Array | bool = False,
    inputs: Any = None,
  ) -> DecodeState:
    """Prefills both models with the prompts.

    Args:
      params: parameters of both models.
      prompts: `i32[B, P]`, right-padded with any ids.
      lengths: `i32[B]` in 1..P.
      rng_key: a typed key; row b gets the stream `fold_in(rng_key, b)`. Or
        `key[B]`, one per row, so that seeds follow prompts into any batch
        (`specjax.random.row_keys`).
      buffer_length: static; a row's prompt and completion must fit into it.
      max_new_tokens: the most tokens to emit, for all rows or `i32[B]`.
      sampling: the warp; by default temperature 1 and no truncation.
      stop_tokens: ids that end a row once emitted.
      ignore_stop: `bool[B]`, rows that ignore stop tokens.
      inputs: the encoders' inputs, any pytree with rows first (`encode` of
        `LanguageModel`).

    Returns:
      The state before the first step.

    Raises:
      ValueError: for sizes that do not fit; lengths, budgets and tokens are
        checked when they are concrete (under `jit`, rows end at the buffer's
        end, or at once if a token is out of range: UNKNOWN_TOKEN).
    """
    checked = self._checked(
      params, prompts, lengths, rng_key, buffer_length=buffer_length,
      max_new_tokens=max_new_tokens, sampling=sampling, stop_tokens=stop_tokens,
      ignore_stop=ignore_stop, inputs=inputs,
    )  # fmt: skip
    return self._begin(params, checked, buffer_length)

  def admit(
    self,
    params: Params,
    state: DecodeState,
    row: Array | int,
    prompt: Array,
    length: Array | int,
    rng_key: Array,
    *,
    max_new_tokens: Array | int,
    sampling: Sampling | None = None,
    ignore_stop: Array | bool = False,
    inputs: Any = None,
    source: Array | int | None = None,
    keep: Array | int = 0,
    slots: int | None = None,
  ) -> DecodeState:
    """Refills a finished row of a running state with another prompt.

    The row emits exactly what it would in a state of its own, and the other
    rows are unaffected. Prompts of one width share a program.

    The first `keep` tokens of row `source` can be reused as a prefix; `prompt`
    then holds only the tokens after them. The row draws what it would without
    reuse, up to rounding (only in distribution if its drafter keeps what it
    learned from a row). A target with recurrent states can reuse either nothing
    or all of a text but its newest tokens: a row that keeps fewer ends with
    NAN_LOGITS.

    Args:
      params: parameters of both models.
      state: from `init` or later; donate it.
      row: index of a finished row.
      prompt: `i32[P]`, right-padded with any ids.
      length: its number of tokens, in 1..P.
      rng_key: the row's key, used as is.
      max_new_tokens, ignore_stop, inputs: as in `init`, for one row.
      sampling: the warp of one row, with the same truncations as the state's;
        by default temperature 1 and no truncation.
      source: `i32[]`, row whose text and inputs are reused; None for no reuse.
      keep: `i32[]`, how many of its first tokens to reuse, at most its length.
      slots: static, how many cache slots a pass reads: enough for the whole
        text (`slots_for`).

    Returns:
      The state. If the reused tokens, the prompt and the budget do not fit into
      the buffer, the row ends early (LENGTH).

    Raises:
      ValueError: as in `init`, and for a row or prefix that does not exist.
    """
    row = checks.row_index(state, row)
    source = checks.prefix(state, source, keep)
    checked = self._checked(
      params, jnp.asarray(prompt)[None], jnp.reshape(length, 1), rng_key[None],
      buffer_length=self.buffer_length(state), max_new_tokens=max_new_tokens,
      sampling=warp_lib.match_state(sampling, state.sampling),
      stop_tokens=state.stop_tokens, ignore_stop=ignore_stop, inputs=inputs,
    )  # fmt: skip
    return self._admitted(params, state, row, checked, source, keep, slots)

  def extend(
    self,
    params: Params,
    state: DecodeState,
    row: Array | int,
    tokens: Array,
    count: Array | int,
    *,
    max_new_tokens: Array | int,
    sampling: Sampling | None = None,
  ) -> DecodeState:
    """Appends tokens to the text of a row, which then continues.

    For the next turn of a conversation: only the new tokens and the last few
    before them (`Drafter.num_refed`) are prefilled. The row then emits what it
    would with the whole text as its prompt (only in distribution if its drafter
    keeps what it learned from the row). The text so far becomes the prompt, and
    counters restart. Tokens of one width share a program.

    Args:
      params, state, max_new_tokens, sampling: as in `admit`; the row's own warp
        by default.
      row: index of a row, done or not.
      tokens: `i32[P]`, right-padded with any ids.
      count: their number, in 1..P.

    Returns:
      The state. Under `jit`, which cannot check this, a row whose text and
      tokens do not fit into the buffer has ended (LENGTH); all is prompt.

    Raises:
      ValueError: as in `init`.
    """
    checks.params(params)
    if sampling is not None:
      sampling = warp_lib.match_state(sampling, state.sampling)
    checked = checks.extension(
      state, row, tokens, count, max_new_tokens,
      buffer_length=self.buffer_length(state), vocab_size=self.vocab_size,
    )  # fmt: skip
    return self._extended(params, state, *checked, sampling)

  def step(
    self, params: Params, state: DecodeState
  ) -> tuple[DecodeState, StepInfo]:
    """Runs one round on every row; finished rows stay as they are.

    An example of three rows and a chain of three drafted tokens (four nodes).
    The target is greedy and counts up. All of row 0's draft is accepted, row
    1's first token is rejected, and row 2's budget has two tokens left::

                              row 0        row 1        row 2
      text (length)           3 4 (2)      8 (1)        0 0 1 (3)
      drafted                 5 6 7        9 9 9        2 3 4
      fed to the target       4 5 6 7      8 9 9 9      1 2 3 4
      at positions            1 2 3 4      0 1 2 3      2 3 4 5
      the target's next       5 6 7 8      9 0 0 0      2 3 4 5
      node_probs              0 0 0 1      0 1 0 0      0 0 0 1
      node, next token        3, 8         1, 0         3, 5
      emitted                 5 6 7 8      9 0          2 3
      their Origin            A A A bonus  A residual   A A
      length                  6            3            5
      slots cached            3 4 5 6 7    8 9          0 0 1 2
      stop_reason             -            -            LENGTH

    The newest token is never cached: it is the next root.

    Returns:
      The next state, and a record of the round.
    """
    checks.params(params)
    keys = random.step_keys(state.keys, state.length)
    now, verification = self.draft_and_verify(params, state)
    draft, cache, root_slot = now.draft, now.target_cache, state.length - 1
    idle = state.done
    node_probs, distance = verification.node_probs, verification.total_variation
    if distance is None:  # not reported
      unknown = 0 if self.rule.lossless else jnp.nan
      distance = jnp.full_like(node_probs, unknown)
    with jax.named_scope("verify"):
      numbers = random.verification_numbers(keys, node_probs.dtype)  # [B, 2, 2]
      node = random.invert(node_probs, numbers[:, 0, 0])
      next_token = random.pick(numbers[:, 1], verification.next_log_probs(node))
    with jax.named_scope("commit"):
      emission = emission_lib.emit(state, now, node, next_token)
      counters = emission_lib.count(state, now, node_probs, distance, emission)
      state = emission_lib.write(state, now.logits, emission)
      if draft.tree.is_chain:
        cache = cache.replace(length=state.length - 1)
      else:
        cache = cache_lib.keep_path(
          cache, root_slot, emission.path, state.length - 1,
          nodes=draft.tree.num_nodes,
        )  # fmt: skip
    with jax.named_scope("draft"):  # a head's pass over what was committed
      drafter_state = self.drafter.commit(
        params,
        cache_lib.with_idle(now.drafter_state, idle),
        Commit(
          tokens=draft.tokens,
          start=root_slot,
          path=emission.path,
          length=state.length,
          newest=take_node(state.tokens, state.length - 1),
          target_output=now.output,
          num_refed=jnp.zeros_like(root_slot),
          target_log_probs=now.target_log_probs,
        ),
      )
    state = dataclasses.replace(
      state,
      target_cache=cache,
      drafter_state=cache_lib.with_idle(drafter_state, None),
      counters=counters,
    )
    info = StepInfo(
      draft=draft,
      target_log_probs=now.target_log_probs,
      node_probs=node_probs,
      node=node,
      tokens=emission.tokens,
      num_emitted=emission.count,
      total_variation=distance,
    )
    return state, info

  def draft_and_verify(
    self, params: Params, state: DecodeState, *, draws: DrawFn = pick_nodes
  ) -> tuple[Round, Verification]:
    """Runs a round up to its final draws; for `draws` see `Context`."""
    now = self.score(params, state, draws=draws)
    with jax.named_scope("verify"):
      verification = self.rule.verify(
        now.draft, now.topology, now.target_log_probs
      )
    return now, verification

  def score(
    self, params: Params, state: DecodeState, *, draws: DrawFn = pick_nodes
  ) -> Round:
    """Drafts and scores; `draft_and_verify` without verification."""
    tree, root_slot = self.drafter.tree, state.length - 1
    with jax.named_scope("draft"):
      draft, topology, drafter_state, cache = self.propose(params, state, draws)
    with jax.named_scope("score"):
      mask = topology.ancestors
      if isinstance(mask, np.ndarray):  # one for all rows
        mask = mask[0]
      which: Array | None = None
      num_fed: Array | int = tree.num_fed
      if self.widths:
        which, num_fed = widths_lib.choose(self.widths, topology, state.done)
      output, cache = widths_lib.apply(
        self.target.apply,
        self.widths,
        which,
        params.target,
        draft.tokens,
        cache.replace(length=root_slot, idle=state.done),
        positions=root_slot[:, None] + topology.depth,
        mask=None if tree.is_chain and not tree.lanes else mask,
      )
      checks.logits(self.target, output.logits, draft.tokens.shape)
      logits = output.logits[:, : tree.num_nodes, : self.vocab_size]
      logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
      sampled = logits
      if state.sampling.penalties is not None:
        along = penalties.path_tokens(draft, topology)
        sampled = penalties.penalized(logits, state, along)
      sampling = warp_lib.of_running(state.sampling, state.done)
      target_log_probs = warp_lib.warp(sampled, sampling)
      draft, target_log_probs, broken = checks.replace_nans(
        draft, topology, target_log_probs
      )
    return Round(
      draft=draft,
      topology=topology,
      drafter_state=drafter_state,
      output=output,
      target_cache=cache.replace(idle=None),
      logits=logits,
      target_log_probs=target_log_probs,
      broken=broken,
      num_fed=num_fed,
    )

  def propose(
    self, params: Params, state: DecodeState, draws: DrawFn = pick_nodes
  ) -> tuple[Draft, Topology, Any, Cache]:
    """The draft to score, checked and cut; see `Drafter.propose`."""
    tree = self.drafter.tree
    keys = random.step_keys(state.keys, state.length)
    context = Context(
      tokens=state.tokens,
      length=state.length,
      max_depth=jnp.where(state.done, 0, state.max_depth),
      sampling=warp_lib.of_running(state.sampling, state.done),
      keys=random.drafter_keys(keys),
      row_keys=random.drafter_keys(state.keys),
      numbers=random.drafted_numbers(keys, tree.num_drafted),
      draws=draws,
    )
    draft, drafter_state, cache = self.drafter.propose(
      params,
      cache_lib.with_idle(state.drafter_state, state.done),
      state.target_cache.replace(idle=state.done),
      context,
    )
    checks.draft(
      self.drafter, draft, len(state.length), vocab_size=self.vocab_size
    )
    draft, topology = checks.sanitized(
      draft, vocab_size=self.vocab_size, max_depth=state.max_depth
    )
    drafter_state, cache = cache_lib.with_idle((drafter_state, cache), None)
    return draft, topology, drafter_state, cache

  def generate(self, params: Params, state: DecodeState) -> DecodeState:
    """Decodes until every row is done, in one `lax.while_loop`."""
    return self.steps(params, state, None)

  def steps(
    self,
    params: Params,
    state: DecodeState,
    num_steps: Array | int | None,
    *,
    num_idle: Array | int | None = None,
    slots: int | None = None,
  ) -> DecodeState:
    """Runs at most `num_steps` rounds (traced), fewer if all rows finish.

    Between calls the caller may read `state.tokens` up to `state.length`. The
    loop stops early once `num_idle` rows are done (traced), so that `admit` can
    refill them; and, if passes read only `slots` slots (static, see
    `slots_for`), before a running row needs more.
    """
    checks.params(params)
    condition = self._condition(state, num_steps, num_idle, slots)
    return cache_lib.with_read_slots(
      lax.while_loop(
        condition,
        lambda s: self.step(params, s)[0],
        cache_lib.with_read_slots(state, slots),
      ),
      None,
    )

  def buffer_length(self, state: DecodeState) -> int:
    """The most tokens that a row's prompt and completion may have together."""
    return state.tokens.shape[1] - self.drafter.tree.max_depth - 1

  def slots_for(self, state: DecodeState, text: int) -> int | None:
    """The `slots` of `steps` and `admit` for texts of up to `text` tokens.

    It is as small as every cache of the state allows (see `cache.slots_for`);
    None for all.
    """
    return cache_lib.slots_for(_caches(state), text, self.buffer_length(state))

  def row_axes(self, state: DecodeState) -> DecodeState:
    """The row axis of each leaf; None where all rows share it."""
    return dataclasses.replace(
      jax.tree.map(lambda x: 0, state),
      stop_tokens=None,
      num_steps=None,
      target_cache=cache_lib.row_axes(state.target_cache),
      drafter_state=self.drafter.row_axes(state.drafter_state),
    )

  def _num_done(self, state: DecodeState) -> Array:
    return jnp.sum(state.done)

  def _longest(self, state: DecodeState) -> Array:
    return jnp.max(jnp.where(state.done, 0, state.length))

  def _condition(
    self, first: DecodeState, num_steps, num_idle, slots: int | None
  ) -> Callable[[DecodeState], Array]:
    """The loop's condition, see `steps`."""

    def condition(state: DecodeState) -> Array:
      left = ~jnp.all(state.done)
      if num_steps is not None:  # subtracted, as a sum could wrap around
        left &= state.num_steps - first.num_steps < num_steps
      if num_idle is not None:
        left &= self._num_done(state) < num_idle
      if slots is not None:
        spare = cache_lib.most_slots(_caches(state)) - self.buffer_length(state)
        left &= self._longest(state) <= slots - spare
      return left

    return condition

  def _checked(self, params: Params, *args: Array, **options: Any) -> Prompts:
    """The arguments of `init` as arrays, if they fit the decoder."""
    checks.params(params)
    limits = self.target.max_positions, self.drafter.max_positions
    return checks.prompts(
      *args, **options, vocab_size=self.vocab_size, max_positions=limits
    )

  def _begin(
    self, params: Params, given: Prompts, buffer_length: int, blank: Any = None
  ) -> DecodeState:
    if blank is None:
      blank = self._blank(params, given, buffer_length)
    return prefill.begin(
      self.target, self.drafter, params, given, blank,
      buffer_length=buffer_length, vocab_size=self.vocab_size,
      with_log_probs=self.with_log_probs, num_likeliest=self.num_likeliest,
    )  # fmt: skip

  def _admitted(
    self, params: Params, state: DecodeState, row, given: Prompts, source, keep,
    slots: int | None,
  ) -> DecodeState:  # fmt: skip
    axes, size = self.row_axes(state), self.buffer_length(state)
    in_place = self.target.takes_rows
    # State that all rows share carries on from where it is.
    blank = rows.over_leaves(
      lambda axis, new, now: now if axis is None else new,
      self.drafter.row_axes(state.drafter_state),
      self._blank(params, given, size), state.drafter_state,
    )  # fmt: skip
    if source is None:
      fresh = Decoder._begin(self, params, given, size, blank)
    else:
      old = rows.take(axes, state, row, source, keep, in_place=in_place)
      fresh = self._appended(
        params, prefill.cut(old, keep, blank, given), given.tokens[0],
        given.lengths[0], given.max_new_tokens, given.sampling, slots,
      )  # fmt: skip
    fresh = dataclasses.replace(fresh, num_steps=state.num_steps)
    return rows.merge(axes, state, (row,), fresh)

  def _extended(
    self, params: Params, state: DecodeState, row: Array, *more: Any
  ) -> DecodeState:
    axes, in_place = self.row_axes(state), self.target.takes_rows
    alone = rows.take(axes, state, row, row, 0, in_place=in_place)
    longer = self._appended(params, alone, *more)
    return rows.merge(axes, state, (row,), longer)

  def _blank(self, params: Params, given: Prompts, buffer_length: int) -> Any:
    """The drafter's state of fresh rows."""
    slots = prefill.slots(self.target, self.drafter, buffer_length)
    return self.drafter.init(params, len(given.lengths), slots, given.inputs)

  def _appended(
    self, params: Params, one: DecodeState, tokens, count, budget, sampling,
    slots: int | None = None,
  ) -> DecodeState:  # fmt: skip
    return prefill.extend(
      self.target, self.drafter, params, one, tokens, count,
      vocab_size=self.vocab_size, max_new_tokens=budget, sampling=sampling,
      slots=slots,
    )  # fmt: skip


def _caches(state: DecodeState) -> tuple[Cache, Any]:
  return state.target_cache, state.drafter_state


def make_decoder(
  target: LanguageModel,
  *,
  drafter: Drafter | None = None,
  rule: str | Rule = "token",
  vocab_size: int | None = None,
  **options: Any,
) -> Decoder:
  """A `Decoder`; without a drafter, plain autoregressive decoding.

  Args:
    target: the model whose distribution is sampled.
    drafter: see `specjax.drafters`; build it with the same `vocab_size`.
    rule: a `Rule`, or its name in `specjax.rules`.
    vocab_size: number of real tokens; by default the target's.
    **options: the other fields of `Decoder`.

  Raises:
    ValueError: for an unknown rule, or incompatible parts.
    TypeError: for a part of the wrong type, such as a drafter's name as text.
  """
  check_functions("target", target)
  vocab_size = target.vocab_size if vocab_size is None else vocab_size
  return Decoder(
    target=target,
    drafter=drafters.plain() if drafter is None else drafter,
    rule=rules.get(rule) if isinstance(rule, str) else rule,
    vocab_size=vocab_size,
    **options,
  )
