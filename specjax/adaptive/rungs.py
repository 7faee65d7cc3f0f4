"""The programs of a ladder: decoders of several draft lengths, one state.

All share the state of the longest. A drafter declares what it needs of rounds
that draft nothing (`Drafter.empty_rounds`). The caller chooses the next length,
as `specjax.adaptive.ladder` does on the host.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from specjax.decode import Decoder
from specjax.runtime.mesh import MeshDecoder
from specjax.state import DecodeState
from specjax.tree import Tree, chain
from specjax.types import (
  Context,
  Draft,
  Drafter,
  EmptyRoundPolicy,
  LanguageModel,
  Params,
  Rule,
  keep,
)

LENGTHS = (0, 1, 2, 4, 8)

# A compiled loop: parameters, a state that is donated, the most rounds to make.
Loop = Callable[[Params, DecodeState, Any], DecodeState]


def check(lengths: Sequence[int]) -> None:
  """Raises ValueError unless drafts of these lengths make a ladder."""
  rising = all(a < b for a, b in itertools.pairwise(lengths))
  if len(lengths) < 2 or lengths[0] < 0 or not rising:
    raise ValueError(
      "a ladder has two lengths or more, of 0 drafted tokens and more, rising, "
      f"got {tuple(lengths)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rungs:
  """Decoders of several draft lengths that go on with each other's state.

  Attributes:
    decoders: by length; prompts are read by that of the `longest`.
    mesh: over which rows lie as a `MeshDecoder` cuts them; None for one device.
  """

  decoders: Mapping[int, Decoder]
  mesh: jax.sharding.Mesh | None = None

  @property
  def longest(self) -> Decoder:
    """The decoder of the longest drafts, whose state all share."""
    return self.decoders[max(self.decoders)]

  @property
  def unread(self) -> Decoder | None:
    """The longest decoder, but only the target reads the prompts.

    The draft reads them when it first drafts, which a batch may never come to.
    None if the drafter cannot do so, or no length is 0.
    """
    drafter = self.longest.drafter
    if (
      0 not in self.decoders
      or drafter.empty_rounds is not EmptyRoundPolicy.NOTHING
    ):
      return None
    return dataclasses.replace(
      self.longest, drafter=dataclasses.replace(drafter, prefill=keep)
    )

  def steps(
    self, length: int, params: Params, state: DecodeState, num_steps: Any
  ) -> DecodeState:
    """As `Decoder.steps`, at a length; to be jitted for each."""
    decoder, whole = self.decoders[length], state.counters
    tree = decoder.drafter.tree
    cut = dict(
      accept_counts=whole.accept_counts[:, : tree.max_depth + 1],
      rank_offered=whole.rank_offered[:, : tree.max_children],
      rank_accepted=whole.rank_accepted[:, : tree.max_children],
    )
    state = dataclasses.replace(
      state, counters=dataclasses.replace(whole, **cut)
    )
    if self.mesh is None:
      state = decoder.steps(params, state, num_steps)
    else:
      on_mesh = MeshDecoder.of(decoder, mesh=self.mesh)
      state = on_mesh.steps(params, state, num_steps)
    counters = state.counters
    back = {
      name: getattr(whole, name)
      .at[:, : part.shape[1]]
      .set(getattr(counters, name))
      for name, part in cut.items()
    }
    return dataclasses.replace(
      state, counters=dataclasses.replace(counters, **back)
    )


def make_rungs(
  target: LanguageModel,
  draft: Callable[[Tree], Drafter],
  *,
  rule: Rule,
  vocab_size: int,
  lengths: Sequence[int] = LENGTHS,
  **options: Any,
) -> Rungs:
  """Decoders of some draft lengths.

  Args:
    target: the target.
    draft: makes the drafter of a chain. Its state must not depend on the
      chain's length, and for a length of 0 it must say what it needs of rounds
      in which nothing is drafted (`Drafter.empty_rounds`):
      `drafters.model(..., longest=G)`, as `layer_skip`, `quantised_self`, the
      EAGLEs and `mtp`, or `drafters.medusa`, `blockwise`, `assistant` and
      `ngram`. Not with a policy that learns: its state is of one length.
    rule: what verifies.
    vocab_size: V.
    lengths: drafted tokens, rising; 0 drafts nothing.
    **options: other fields of the decoders.

  Raises:
    ValueError: if they are no ladder, or 0 is one of them and the drafter was
      not made for it.
  """
  check(lengths)
  made = {n: draft(chain(n)) for n in lengths if n}
  if 0 in lengths:
    long = made[max(made)]
    if long.empty_rounds is None:
      raise ValueError(
        f"a ladder with length 0 is of drafters that outlive rounds without a "
        f"draft (Drafter.empty_rounds), and {long.name!r} does not say how "
        "it does"
      )
    proposes = long.empty_rounds is EmptyRoundPolicy.PROPOSE
    made[0] = draft(chain(0)) if proposes else _nothing(long)
  return Rungs(
    decoders={
      n: Decoder(
        target=target, drafter=one, rule=rule, vocab_size=vocab_size, **options
      )
      for n, one in made.items()
    }
  )  # fmt: skip


def _nothing(long: Drafter) -> Drafter:
  """Drafts nothing, and keeps the state of one that does."""
  tree = chain(0)

  def propose(params, state, cache, context: Context):
    del params
    draft = Draft(
      tree=tree, siblings=long.siblings, tokens=context.root, log_probs=None
    )
    return draft, state, cache

  return dataclasses.replace(
    long, name="nothing", tree=tree, propose=propose, passes=()
  )


def programs(rungs: Rungs) -> dict[int, Loop]:
  """The loops of some decoders, compiled when they are first called."""
  return {
    n: jax.jit(functools.partial(rungs.steps, n), donate_argnums=1)
    for n in rungs.decoders
  }
