"""The decoding loop: `Decoder`, with `init`, `step` and `generate`.

One round is draft, score, verify, draw, commit:

  propose a token tree -> one target pass over its nodes under the ancestor mask
  -> the rule's law of the deepest accepted node -> draw it, then the next token
  -> write the accepted path and the token, cut at stop tokens and budgets
  -> keep that path in the caches.

Plain autoregressive decoding is the same loop with the empty tree. Nothing here
is jitted; shapes are fixed, so `jax.jit(decoder.generate, donate_argnums=1)` is
one program for every prompt, length, temperature and budget of the same sizes.
How prompts are read is in `prefill`, what is checked in `arguments` and
`checks`, what is counted in `emission`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from specjax import (
  arguments,
  checks,
  drafters,
  penalties,
  prefill,
  random,
  rows,
  rules,
)
from specjax import cache as cache_lib
from specjax import emission as emission_lib
from specjax import warp as warp_lib
from specjax.adaptive import widths as widths_lib
from specjax.cache import Cache
from specjax.state import DecodeState, Round, StepInfo
from specjax.tree import Form
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
  """A target, a way to draft, and a rule: everything static about decoding.

  Attributes:
    target: the model whose law is sampled.
    drafter: proposes a token tree each round.
    rule: verifies it.
    vocab_size: V, the number of real tokens (ids at or beyond it get no mass).
    with_log_probs: whether to record the target's log-probabilities.
    num_likeliest: K, likeliest tokens to record in the place of each emitted
      one (`specjax.state.Likeliest`); 0 for none.
    widths: rising numbers of fed tokens, below F, that have a target pass of
      their own; each round takes the narrowest that holds what was drafted (see
      `specjax.adaptive.widths`). For drafts whose nodes may not be there.
    share_encoder: whether the draft is given the output of the target's encoder
      in place of the inputs (`LanguageModel.encode_inputs`).

  Raises:
    ValueError: if the rule does not fit the drafter's tree, the tree has no
      such widths, K is more than V, or the target knows fewer than V tokens, or
      has no encoder to share.
  """

  target: LanguageModel
  drafter: Drafter
  rule: Rule
  vocab_size: int
  with_log_probs: bool = False
  num_likeliest: int = 0
  widths: tuple[int, ...] = ()
  share_encoder: bool = False

  def __post_init__(self):
    checks.parts(self.target, self.drafter, self.rule, self.vocab_size)
    widths_lib.check(self.widths, self.drafter.tree)
    if not 0 <= self.num_likeliest <= self.vocab_size:
      raise ValueError(
        f"num_likeliest must be in 0..{self.vocab_size}, got "
        f"{self.num_likeliest}"
      )
    if self.share_encoder and self.target.encode_inputs is None:
      raise ValueError("the target has no encoder that a draft could share")

  def step(
    self, params: Params, state: DecodeState
  ) -> tuple[DecodeState, StepInfo]:
    """Decodes one round of every row; finished rows stay as they are.

    Three rows and a chain of three drafted tokens, so four nodes; the target
    counts up and is greedy; row 2 may emit two more tokens. Each row is another
    case: everything is accepted, a token is rejected, the budget cuts.

                              row 0        row 1        row 2
      text (`length`)         3 4 (2)      8 (1)        0 0 1 (3)
      drafted                 5 6 7        9 9 9        2 3 4
      fed to the target       4 5 6 7      8 9 9 9      1 2 3 4
      at positions            1 2 3 4      0 1 2 3      2 3 4 5
      the target's next       5 6 7 8      9 0 0 0      2 3 4 5
      `node_probs`            0 0 0 1      0 1 0 0      0 0 0 1
      `node`, next token      3, 8         1, 0         3, 5
      emitted                 5 6 7 8      9 0          2 3
      their `Origin`          A A A bonus  A residual   A A
      `length`                6            3            5
      slots cached            3 4 5 6 7    8 9          0 0 1 2
      why it ended            -            -            LENGTH

    The newest token is never among the cached slots: it is the next root.

    Args:
      params: parameters of both models.
      state: from `init` or an earlier step.

    Returns:
      The next state, and what happened.
    """
    arguments.check_params(params)
    keys = random.step_keys(state.keys, state.length)
    now, verification = self.draft_and_verify(params, state)
    draft, cache = now.draft, now.target_cache
    root_slot = state.length - 1
    with jax.named_scope("verify"):
      numbers = random.numbers(
        random.verification_keys(keys), verification.node_probs.dtype
      )  # [B, 2, 2]
      node = random.pick_node(numbers[:, 0, 0], verification.node_probs)
      next_token = random.pick(numbers[:, 1], verification.next_log_probs(node))
    with jax.named_scope("commit"):
      emission = emission_lib.emit(state, draft, node, next_token, now.broken)
      distance = emission_lib.distances(
        verification, lossless=self.rule.lossless
      )
      state = emission_lib.record(
        state, draft, verification, emission, distance,
        num_fed=now.num_fed, num_experts=now.output.experts,
      )  # fmt: skip
      if self.with_log_probs:
        state = emission_lib.record_log_probs(
          state, now.logits, emission, root_slot + 1
        )
      if self.num_likeliest:
        state = emission_lib.record_likeliest(
          state, now.logits, emission, root_slot + 1
        )
      if draft.tree.is_chain:
        cache = cache.replace(length=state.length - 1)
      else:
        cache = cache_lib.keep_path(
          cache,
          root_slot,
          emission.path,
          state.length - 1,
          nodes=draft.tree.num_nodes,
        )
      drafter_state = self.drafter.commit(
        params,
        now.drafter_state,
        Commit(
          tokens=draft.tokens,
          start=root_slot,
          path=emission.path,
          length=state.length,
          target_output=now.output,
          num_refed=jnp.zeros_like(root_slot),
          target_log_probs=now.target_log_probs,
        ),
      )
    state = dataclasses.replace(
      state, target_cache=cache, drafter_state=drafter_state
    )
    info = StepInfo(
      draft=draft,
      target_log_probs=now.target_log_probs,
      node_probs=verification.node_probs,
      node=node,
      tokens=emission.tokens,
      num_emitted=emission.count,
      total_variation=distance,
    )
    return state, info

  def draft_and_verify(
    self,
    params: Params,
    state: DecodeState,
    *,
    draws: DrawFn = pick_nodes,
  ) -> tuple[Round, Verification]:
    """Draft, score, verify: all of a round that comes before its coins.

    Args:
      params: parameters of both models.
      state: from `init` or an earlier step.
      draws: what draws the drafted tokens, see `Context`.

    Returns:
      The `Round`, and what the rule says of it.
    """
    now = self.score(params, state, draws=draws)
    with jax.named_scope("verify"):
      verification = self.rule.verify(now.draft, now.target_log_probs)
    return now, verification

  def score(
    self,
    params: Params,
    state: DecodeState,
    *,
    draws: DrawFn = pick_nodes,
  ) -> Round:
    """Draft and score: as `draft_and_verify`, without verification."""
    tree, root_slot = self.drafter.tree, state.length - 1
    with jax.named_scope("draft"):
      draft, drafter_state, cache = self.propose(params, state, draws)
    with jax.named_scope("score"):
      if tree.form is Form.FREE:
        topology = draft.topology()
        depth, mask = topology.depth, topology.ancestors
      else:  # masked nodes are above no other nodes
        depth, mask = tree.fed_depth, tree.fed_ancestors
      which: Array | None = None
      num_fed: Array | int = tree.num_fed
      if self.widths:
        which, num_fed = widths_lib.choose(self.widths, draft, state.done)
      output, cache = widths_lib.apply(
        self.target.apply,
        self.widths,
        which,
        params.target,
        draft.tokens,
        cache.replace(length=root_slot, idle=state.done),
        positions=root_slot[:, None] + depth,
        mask=None if tree.is_chain and not tree.lanes else mask,
      )
      checks.logits(self.target, output.logits, draft.tokens.shape)
      logits = output.logits[:, : tree.num_nodes, : self.vocab_size]
      logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
      sampled = logits
      if state.sampling.penalties is not None:
        along = penalties.path_tokens(draft)
        sampled = penalties.penalised(logits, state, along)
      target_log_probs = warp_lib.warp(sampled, state.sampling)
      draft, target_log_probs, broken = checks.heal(draft, target_log_probs)
    return Round(
      draft=draft,
      drafter_state=drafter_state,
      output=output,
      target_cache=cache.replace(idle=None),
      logits=logits,
      target_log_probs=target_log_probs,
      broken=broken,
      num_fed=num_fed,
    )

  def propose(
    self,
    params: Params,
    state: DecodeState,
    draws: DrawFn = pick_nodes,
  ) -> tuple[Draft, Any, Cache]:
    """The draft to be scored, checked and cut; see `Drafter.propose`."""
    tree = self.drafter.tree
    keys = random.step_keys(state.keys, state.length)
    context = Context(
      tokens=state.tokens,
      length=state.length,
      max_depth=jnp.where(state.done, 0, state.max_depth),
      sampling=state.sampling,
      keys=random.drafter_keys(keys),
      row_keys=random.drafter_keys(state.keys),
      numbers=random.drafted_numbers(keys, tree.num_drafted),
      draws=draws,
    )
    draft, drafter_state, cache = self.drafter.propose(
      params,
      state.drafter_state,
      state.target_cache.replace(idle=state.done),
      context,
    )
    checks.draft(
      self.drafter, draft, len(state.length), vocab_size=self.vocab_size
    )
    draft = checks.known(draft, self.vocab_size)
    draft = checks.within(draft, state.max_depth)
    return draft, drafter_state, cache.replace(idle=None)

  def generate(self, params: Params, state: DecodeState) -> DecodeState:
    """Rounds until every row is done: one `lax.while_loop`."""
    arguments.check_params(params)
    return lax.while_loop(
      lambda s: ~jnp.all(s.done),
      lambda s: self.step(params, s)[0],
      state,
    )

  def steps(
    self,
    params: Params,
    state: DecodeState,
    num_steps: Array | int,
    *,
    num_idle: Array | int | None = None,
  ) -> DecodeState:
    """At most `num_steps` rounds (traced), fewer if all rows are done.

    Between calls the caller may read `state.tokens` up to `state.length`: this
    is how to stream.

    Args:
      params: parameters of both models.
      state: from `init` or an earlier step.
      num_steps: rounds at most.
      num_idle: end as soon as so many rows are done (traced), so that they can
        be given other prompts (`admit`). None: as soon as all are.

    Returns:
      The state.
    """
    arguments.check_params(params)
    first = state.num_steps
    enough = len(state.length) if num_idle is None else num_idle

    def goes_on(s):
      idle = jnp.sum(s.done)
      made = s.num_steps - first
      return ~jnp.all(s.done) & (idle < enough) & (made < num_steps)

    return lax.while_loop(goes_on, lambda s: self.step(params, s)[0], state)

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
    ignore_stop: Array | None = None,
    inputs: Any = None,
  ) -> DecodeState:
    """Runs the prompts through the models (prefill).

    Args:
      params: parameters of both models.
      prompts: `i32[B, P]`, each row right-padded with anything.
      lengths: `i32[B]` in 1..P.
      rng_key: a typed key; row b gets the stream `fold_in(rng_key, b)`. Or
        `key[B]`, one per row, for seeds that follow a prompt wherever it is
        batched (`specjax.random.row_keys`).
      buffer_length: static; prompt and completion of a row must fit into it.
      max_new_tokens: tokens to emit at most, for all rows or `i32[B]`.
      sampling: the warp; by default temperature 1 and no truncation.
      stop_tokens: ids that end a row once emitted.
      ignore_stop: `bool[B]`, rows that they do not end; None: they end all.
      inputs: what encoders read, any pytree with rows first (`encode` of
        `LanguageModel`).

    Returns:
      The state before the first step.

    Raises:
      ValueError: for sizes that do not fit; lengths, budgets and tokens are
        checked when they are concrete (under `jit`, rows end at the buffer's
        end, and at once where a token is none: UNKNOWN_TOKEN).
    """
    prompts = jnp.asarray(prompts)
    lengths = jnp.asarray(lengths, jnp.int32)
    max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
    self.check(
      params, prompts, lengths, rng_key, buffer_length=buffer_length,
      max_new_tokens=max_new_tokens, sampling=sampling,
    )  # fmt: skip
    count = len(prompts)
    if rng_key.ndim == 0:
      rng_key = random.row_keys(rng_key, jnp.arange(count))
    inputs = self.encode_inputs(params, inputs)
    # Every row may write a whole draft beyond its last committed token.
    slots = buffer_length + self.drafter.tree.num_fed
    state = prefill.begin(
      self.target, self.drafter, params, prompts, lengths, rng_key,
      buffer_length=buffer_length,
      vocab_size=self.vocab_size,
      max_new_tokens=max_new_tokens,
      sampling=sampling or warp_lib.make_sampling(count),
      stop_tokens=jnp.asarray(stop_tokens, jnp.int32).reshape(-1),
      inputs=inputs,
      drafter_state=self.drafter.init(params, count, slots, inputs),
      with_log_probs=self.with_log_probs,
      num_likeliest=self.num_likeliest,
    )  # fmt: skip
    if ignore_stop is not None:
      ignored = jnp.copy(jnp.asarray(ignore_stop, bool))
      state = dataclasses.replace(state, ignores_stop=ignored)
    return state

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
  ) -> DecodeState:
    """Replaces a finished row of a running state by another prompt.

    The row emits exactly what it would in a state of its own, and the other
    rows what they would have emitted. One program for prompts of one width:
    `row`, `length`, `rng_key`, the budget and the warp are traced.

    A prompt that shares a prefix with a row's text need not be read from its
    start: the first `keep` tokens of row `source` are reused from its caches,
    and `prompt` holds the tokens after them. The row then draws what it would
    draw if all were read, up to the rounding of passes of other widths. The
    drafter's caches are reused; whatever else it has learned of the text is
    not. The cost does not grow with the buffer if the target takes rows
    (`LanguageModel.takes_rows`). A target with recurrent states can reuse all
    of a text but its newest tokens, or nothing: a row that keeps less ends with
    NAN_LOGITS.

    Args:
      params: parameters of both models.
      state: from `init` or later; donate it.
      row: index of one of its B rows, which is done.
      prompt: `i32[P]`, right-padded with anything.
      length: tokens of it, in 1..P.
      rng_key: the row's stream, used as it is: the request's, not the slot's.
      max_new_tokens: tokens to emit at most.
      sampling: the warp of one row, with the same truncations as the state's;
        by default temperature 1 and no truncation.
      ignore_stop: whether the row goes on after a stop token, to its budget.
      inputs: as `init`'s, of one row.
      source: `i32[]`, row whose text and inputs are reused; None to read all.
      keep: `i32[]`, tokens of its text to reuse, at most its length.

    Returns:
      The state with the row in it. Where the reused tokens, the prompt and the
      budget do not fit into the buffer, the row ends early (LENGTH).

    Raises:
      ValueError: as `init`.
    """
    request = self.check_request(
      params, state, prompt, length, rng_key, max_new_tokens=max_new_tokens,
      sampling=sampling,
    )  # fmt: skip
    inputs = self.encode_inputs(params, inputs)
    slots = request["buffer_length"] + self.drafter.tree.num_fed
    blank = self.drafter.init(params, 1, slots, inputs)
    # What all rows share goes on from where it is.
    blank = rows.over_leaves(
      lambda axis, new, now: now if axis is None else new,
      self.drafter.row_axes(state.drafter_state), blank, state.drafter_state,
    )  # fmt: skip
    axes = self.row_axes(state)
    if source is None:
      fresh = prefill.begin(
        self.target, self.drafter, params,
        **request,
        vocab_size=self.vocab_size,
        stop_tokens=state.stop_tokens,
        inputs=inputs,
        drafter_state=blank,
        with_log_probs=self.with_log_probs,
        num_likeliest=self.num_likeliest,
      )  # fmt: skip
    else:
      fresh = prefill.extend(
        self.target, self.drafter, params,
        prefill.cut(
          rows.take(
            axes, state, row, source, keep, in_place=self.target.takes_rows
          ),
          keep, blank, request["rng_key"],
        ),
        jnp.asarray(prompt), jnp.asarray(length, jnp.int32),
        vocab_size=self.vocab_size,
        max_new_tokens=request["max_new_tokens"], sampling=request["sampling"],
      )  # fmt: skip
    fresh = dataclasses.replace(
      fresh,
      ignores_stop=jnp.asarray(ignore_stop, bool).reshape(1),
      num_steps=state.num_steps,
    )
    return rows.give(axes, state, row, fresh)

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
    """Appends tokens to the text of a row, which then goes on.

    For the next turn of a conversation: the caches keep the row's text, and
    only the new tokens are read (and the two newest before them, one of which
    was not read yet). The row then emits what one with all of that text as its
    prompt would; if its drafter keeps what it learned of the row, as lookahead
    and online drafts do, it emits by the same law. The text so far counts as
    prompt, and counters start anew. One program for tokens of one width: `row`,
    `count`, the budget and the warp are traced.

    Args:
      params: parameters of both models.
      state: from `init` or later; donate it.
      row: index of one of its B rows, done or not.
      tokens: `i32[P]`, right-padded with anything.
      count: tokens of it, in 1..P.
      max_new_tokens: tokens to emit at most.
      sampling: the warp of one row, as `admit`'s; by default the row keeps its
        own.

    Returns:
      The state. Where text and tokens do not fit into the buffer (under `jit`
      this cannot be raised), the row is as it was and ended (LENGTH).

    Raises:
      ValueError: as `init`.
    """
    tokens, row = jnp.asarray(tokens), jnp.asarray(row, jnp.int32)
    count = jnp.asarray(count, jnp.int32)
    max_new_tokens = jnp.asarray(max_new_tokens, jnp.int32)
    self.check_extension(
      params, state, row, tokens, count, max_new_tokens=max_new_tokens
    )
    if sampling is not None:
      sampling = warp_lib.as_in(state.sampling, sampling)
    axes = self.row_axes(state)
    alone = rows.take(axes, state, row, row, 0, in_place=self.target.takes_rows)
    longer = prefill.extend(
      self.target, self.drafter, params, alone, tokens, count,
      vocab_size=self.vocab_size, max_new_tokens=max_new_tokens,
      sampling=sampling,
    )  # fmt: skip
    return rows.give(axes, state, row, longer)

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

  def check_request(
    self, params, state, prompt, length, rng_key, *, max_new_tokens, sampling
  ) -> dict[str, Any]:
    """Arguments of `admit` as those of `init` for one row; raises as `init`."""
    request = dict(
      prompts=jnp.asarray(prompt)[None],
      lengths=jnp.asarray(length, jnp.int32).reshape(1),
      rng_key=rng_key[None],
      max_new_tokens=jnp.asarray(max_new_tokens, jnp.int32).reshape(1),
      sampling=warp_lib.as_in(state.sampling, sampling),
      buffer_length=self.buffer_length(state),
    )
    self.check(params, **request)
    return request

  def check_extension(
    self, params, state, row, tokens, count, *, max_new_tokens
  ) -> None:
    """Raises ValueError for arguments of `extend` that cannot work."""
    arguments.check_params(params)
    arguments.check_extension(
      state, row, tokens, count, max_new_tokens,
      buffer_length=self.buffer_length(state), vocab_size=self.vocab_size,
    )  # fmt: skip

  def encode_inputs(self, params: Params, inputs: Any) -> Any:
    """The inputs of both models: the encoder's output if they share it."""
    encode = self.target.encode_inputs
    if not self.share_encoder or encode is None or inputs is None:
      return inputs
    return encode(params.target, inputs)

  def buffer_length(self, state: DecodeState) -> int:
    """Tokens that prompt and completion of a row may have together."""
    return state.tokens.shape[1] - self.drafter.tree.max_depth - 1

  def row_axes(self, state: DecodeState) -> DecodeState:
    """The axis of each leaf that rows lie along; None: all rows share it."""
    return dataclasses.replace(
      jax.tree.map(lambda x: 0, state),
      stop_tokens=None,
      num_steps=None,
      target_cache=cache_lib.row_axes(state.target_cache),
      drafter_state=self.drafter.row_axes(state.drafter_state),
    )


