"""Contracts between target, drafter and rule, checked or mended at run time."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import laws
from specjax.drafters.shared.arguments import check_model
from specjax.tree import Form, Topology
from specjax.types import Draft, Drafter, LanguageModel, Rule


def parts(
  target: LanguageModel, drafter: Drafter, rule: Rule, vocab_size: int
) -> None:
  """Raises unless a target, a drafter and a rule fit each other."""
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
  if drafter.siblings.with_noise and not rule.with_noise:
    raise ValueError(
      f"rule {rule.name!r} does not verify drafts with noise (siblings "
      f"{drafter.siblings.name!r}); rule 'gumbel_list' does"
    )
  check_model("target", target, vocab_size)


def draft(drafter: Drafter, proposed: Draft, rows: int, *, vocab_size: int):
  """Raises ValueError unless a draft is what its drafter has announced.

  Args:
    drafter: the drafter.
    proposed: its proposal.
    rows: B.
    vocab_size: V.
  """
  tree = drafter.tree
  if proposed.tree != tree or proposed.siblings != drafter.siblings:
    raise ValueError(
      f"drafter {drafter.name!r} must propose the tree and siblings that it "
      f"announces ({tree}, {drafter.siblings.name!r}), got {proposed.tree} and "
      f"{proposed.siblings.name!r}"
    )
  if (proposed.parents is None) != (tree.form is Form.FIXED):
    raise ValueError(
      f"drafter {drafter.name!r} must give parents exactly if its tree's form "
      f"is not fixed, got a form that is {tree.form.value} and "
      f"{'no' if proposed.parents is None else 'some'} parents"
    )
  if (
    proposed.log_probs is None
    and proposed.siblings.independent
    and tree.max_children > 1
  ):
    raise ValueError(
      f"drafter {drafter.name!r} proposes certain tokens, which are no "
      f"independent draws from one law: its siblings must be 'given', got "
      f"{proposed.siblings.name!r}"
    )
  fed = (rows, tree.num_fed)
  for name, array, expected in (
    ("tokens", proposed.tokens, fed),
    ("parents", proposed.parents, fed),
    ("log_probs", proposed.log_probs, (rows, tree.num_nodes, vocab_size)),
  ):
    if array is not None and array.shape != expected:
      raise ValueError(
        f"drafter {drafter.name!r} must return {name} of shape {expected} (it "
        f"may be built for another vocab_size), got {array.shape}"
      )


def known(draft: Draft, vocab_size: int) -> Draft:
  """The draft with ids beyond the vocabulary replaced.

  Look-ups copy ids from a text, which may be no tokens. A certain draft may
  propose any token in their place, since none was drawn.
  """
  valid = (draft.tokens >= 0) & (draft.tokens < vocab_size)
  return dataclasses.replace(draft, tokens=jnp.where(valid, draft.tokens, 0))


def logits(model: LanguageModel, returned: Array, fed: tuple[int, ...]) -> None:
  """Raises ValueError unless the target's logits are of T fed tokens."""
  expected = (*fed, model.vocab_size)
  if returned.shape != expected:
    raise ValueError(
      f"the target must return logits of shape {expected}, got {returned.shape}"
    )


def within(draft: Draft, max_depth: Array) -> tuple[Draft, Topology]:
  """The draft without what is deeper than its row may draft, and its topology.

  A depth that is set between rounds does not depend on the tokens, so that
  every rule for a tree of that form stays lossless.
  """
  topology = draft.topology(max_depth)
  if draft.parents is None:
    return draft, topology
  parents = jnp.where(topology.present, draft.parents, -1)
  return dataclasses.replace(draft, parents=parents), topology


def heal(
  draft: Draft, topology: Topology, target_log_probs: Array
) -> tuple[Draft, Array, Array]:
  """Replaces laws that are NaN by uniform ones, and says which nodes end a row.

  Rules then never see a NaN. Where the target's law is NaN, it is uniform to
  the rule, and a row that reaches the node ends before a token is drawn; a node
  that is not reached costs its row nothing. Tokens drawn from an unknown law
  cannot be verified, so that a draft with a NaN law ends its row before any of
  it is emitted. The library's drafters heal their laws before they draw.

  Returns:
    The draft, the target's laws, and `bool[B, N + 1]`.
  """
  broken = jnp.isnan(target_log_probs[..., 0])
  if draft.log_probs is not None:
    nodes = draft.tree.num_nodes
    unknown = jnp.isnan(draft.log_probs).any(axis=-1)
    unknown &= topology.present[:, :nodes] & (np.arange(nodes) > 0)
    broken |= unknown.any(axis=1, keepdims=True)
    draft = dataclasses.replace(draft, log_probs=laws.heal(draft.log_probs))
  return draft, laws.heal(target_log_probs), broken
