"""Calls around a drafter (`repeats`, `ladder`): one `Drafting` to another."""

import dataclasses
import inspect
from typing import Any

from launch.assembly.drafting import Drafting, Learning, as_library, tried
from specjax import drafters
from specjax.adaptive import policies
from specjax.adaptive.rungs import LENGTHS
from specjax.adaptive.rungs import check as check_lengths
from specjax.siblings import IID
from specjax.types import Drafter, Rule


def repeats(drafter: Drafting, **settings: Any) -> Drafting:
  """As `specjax.drafters.repeats`, whose words and defaults it gets below."""
  made = drafters.repeats(drafter.unread, **settings)
  if drafter.learning is not None or drafter.lengths:
    raise ValueError("repeats is not around online and ladder")
  depth, tokens = drafter.tree.max_depth, made.tree.max_depth
  fed, forms = drafter.tree.num_drafted + 1, {}
  if drafter.tree.is_chain and tokens > depth:
    # As `Drafter.longer`, and the form can be changed again.
    settings.pop("tokens")
    forms = dict(tokens=tokens, policy=policies.fixed(depth))

  def call(model: Any, vocab_size: int, **form: Any) -> Drafter:
    return drafters.repeats(drafter.call(model, vocab_size, **form), **settings)

  wrapped = dataclasses.replace(
    drafter.of_form(**forms) if forms else drafter,
    call=call, learns=False, climbs=False, takes_policy=False,
  )  # fmt: skip
  if made.tree.num_drafted >= fed:
    wrapped = dataclasses.replace(wrapped, widths=(*drafter.widths, fed))
  return wrapped


_LIBRARY = list(inspect.signature(drafters.repeats).parameters.values())
as_library(
  repeats, drafters.repeats,
  [_LIBRARY[0].replace(annotation=Drafting), *_LIBRARY[1:]],
)  # fmt: skip


def ladder(
  drafter: Drafting, *, lengths: tuple[int, ...] = LENGTHS
) -> Drafting:
  """Chains of several lengths; the host changes to the fastest by rounds."""
  check_lengths(lengths)
  if not drafter.climbs:
    raise ValueError(
      "a ladder is of drafters whose state is the same for all lengths, got "
      f"{drafter.name!r}"
    )
  whole = drafter.tree.is_chain and drafter.siblings is IID
  if not whole or drafter.policy or drafter.widths or drafter.learning:
    raise ValueError(
      "a ladder is of chains that are drafted whole: without tree, siblings, "
      "policy, widths and online"
    )
  longest = {"longest": lengths[-1]} if drafter.takes_longest else {}
  wrapped = drafter.of_form(tokens=lengths[-1], **longest)
  return tried(dataclasses.replace(wrapped, lengths=lengths))


def online(
  drafter: Drafting,
  *,
  rounds: int = 8,
  entries: int = 512,
  laws: int = 0,
  objective: str = "forward_kl",
  rate: float = 5e-5,
) -> Drafting:
  """A draft that learns while it decodes, every so many rounds."""
  if drafter.lengths:
    raise ValueError("the draft of a ladder does not learn online")
  if not drafter.learns:
    raise ValueError(
      "online learning is for drafts with parameters of their own (model, "
      f"eagle, eagle3), none in few bits, got {drafter.name!r}"
    )
  learning = Learning(
    rounds=rounds, entries=entries, laws=laws, objective=objective, rate=rate
  )
  return dataclasses.replace(drafter, learning=learning)


def with_widths(drafter: Drafting, *tokens: int) -> Drafting:
  """Passes of the target of these widths too, where a draft ends early."""
  if not tokens or min(tokens) < 1:
    raise ValueError(f"widths must be >= 1, got {tokens}")
  return dataclasses.replace(drafter, widths=(*drafter.widths, *tokens))


def with_rule(drafter: Drafting, rule: Rule) -> Drafting:
  """Verified by this rule, in place of `config.rule`."""
  return dataclasses.replace(drafter, rule=rule.name)