def make_decoder(
  target: LanguageModel,
  *,
  drafter: Drafter | None = None,
  rule: str | Rule = "token",
  vocab_size: int | None = None,
  with_log_probs: bool = False,
  num_likeliest: int = 0,
  widths: Sequence[int] = (),
  share_encoder: bool = False,
) -> Decoder:
  """A `Decoder`; without a drafter, plain autoregressive decoding.

  Args:
    target: the model whose law is sampled.
    drafter: see `specjax.drafters`; build it with the same `vocab_size`.
    rule: a `Rule`, or its name in `specjax.rules`.
    vocab_size: number of real tokens; by default the target's.
    with_log_probs: record the target's log-probabilities of emitted tokens.
    num_likeliest: of tokens in the place of each, see `Decoder`.
    widths: of narrower target passes, see `Decoder`.
    share_encoder: see `Decoder`.

  Returns:
    The decoder.

  Raises:
    ValueError: for an unknown rule, or parts that do not fit each other.
  """
  vocab_size = target.vocab_size if vocab_size is None else vocab_size
  return Decoder(
    target=target,
    drafter=drafter or drafters.plain(),
    rule=rules.get(rule) if isinstance(rule, str) else rule,
    vocab_size=vocab_size,
    with_log_probs=with_log_probs,
    num_likeliest=num_likeliest,
    widths=tuple(widths),
    share_encoder=share_encoder,
  )
