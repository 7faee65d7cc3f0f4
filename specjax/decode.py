"""The decoding loop: `Decoder`, with `init`, `step` and `generate`.

One round is draft, score, verify, draw, commit:

  propose a token tree -> one target pass over its nodes under the ancestor mask
  -> the rule's law of the deepest accepted node -> draw it, then the next token
  -> write the accepted path and the token, cut at stop tokens and budgets
  -> keep that path in the caches.

Plain autoregressive decoding is the same loop with the empty tree. Nothing here
is jitted; shapes are fixed, so `jax.jit(decoder.generate, donate_argnums=1)` is
one program for every prompt, length, temperature and budget of the same sizes.
How rows get prompts is in `admission` and `prefill`, checks are in `arguments`
and `checks`, counters in `emission`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specjax import (
  admission,
  arguments,
  checks,
  drafters,
  penalties,
  random,
  rules,
)
from specjax import cache as cache_lib
from specjax import emission as emission_lib
from specjax import warp as warp_lib
from specjax.adaptive import widths as widths_lib
from specjax.cache import Cache
from specjax.drafters.shared.arguments import check_functions
from specjax.state import DecodeState, Round, StepInfo
from specjax.tree import Topology
from specjax.types import (
  Commit,
  Context,
  Draft,
  Drafter,
  DrawFn,
  LanguageModel,
  Params,
  Rule,
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
      node = random.invert(verification.node_probs, numbers[:, 0, 0])
      next_token = random.pick(numbers[:, 1], verification.next_log_probs(node))
    with jax.named_scope("commit"):
      emission = emission_lib.emit(state, now, node, next_token)
      distance = emission_lib.distances(
        verification, lossless=self.rule.lossless
      )
      state = emission_lib.record(state, now, verification, emission, distance)
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
    self, params: Params, state: DecodeState, *, draws: DrawFn = pick_nodes
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
      verification = self.rule.verify(
        now.draft, now.topology, now.target_log_probs
      )
    return now, verification

  def score(
    self, params: Params, state: DecodeState, *, draws: DrawFn = pick_nodes
  ) -> Round:
    """Draft and score: as `draft_and_verify`, without verification."""
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
        sampled = penalties.penalised(logits, state, along)
      sampling = warp_lib.of_running(state.sampling, state.done)
      target_log_probs = warp_lib.warp(sampled, sampling)
      draft, target_log_probs, broken = checks.heal(
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
    """The draft to be scored, checked and cut; see `Drafter.propose`."""
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
    draft = checks.known(draft, self.vocab_size)
    draft, topology = checks.within(draft, state.max_depth)
    drafter_state, cache = cache_lib.with_idle((drafter_state, cache), None)
    return draft, topology, drafter_state, cache

  def generate(self, params: Params, state: DecodeState) -> DecodeState:
    """Rounds until every row is done: one `lax.while_loop`."""
    arguments.check_params(params)
    return lax.while_loop(
      lambda s: ~jnp.all(s.done), lambda s: self.step(params, s)[0], state
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

  # How rows get their texts.
  init = admission.init
  admit = admission.admit
  extend = admission.extend
  check = admission.check
  check_request = admission.check_request
  check_extension = admission.check_extension

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
    TypeError: for a part of another type, such as the name of a drafter.
  """
  check_functions("target", target)
  vocab_size = target.vocab_size if vocab_size is None else vocab_size
  return Decoder(
    target=target,
    drafter=drafters.plain() if drafter is None else drafter,
    rule=rules.get(rule) if isinstance(rule, str) else rule,
    vocab_size=vocab_size,
    with_log_probs=with_log_probs,
    num_likeliest=num_likeliest,
    widths=tuple(widths),
    share_encoder=share_encoder,
  )
